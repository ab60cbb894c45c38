"""Optimal checkpointing of a chain of steps: where to keep states, and how often a step has to run again.

With `c` states kept, a chain of up to ``beta(c, r)`` steps can be reversed while no step is advanced more than `r`
times (Griewank 1992, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation";
Griewank and Walther 2000, algorithm 799, "Revolve"). A chain whose length is not known beforehand is checkpointed
online, as Wang, Moin and Iaccarino (2009, "Minimal repetition dynamic checkpointing algorithm for unsteady adjoint
calculation") and Stumm and Walther (2010, "New algorithms for optimal online checkpointing") do it: what is kept is
thinned out as the chain grows.

Counting is theirs: the state at the start is one of the `c`, the state that is being worked on is not, and the forward
evaluation that the derivative of a step itself needs is not counted.
"""

from __future__ import annotations

import functools
import math

import numpy as np


def beta(checkpoints: int, repetitions: int) -> int:
    """The most steps that can be reversed with so many states kept and each step advanced so often."""
    return math.comb(checkpoints + repetitions, checkpoints) if repetitions >= 0 else 0


def repetitions(length: int, checkpoints: int) -> int:
    """How often the step that is advanced most often has to be, at least."""
    r = 0
    while beta(checkpoints, r) < length:
        r += 1
    return r


def advances(length: int, checkpoints: int) -> int:
    """The fewest steps to advance for reversing a chain, the first forward pass but for its last step included."""
    if length < 2:
        return 0
    r = repetitions(length, checkpoints)
    return r * length - beta(checkpoints + 1, r - 1)


def split(length: int, checkpoints: int) -> int:
    """How far to advance before the next state is kept, so that the whole takes the fewest advances."""
    if checkpoints == 1:
        return length - 1
    r = repetitions(length, checkpoints)
    return max(1, beta(checkpoints, r - 2), length - beta(checkpoints - 1, r))


def kept(length: int, checkpoints: int) -> list[int]:
    """The states that the first forward pass keeps, by the number of steps before them."""
    at, found = 0, [0]
    while length - at > 1 and len(found) < checkpoints:
        at += split(length - at, checkpoints - len(found) + 1)
        if at < length - 1:  # the last state is the one being worked on
            found.append(at)
        else:
            break
    return found


def checkpoints_for(length: int, most: int = 2) -> int:
    """The fewest states to keep so that no step is advanced more than `most` times."""
    c = 1
    while beta(c, most) < length:
        c += 1
    return c


def slots(length: int, checkpoints: int) -> np.ndarray:
    """For each step of a chain of known length: where its state is kept; `checkpoints` for those that are not."""
    table = np.full(length, checkpoints, np.int32)
    for slot, step in enumerate(kept(length, checkpoints)):
        table[step] = slot
    return table


@functools.lru_cache(maxsize=64)
def online_slots(most: int, checkpoints: int) -> np.ndarray:
    """The same for a chain that may end after any number of steps up to `most`; places are used again.

    Each state that needs a place takes it from the one whose absence costs the fewest advances. A gap between two
    kept states never grows beyond what can be reversed in so many repetitions as the chain so far needs at least, or
    one more.
    """
    c = checkpoints
    found = np.full(most, c, np.int32)
    betas = table(c + 1, most, repetitions(most, c) + 3).astype(np.int64)
    steps: list[int] = []
    places: list[int] = []
    r = 1
    for step in range(most):
        place = len(steps)
        if place >= c:
            dropped = None
            while step - steps[-1] > r:
                dropped = _dispensable(np.array([*steps, step]), betas, r)
                if dropped is not None:
                    break
                r += 1
            if dropped is None:
                continue
            del steps[dropped]
            place = places.pop(dropped)
        steps.append(step)
        places.append(place)
        found[step] = place
    found.setflags(write=False)
    return found


def _dispensable(steps: np.ndarray, betas: np.ndarray, r: int) -> int | None:
    """The kept state without which the fewest more steps are advanced; None where a gap would grow too large."""
    if len(steps) < 3:
        return None
    gaps = np.diff(steps)
    free = len(gaps) - np.arange(len(gaps) - 1)  # places for reversing each gap but the last
    merged = gaps[:-1] + gaps[1:]
    more = _advances(merged, free, betas) - _advances(gaps[:-1], free, betas) - _advances(gaps[1:], free - 1, betas)
    more = np.where(merged <= betas[free, r + 1], more, np.iinfo(np.int64).max)
    best = int(np.argmin(more))
    return None if merged[best] > betas[free[best], r + 1] else best + 1


def _advances(lengths: np.ndarray, checkpoints: np.ndarray, betas: np.ndarray) -> np.ndarray:
    """`advances` of many chains at once."""
    r = np.sum(betas[checkpoints, 2:] < lengths[:, None], axis=1)
    return r * lengths - betas[checkpoints + 1, r + 1]


def table(checkpoints: int, longest: int, most: int) -> np.ndarray:
    """`beta` for 0 to `checkpoints` states (rows) and -2 to `most` repetitions (columns), cut off at `longest`.

    A part of a chain never needs more repetitions than the whole, so that few columns do, however long the chain is.
    """
    rows = np.zeros((checkpoints + 1, most + 3), np.int64)
    rows[0, 2:] = 1
    for c in range(1, checkpoints + 1):
        rows[c] = np.minimum(np.cumsum(rows[c - 1]), longest)
    return rows.astype(np.int32)
