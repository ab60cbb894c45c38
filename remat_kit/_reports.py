"""The two views of a function before it is compiled: `trace` (what it computes) and `residuals` (what is kept)."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit import _adapters, _notes
from remat_kit._apply import Policies, Rules, rewritten
from remat_kit._errors import RematError
from remat_kit._naming import is_reserved
from remat_kit._trace import blocks, default, jaxprs, program, tracing
from remat_kit._trace import residuals as reading
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
        return _report(call, policy, argnums, has_aux, len(args))


def _report(call: _adapters.Call, policy: Policies, argnums: int | Sequence[int], has_aux: bool, n: int) -> Residuals:
    traced = tracing.trace(call.fun, call.args, call.kwargs)
    differentiated = _differentiated(traced, argnums, n, call)
    outputs = _outputs(traced, call, has_aux)
    if policy is None:
        jaxpr, removed, replaced, rules = traced.jaxpr, (), (), None
        chosen = default.default_blocks(traced, blocks.find(traced.jaxpr))
    else:
        rules = Rules.of(policy)
        jaxpr, applied = rewritten(traced, rules)
        chosen = [c for c, _ in applied.blocks]
        removed, replaced = applied.removed, applied.replaced
    try:
        lin = linearize(jaxpr, differentiated, outputs)
    except (ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:300]
        raise RematError(f"reverse mode cannot differentiate the function: {reason}") from error

    def block_of(chain: tuple[int, ...]) -> str:
        return default.block_of(chosen, [lin.tagged.origins[t].eqn for t in chain]) if rules is None else ""

    local = _device_bytes(call)
    avals = [v.aval for v in jaxprs.opened(traced.jaxpr).invars]
    sharded = any(n < jaxprs.nbytes(avals[i]) for i, n in local.items())
    found = reading.read(
        lin,
        traced.labels,
        device_bytes=local,
        hidden=is_reserved,
        block_of=block_of,
    )
    return Residuals(
        entries=tuple(f.entry for f in found),
        policy="as written" if rules is None else str(rules),
        blocks=tuple(c.path for c in chosen),
        notes=_notes.notes(found, lin, traced.jaxpr, rules, chosen, removed, replaced, sharded),
    )


def _differentiated(traced: tracing.Traced, argnums: int | Sequence[int], n: int, call: _adapters.Call) -> list[bool]:
    try:
        numbers = tuple(map(operator.index, argnums if isinstance(argnums, Sequence) else (argnums,)))
    except TypeError:
        raise RematError(f"argnums is a position or several, as in jax.grad; got {argnums!r}.") from None
    if not numbers or not all(-n <= i < n for i in numbers):
        raise RematError(f"argnums={argnums!r} does not fit: the function was given {n} positional arguments.")
    wanted = {i % n for i in numbers}
    avals = [v.aval for v in jaxprs.opened(traced.jaxpr).invars]
    out = []
    trainable = call.trainable or (True,) * len(avals)
    for aval, label, position, trains in zip(avals, traced.labels, traced.argnums, trainable, strict=True):
        mine = position in wanted and trains
        if mine and not jaxprs.is_inexact(aval):
            raise RematError(
                f"cannot differentiate with respect to {label} of type {aval.str_short()}: gradients need floating or "
                "complex numbers. Choose other argnums, or pass such leaves in another argument."
            )
        out.append(mine)
    if not any(out):
        raise RematError(
            f"nothing to differentiate: argument {', '.join(map(str, sorted(wanted)))} holds no arrays of numbers."
        )
    return out


@dataclasses.dataclass(frozen=True)
class _Output:
    """Stands for one output of a program in the structure of its result."""

    index: int
    aval: Any


def _outputs(traced: tracing.Traced, call: _adapters.Call, has_aux: bool) -> list[bool]:
    """Which outputs of the program are the loss."""
    avals = [v.aval for v in jaxprs.opened(traced.jaxpr).outvars]
    loss = call.result(traced.outputs.merge(_Output(i, a) for i, a in enumerate(avals)))
    if has_aux:
        if not isinstance(loss, tuple) or len(loss) != 2:
            found = loss.aval.str_short() if isinstance(loss, _Output) else type(loss).__name__
            raise RematError(f"has_aux=True needs a function that returns (loss, aux); it returned {found}.")
        loss = loss[0]
    leaves = jax.tree.leaves(loss)
    out = leaves[0] if len(leaves) == 1 and isinstance(leaves[0], _Output) else None
    if out is None or out.aval.shape != ():
        found = (
            ", ".join(x.aval.str_short() if isinstance(x, _Output) else type(x).__name__ for x in leaves) or "nothing"
        )
        more = (
            " It returned a pair: pass has_aux=True if the second is auxiliary."
            if isinstance(loss, tuple) and len(loss) == 2
            else ""
        )
        raise RematError(
            f"the function must return one scalar, as jax.grad requires, but returned {found}.{more} "
            "To look at a layer, sum its output: lambda *a: f(*a).sum()."
        )
    if not jaxprs.is_inexact(out.aval):
        raise RematError(f"the function must return a floating or complex scalar, but returned {out.aval.str_short()}.")
    return [i == out.index for i in range(len(avals))]


def _device_bytes(call: _adapters.Call) -> dict[int, int]:
    """Bytes on one device of arguments with a known sharding."""
    out = {}
    leaves, _ = tracing.split((call.args, call.kwargs))
    for i, x in enumerate(leaves):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and math.prod(x.shape):
            part = math.prod(sharding.shard_shape(x.shape))
            out[i] = jaxprs.nbytes(jaxprs.aval_of(x)) * part // math.prod(x.shape)
    return out
