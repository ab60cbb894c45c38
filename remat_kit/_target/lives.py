"""From the text of a compiled program to its timeline: which step writes a value into memory, and how long it stays.

A buffer holds one value after another, where XLA writes in place. Here each of them counts for its own time, so that a
residual that the backward pass writes over is one only until then.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
from collections.abc import Iterator, Sequence

from remat_kit._target import buffers, hlo, hlo_loops, hlo_shapes, live, reconcile
from remat_kit._target.buffers import Span, Value
from remat_kit._target.hlo import Computation, Instruction, Module
from remat_kit._target.measurement import Measurement
from remat_kit._target.timeline import Life, Loop, Schedule, Step, Timeline

# Instructions that take no time: they hand pointers on, or what they run stands in the schedule itself.
_NO_STEP = ("tuple", "get-tuple-element", "bitcast", "constant", "parameter", "after-all")
_CALLS = ("while", "conditional", "call")


def timeline(measurement: Measurement, schedule: Schedule) -> Timeline | None:
    """The timeline of a measured program; None where its text is not in the order of execution."""
    module = hlo.parse(schedule.unpacked())
    if not module.is_scheduled:
        return None
    program = buffers.Program(module)
    program.run()
    count = len(program.steps)
    turn = live.turn(module, program.steps)
    placed = [p for p in live.placed(program) if p.span.bytes]
    found: list[_Piece] = []
    owners: dict[int, int] = {}
    for p in sorted(placed, key=lambda p: p.inside is not None):
        inside = None if p.inside is None else owners[id(p.inside)]
        owners[id(p.span)] = len(found)
        found += [dataclasses.replace(piece, inside=inside) for piece in _pieces(module, p, turn)]
    steps = _Steps(module, program, _peak(found, count))
    host = [
        s
        for s in program.spans()
        if s.space == hlo_shapes.HOST and "argument" not in s.kinds and "output" not in s.kinds
    ]
    return Timeline(
        target=measurement.target,
        policy=measurement.policy,
        steps=steps.steps,
        loops=steps.loops(),
        lives=tuple(
            Life(reconcile.to_held(p.buffer, schedule.labels, measurement.residuals), p.role, *steps.of(p), p.inside)
            for p in found
        ),
        host=steps.sums(host),
        turn=None if turn is None else steps.first(turn),
        memory_bytes=measurement.memory_bytes,
    )


@dataclasses.dataclass(frozen=True)
class _Piece:
    """What will be a `Life`: its buffer, role and time, in instructions; `inside` counts pieces."""

    buffer: live.Buffer
    role: str
    start: int
    end: int
    inside: int | None = None


def _pieces(module: Module, placed: live.Placed, turn: int | None) -> Iterator[_Piece]:
    """The values of a buffer in the order of time."""
    span = placed.span
    kinds = {"argument": "arguments", "output": "outputs", "constant": "constants"}
    role = next((role for kind, role in kinds.items() if kind in span.kinds), "")
    if role:
        first, last = placed.intervals[0][0], placed.intervals[-1][1]
        yield _Piece(live.describe(module, span, last), role, first, last)
        return
    for start, end, after, values in _contents(span, placed.written_over):
        at = turn - 1 if turn is not None and start < turn <= after else None
        one = Span(span.bytes, span.space, values, [(start, end)])
        buffer = live.describe(module, one, start if at is None else at)
        if at is not None and buffer.phase == "forward":
            role = "residuals"
        elif any(_from_host(v) for v in values):
            role = "fetched"
        else:
            role = "recomputed" if buffer.recomputed else "temporary"
        yield _Piece(buffer, role, start, end)


def _contents(span: Span, written_over: bool) -> Iterator[tuple[int, int, int, list[Value]]]:
    """Cuts the life of a buffer where an instruction with a name of its own writes something else into it.

    Yields:
      First and last instruction, the one that writes over it (else the last again), and the values.
    """
    for first, last in span.intervals:
        values = [v for v in span.values if first <= v.start <= last]
        cuts = sorted({v.start for v in values if live.tells(v) >= 2})[1:]
        starts = [first, *cuts]
        for start, after in zip(starts, [*cuts, None], strict=True):
            mine = [v for v in values if start <= v.start and (after is None or v.start < after)]
            yield start, last if after is None else after - 1, last + written_over if after is None else after, mine


def _from_host(value: Value) -> bool:
    """Whether a value in device memory is read from host memory."""
    i = value.instruction
    return i.opcode not in ("parameter", "while", "conditional", "call") and any(
        o.shape.parts is None and o.shape.space == hlo_shapes.HOST for o in value.computation.operands(i)
    )


def _peak(pieces: Sequence[_Piece], count: int) -> int:
    change = [0] * (count + 1)
    for p in pieces:
        if p.inside is None:
            change[p.start] += p.buffer.bytes
            change[p.end + 1] -= p.buffer.bytes
    best = at = total = 0
    for n in range(count):
        total += change[n]
        if total > best:
            best, at = total, n
    return at


class _Steps:
    """The instructions that are shown as steps, and from one numbering to the other."""

    def __init__(self, module: Module, program: buffers.Program, peak: int) -> None:
        self._module, self._program = module, program
        self._found: list[tuple[Instruction, Computation]] = []
        for name, where in program.steps:
            computation = module.computations[where] if where else module.entry
            self._found.append((computation.by_name[name], computation))
        shown = [n for n, (i, _) in enumerate(self._found) if n == peak or not _handed_on(module, i)]
        self._shown = shown or list(range(len(self._found)))
        self.steps = tuple(self._step(*self._found[n]) for n in self._shown)

    def _step(self, i: Instruction, computation: Computation) -> Step:
        maker = live.origin(self._module, computation, i)
        path, op = reconcile.place(maker.op_name)
        phase = "recomputed" if "rematted_computation" in maker.op_name else live.phase(maker.op_name)
        return Step(i.name, op or i.opcode, path, phase)

    def first(self, n: int) -> int:
        """The first step that is not before an instruction."""
        return min(bisect.bisect_left(self._shown, n), len(self._shown) - 1)

    def of(self, piece: _Piece) -> tuple[int, int]:
        """First and last step of a piece. What lives between two steps only counts for the one after it."""
        start = self.first(piece.start)
        return start, max(start, bisect.bisect_right(self._shown, piece.end) - 1)

    def sums(self, spans: Sequence[Span]) -> tuple[int, ...]:
        """The bytes of buffers at each step."""
        change = [0] * (len(self._shown) + 1)
        for s in spans:
            for a, b in s.intervals:
                change[self.first(a)] += s.bytes
                change[max(self.first(a), bisect.bisect_right(self._shown, b) - 1) + 1] -= s.bytes
        out, total = [], 0
        for n in range(len(self._shown)):
            total += change[n]
            out.append(total)
        return tuple(out)

    def loops(self) -> tuple[Loop, ...]:
        """The loops that have steps, outer ones first."""
        out = []
        for instruction, computation, start, end in self._program.loops:
            first, last = bisect.bisect_left(self._shown, start), bisect.bisect_left(self._shown, end)
            if first < last:
                paths = [s.path.split("/") for s in self.steps[first:last] if s.path]
                path = "/".join(os.path.commonprefix(paths)) if paths else ""
                trips = hlo_loops.trip_count(self._module, computation, instruction)
                out.append(Loop(path, first, last, trips))
        return tuple(sorted(out, key=lambda loop: (loop.start, -loop.end)))


def _handed_on(module: Module, i: Instruction) -> bool:
    return i.opcode in _NO_STEP or (i.opcode in _CALLS and bool(module.called(i)))
