"""scan: `jax.lax.scan` whose reverse mode keeps what was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from remat_kit._errors import RematError
from remat_kit._loops import binomial
from remat_kit._loops.runs import Run, in_parts, runs
from remat_kit._numbers import whole
from remat_kit._override import Wanted
from remat_kit._policy import offload
from remat_kit._wrap import check_options, remat

CARRY = "scan_carry"  # the checkpoint name of a carry that is offloaded
_CARRY_OFFLOADED = offload(name=CARRY)


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
        host. A CPU has no other memory, and keeps them where they are.
      prevent_cse, block: as in `remat`, for the step.

    Returns:
      The last carry and the stacked outputs.

    Raises:
      RematError: for options that do not fit together; what `jax.lax.scan` raises for arguments that do not.
    """
    check_options(prevent_cse, block)
    several = isinstance(policy, (Sequence, Mapping)) and not isinstance(policy, str)
    if checkpoints is not None and segments != "binomial":
        raise RematError(f'checkpoints= goes with segments="binomial", got segments={segments!r}.')
    if several and segments is not None:
        raise RematError("segments= and a policy for each step cannot be had together: choose one.")
    if segments == "binomial" and offload_carry:
        raise RematError('offload_carry= goes with carries that a scan stacks; segments="binomial" keeps few of them.')
    if not several and segments is None:
        body = _body(f, policy, offload_carry, prevent_cse, block)
        return lax.scan(body, init, xs, length=length, reverse=reverse, unroll=unroll)

    jax.eval_shape(lambda init, xs: lax.scan(f, init, xs, length=length, reverse=reverse), init, xs)  # JAX's errors
    n = length if length is not None else jax.tree.leaves(xs)[0].shape[0]
    xs = jax.tree.map(jnp.asarray, xs)
    if n == 0:
        return lax.scan(f, init, xs, length=length, reverse=reverse)
    if several:
        bodies = {run: _body(f, run.policy, offload_carry, prevent_cse, block) for run in runs(policy, n)}

        def part(carry: Any, xs: Any, run: Run) -> tuple[Any, Any]:
            return lax.scan(bodies[run], carry, xs, length=run.last - run.first, reverse=reverse, unroll=unroll)

        return in_parts(part, init, xs, list(bodies), reverse)
    if segments == "binomial":
        body = f if policy is None else _body(f, policy, False, prevent_cse, block)
        return binomial.scan(body, init, xs, n, reverse, unroll, checkpoints)
    body = _body(f, policy, False, prevent_cse, block)
    return _in_segments(body, init, xs, n, _segment_length(segments, n), reverse, unroll, offload_carry)


def _body(f: Any, policy: Any, offloads: bool, prevent_cse: bool | None, block: str | None) -> Callable[..., Any]:
    if not offloads:
        return remat(f, policy=policy, prevent_cse=prevent_cse, block=block)
    chosen = Wanted.of(policy).policy
    if not chosen.remat:
        raise RematError('offload_carry= needs steps that are rematerialized, and policy= is "none".')
    both = _CARRY_OFFLOADED | chosen
    return remat(lambda carry, x: f(_named(carry), x), policy=both, prevent_cse=prevent_cse, block=block)


def _named(carry: Any) -> Any:
    """Names the arrays of a carry. Scalars and what has no derivative stay where they are."""
    return jax.tree.map(lambda x: checkpoint_name(x, CARRY) if jnp.ndim(x) else x, carry)


def _segment_length(segments: Any, n: int) -> int:
    if segments == "sqrt":
        segments = math.isqrt(n - 1) + 1
    count = whole(segments)
    if count is None or count < 1:
        raise RematError(f'segments= is a number of segments, "sqrt" or "binomial", got {segments!r}.')
    return -(-n // count)


def _in_segments(
    body: Any, init: Any, xs: Any, n: int, size: int, reverse: bool, unroll: Any, offloads: bool
) -> tuple[Any, Any]:
    """A scan over segments of `size` steps, each a region of its own, and one over what is left at the end."""

    def segment(steps: int) -> Callable[..., Any]:
        def run(carry: Any, xs: Any) -> tuple[Any, Any]:
            carry = _named(carry) if offloads else carry
            return lax.scan(body, carry, xs, length=steps, reverse=reverse, unroll=unroll)

        return remat(run, policy=_CARRY_OFFLOADED if offloads else None)

    def part(carry: Any, xs: Any, run: Run) -> tuple[Any, Any]:
        count = (run.last - run.first) // size
        if not count:
            return segment(run.last - run.first)(carry, xs)
        folded = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[1:]), xs)
        carry, ys = lax.scan(segment(size), carry, folded, length=count, reverse=reverse)
        return carry, jax.tree.map(lambda y: y.reshape(count * size, *y.shape[2:]), ys)

    left = n % size
    spans = [Run(0, left, None), Run(left, n, None)] if reverse else [Run(0, n - left, None), Run(n - left, n, None)]
    return in_parts(part, init, xs, [s for s in spans if s.first < s.last], reverse)
