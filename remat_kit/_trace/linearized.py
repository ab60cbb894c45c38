"""The program that reverse mode runs forward: what `jax.vjp` computes and hands to its backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit._trace import jaxprs, provenance
from remat_kit._trace.jaxprs import Literal


@dataclasses.dataclass(frozen=True, eq=False)
class Linearized:
    """A differentiated program, forward and backward, with the numbers of `provenance` on its equations.

    Attributes:
      tagged: the original program, numbered.
      forward: what `jax.vjp` runs, closed; its last outputs are what the backward pass is handed.
      backward: the backward pass as a program of those outputs and the cotangents, without dead code; None if not
        asked for.
      kept: for each distinct non-literal value handed over, its variable in `forward` and the indices of the
        inputs of `backward` that read it.
      differentiated, outputs: with respect to which inputs, and which of the results.
    """

    tagged: provenance.Tagged
    forward: Any
    backward: Any
    kept: tuple[tuple[Any, tuple[int, ...]], ...]
    differentiated: tuple[bool, ...]
    outputs: tuple[bool, ...]


def linearize(
    jaxpr: Any,
    differentiated: Sequence[bool],
    outputs: Sequence[bool],
    *,
    without_remat: bool = False,
    backward: bool = True,
) -> Linearized:
    """Differentiates a closed program in reverse mode, without running it.

    Args:
      differentiated: for each input, whether it is differentiated with respect to.
      outputs: for each output, whether it is part of the result (the others are auxiliary).
      without_remat: whether the program is taken without its `jax.checkpoint` regions.
      backward: whether the backward pass is traced too.
    """
    tagged = provenance.tag(jaxpr, without_remat=without_remat)
    evaluate = jaxprs.as_function(tagged.jaxpr)
    avals = [v.aval for v in jaxprs.opened(tagged.jaxpr).invars]

    seen: list[Any] = []  # what a trace of `flat` cannot return: the pullback's structure, cotangent types

    def flat(*args: Any) -> Sequence[Any]:
        def fun(*diff: Any) -> Any:
            it = iter(diff)
            out = evaluate(*(next(it) if d else x for x, d in zip(args, differentiated, strict=True)))
            return _select(out, outputs), _select(out, [not o for o in outputs])

        primal, pullback, aux = jax.vjp(fun, *_select(args, differentiated), has_aux=True)
        leaves, structure = jax.tree.flatten(pullback)
        types = [jax.typeof(x) for x in leaves]
        seen[:] = [structure, [jax.typeof(x) for x in primal], types]
        # A mutable reference is its caller's: it is no value, and a program cannot return it.
        return [*primal, *aux, *(x for x, t in zip(leaves, types, strict=True) if not jaxprs.is_ref(t))]

    forward = jaxprs.trace(flat, avals)
    structure, cotangents, types = seen
    count = len(types)
    values = [i for i, t in enumerate(types) if not jaxprs.is_ref(t)]
    outvars = jaxprs.opened(forward).outvars
    handed = dict(zip(values, outvars[len(outvars) - len(values) :], strict=True))

    def pull(*xs: Any) -> Sequence[Any]:
        pullback: Callable[..., Any] = jax.tree.unflatten(structure, xs[:count])
        return jax.tree.leaves(pullback(list(xs[count:])))

    avals = [handed[i].aval if i in handed else t for i, t in enumerate(types)]
    # jax_remat3 computes things again that nothing reads then.
    pulled = jaxprs.without_dead_code(jaxprs.trace(pull, [*avals, *cotangents])) if backward else None
    kept: dict[Any, list[int]] = {}
    for i, v in handed.items():
        if not isinstance(v, Literal):
            kept.setdefault(v, []).append(i)
    values_kept = tuple((v, tuple(i)) for v, i in kept.items())
    return Linearized(tagged, forward, pulled, values_kept, tuple(differentiated), tuple(outputs))


def _select(items: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [x for x, w in zip(items, which, strict=True) if w]
