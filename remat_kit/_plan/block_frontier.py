"""The frontier of one block: points that no other beats in bytes kept, working bytes and cost."""

from __future__ import annotations

import heapq
import itertools

from remat_kit._plan.graph import Graph
from remat_kit._plan.memory import working_bytes
from remat_kit._plan.point import Point, choose, without_remat
from remat_kit._plan.solve import Solver

_FLIPPED = 12
_EXPLORED = 200


class BlockFrontier:
    """Points of one block, from the fewest bytes kept to no remat at all; more of them where they are asked for.

    Attributes:
      graph: the block.
      plain: the block without remat.
      floor: working bytes that no choice does without: those of the backward pass with everything kept.
    """

    def __init__(self, graph: Graph, minimize: str, host_bytes: float = 0.0, *, save: bool = True) -> None:
        self.graph, self.minimize, self.save = graph, minimize, save
        self._solver = Solver(graph, minimize, host_bytes, save=save)
        self._proved: list[tuple[float, float]] = []  # nothing that keeps so few bytes costs less than this
        self._asked: set[float] = set()
        self._points: list[Point] | None = None
        self.plain = without_remat(graph)
        self.floor = working_bytes(graph, (), frozenset(graph.values[v].root for v in graph.residuals))
        self._all = [self.plain] if graph.decisions and save else [self.plain, choose(graph, ())]
        least = self._solver.least()
        self._add(least, least.kept_bytes)

    def fill(self, most: int) -> None:
        """Solves the block for some more budgets, each where the most is to be gained.

        That is, for the bytes halfway between two points that enclose the largest rectangle of bytes and cost.
        """
        count = itertools.count()
        heap: list[tuple[float, int, Point, Point]] = []

        def push(low: Point, high: Point) -> None:
            gain = (high.kept_bytes - low.kept_bytes) * (low.cost(self.minimize) - high.cost(self.minimize))
            if gain > 0:
                heapq.heappush(heap, (-gain, next(count), low, high))

        least = min(self._all, key=lambda p: (p.kept_bytes, p.cost(self.minimize)))
        free = self.at(float("inf"))
        if free is not None:
            push(least, free)
        for _ in range(most):
            if not heap:
                break
            _, _, low, high = heapq.heappop(heap)
            middle = self.at((low.kept_bytes + high.kept_bytes) / 2)
            if middle is not None and middle.kept_bytes > low.kept_bytes:
                push(low, middle)
                push(middle, high)
        self.explore()

    def at(self, kept_bytes: float) -> Point | None:
        """Solves the block for a number of bytes; None if it cannot do with so few."""
        if kept_bytes in self._asked:
            return None
        self._asked.add(kept_bytes)
        point = self._solver.solve(kept_bytes)
        if point is not None:
            self._add(point, kept_bytes)
        return point

    def explore(self) -> None:
        """Adds points that save one of the largest values more or less than the frontier's, and again from these.

        The solver does not see working sets, which differ between choices that keep as much.
        """
        graph = self.graph
        pinned = {v for o in graph.decisions for v in graph.ops[o].writes}
        large = sorted(graph.choices, key=lambda c: -c.bytes)[:_FLIPPED] if self.save else []
        large = [c for c in large if not any(v in pinned for o in c.ops for v in graph.ops[o].reads)]
        seen: set[tuple[tuple[str, ...], tuple[str, ...]]] = {(p.saved, p.offloaded) for p in self._all if p.remat}
        allowance = _EXPLORED
        todo = [p for p in self.points if p.remat]
        while todo and allowance > 0:
            point = todo.pop(0)
            if point not in self.points:
                continue
            for c in large if point.remat else ():
                if c.label in point.offloaded:
                    continue
                found = choose(graph, set(point.saved) ^ {c.label}, point.offloaded)
                allowance -= 1
                if (found.saved, found.offloaded) not in seen:
                    seen.add((found.saved, found.offloaded))
                    self._add(found, None)
                    todo.append(found)

    def _add(self, point: Point, kept_bytes: float | None) -> None:
        if point not in self._all:
            self._all.append(point)
            self._points = None
        if kept_bytes is not None:
            self._proved.append((kept_bytes, point.bound))

    @property
    def points(self) -> list[Point]:
        """The points that no other beats, fewest bytes first."""
        if self._points is not None:
            return self._points
        out: list[Point] = []
        for p in sorted(self._all, key=lambda p: (p.kept_bytes, p.cost(self.minimize), p.working_bytes)):
            mine = self._objectives(p)
            if not any(all(a <= b for a, b in zip(self._objectives(q), mine, strict=True)) for q in out):
                out.append(p)
        self._points = out
        return out

    def _objectives(self, p: Point) -> tuple[float, ...]:
        return p.kept_bytes, p.working_bytes, p.host_bytes, p.cost(self.minimize)

    def bounds(self) -> list[tuple[float, float]]:
        """What was proved: pairs of bytes and cost, so that what keeps more than these bytes, and no more than those of
        the next pair, costs no less. The last holds from its bytes on.
        """
        levels = sorted({n: max(b for m, b in self._proved if m >= n) for n, _ in self._proved}.items())
        floor = [float(min(p.kept_bytes for p in self._all)), *(n for n, _ in levels[:-1])]
        return [(low, b) for low, (_, b) in zip(floor, levels, strict=True)]
