"""The blocks of a program whose user names none."""

from __future__ import annotations

from collections.abc import Sequence

from remat_kit._trace import blocks, jaxprs
from remat_kit._trace.blocks import Candidate
from remat_kit._trace.jaxprs import JaxprEqn
from remat_kit._trace.levels import Level, trace_back
from remat_kit._trace.linearized import Linearized, linearize
from remat_kit._trace.tracing import Traced


def default_blocks(traced: Traced, candidates: Sequence[Candidate], lin: Linearized | None = None) -> list[Candidate]:
    """Chooses blocks by where the residuals of the program, taken without any remat, lie.

    Args:
      lin: the program differentiated, where that was done already: it is not done again if it would be the same.
    """
    owner = jaxprs.opened(traced.jaxpr)
    differentiated = tuple(jaxprs.is_inexact(v.aval) for v in owner.invars)
    outputs = tuple(jaxprs.is_inexact(v.aval) for v in owner.outvars)
    if not any(differentiated) or not any(outputs):
        return blocks.segments(traced.jaxpr)
    if lin is not None and not lin.tagged.regions and (lin.differentiated, lin.outputs) == (differentiated, outputs):
        return blocks.choose(traced.jaxpr, candidates, kept(lin))
    try:
        lin = linearize(traced.jaxpr, differentiated, outputs, without_remat=True, backward=False)
    except (NotImplementedError, TypeError, ValueError):  # a while loop or callback: forward mode may still work
        return blocks.choose(traced.jaxpr, candidates, [])
    return blocks.choose(traced.jaxpr, candidates, kept(lin))


def kept(lin: Linearized) -> list[tuple[tuple[JaxprEqn, ...], int]]:
    """For each intermediate that is kept: the original equations that lead to it, and its bytes."""
    root = Level(lin.forward)
    found = []
    for var, _ in lin.kept:
        if var not in root.producers:
            continue
        chain = trace_back(root, var).chain
        found.append((tuple(lin.tagged.origins[t].eqn for t in chain), jaxprs.nbytes(var.aval)))
    return found
