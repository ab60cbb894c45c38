"""Which point to take for each stage of a program: a knapsack over frontiers, along the order of the backward pass.

The backward pass runs the stages from the last to the first, and what a stage kept is given up when it has run. So the
peak is the largest, over stages, of what all stages up to it keep and what it works with:

    peak = fixed + max over i of ( sum over j <= i of kept(j)  +  working(i) )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to treat a stage, with what it takes in one run of the program.

    Attributes:
      kept, working: bytes.
      cost: what is minimized.
    """

    kept: int
    working: int
    cost: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """The options taken, by their number in each stage, and what they take."""

    taken: tuple[int, ...]
    peak: int
    cost: float


def peak_of(options: Sequence[Option]) -> int:
    """The peak of a sequence of options, without what is there all the time."""
    kept = most = 0
    for o in options:
        kept += o.kept
        most = max(most, kept + o.working)
    return most


def least_peak(stages: Sequence[Sequence[Option]]) -> int:
    """The smallest peak that any options have, to within a thousandth.

    Within a peak, the option with the fewest kept bytes leaves most to the stages behind it, so one pass tells.
    """
    low, high = 0, peak_of([max(s, key=lambda o: o.kept + o.working) for s in stages])
    while high - low > max(1, high >> 10):
        middle = (low + high) // 2
        kept: int | None = 0
        for options in stages:
            fitting = [o.kept for o in options if kept + o.kept + o.working <= middle]
            if not fitting:
                kept = None
                break
            kept += min(fitting)
        low, high = (middle, high) if kept is None else (low, middle)
    return high


def solve(stages: Sequence[Sequence[Option]], budget: int) -> Answer | None:
    """The cheapest options whose peak is within a budget; None if there are none.

    States are sums of kept bytes with the least cost that reaches them. As long as there are few the answer is exact;
    of many the cheapest in each small interval of bytes are kept on, so that a little of the budget may be left over.
    """
    table = _Table(budget)
    for options in stages:
        if not table.add(options):
            return None
    taken = table.taken()
    peak = peak_of([options[k] for options, k in zip(stages, taken, strict=True)])
    return Answer(taken, peak, float(table.cost.min()))


def bound(stages: Sequence[Sequence[Option]], budget: int) -> float:
    """What no choice of options within a budget costs less than: that of `solve`, with all its rounding downwards."""
    table = _Table(budget, optimistic=True)
    return float(table.cost.min()) if all(table.add(options) for options in stages) else float("inf")


class _Table:
    """The states after some stages: sums of kept bytes, rising, with falling costs."""

    def __init__(self, budget: int, *, optimistic: bool = False) -> None:
        self.budget, self.optimistic = budget, optimistic
        self.kept = np.zeros(1, np.int64)
        self.cost = np.zeros(1)
        self.back: list[tuple[np.ndarray, np.ndarray]] = []  # for each stage: the option taken, the state before

    def add(self, options: Sequence[Option]) -> bool:
        """Adds a stage; tells whether anything is within the budget."""
        sums = self.kept[None, :] + np.array([o.kept for o in options], np.int64)[:, None]
        peaks = sums + np.array([o.working for o in options], np.int64)[:, None]
        costs = self.cost[None, :] + np.array([o.cost for o in options])[:, None]
        which, before = np.nonzero(peaks <= self.budget)
        if not which.size:
            return False
        sums, costs = sums[which, before], costs[which, before]
        order = np.lexsort((before, which, costs, sums))
        ordered = costs[order]
        order = order[np.concatenate([[True], ordered[1:] < np.minimum.accumulate(ordered)[:-1]])]
        self.kept, self.cost = sums[order], costs[order]
        if len(order) > _MOST_STATES:
            interval = self.kept * _MOST_STATES // max(self.budget, 1)
            last = np.concatenate([interval[1:] != interval[:-1], [True]])
            first = np.concatenate([[True], last[:-1]])
            kept = self.kept[first] if self.optimistic else self.kept[last]
            self.kept, self.cost, order = kept, self.cost[last], order[last]
        self.back.append((which[order], before[order]))
        return True

    def taken(self) -> tuple[int, ...]:
        """The options that lead to the cheapest state."""
        at = int(np.argmin(self.cost))
        found: list[int] = []
        for which, before in reversed(self.back):
            found.append(int(which[at]))
            at = int(before[at])
        return tuple(reversed(found))


_MOST_STATES = 512
