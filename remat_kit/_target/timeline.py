"""Memory over one run of a compiled program: the steps of its schedule, and what lies in memory for which of them.

Data only: `lives.py` reads it from XLA's text, `remat_kit._show` draws it and writes it for trace viewers.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from remat_kit._errors import RematError
from remat_kit._target.measurement import Held

SCHEMA = 1

# What lies in a piece of memory. The order is that of the pictures, from the bottom.
CLASSES: Mapping[str, str] = {
    "arguments": "arguments of the step",
    "outputs": "set aside for results, less the temporaries that XLA puts there meanwhile",
    "constants": "constants of the compiled program",
    "residuals": "made by the forward pass and kept for the backward pass",
    "fetched": "copies of offloaded values on their way back from the host",
    "recomputed": "made again by rematerialization",
    "temporary": "everything else: intermediates, cotangents, copies",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One instruction of the schedule.

    Attributes:
      name: XLA's, unique in its computation.
      op: the operation of the traced program, ``"dot_general"``; XLA's opcode for what the compiler made up.
      path: module path; empty where it is not known.
      phase: ``forward``, ``backward``, ``recomputed``, or empty.
    """

    name: str
    op: str
    path: str
    phase: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop. Its body stands in the schedule once.

    Attributes:
      path: the module path that its steps share; empty where they share none.
      start, end: its first step, and the one after its last.
      trips: how often the body runs; None where that cannot be told.
    """

    path: str
    start: int
    end: int
    trips: int | None


@dataclasses.dataclass(frozen=True)
class Life:
    """A value in device memory, from the step that writes it to the last one that reads it.

    Attributes:
      what: the buffer, as in `Measurement.held`.
      role: one of `CLASSES`.
      start, end: first and last step, both included.
      inside: the index in `Timeline.lives` of the result in whose memory it lies, which takes no memory besides; or
        None.
    """

    what: Held
    role: str
    start: int
    end: int
    inside: int | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Live bytes on one device over the schedule of a compiled program. *Compiled*.

    The text of XLA's program is walked; its buffers are those of XLA's assignment as far as that follows from the
    text. `peak_bytes` is therefore near `Measurement.peak_bytes`, XLA's own figure, but not the same: gaps between
    buffers in XLA's heap and memory on the chip of a TPU are not in it. Instructions that only hand pointers on are
    left out. Steps are in the order in which they run, and take different times.

    Attributes:
      target, policy: as in `Measurement`.
      steps: the schedule. What loops run stands there once.
      loops: outer ones before inner ones.
      lives: what lies in device memory when.
      host: bytes of host memory that temporaries take, at each step.
      turn: the step at which the backward pass begins; None where the program does not tell.
      memory_bytes: what a program can have of the device's memory; None where that is not known.
    """

    target: str
    policy: str
    steps: tuple[Step, ...]
    loops: tuple[Loop, ...]
    lives: tuple[Life, ...]
    host: tuple[int, ...]
    turn: int | None
    memory_bytes: int | None

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.steps)} steps, peak {self.peak_bytes} bytes at step {self.peak}>"

    @functools.cached_property
    def total(self) -> tuple[int, ...]:
        """Live bytes at each step."""
        return tuple(self._sums(lambda life: "all")["all"])

    @functools.cached_property
    def peak(self) -> int:
        """The step with the most live bytes, the first of them."""
        total = self.total
        return max(range(len(total)), key=total.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """The most live bytes."""
        return max(self.total)

    def by(self, key: str) -> dict[str, tuple[int, ...]]:
        """Live bytes at each step, split up.

        Args:
          key: ``"class"``: those of `CLASSES`, each with the bytes of all steps; ``"module"``: arguments, outputs,
            constants, and the rest by the module that made it: the first part of the path below what all paths share,
            with layers that differ in their number together (``layers_*``), the module with most bytes first.

        Returns:
          For each part the bytes at each step. The parts add up to `total`.

        Raises:
          RematError: for any other key.
        """
        if key == "class":
            found = self._sums(lambda life: life.role)
            return {role: tuple(found[role]) for role in CLASSES if role in found}
        if key != "module":
            raise RematError(f"by({key!r:.40}): a timeline is split up by 'class' or 'module'.")
        fixed = ("arguments", "outputs", "constants")
        module = modules([life.what.path for life in self.lives if life.role not in fixed])
        found = self._sums(lambda life: f"({life.role})" if life.role in fixed else module(life.what.path))
        first = [f"({role})" for role in fixed if f"({role})" in found]
        rest = sorted((m for m in found if m not in first), key=lambda m: -sum(found[m]))
        return {m: tuple(found[m]) for m in (*first, *rest)}

    def at(self, step: int | None = None) -> tuple[Held, ...]:
        """The buffers that are live at a step, at the peak by default, identical ones together, the largest first.

        Their bytes add up to `total` there: a result counts with what no temporary is put into.

        Raises:
          RematError: for a step that the schedule does not have.
        """
        step = self.peak if step is None else step
        if not isinstance(step, int) or not -len(self.steps) <= step < len(self.steps):
            raise RematError(f"at({step!r:.40}): the schedule has {len(self.steps)} steps, counted from 0.")
        step %= len(self.steps)
        from remat_kit._target.reconcile import joined

        return joined(dataclasses.replace(self.lives[n].what, bytes=size) for n, size in self.held(step).items())

    def held(self, step: int) -> dict[int, int]:
        """Indices in `lives` of what is live at a step, with the bytes that each takes and nothing else lies in."""
        found = {n: life.what.bytes for n, life in enumerate(self.lives) if life.start <= step <= life.end}
        for n in tuple(found):
            inside = self.lives[n].inside
            if inside is not None:
                found[inside] -= self.lives[n].what.bytes
        return {n: size for n, size in found.items() if size}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version; the buffers as sums, but for those at the peak."""
        return {
            "schema": SCHEMA,
            "figures": "compiled",
            "target": self.target,
            "policy": self.policy,
            "memory_bytes": self.memory_bytes,
            "peak_bytes": self.peak_bytes,
            "peak": self.peak,
            "turn": self.turn,
            "steps": [dataclasses.asdict(s) for s in self.steps],
            "loops": [dataclasses.asdict(loop) for loop in self.loops],
            "total": list(self.total),
            "host": list(self.host),
            "by_class": {k: list(v) for k, v in self.by("class").items()},
            "by_module": {k: list(v) for k, v in self.by("module").items()},
            "at_peak": [dataclasses.asdict(h) for h in self.at()],
        }

    def save(self, path: str | os.PathLike[str], format: str | None = None) -> None:
        """Writes the timeline for a trace viewer. Time is the position in the schedule, a microsecond for each step.

        Args:
          path: of the file.
          format: ``"trace"``: the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open: counters
            of live bytes, slices for the passes, loops, modules and instructions. ``"speedscope"``: for
            https://www.speedscope.app: what is live at the peak by class and module, in bytes, and the schedule. By
            default ``"speedscope"`` for a path that ends in ``.speedscope.json``, else ``"trace"``.

        Raises:
          RematError: for another format, or where the file cannot be written.
        """
        from remat_kit._show import traces

        traces.write(self, path, format)

    def _sums(self, key: Callable[[Life], str]) -> dict[str, list[int]]:
        count = len(self.steps)
        change: dict[str, list[int]] = {}
        for life in self.lives:
            owner = None if life.inside is None else self.lives[life.inside]
            for sign, other in ((1, life), (-1, owner)):
                if other is not None:
                    row = change.setdefault(key(other), [0] * (count + 1))
                    row[life.start] += sign * life.what.bytes
                    row[life.end + 1] -= sign * life.what.bytes
        return {k: list(accumulate(row[:count])) for k, row in change.items()}


def modules(paths: Sequence[str]) -> Callable[[str], str]:
    """A function from module paths to names of top-level modules: the part below what all of the paths share."""
    split = [p.split("/") for p in set(paths) if p]
    common = 0 if not split else len(os.path.commonprefix(split))
    common = min([common, *(len(s) - 1 for s in split)])

    def module(path: str) -> str:
        parts = path.split("/")[common:]
        return re.sub(r"\d+", "*", parts[0]) if path and parts else "(no module)"

    return module


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The text of a compiled program, packed: what a timeline is read from when it is asked for.

    Attributes:
      text: of the optimized module, compressed.
      labels: names of the arguments' leaves.
    """

    text: bytes
    labels: tuple[str, ...]

    @classmethod
    def of(cls, text: str, labels: Sequence[str]) -> Schedule:
        """Packs a text."""
        return cls(zlib.compress(text.encode(), 1), tuple(labels))

    def unpacked(self) -> str:
        """The text."""
        return zlib.decompress(self.text).decode()
