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

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


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


@dataclasses.dataclass(frozen=True)
class Places:
    """The steps of a chain of up to `most` steps whose states can be kept.

    All of the first 8192; of those up to 16384 every second one, of those up to 32768 every fourth, and so on.
    """

    most: int

    @property
    def entries(self) -> int:
        """How many there are."""
        if self.most <= EXACT:
            return self.most
        octave = (self.most - 1).bit_length() - _EXACT_BITS - 1
        begin = EXACT << octave
        return EXACT + EXACT // 2 * octave - (begin - self.most) // (2 << octave)

    @property
    def widest(self) -> int:
        """The most steps from one to the next."""
        return 1 if self.most <= EXACT else 2 << ((self.most - 1).bit_length() - _EXACT_BITS - 1)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Each of these steps, and how far apart they are there."""
        step, stride = 0, 1
        while step < self.most:
            if step >= EXACT * stride:
                stride *= 2
            yield step, stride
            step += stride

    def entry(self, step: Any) -> tuple[Any, Any]:
        """The number of a step among these, where it is one of them; a traced number."""
        octave = jnp.maximum(0, 31 - lax.clz(step >> _EXACT_BITS))
        later = step >= EXACT
        stride = jnp.where(later, 2 << octave, 1)
        coarse = EXACT + EXACT // 2 * octave + (step - (EXACT << octave)) // stride
        return jnp.where(later, coarse, step), step % stride == 0


_EXACT_BITS = 13
EXACT = 1 << _EXACT_BITS


@functools.lru_cache(maxsize=64)
def online_slots(places: Places, checkpoints: int) -> np.ndarray:
    """For each step that can be kept of a chain that may end anywhere: where its state is kept; places are used again.

    Each state that needs a place takes it from the one whose absence costs the fewest advances. A gap between two
    kept states never grows beyond what can be reversed in so many repetitions as the chain so far needs at least, or
    one more.
    """
    c = checkpoints
    found = np.full(places.entries, c, np.int32)
    betas = table(c + 1, places.most, repetitions(2 * EXACT, c) + 3).astype(np.int64)
    kept: list[int] = []
    at: list[int] = []
    r, stride = 1, 1
    for entry, (step, apart) in enumerate(places.steps()):
        if apart != stride:  # the same problem in larger units
            stride = apart
            r = max(1, repetitions(step // stride, c))
        place = len(kept)
        if place >= c:
            dropped = None
            while step - kept[-1] > r * stride:
                dropped = _dispensable(-(-np.array([*kept, step]) // stride), betas, r)
                if dropped is not None:
                    break
                r += 1
            if dropped is None:
                continue
            del kept[dropped]
            place = at.pop(dropped)
        kept.append(step)
        at.append(place)
        found[entry] = place
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
