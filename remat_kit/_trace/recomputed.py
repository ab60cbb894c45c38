"""What a backward pass computes again: the equations of a differentiated program that remat repeats."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from remat_kit._trace import cost, jaxprs
from remat_kit._trace.jaxprs import JaxprEqn
from remat_kit._trace.levels import Level, walk
from remat_kit._trace.linearized import Linearized


@dataclasses.dataclass(frozen=True, eq=False)
class Again:
    """One equation that the backward pass computes again.

    Attributes:
      level, eqn: where it stands in the backward pass.
      chain: the numbers of the original equations that it comes from, outermost call first.
    """

    level: Level
    eqn: JaxprEqn
    chain: tuple[int, ...]

    @property
    def flops(self) -> int:
        """FLOPs of a step, trip counts included."""
        return cost.eqn_flops(self.eqn) * self.level.trips

    @property
    def bytes(self) -> int:
        """Bytes of what it makes in a step, trip counts included."""
        return sum(jaxprs.nbytes(v.aval) for v in self.eqn.outvars) * self.level.trips


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """The forward rule of a custom_vjp call that runs again in the backward pass.

    Attributes:
      tag: the number of the call.
      chain: that of the call and of those around it.
      types: of the values that it is run again for, ``"f32[8,128]"``.
      flops: FLOPs of what runs again.
    """

    tag: int
    chain: tuple[int, ...]
    types: tuple[str, ...]
    flops: int


def equations(lin: Linearized) -> Iterator[Again]:
    """What a backward pass computes again, calls left out but for the equations in them."""
    for level, eqn in walk(Level(lin.backward)):
        if not jaxprs.calls(eqn) and jaxprs.name_of(eqn) is None and is_again(level, eqn):
            yield Again(level, eqn, level.chain_of(eqn))


def forward_rules(lin: Linearized) -> list[Rule]:
    """The forward rules of custom_vjp functions that run again for values which nothing keeps."""
    origins = lin.tagged.origins
    types: dict[int, dict[str, None]] = {}
    chains: dict[int, tuple[int, ...]] = {}
    flops: dict[int, int] = {}
    for level, eqn in walk(Level(lin.backward)):
        chain = level.chain_of(eqn)
        owner = next((t for t in chain if jaxprs.is_custom_vjp(origins[t].eqn)), None)
        if owner is None or not is_again(level, eqn) or jaxprs.calls(eqn) or jaxprs.name_of(eqn) is not None:
            continue
        flops[owner] = flops.get(owner, 0) + cost.eqn_flops(eqn) * level.trips
        made = list(eqn.outvars)
        for e in level.jaxpr.eqns:  # under other names too
            if jaxprs.name_of(e) is not None and any(e.invars[0] is o for o in made):
                made += e.outvars
        readers = [e for e in level.jaxpr.eqns if any(v is o for v in e.invars for o in made)]
        if any(owner not in level.chain_of(r) or not is_again(level, r) for r in readers) or _handed_out(level, made):
            types.setdefault(owner, {}).update(dict.fromkeys(o.aval.str_short(short_dtypes=True) for o in eqn.outvars))
            chains.setdefault(owner, chain[: chain.index(owner) + 1])
    return [Rule(tag, chains[tag], tuple(found), flops[tag]) for tag, found in types.items()]


def is_again(level: Level, eqn: JaxprEqn) -> bool:
    """Whether an equation of a backward pass is computed again, and not the work of the pass itself."""
    here: Level | None = level
    while "rematted_computation" not in jaxprs.scopes(eqn):
        if here is None or here.eqn is None:
            return False
        if _recomputes(here.eqn):
            return True
        eqn, here = here.eqn, here.parent
    return True


def _recomputes(eqn: JaxprEqn) -> bool:
    """Whether an equation of a backward pass is a region that only recomputes, as those of `jax_remat3` are."""
    region = jaxprs.remat_region(eqn)
    return region is not None and not region.differentiated


def _handed_out(level: Level, made: list[Any]) -> bool:
    """Whether values that are recomputed leave their region to be read in the backward pass."""
    if level.parent is None or level.eqn is None or not _recomputes(level.eqn):
        return False
    out = [o for v, o in zip(level.jaxpr.outvars, level.eqn.outvars, strict=True) if any(v is x for x in made)]
    return any(v is o for e in level.parent.jaxpr.eqns for v in e.invars for o in out)
