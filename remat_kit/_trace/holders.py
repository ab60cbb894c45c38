"""Which regions of a program hold an equation: looked up, not searched for.

A deep program has thousands of equations and thousands of regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from remat_kit._trace.jaxprs import JaxprEqn

if TYPE_CHECKING:
    from remat_kit._trace.blocks import Candidate


class Holders:
    """Regions, by the ways that lead to the equations they are made of."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._at: dict[tuple[int, ...], list[Candidate]] = {}
        for c in candidates:
            way = tuple(map(id, c.outer))
            for member in c.members:
                self._at.setdefault((*way, member), []).append(c)

    def of(self, chain: Sequence[JaxprEqn]) -> list[Candidate]:
        """The regions that hold an equation, outer ones first, given it and the calls around it, outermost first."""
        way = tuple(map(id, chain))
        return [c for n in range(1, len(way) + 1) for c in self._at.get(way[:n], ())]

    def path(self, chain: Sequence[JaxprEqn]) -> str:
        """Path of the outermost region that holds an equation, or the empty string."""
        return next((c.path for c in self.of(chain)), "")
