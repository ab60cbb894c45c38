"""What the rules of `lint` look at: one program, as written and under a policy, differentiated when it is asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remat_kit import _adapters, _loss, _matching
from remat_kit._apply import Policies, Rules
from remat_kit._block_inputs import INPUT
from remat_kit._errors import RematError
from remat_kit._naming import is_reserved
from remat_kit._policy import Policy
from remat_kit._reports import device_bytes, differentiable
from remat_kit._target.measurement import Measurement
from remat_kit._target.target import Target
from remat_kit._trace import blocks, cost, jaxprs, marks, recomputed, residuals, tracing
from remat_kit._trace.holders import Holders
from remat_kit._trace.jaxprs import JaxprEqn
from remat_kit._trace.levels import VIEWS, Level, trace_back, walk
from remat_kit._trace.linearized import Linearized, linearize
from remat_kit._trace.report import Kind
from remat_kit._trace.residuals import Found
from remat_kit._verify.finding import Where
from remat_kit._verify.regions import Region, chain_of, regions

_OF_REMAT = ("checkpoint", "rematted_computation")  # scopes that JAX gives to regions


class Unavailable(Exception):
    """What a rule looks at cannot be had for this program; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A residual, with the original equations that lead to it, outermost call first."""

    found: Found
    chain: tuple[JaxprEqn, ...]

    @property
    def bytes(self) -> int:
        return self.found.entry.bytes

    @functools.cached_property
    def counts(self) -> bool:
        """Whether it takes device memory of its own: it is no argument, and no other look at one or at what is kept."""
        entry, source = self.found.entry, self.found.source
        if entry.action is not Kind.SAVED or entry.alias_of:
            return False
        while source.eqn is not None and source.eqn.primitive.name in VIEWS:
            source = trace_back(source.level, source.eqn.invars[0])
        return source.kind not in ("argument", "constant")


class Subject:
    """One program that rules look at.

    Attributes:
      call: the function and its arguments.
      loss: the program under the policy; as written where that is not given or refused.
      written: the program as written.
      rules: the policy that was asked for, or None.
      target: what to compile for, or None.
      missing: the names that policies, the asked one and those in the program, have and the program lacks.
    """

    def __init__(
        self,
        call: _adapters.Call,
        policy: Policies,
        argnums: int | Sequence[int],
        has_aux: bool,
        target: Target | None,
        measure: Callable[[], Measurement],
    ):
        self.call = call
        self.target = target
        self.rules = None if policy is None else Rules.of(policy)
        self._measure = measure
        self.written = _loss.read(call, None, argnums, has_aux)
        asked = () if self.rules is None else self.rules.policies
        self.missing = list(_matching.missing_names(self.written.jaxpr, asked, INPUT))
        self.refused = bool(self.missing)
        self.loss = self.written
        if self.rules is not None and not self.refused:
            self.loss = _loss.read(call, policy, argnums, has_aux)

    # The program ------------------------------------------------------------------------------------------------------

    @property
    def traced(self) -> tracing.Traced:
        return self.written.traced

    @functools.cached_property
    def root(self) -> Level:
        """The program under the policy."""
        return Level(self.loss.jaxpr)

    @functools.cached_property
    def equations(self) -> tuple[tuple[Level, JaxprEqn], ...]:
        """All equations of the program as written."""
        return tuple(walk(Level(self.written.jaxpr)))

    @functools.cached_property
    def blocks(self) -> Holders:
        """The blocks that the program as written has."""
        return Holders(blocks.find(self.written.jaxpr))

    @functools.cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions that are rematerialized, outer ones before those inside them."""
        applied = {} if self.loss.applied is None else {c.path: p for c, p in self.loss.applied.blocks}
        return regions(self.root, applied)

    def region_of(self, chain: Sequence[JaxprEqn]) -> Region | None:
        """The innermost region that an equation lies in."""
        return next(iter(self._regions_around(chain)), None)

    def _regions_around(self, chain: Sequence[JaxprEqn]) -> list[Region]:
        """The regions that an equation lies in, inner ones first."""
        way = tuple(map(id, chain))
        return [r for n in range(len(way) - 1, 0, -1) if (r := self._region_at.get(way[:n])) is not None]

    @functools.cached_property
    def _region_at(self) -> dict[tuple[int, ...], Region]:
        return {tuple(map(id, r.chain)): r for r in self.regions}

    def policies(self) -> Iterator[Policy]:
        """The policies in force: that of each region, each once."""
        return iter(dict.fromkeys(r.policy for r in self.regions))

    # Differentiated ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def lin(self) -> Linearized:
        """The program under the policy, differentiated."""
        return self._linearized(self.loss.jaxpr, without_remat=False)

    @functools.cached_property
    def kept(self) -> tuple[Kept, ...]:
        """What it keeps."""
        return self._kept(self.lin)

    @functools.cached_property
    def plain(self) -> tuple[Kept, ...]:
        """What the program would keep without remat, only what takes memory."""
        lin = self._linearized(self.loss.jaxpr, without_remat=True)
        return tuple(k for k in self._kept(lin) if k.counts)

    @functools.cached_property
    def plain_bytes(self) -> int:
        return sum(k.bytes for k in self.plain)

    @functools.cached_property
    def kept_bytes(self) -> int:
        """What is kept on the device, arguments apart."""
        return sum(k.bytes for k in self.kept if k.counts)

    @functools.cached_property
    def kept_names(self) -> frozenset[str]:
        """The checkpoint names of what is kept."""
        return frozenset(n for k in self.kept for n in k.found.entry.names)

    @functools.cached_property
    def again(self) -> tuple[recomputed.Again, ...]:
        """What the backward pass computes again."""
        return tuple(recomputed.equations(self.lin))

    @functools.cached_property
    def step_flops(self) -> int:
        """FLOPs of forward and backward pass."""
        return sum(cost.program_cost(j).flops for j in (self.lin.forward, self.lin.backward))

    def held(self, region: Region) -> int:
        """Bytes that a region would keep without remat."""
        return sum(k.bytes for k in self.within(region))

    def within(self, region: Region) -> Sequence[Kept]:
        """What a region would keep without remat."""
        return self._within.get(region, ())

    @functools.cached_property
    def _within(self) -> dict[Region, list[Kept]]:
        found: dict[Region, list[Kept]] = {}
        for k in self.plain:
            for r in self._regions_around(k.chain):
                found.setdefault(r, []).append(k)
        return found

    def _linearized(self, jaxpr: Any, *, without_remat: bool) -> Linearized:
        diff, outputs = list(self.loss.differentiated), list(self.loss.outputs)
        try:
            return differentiable(lambda: linearize(jaxpr, diff, outputs, without_remat=without_remat))
        except RematError as error:
            raise Unavailable(str(error)) from error
        except Exception as error:  # JAX's own, on programs that it cannot differentiate
            reason = f"{type(error).__name__}: {error}"[:260]
            raise Unavailable(f"JAX cannot differentiate the function: {reason}") from error

    def _kept(self, lin: Linearized) -> tuple[Kept, ...]:
        found = residuals.read(lin, self.traced.labels, device_bytes=device_bytes(self.call), hidden=is_reserved)
        origins = lin.tagged.origins
        return tuple(Kept(f, tuple(origins[t].eqn for t in f.source.chain)) for f in found)

    # Compiled ---------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def measurement(self) -> Measurement:
        """The step under the policy, compiled, beside that without any remat."""
        if self.target is None or self.refused or not self.regions:
            raise Unavailable("")
        return self._measure()

    # Places -----------------------------------------------------------------------------------------------------------

    def at(self, level: Level, eqn: JaxprEqn) -> Where:
        """The place of an equation of the program."""
        return self.place((*chain_of(level), eqn))

    def place(self, chain: Sequence[JaxprEqn]) -> Where:
        """The place of an equation, given it and the calls around it, outermost first."""
        if not chain:
            return Where()
        scopes = [s for e in chain for s in jaxprs.scopes(e)]
        block = next((s[len(marks.BLOCK) :] for s in scopes if s.startswith(marks.BLOCK)), "")
        if not block:
            inside = self.blocks.of(chain)
            block = inside[-1].path if inside else ""
        region = jaxprs.remat_region(chain[-1])  # which has no line of its own where all of a function is one
        within = [] if region is None else jaxprs.opened(region.jaxpr).eqns[:1]
        sources = (jaxprs.source_line(e) for e in (*reversed(chain), *within))
        file, line, function = next((s for s in sources if s[0]), ("", 0, ""))
        return Where(block, marks.path([x for x in scopes if x not in _OF_REMAT]), file, line, function)

    def first(self, again: Sequence[recomputed.Again]) -> Where:
        """The place of the first of some recomputed equations in the program."""
        return self.origin(self.lin, min(x.chain for x in again))

    def origin(self, lin: Linearized, chain: Sequence[int]) -> Where:
        """The place of an equation of a differentiated program, given the numbers of those that it comes from."""
        return self.place([lin.tagged.origins[t].eqn for t in chain])
