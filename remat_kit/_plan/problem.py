"""A whole program with a budget: stages, their frontiers, and the cheapest selection within a predicted peak."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from remat_kit._apply import BlockForm
from remat_kit._plan import knapsack
from remat_kit._plan.block_frontier import BlockFrontier
from remat_kit._plan.graph import Graph
from remat_kit._plan.knapsack import Option
from remat_kit._plan.point import Point, choose
from remat_kit._plan.rates import Rates
from remat_kit._plan.stages import Stage, Stages
from remat_kit._plan.treatment import Treatment, splits, whole
from remat_kit._policy import Action, ValueFacts
from remat_kit._presets import presets


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """A treatment of each stage, with what is predicted of the whole program.

    Attributes:
      treatments: one for each stage of the problem; None for stages that keep nothing.
      peak: bytes.
      cost: of what is recomputed, in what is minimized.
      bound: no selection within the peak that was asked for costs less, as far as was proved; None if nobody asked.
    """

    treatments: tuple[Treatment | None, ...]
    peak: int
    cost: float
    bound: float | None = None

    @property
    def key(self) -> tuple[Treatment | None, ...]:
        """Equal for selections that are the same."""
        return self.treatments


_POINTS = 12  # solved for each block before anything is asked
_ROUNDS = 4


class Problem:
    """The stages of a program and what can be done with each.

    Attributes:
      program: the stages, and the memory that is there all the time.
      minimize: ``"time"`` or ``"flops"``.
      rates: of the target.
      offloads: whether values may be offloaded.
      split: by what share of the step's cost two parts of a scan must be better than one; None leaves scans whole.
    """

    by_name = False  # whether choices go by checkpoint names

    def __init__(
        self,
        program: Stages,
        rates: Rates,
        minimize: str,
        actions: frozenset[str],
        *,
        split: float | None = None,
        points: int = _POINTS,
    ) -> None:
        self.program, self.minimize, self.rates, self.split = program, minimize, rates, split
        self.offloads = "offload" in actions
        self.stages = program.stages
        self._forms: dict[str, BlockForm] = {}
        self.frontiers: dict[int, BlockFrontier] = {}
        for s in self.stages:
            if s.graph is not None and id(s.graph) not in self.frontiers:
                f = BlockFrontier(s.graph, minimize, self.host_bytes(s), save="save" in actions)
                f.fill(points)
                self.frontiers[id(s.graph)] = f
        self.active = [(s, f) for s in self.stages if (f := self.frontier(s)) is not None]

    @property
    def fixed_bytes(self) -> int:
        """What is there all the time: arguments, results, and residuals outside all stages."""
        return self.program.argument_bytes + self.program.output_bytes + self.program.other_bytes

    def host_bytes(self, stage: Stage) -> float:
        """What can go to the host and come back while a block computes, one way each, in one run of it."""
        graph = stage.graph
        if graph is None or not self.offloads:
            return 0.0
        return self.rates.host_bandwidth * min(graph.forward_seconds, graph.backward_seconds)

    def form(self, stage: Stage) -> BlockForm:
        """What of a stage's program a plan depends on."""
        path = stage.block.path
        if path not in self._forms:
            self._forms[path] = BlockForm.of(stage.block)
        return self._forms[path]

    def frontier(self, stage: Stage) -> BlockFrontier | None:
        return None if stage.graph is None else self.frontiers[id(stage.graph)]

    # What others choose -----------------------------------------------------------------------------

    def extra(self, selection: Selection) -> tuple[int, float]:
        """FLOPs of what a selection recomputes, and seconds of that and of keeping the rest."""
        taken = [(s, t) for s, t in zip(self.stages, selection.treatments, strict=True) if t is not None]
        return sum(t.flops(s) for s, t in taken), sum(t.cost(s, "time") for s, t in taken)

    def without_remat(self) -> Selection:
        """Nothing is recomputed."""
        return self.evaluate(lambda stage, graph: None)

    def evaluate(self, choice: Callable[[Stage, Graph], Point | None]) -> Selection:
        """The selection of a choice made by somebody else; None leaves a stage without remat."""
        taken: list[Treatment | None] = []
        for s in self.stages:
            f = self.frontier(s)
            taken.append(None if f is None else whole(s, choice(s, f.graph) or f.plain))
        options = [t.option(s, self.minimize) for s, t in zip(self.stages, taken, strict=True) if t is not None]
        peak = self.fixed_bytes + knapsack.peak_of(options)
        return Selection(tuple(taken), peak, sum(o.cost for o in options))

    @functools.cached_property
    def presets(self) -> dict[str, Selection]:
        """What the presets come to on the blocks of the default choice, by name; equal ones once, cheapest first."""
        found: dict[Any, tuple[str, Selection]] = {}
        for name, preset in presets.items():
            if preset.native is not None or (Action.OFFLOAD in preset.actions and not self.offloads):
                continue
            if self.by_name and any(set(r.selector.criteria()) != {"name"} for r in preset.rules):
                continue  # it saves values that no name stands for
            if self.by_name and preset.remat and preset.rest is not Action.RECOMPUTE:
                continue
            selection = self.without_remat()
            if preset.remat:
                selection = self.by_facts(lambda f, p=preset: p.action(f), lambda s: s.block.kind != "rest")
            found.setdefault(selection.key, (name, selection))
        return dict(sorted(found.values(), key=lambda x: (x[1].cost, x[1].peak)))

    def by_facts(self, keeps: Callable[[ValueFacts], str | None], planned: Callable[[Stage], bool]) -> Selection:
        """The selection of a policy, asked about each value; stages that are not planned have no remat."""

        @functools.cache  # equal blocks share a graph
        def point(graph: Graph) -> Point:
            actions = {c.label: keeps(c.facts) for c in graph.choices}
            saved = [k for k, a in actions.items() if a == "save"]
            return choose(graph, saved, [k for k, a in actions.items() if a == "offload"])

        return self.evaluate(lambda stage, graph: point(graph) if planned(stage) else None)

    # What the solver chooses ------------------------------------------------------------------------

    def solve(self, peak: float) -> Selection | None:
        """The cheapest selection within a predicted peak; None if there is none.

        After a first answer each block is solved for the bytes that it left over, until that gains nothing more.
        """
        best: Selection | None = None
        for _ in range(_ROUNDS):
            found = self._solve(peak)
            if found is None:
                break
            if best is not None and found.cost >= best.cost * (1 - 1e-6):
                break
            best = found
            if not self._refine(found, peak):
                break
        if best is None:
            return self._solve(peak, split=True) if self.split is not None else None
        if self.split is not None:
            parted = self._solve(peak, split=True)
            if parted is not None and best.cost - parted.cost > self.split * self.whole_cost:
                best = parted
        return dataclasses.replace(best, bound=min(best.cost, self.bound(max(peak, best.peak))))

    def least(self) -> Selection:
        """The selection with the smallest predicted peak, and the least cost among those."""
        found = self.solve(self.fixed_bytes + knapsack.least_peak(self._options(self._all())))
        return found if found is not None else self.without_remat()

    def cheapest(self) -> Selection:
        """The selection with the least cost, whatever it takes: without remat, unless keeping things costs too much."""
        return self.solve(float("inf")) or self.least()

    @functools.cached_property
    def whole_cost(self) -> float:
        """What the whole step costs without remat, in what is minimized."""
        of = (lambda o: o.seconds) if self.minimize == "time" else (lambda o: float(o.flops))
        return sum(sum(map(of, s.graph.ops)) * s.trips * s.around for s in self.stages if s.graph is not None)

    def bound(self, peak: float) -> float:
        """What no selection within a predicted peak costs less than, as far as the solver proved it.

        For scans that are not split. Between two levels that were proved for a block the next one's cost holds, with
        the working bytes that no choice does without.
        """
        tables = []
        for s, f in self.active:
            runs = s.trips * s.around
            levels = [Option(int(low) * runs, f.floor, least * runs) for low, least in f.bounds()]
            tables.append([whole(s, f.plain).option(s, self.minimize), *levels])
        return knapsack.bound(tables, self._room(peak))

    def _all(self, *, split: bool = False) -> list[list[Treatment]]:
        """The treatments of each active stage."""
        found = []
        for s, f in self.active:
            found.append([whole(s, p) for p in f.points] + (splits(s, f.points, self.minimize) if split else []))
        return found

    def _options(self, treatments: list[list[Treatment]]) -> list[list[Option]]:
        return [[t.option(s, self.minimize) for t in ts] for (s, _), ts in zip(self.active, treatments, strict=True)]

    def _room(self, peak: float) -> int:
        return int(min(peak, 2.0**62)) - self.fixed_bytes

    def _solve(self, peak: float, *, split: bool = False) -> Selection | None:
        treatments = self._all(split=split)
        answer = knapsack.solve(self._options(treatments), self._room(peak))
        if answer is None:
            return None
        taken = iter(ts[k] for ts, k in zip(treatments, answer.taken, strict=True))
        chosen = tuple(next(taken) if s.graph is not None else None for s in self.stages)
        return Selection(chosen, self.fixed_bytes + answer.peak, answer.cost)

    def _refine(self, found: Selection, peak: float) -> bool:
        """Solves blocks for what they keep and what is left over; tells whether there was anything to solve."""
        left = peak - found.peak
        asked = False
        seen: set[int] = set()
        for s, t in zip(self.stages, found.treatments, strict=True):
            f = self.frontier(s)
            if f is None or t is None or t.parts[0][1] == f.points[-1] or id(f) in seen:
                continue
            seen.add(id(f))
            alike = sum(
                r.trips * r.around
                for r, q in zip(self.stages, found.treatments, strict=True)
                if q is not None and q.parts[0][1] is t.parts[0][1]
            )
            more = t.parts[0][1].kept_bytes + left / max(alike, 1)
            asked |= f.at(min(more, f.points[-1].kept_bytes)) is not None
        return asked
