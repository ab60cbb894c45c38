"""The `jax.checkpoint` regions of a program, each with its policy as data and the calls around it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from remat_kit._errors import RematError, RematWarning
from remat_kit._naming import policy_behind
from remat_kit._policy import Policy
from remat_kit._policy import policy as as_policy
from remat_kit._rewrite import is_loop
from remat_kit._trace import cost, jaxprs, marks
from remat_kit._trace.jaxprs import JaxprEqn
from remat_kit._trace.levels import Level, walk


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """One region that is rematerialized.

    Attributes:
      level, eqn: where its equation stands.
      chain: the calls around it and its own equation, outermost first.
      body: its program, closed.
      policy: its policy as data, or with JAX's callable in it.
      prevent_cse: as written.
      outer: the region around it, or None.
    """

    level: Level
    eqn: JaxprEqn
    chain: tuple[JaxprEqn, ...]
    body: Any
    policy: Policy
    prevent_cse: Any
    outer: Region | None

    @functools.cached_property
    def looped(self) -> bool:
        """Whether it lies in a loop."""
        return any(map(is_loop, self.chain[:-1]))

    def precedes(self, chain: Sequence[JaxprEqn]) -> bool:
        """Whether an equation stands behind it in the program, or behind the outermost loop around it."""
        n, order = self._beside
        if len(chain) <= n or any(a is not b for a, b in zip(chain[:n], self.chain, strict=False)):
            return False
        return order.get(id(chain[n]), -1) > order[id(self.chain[n])]

    @functools.cached_property
    def _beside(self) -> tuple[int, dict[int, int]]:
        """How many calls lie around it, or around the outermost loop around it; the order of the equations there."""
        n = next((i for i, e in enumerate(self.chain) if is_loop(e)), len(self.chain) - 1)
        level = self.level
        while level.parent is not None and len(chain_of(level)) > n:
            level = level.parent
        return n, {id(e): i for i, e in enumerate(level.jaxpr.eqns)}

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of all its runs in one forward pass."""
        return cost.program_cost(self.body).flops * self.level.trips

    @functools.cached_property
    def inside(self) -> tuple[tuple[Level, JaxprEqn], ...]:
        """All equations in it, with levels that start at its body."""
        return tuple(walk(Level(self.body)))


def regions(root: Level, applied: Mapping[str, Policy]) -> tuple[Region, ...]:
    """All regions of a program, outer ones before those inside them.

    Args:
      applied: the policies of the blocks that were made regions, by path.
    """
    found: list[Region] = []
    of: dict[int, Region] = {}
    for level, eqn in walk(root):
        region = jaxprs.remat_region(eqn)
        if region is None or region.differentiated:
            continue
        outer = next((of[id(e)] for e in reversed(chain_of(level)) if id(e) in of), None)
        chain = (*chain_of(level), eqn)
        scopes = [s for e in chain for s in jaxprs.scopes(e)]
        block = next((s[len(marks.BLOCK) :] for s in scopes if s.startswith(marks.BLOCK)), "")
        policy = applied[block] if block in applied and outer is None else _policy(region.policy)
        of[id(eqn)] = made = Region(level, eqn, chain, region.jaxpr, policy, region.prevent_cse, outer)
        found.append(made)
    return tuple(found)


def chain_of(level: Level) -> tuple[JaxprEqn, ...]:
    """The equations that call the program of a level, outermost first."""
    found: list[JaxprEqn] = []
    here: Level | None = level
    while here is not None and here.eqn is not None:
        found.append(here.eqn)
        here = here.parent
    return tuple(reversed(found))


def _policy(native: Any) -> Policy:
    if native is None:
        return Policy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # what is wrong with it is for the rules to say
        try:
            found = as_policy(native)
        except RematError:
            return Policy()
    return policy_behind(n for r in found.rules for n in r.selector.name) or found
