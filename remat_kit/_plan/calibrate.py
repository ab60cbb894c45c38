"""Closing the loop with the compiler: each compiled plan corrects what the model predicts for the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from remat_kit._plan.problem import Selection

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, eq=False)
class Trial(Generic[M]):
    """A selection that was compiled.

    Attributes:
      selection: with its predicted peak.
      peak: the compiled one.
      found: what the compiler said.
    """

    selection: Selection
    peak: int
    found: M


@dataclasses.dataclass(frozen=True)
class Line:
    """The compiled peak as a line of the predicted one.

    Before any trial the two are equal but for the part of each value that a device holds; one trial corrects the
    intercept, two the slope between them.

    Attributes:
      fixed_bytes: what is there all the time (arguments and results), per device in both.
      share: the part of all other values that a device holds, as far as the arguments' shardings tell.
      points: predicted and compiled peaks of trials, by the predicted one.
    """

    fixed_bytes: int = 0
    share: float = 1.0
    points: tuple[tuple[float, float], ...] = ()

    def through(self, trials: Sequence[Trial]) -> Line:
        """The line through trials: of those with the same predicted peak the largest compiled one counts."""
        peaks: dict[float, float] = {}
        for t in trials:
            peaks[t.selection.peak] = max(peaks.get(t.selection.peak, 0), t.peak)
        return dataclasses.replace(self, points=tuple(sorted(peaks.items())))

    def compiled(self, predicted: float) -> float:
        """The compiled peak to expect for a predicted one."""
        (x, y), slope = self._near(predicted, 0)
        return y + slope * (predicted - x)

    def predicted(self, compiled: float) -> float:
        """The predicted peak to ask for, for a compiled one."""
        (x, y), slope = self._near(compiled, 1)
        return x + (compiled - y) / slope

    def _near(self, at: float, axis: int) -> tuple[tuple[float, float], float]:
        """The nearest trial, and the slope from there."""
        if not self.points:
            return (self.fixed_bytes, self.fixed_bytes), self.share
        below = [p for p in self.points if p[axis] <= at]
        above = [p for p in self.points if p[axis] > at]
        if below and above:
            return below[-1], self._slope(below[-1], above[0])
        nearest, *others = self.points if above else self.points[::-1]
        further = next((p for p in others if abs(p[0] - nearest[0]) >= _APART * nearest[0]), None)
        return nearest, self.share if further is None else self._slope(further, nearest)

    def _slope(self, a: tuple[float, float], b: tuple[float, float]) -> float:
        slope = (b[1] - a[1]) / (b[0] - a[0]) if b[0] != a[0] else self.share
        return min(max(slope, self.share / _BEND), self.share * _BEND)


_BEND = 4  # what lies between or beyond two trials is no steeper or flatter than this
_APART = 0.05  # trials nearer to each other than this say nothing of what lies beyond them


def search(
    solve: Callable[[float], Selection | None],
    least: Callable[[], Selection],
    cheapest: Any,
    compiled: Callable[[Selection], tuple[int, M]],
    budget: int,
    compiles: int,
    line: Line,
    cost: Callable[[Selection, M], float],
    known: Sequence[Trial[M]] = (),
    rivals: Sequence[Selection] = (),
    doubt: float = 0.0,
) -> tuple[list[Trial[M]], Trial[M] | None]:
    """Looks for the cheapest selection whose compiled peak is within a budget.

    Each selection is asked for at the predicted peak that the trials so far say compiles to the budget. What does not
    keep within it is never asked for again, nor anything predicted to take more than what did not.

    Args:
      solve: the cheapest selection within a predicted peak.
      least: the one with the smallest predicted peak.
      cheapest: the key of the one that costs least of all.
      line: how compiled peaks follow predicted ones before any trial.
      compiled: compiles a selection; returns its peak and whatever else is to be kept.
      compiles: the most programs to compile.
      cost: what is minimized of a compiled selection.
      known: what was compiled before.
      rivals: selections made by others (presets), cheapest first. The last compile is for one of these that should keep
        within the budget, if it is predicted to cost less than the best one so far.
      doubt: by what share the predicted cost of a rival may be too high.

    Returns:
      All trials, and the best of them within the budget; None if there is none.
    """
    trials = list(known)
    done = {t.selection.key: t for t in trials}
    spent = 0

    def best() -> Trial[M] | None:
        within = [t for t in trials if t.peak <= budget]
        return min(within, key=lambda t: (cost(t.selection, t.found), t.peak), default=None)

    def compile_next(selection: Selection) -> Trial[M]:
        peak, kept = compiled(selection)
        trial = Trial(selection, peak, kept)
        trials.append(trial)
        done[selection.key] = trial
        return trial

    def next_rival() -> Selection | None:
        better, now = best(), line.through(trials)
        worth = [r for r in rivals if better is None or r.cost * (1 - doubt) < better.selection.cost]
        for room in (budget * (1 + _CLOSE), budget * (1 + _LUCK)):
            for rival in worth:
                if rival.key not in done and now.compiled(rival.peak) <= room:
                    return rival
        return None

    def smallest_rival() -> Selection | None:
        now, room = line.through(trials), min(t.peak for t in trials) * (1 + _LUCK)
        left = [r for r in rivals if r.key not in done and now.compiled(r.peak) <= room]
        return min(left, key=lambda r: r.peak, default=None)

    def next_one() -> Selection | None:
        missed = sum(t.peak > budget for t in trials[len(known) :])
        # After a miss a little less is aimed at.
        aim = budget - budget * _MARGINS[min(missed, len(_MARGINS) - 1)]
        ask = line.through(trials).predicted(aim)
        over = [t.selection.peak for t in trials if t.peak > budget]
        if over:
            ask = min(ask, min(over) - budget * _STEP)
        found = solve(ask) or least()
        if found.key not in done:
            return found
        found = least()
        return None if best() is not None or found.key in done else found

    while spent < compiles:
        last = compiles > 1 and spent == compiles - 1
        better = best()
        found = least() if last and better is None else None
        if last and better is not None and better.peak >= budget * (1 - _FAR):
            found = next_rival()
        if found is None or found.key in done:
            found = next_one()
        if found is None:
            found = next_rival() if best() is not None else smallest_rival()
        if found is None:
            break
        trial = compile_next(found)
        spent += 1
        if trial.peak <= budget and (found.key == cheapest or trial.peak >= budget - budget * _CLOSE):
            break
    if spent < compiles and (found := next_rival()) is not None:
        compile_next(found)
    return trials, best()


_LUCK = 0.15  # compilers lay out some programs better than others, so presets a little too large are tried too
_FAR = 0.03  # with more than this left over, the next plan is worth more than a preset
_CLOSE = 0.004  # so little below the budget is close enough
_MARGINS = (0.0, 0.004, 0.012, 0.03)
_STEP = 0.004
