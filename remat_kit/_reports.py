"""The two views of a function before it is compiled: `trace` (what it computes) and `residuals` (what is kept)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from remat_kit import _adapters, _notes
from remat_kit._apply import Policies
from remat_kit._errors import RematError, first_line
from remat_kit._loss import Loss, read
from remat_kit._naming import is_reserved
from remat_kit._trace import blocks, default, jaxprs, program, tracing
from remat_kit._trace import residuals as reading
from remat_kit._trace.holders import Holders
from remat_kit._trace.linearized import linearize
from remat_kit._trace.program import Program
from remat_kit._trace.report import Residuals


def trace(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """Reads what a function computes: blocks and values, with bytes, FLOPs, trip counts and source lines.

    Args:
      fun: any function of pytrees of arrays, numbers, static values and NNX modules.
      *args, **kwargs: its arguments, real or abstract (`jax.ShapeDtypeStruct`); nothing is allocated or run.

    Raises:
      RematError: if `fun` is not callable.
    """
    with _adapters.adapted(fun, args, kwargs) as call:
        return program.read(tracing.trace(call.fun, call.args, call.kwargs))


def residuals(
    fun: Callable[..., Any],
    *args: Any,
    policy: Policies = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Residuals:
    """Reports which values reverse mode keeps between the forward and the backward pass.

    Exact: the entries are the distinct values that `jax.vjp` hands to its backward pass. Predicted from the
    program, before XLA; nothing is allocated or run.

    Args:
      fun: a function as `jax.grad` takes it: its result is a scalar loss (with `has_aux`, the first of a pair).
      *args, **kwargs: its arguments: arrays, `jax.ShapeDtypeStruct`s, pytrees of these, NNX modules.
      policy: a policy for the default blocks, or a mapping of block globs to policies, as `apply` takes it;
        None reports the function as written.
      argnums: which arguments are differentiated.

    Returns:
      A `Residuals`: print it, group it with ``.by(...)``, compare two with ``.diff(...)``.

    Raises:
      RematError: for a result that is not a scalar, a differentiated argument without numbers to differentiate,
        an unknown policy, block or name.
    """
    with _adapters.adapted(fun, args, kwargs) as call:
        return report(read(call, policy, argnums, has_aux))


def report(loss: Loss) -> Residuals:
    """The residual report of a loss that was read.

    Raises:
      RematError: where reverse mode cannot differentiate the function.
    """
    call, traced, jaxpr, applied = loss.call, loss.traced, loss.jaxpr, loss.applied
    lin = differentiable(lambda: linearize(jaxpr, list(loss.differentiated), list(loss.outputs)))
    if applied is None:
        chosen = default.default_blocks(traced, blocks.find(traced.jaxpr), lin)
    else:
        chosen = [c for c, _ in applied.blocks]

    holders = Holders(chosen)

    def block_of(chain: tuple[int, ...]) -> str:
        return holders.path([lin.tagged.origins[t].eqn for t in chain]) if loss.rules is None else ""

    local = device_bytes(call)
    avals = [v.aval for v in jaxprs.opened(traced.jaxpr).invars]
    sharded = any(n < jaxprs.nbytes(avals[i]) for i, n in local.items())
    found = reading.read(
        lin,
        traced.labels,
        device_bytes=local,
        hidden=is_reserved,
        block_of=block_of,
    )
    removed, replaced = (applied.removed, applied.replaced) if applied is not None else ((), ())
    return Residuals(
        entries=tuple(f.entry for f in found),
        policy=loss.policy,
        blocks=tuple(c.path for c in chosen),
        notes=_notes.notes(found, lin, traced.jaxpr, loss.rules, chosen, removed, replaced, sharded),
    )


T = TypeVar("T")


def differentiable(read: Callable[[], T]) -> T:
    """Returns what a function that differentiates the loss returns.

    Raises:
      RematError: where JAX cannot differentiate it in reverse mode.
    """
    try:
        return read()
    except RematError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        raise RematError(f"reverse mode cannot differentiate the function: {first_line(error)}") from error


def device_bytes(call: _adapters.Call) -> dict[int, int]:
    """Bytes on one device of arguments with a known sharding."""
    out = {}
    leaves, _ = tracing.split((call.args, call.kwargs))
    for i, x in enumerate(leaves):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and math.prod(x.shape):
            part = math.prod(sharding.shard_shape(x.shape))
            out[i] = jaxprs.nbytes(jaxprs.aval_of(x)) * part // math.prod(x.shape)
    return out
