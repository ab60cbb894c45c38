"""What becomes of one stage: a point for all its runs, or for a scan in several parts a point for each part."""

from __future__ import annotations

import dataclasses

from remat_kit._plan.knapsack import Option
from remat_kit._plan.point import Point
from remat_kit._plan.stages import Stage


@dataclasses.dataclass(frozen=True)
class Treatment:
    """Points for one stage, each for a number of iterations, in the order in which they run.

    Attributes:
      parts: iterations and their point; one part for all of them, unless a scan is split.
    """

    parts: tuple[tuple[int, Point], ...]

    @property
    def is_split(self) -> bool:
        return len(self.parts) > 1

    def kept_bytes(self, stage: Stage) -> int:
        """What all its runs keep. A split scan keeps slices of its parameters besides, about a copy of them."""
        kept = sum((p.kept_bytes - p.fixed_bytes) * n + p.fixed_bytes for n, p in self.parts)
        return (kept + (stage.slice_bytes if self.is_split else 0)) * stage.around

    def working_bytes(self, stage: Stage) -> int:
        """The most that its backward pass holds besides all that it kept; parts that have run give up theirs."""
        most = given_up = 0
        for n, p in reversed(self.parts):
            most = max(most, p.working_bytes - given_up)
            given_up += (p.kept_bytes - p.fixed_bytes) * n
        return most

    def host_bytes(self, stage: Stage) -> int:
        return sum(p.host_bytes * n for n, p in self.parts) * stage.around

    def flops(self, stage: Stage) -> int:
        """FLOPs of what all its runs recompute."""
        return sum(p.flops * n for n, p in self.parts) * stage.around

    def cost(self, stage: Stage, minimize: str) -> float:
        """What is minimized, of all its runs: of recomputing, and for time of keeping and of slicing too."""
        cost = sum(p.cost(minimize) * n for n, p in self.parts)
        if self.is_split and minimize == "time" and stage.graph is not None:
            cost += 4 * stage.slice_bytes / stage.graph.rates.bandwidth  # slices and gradients, read and written
        return cost * stage.around

    def option(self, stage: Stage, minimize: str) -> Option:
        """What the knapsack sees of it. A trifle for what is offloaded: where there is room it stays on the device."""
        trifle = self.host_bytes(stage) * (1e-20 if minimize == "time" else 1e-9)
        return Option(self.kept_bytes(stage), self.working_bytes(stage), self.cost(stage, minimize) + trifle)


def whole(stage: Stage, p: Point) -> Treatment:
    """One point for all runs of a stage."""
    return Treatment(((stage.trips, p),))


def splits(stage: Stage, points: list[Point], minimize: str) -> list[Treatment]:
    """A scan in two parts, with two points that are neighbours on the convex hull of its frontier, at several places.

    What keeps more comes last: its backward pass is first, and gives it up before the other works.
    """
    if stage.block.kind != "scan" or stage.trips < 2:
        return []
    hull = _hull(points, minimize)
    step = max(1, stage.trips // _MOST_PLACES)
    return [
        Treatment(((n, low), (stage.trips - n, high)))
        for low, high in zip(hull, hull[1:], strict=False)
        for n in range(step, stage.trips, step)
    ]


def _hull(points: list[Point], minimize: str) -> list[Point]:
    """The points below which no mixture of two others lies."""
    hull: list[Point] = []
    for p in points:
        while len(hull) > 1:
            a, b = hull[-2:]
            through = (b.cost(minimize) - a.cost(minimize)) * (p.kept_bytes - a.kept_bytes)
            if through < (p.cost(minimize) - a.cost(minimize)) * (b.kept_bytes - a.kept_bytes):
                break
            hull.pop()
        if not hull or p.cost(minimize) < hull[-1].cost(minimize):
            hull.append(p)
    return hull


_MOST_PLACES = 16
