"""sequential: a chain of functions in rematerialized segments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from remat_kit import _adapters
from remat_kit._errors import RematError
from remat_kit._numbers import whole
from remat_kit._override import Wanted
from remat_kit._trace import default, jaxprs, narrow
from remat_kit._trace.inputs import seal, unseal
from remat_kit._trace.linearized import linearize
from remat_kit._wrap import check_options, remat


def sequential(
    fns: Sequence[Callable[[Any], Any]],
    x: Any,
    *,
    segments: int | Sequence[int] | str = "sqrt",
    policy: Any = None,
    prevent_cse: bool | None = None,
    block: str | None = None,
) -> Any:
    """Calls functions one after the other, ``fns[-1](...fns[0](x))``, keeping what goes from segment to segment.

    The backward pass computes the inside of a segment again when it gets there (Chen et al. 2016, "Training Deep Nets
    with Sublinear Memory Cost"). The last segment is left without remat, since its backward pass comes first: nothing
    is gained by dropping what is wanted next.

        y = rk.sequential([stem, *layers, head], x)                         # about sqrt(n) segments
        y = rk.sequential([stem, *layers, head], x, segments="auto")        # where they cost least memory
        y = rk.sequential([stem, *layers, head], x, segments=[1, 4, 4, 1])  # so many functions in each

    Args:
      fns: functions of one pytree each. What they close over (parameters) is differentiated as usual. Flax modules,
        which have state, are refused: pass functions of their parameters, or use the decorators for Flax.
      x: what the first one is given.
      segments: how many, of equally many functions as far as possible; how many functions in each; ``"sqrt"`` for
        about the square root of their number; or ``"auto"`` for the cuts with the smallest sum of what segments hand
        on and the most that one of them keeps while it is differentiated, in bytes: for functions that differ.
      policy, prevent_cse, block: as in `remat`, for each segment.

    Returns:
      What the last function returns.

    Raises:
      RematError: for no functions, or segments that do not fit them.
    """
    check_options(prevent_cse, block)
    Wanted.of(policy)  # read here too: a single segment has no use for it
    if isinstance(fns, str) or not isinstance(fns, Iterable):
        raise RematError(f"sequential takes functions, one or more, got {fns!r:.200}.")
    fns = list(fns)
    if not fns or not all(map(callable, fns)):
        raise RematError(f"sequential takes functions, one or more, got {fns!r:.200}.")
    _adapters.refuse_modules("sequential", fns)
    for fn in fns:
        _adapters.refuse_without_variables(fn)
    sizes = _auto(fns, x) if isinstance(segments, str) and segments == "auto" else _sizes(segments, len(fns))
    bounds = list(itertools.accumulate(sizes, initial=0))
    for first, last in itertools.pairwise(bounds):
        run = _Chain(fns[first:last])
        x = run(x) if last == len(fns) else remat(run, policy=policy, prevent_cse=prevent_cse, block=block)(x)
    return x


class _Chain:
    """Functions one after the other."""

    def __init__(self, fns: Sequence[Callable[[Any], Any]]) -> None:
        self._fns = fns
        self.__name__ = "segment"

    def __call__(self, x: Any) -> Any:
        for fn in self._fns:
            x = fn(x)
        return x


def _sizes(segments: Any, n: int) -> list[int]:
    """How many functions each segment has."""
    if isinstance(segments, str) and segments == "sqrt":
        segments = math.isqrt(n)
    if (count := whole(segments)) is not None:
        if not 1 <= count <= n:
            raise RematError(f"segments={count}, but there are {n} functions: give a number from 1 to {n}.")
        return [n * (k + 1) // count - n * k // count for k in range(count)]
    if isinstance(segments, str) or not isinstance(segments, (Sequence, np.ndarray)):
        raise RematError(f'segments= is a number, a list of sizes, "sqrt" or "auto", got {segments!r}.')
    sizes = [whole(s) or 0 for s in segments]
    if min(sizes, default=0) < 1 or sum(sizes) != n:
        raise RematError(
            f"segments={list(segments)} are to be positive sizes that add up to the number of functions, {n}."
        )
    return sizes


def _auto(fns: Sequence[Callable[[Any], Any]], x: Any) -> list[int]:
    """The sizes for which what is handed on and the most that one segment keeps are least together."""

    def chain(x: Any) -> list[Any]:
        values = []
        for fn in fns:
            values.append(x := jax.jit(lambda x, fn=fn: seal(fn(unseal(x))))(x))  # one equation for each
        return values

    with jax.disable_jit(False), _adapters.state_errors("sequential"):
        jaxpr, values = jax.make_jaxpr(chain, return_shape=True)(seal(x))
    owner = jaxprs.opened(jaxpr)
    program = jaxprs.subprogram(jaxpr, owner.eqns, jaxprs.inputs(jaxpr), owner.outvars)
    invars, outvars = jaxprs.opened(program).invars, owner.outvars
    last = len(jax.tree.leaves(values[-1]))
    ends = [i >= len(outvars) - last and jaxprs.is_inexact(v.aval) for i, v in enumerate(outvars)]
    lin = linearize(program, [jaxprs.is_inexact(v.aval) for v in invars], ends, without_remat=True, backward=False)
    of = {id(e): k for k, e in enumerate(owner.eqns)}
    held = np.zeros(len(fns) + 1)
    for calls, size in default.kept(lin):
        held[1 + of[id(calls[0])] if calls else 0] += size
    before = np.cumsum(held)
    handed_on = [0, *(sum(map(jaxprs.nbytes, jax.tree.leaves(v))) for v in values)]
    n = len(fns) + 1
    cuts = narrow.best(np.broadcast_to(np.array(handed_on, float), (n, n)), before[None, :] - before[:, None])
    return [b - a for a, b in itertools.pairwise([0, *cuts, len(fns)])]
