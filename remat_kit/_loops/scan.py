"""scan: `jax.lax.scan` whose reverse mode keeps what was asked for."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from remat_kit._errors import RematError, RematWarning
from remat_kit._loops import binomial
from remat_kit._loops.parts import Body, Run, in_parts, is_unrolled, runs
from remat_kit._loops.traced import check_arrays, run_as
from remat_kit._numbers import whole
from remat_kit._options import check_flags
from remat_kit._policy import Policy
from remat_kit._policy import policy as as_policy
from remat_kit._rewrite import check_effects
from remat_kit._static_args import name_of
from remat_kit._trace import jaxprs, marks
from remat_kit._trace.jaxprs import JaxprEqn
from remat_kit._wrap import check_options


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    policy: Any = None,
    segments: int | str | None = None,
    checkpoints: int | None = None,
    offload_carry: bool = False,
    prevent_cse: bool | None = None,
    block: str | None = None,
) -> tuple[Any, Any]:
    """`jax.lax.scan` with rematerialization: same arguments, same values and gradients.

        carry, ys = rk.scan(layer, x, weights)                          # keeps the carry of each step
        carry, ys = rk.scan(layer, x, weights, policy="dots")           # and its matrix products
        carry, ys = rk.scan(cell, h, inputs, segments="sqrt")           # carries between segments only
        carry, ys = rk.scan(cell, h, inputs, segments="binomial", checkpoints=8)    # 8 carries, however long it is

    What the backward pass holds of a scan of n steps, and how often a step runs in it apart from its own derivative:

    - `policy` alone: n carries and what the policy saves of each step; once.
    - ``segments=k``: k carries, and those of the n / k steps of one segment; twice (once with ``policy="none"``, which
      keeps all that a segment computes while it is differentiated). After Chen et al. 2016, "Training Deep Nets with
      Sublinear Memory Cost". The last segment is shorter where k does not divide n.
    - ``segments="binomial"``: `checkpoints` + 1 carries; as often as it takes at least, which is the optimum of
      Griewank and Walther 2000 ("Algorithm 799: revolve"). For n up to ``comb(checkpoints + r, r)``, at most r times.

    Args:
      f, init, xs, length, reverse, unroll: as in `jax.lax.scan`.
      policy: what a step keeps, as in `remat`; None means ``"full"``, which keeps its carry. A list with one for each
        step, or a mapping of ranges to policies (``{range(0, 4): "full", range(4, 12): "dots"}``, counted along `xs`),
        runs the scan in parts. Parts need slices of `xs` and concatenate their gradients: about one copy of `xs`.
      segments: a number, ``"sqrt"`` for about the square root of the number of steps, or ``"binomial"``.
      checkpoints: with ``"binomial"`` the number of carries kept, besides the one being worked on. By default the
        fewest with which no step is advanced more than twice, about ``sqrt(2 n)``.
      offload_carry: whether carries that are kept (those between segments, if there are any) go to the memory of the
        host. A CPU has no other memory, and keeps them where they are, with a warning.
      prevent_cse, block: as in `remat`, for the step.

    Returns:
      The last carry and the stacked outputs.

    Raises:
      RematError: for options that do not fit together; what `jax.lax.scan` raises for arguments that do not.

    Warns:
      RematWarning: when it is traced, for `offload_carry` on a CPU.
    """
    check_options(prevent_cse, block)
    check_flags(offload_carry=offload_carry)
    several = isinstance(policy, (Sequence, Mapping)) and not isinstance(policy, str)
    policies = _policies(policy, several)
    _check(f, several, segments, checkpoints)
    _check_extent(xs, length, unroll)
    check_arrays(init=init, xs=xs)
    if offload_carry:
        _check_offload(init, segments, policies)
        _warn_of_cpu()
    body = Body(prevent_cse, block, offload_carry and segments is None)
    if not several and segments is None:
        step = body.of(f, policy, is_unrolled(_length(xs, length), unroll))
        return lax.scan(step, init, xs, length=length, reverse=reverse, unroll=unroll)

    def run(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        (call,) = jaxprs.calls(eqn)
        check_effects(call.jaxpr)
        n, first, last = eqn.params["length"], call.num_consts, call.num_consts + call.num_carry
        consts, carry, inputs = operands[:first], operands[first:last], operands[last:]

        def step(consts: list[Any], carry: list[Any], x: list[Any]) -> list[Any]:
            return jaxprs.evaluate(call.jaxpr, *consts, *carry, *x)

        def of_consts(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = step(consts, carry, x)
            return out[: call.num_carry], out[call.num_carry :]

        parts = runs(policy, n) if several else []
        if not n:
            return jaxprs.bind(eqn, operands)
        if segments == "binomial":
            chosen = step if policy is None else body.of(step, policy, False)
            return binomial.scan(chosen, consts, carry, inputs, eqn, checkpoints)
        parts = parts or _segments(segments, policy, n, reverse)
        carry, ys = in_parts(of_consts, carry, inputs, parts, eqn, body, offload_carry and not several)
        return [*carry, *ys]

    by_path = any(rule.selector.path for p in policies if p.remat for rule in p.rules)
    loop = lambda init, xs: lax.scan(f, init, xs, length=length, reverse=reverse, unroll=unroll)  # noqa: E731
    return run_as(run, name_of(f), "scan", loop, init, xs, by_path=by_path)


def _check(f: Any, several: bool, segments: Any, checkpoints: Any) -> None:
    """Refuses options that do not fit together."""
    if not callable(f):
        raise RematError(f"scan takes a function first, as jax.lax.scan does, got {type(f).__name__}: {f!r:.80}")
    is_binomial = isinstance(segments, str) and segments == "binomial"
    if checkpoints is not None and not is_binomial:
        raise RematError(f'checkpoints= goes with segments="binomial", got segments={segments!r}.')
    if several and segments is not None:
        raise RematError("segments= and a policy for each step cannot be had together: choose one.")
    if is_binomial:
        binomial.count_of(checkpoints, 1)
    elif segments is not None:
        _segment_length(segments, 1)


def _check_offload(init: Any, segments: Any, policies: Sequence[Policy]) -> None:
    """Refuses to offload where there is nothing that could be."""
    if isinstance(segments, str) and segments == "binomial":
        raise RematError('offload_carry= goes with carries that a scan stacks; segments="binomial" keeps few of them.')
    if segments is None and not all(p.remat for p in policies):
        raise RematError('offload_carry= needs steps that are rematerialized, and policy= is "none".')
    if not any(jnp.ndim(x) and jaxprs.is_inexact(jax.typeof(x)) for x in jax.tree.leaves(init)):
        raise RematError("offload_carry= moves arrays of floating-point numbers, and this carry has none.")


def _warn_of_cpu() -> None:
    """Says that a CPU passes over offloading. What is only read may be meant for another target, and reports say it."""
    if jax.default_backend() == "cpu" and not marks.reading():
        warnings.warn(
            "offload_carry=True has no effect on the CPU, JAX's backend here: its memory is the host's, and carries "
            "stay where they are. rk.measure(..., target=) says what an accelerator makes of it.",
            RematWarning,
            stacklevel=3,
        )


def _check_extent(xs: Any, length: Any, unroll: Any) -> None:
    """Refuses a number of steps that is none, and inputs without steps."""
    if length is not None and (not hasattr(length, "__index__") or (whole(length) or 0) < 0):
        raise RematError(f"length= is the number of steps, a whole number or None, got {length!r:.80}.")
    if not isinstance(unroll, bool) and (whole(unroll) is None or unroll < 0):
        raise RematError(f"unroll= is how many steps one iteration runs, a whole number or a bool, got {unroll!r:.80}.")
    for path, x in jax.tree_util.tree_leaves_with_path(xs):
        if not getattr(x, "shape", isinstance(x, str)):  # a text is refused as such
            raise RematError(f"scan goes along the first axis of xs, and xs{jax.tree_util.keystr(path)} is a scalar.")


def _policies(policy: Any, several: bool) -> list[Policy]:
    given = (policy.values() if isinstance(policy, Mapping) else policy) if several else [policy]
    return [as_policy("full" if p is None else p) for p in given]


def _length(xs: Any, length: Any) -> int | None:
    """The number of steps, where it is easily seen; JAX checks it."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(xs) if hasattr(x, "shape")]
    return next((s[0] for s in shapes if s), whole(length))


def _segment_length(segments: Any, n: int) -> int:
    if isinstance(segments, str) and segments == "sqrt":
        segments = math.isqrt(max(n - 1, 0)) + 1
    count = whole(segments)
    if count is None or count < 1:
        raise RematError(f'segments= is a number of segments, "sqrt" or "binomial", got {segments!r}.')
    return -(-n // count)


def _segments(segments: Any, policy: Any, n: int, reverse: bool) -> list[Run]:
    """The runs of a scan in segments: those of full length, and what is left at the end."""
    size = _segment_length(segments, n)
    left = n % size
    bounds = (0, left, n) if reverse else (0, n - left, n)
    return [Run(a, b, policy, min(size, b - a)) for a, b in itertools.pairwise(bounds) if a < b]
