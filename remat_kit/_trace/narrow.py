"""Narrow places of a program: where it is cut into segments if it has no layers.

A segment hands on what later segments read, and its backward pass holds what it computes. Cutting more often keeps
more of the first and holds less of the second. For a uniform chain the sum is least with about the square root of its
length in segments (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016); here dynamic programming finds
the cuts of any program: the cheapest ones for each of many limits on what one segment computes.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from remat_kit._trace import cost, jaxprs
from remat_kit._trace.jaxprs import Var


def cuts(owner: Any) -> list[int]:
    """Where to cut an open program: before which equations, in order; nowhere if that gains nothing.

    Args:
      owner: the program. Its inputs are there anyway, and so are its results.
    """
    n = len(owner.eqns)
    made = np.concatenate([[0], np.cumsum([_computed_bytes(e) for e in owner.eqns])])
    spans = _spans(owner)
    places = np.array([0, *_places(owner, spans, made), n])
    inside = made[places][None, :] - made[places][:, None]
    return [int(places[c]) for c in best(_handed_on(places, spans), inside)]


def best(handed_on: np.ndarray, inside: np.ndarray) -> list[int]:
    """The places where cutting leaves least in memory: all that is handed on, and the most inside any segment.

    Args:
      handed_on: [i, j]: bytes that a segment from place i to place j adds to what later segments read. Places 0 and
        n - 1 are the ends.
      inside: [i, j]: bytes that it holds while it is differentiated.
    """
    n = len(inside)
    found, least = [], float(inside[0, -1])
    limit = least - 1
    while limit >= 1:
        cheapest = _cheapest(handed_on, inside, limit)
        if cheapest is None or cheapest[0] >= least:
            break
        kept, chosen = cheapest
        held = max(inside[a, b] for a, b in itertools.pairwise([0, *chosen, n - 1]))
        if kept + held < least:
            found, least = chosen, kept + held
        limit = min(limit * _FINER, held - 1)
    return found


_FINER = 0.95  # the sum is the least one to within this
_MOST_PLACES = 400


def refs_alive(owner: Any) -> set[int]:
    """The places between the making and the last use of a mutable reference: a segment cannot hand one on."""
    made = {v: i for i, e in enumerate(owner.eqns) for v in e.outvars if jaxprs.is_ref(v.aval)}
    uses = [(made[v], i) for i, e in enumerate(owner.eqns) for v in e.invars if isinstance(v, Var) and v in made]
    return {k for a, b in uses for k in range(a + 1, b + 1)}


def _spans(owner: Any) -> np.ndarray:
    """For each value that is read later: the equation that makes it, the last one that reads it, and its bytes."""
    made = {v: i for i, e in enumerate(owner.eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(owner.eqns) for v in e.invars if isinstance(v, Var)}
    rows = [(i, last[v], jaxprs.nbytes(v.aval)) for v, i in made.items() if v in last]
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def _places(owner: Any, spans: np.ndarray, made: np.ndarray) -> list[int]:
    """Where no more bytes are alive than on either side; of too many the narrowest in each part of the program."""
    n = len(owner.eqns)
    change = np.zeros(n + 2)
    np.add.at(change, spans[:, 0].astype(int) + 1, spans[:, 2])
    np.add.at(change, spans[:, 1].astype(int) + 1, -spans[:, 2])
    live = np.cumsum(change)  # before each equation
    uncut = refs_alive(owner)
    found = [i for i in range(1, n) if i not in uncut and live[i] <= live[i - 1] and live[i] <= live[i + 1]]
    part = made * _MOST_PLACES // max(made[-1], 1)
    narrowest = {int(part[i]): i for i in sorted(found, key=lambda i: -live[i])} if len(found) > _MOST_PLACES else {}
    return sorted(narrowest.values()) or found


def _handed_on(places: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """[i, j]: bytes of what is computed between two places and read behind the second."""
    n = len(places)
    first = np.searchsorted(places, spans[:, 0], side="right") - 1  # the place before which it is not yet there
    after = np.searchsorted(places, spans[:, 1], side="right") - 1  # the last place at which it is still wanted
    grid = np.zeros((n, n + 1))
    np.add.at(grid, (first, np.minimum(first + 1, n)), spans[:, 2])
    np.add.at(grid, (first, np.maximum(after, first) + 1), -spans[:, 2])
    alive = np.cumsum(grid, axis=1)[:, :n]  # [i, j]: of what is made right behind place i, wanted at place j
    return np.cumsum(alive[::-1], axis=0)[::-1]


def _cheapest(handed_on: np.ndarray, inside: np.ndarray, limit: float) -> tuple[float, list[int]] | None:
    """The cuts that hand on least while no segment computes more than a limit: bytes and indices of places."""
    n = len(inside)
    least = np.full(n, np.inf)
    least[0] = 0
    before = np.zeros(n, dtype=int)
    for j in range(1, n):
        total = np.where(inside[:j, j] <= limit, least[:j], np.inf) + (handed_on[:j, j] if j < n - 1 else 0)
        before[j] = int(np.argmin(total))
        least[j] = total[before[j]]
    if not np.isfinite(least[-1]):
        return None
    chosen = []
    j = int(before[-1])
    while j:
        chosen.append(j)
        j = int(before[j])
    return float(least[-1]), chosen[::-1]


def _computed_bytes(eqn: Any) -> int:
    """Bytes of what an equation computes, or the programs nested in it; nothing for what only moves values."""
    if not cost.eqn_flops(eqn):
        return 0
    outputs = sum(jaxprs.nbytes(v.aval) for v in eqn.outvars)
    nested = (
        max(c.trips, 1) * sum(_computed_bytes(e) for e in jaxprs.opened(c.jaxpr).eqns)
        for c in jaxprs.calls(eqn)
        if c.rewritable
    )
    return max(outputs, *nested, 0)
