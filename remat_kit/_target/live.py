"""Memory over the schedule of a compiled program: what is live at each instruction, and what at the peak.

XLA sets arguments and results aside for the whole run, and puts temporaries into results that are not written
yet. Gaps between buffers in XLA's heap are not modelled, nor is the on-chip memory of TPUs.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterable, Sequence

from remat_kit._target import buffers, hlo_shapes, sharing
from remat_kit._target.buffers import Span, Value
from remat_kit._target.hlo import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A piece of device memory that is taken at some time.

    Attributes:
      bytes: on one device.
      name: of the instruction that says most about what lies in it.
      opcode: of that instruction.
      shape: ``"bf16[8,1024,1024]"``.
      op_name: name stack of the program that was lowered; empty when XLA made the instruction up. For a value
        stacked by a loop it is that of the operation whose values are stacked.
      source: file and line, or None.
      kind: "argument", "output", "temp" or "constant".
      phase: "forward", "backward", or "" where the name stack does not tell.
      recomputed: whether it is the work of rematerialization.
      where: name of the loop body, branch or called computation; empty for the entry computation.
      elements: number of elements of its array.
    """

    bytes: int
    name: str
    opcode: str
    shape: str
    op_name: str = ""
    source: tuple[str, int] | None = None
    kind: str = "temp"
    phase: str = ""
    recomputed: bool = False
    where: str = ""
    elements: int = 0


@dataclasses.dataclass(frozen=True)
class Point:
    """One instruction in the order of the schedule, and the bytes taken while it runs.

    Attributes:
      instruction: its name.
      where: as in `Buffer`.
      bytes: of device memory.
      host_bytes: of host memory.
    """

    instruction: str
    where: str
    bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory over one run, per device.

    Attributes:
      points: in the order of the schedule; what a loop runs stands there once.
      at: the index of the peak in `points`.
      buffers: taken at the peak, the largest first; their bytes sum to the peak.
      host_peak: the most bytes of host memory at any time.
      between: the index in `points` at which the backward pass begins; None where the name stacks tell of none.
      handed_over: temporary buffers of the forward pass that are live across `between`, the largest first: what the
        compiled program keeps for the backward pass.
    """

    points: tuple[Point, ...]
    at: int
    buffers: tuple[Buffer, ...]
    host_peak: int
    between: int | None = None
    handed_over: tuple[Buffer, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes of device memory at any time."""
        return self.points[self.at].bytes if self.points else 0


def walk(module: Module) -> Memory:
    """Follows the schedule of a module and sums what is taken at each instruction.

    Args:
      module: of `hlo.parse`. Of a module that is not scheduled the order of the text is taken.

    Returns:
      Figures that are computed here from the text. XLA's own are in `memory_analysis()`: its temporaries,
      arguments and results less what is aliased correspond to `Memory.peak`.
    """
    program = buffers.Program(module)
    program.run()
    count = len(program.steps)
    found = list(placed(program))
    owned = [(p.span, p.intervals) for p in found if p.inside is None]
    device = _sums(owned, count)
    host = _sums(((s, s.intervals) for s in program.spans() if s.space == hlo_shapes.HOST), count)
    points = tuple(Point(n, w, d, h) for (n, w), d, h in zip(program.steps, device, host, strict=True))
    at = max(range(count), key=device.__getitem__, default=0)
    taken = [s for s, intervals in owned if s.bytes and any(a <= at <= b for a, b in intervals)]
    described = [describe(module, s, at) for s in taken]
    between = turn(module, program.steps)
    return Memory(
        points,
        at,
        tuple(sorted(described, key=lambda b: -b.bytes)),
        max(host, default=0),
        between,
        () if between is None else _handed_over(module, found, between),
    )


def turn(module: Module, steps: Sequence[tuple[str, str]]) -> int | None:
    """Where the schedule turns from the forward to the backward pass: the fewest instructions on the wrong side.

    The two overlap: compilers run what depends on nothing early.
    """
    phases = []
    for name, where in steps:
        computation = module.computations[where] if where else module.entry
        instruction = computation.by_name.get(name)
        phases.append(phase(instruction.op_name) if instruction is not None else "")
    if "backward" not in phases or "forward" not in phases:
        return None
    wrong = fewest = phases.count("forward")  # all of the forward pass behind a turn at 0
    best = 0
    for n, found in enumerate(phases):
        wrong += (found == "backward") - (found == "forward")
        if wrong < fewest:
            best, fewest = n + 1, wrong
    return best if best < len(phases) else None


def _handed_over(module: Module, placed: Iterable[Placed], between: int) -> tuple[Buffer, ...]:
    crossing = [
        p.span for p in placed if p.span.bytes and any(a < between <= b + p.written_over for a, b in p.span.intervals)
    ]
    found = [b for b in (describe(module, s, between - 1) for s in crossing) if b.kind == "temp"]
    return tuple(sorted((b for b in found if b.phase == "forward"), key=lambda b: -b.bytes))


Intervals = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A buffer of device memory.

    Attributes:
      span: the buffer.
      intervals: when memory is set aside for it.
      inside: the result that it lies in; None for memory of its own.
      written_over: whether the instruction after its last interval writes its own value there, and reads it.
    """

    span: Span
    intervals: Intervals
    inside: Span | None = None
    written_over: bool = False


def placed(program: buffers.Program) -> Iterable[Placed]:
    """Places buffers as XLA's buffer assignment does: the largest first, each into the smallest result with room.

    Among buffers of one size results come first, then those that begin first in a walk from operands to their users.
    Those without room share memory among themselves where instructions may write over their operands.
    """
    module, spans, last = program.module, program.spans(), len(program.steps) - 1
    results: list[tuple[Span, list[_Taken]]] = []  # from the largest to the smallest
    rest: list[Span] = []
    device = [s for s in spans if s.space == hlo_shapes.DEVICE]
    number = {name: n for n, name in enumerate(module.computations)}
    order = {c: _post_order(c) for c in {id(v.computation): v.computation for s in device for v in s.values}.values()}

    def begins(span: Span) -> tuple[int, int]:
        # 0 for what a damaged text does not have
        return min(
            (number.get(v.computation.name, 0), order[v.computation].get(v.instruction.name, 0)) for v in span.values
        )

    for span in sorted(device, key=lambda s: (-s.bytes, "output" not in s.kinds, begins(s))):
        if "output" in span.kinds:
            results.append((span, [(a, b, span) for a, b in span.intervals]))
            yield Placed(span, [(0, last)])
        elif span.kinds & {"argument", "constant"}:
            yield Placed(span, span.intervals)
        elif not any(_fits(program, span, taken) for _, taken in reversed(results)):
            rest.append(span)
    for result, taken in results:
        inside = {id(t[2]): t[2] for t in taken}
        begun: dict[int, list[Span]] = {}
        for span in inside.values():
            for v in span.values:
                begun.setdefault(v.start, []).append(span)
        for span in inside.values():
            if span is not result:
                yield _inside(program, span, result, begun.get(span.intervals[-1][1], []))
    for span in program.share(rest):
        yield Placed(span, span.intervals)


def _inside(program: buffers.Program, span: Span, result: Span, others: Iterable[Span]) -> Placed:
    start, end = span.intervals[-1]
    over = start < end and any(o is not span and program.written_over(span, o, end) for o in others)
    intervals = [*span.intervals[:-1], (start, end - over)]
    return Placed(dataclasses.replace(span, intervals=intervals), intervals, result, over)


_PREDECESSORS = re.compile(r"[\w.\-]+")


def _post_order(computation: Computation) -> dict[str, int]:
    """The places of instructions in XLA's post-order: operands, the first one first, before the instruction itself."""
    found: dict[str, int] = {}
    visited: set[str] = set()
    for last in (computation.root, *computation.instructions):
        stack = [last]
        while stack:
            i = stack[-1]
            if i.name in visited:
                stack.pop()
                found.setdefault(i.name, len(found))
                continue
            visited.add(i.name)
            stack += [o for o in reversed(computation.operands(i)) if o.name not in visited]
            before = _PREDECESSORS.findall(i.attributes.get("control-predecessors", ""))
            stack += [computation.by_name[p] for p in before if p in computation.by_name and p not in visited]
    return found


_Taken = tuple[int, int, Span]


def _fits(program: buffers.Program, span: Span, taken: list[_Taken]) -> bool:
    """Enters a span into what is taken, sorted, if it overlaps with none of it, but for an operand written over."""
    for start, end in span.intervals:
        n = bisect.bisect_right(taken, end, key=lambda t: t[0]) - 1
        while n >= 0 and taken[n][1] >= start:
            first, last, other = taken[n]
            after = first < last == start and program.written_over(other, span, start)
            if not after and not (start < end == first and program.written_over(span, other, end)):
                return False
            n -= 1
    for start, end in span.intervals:
        bisect.insort(taken, (start, end, span), key=lambda t: t[:2])
    return True


def _sums(placed: Iterable[tuple[Span, Intervals]], count: int) -> list[int]:
    change = [0] * (count + 1)
    for span, intervals in placed:
        for start, end in intervals:
            change[start] += span.bytes
            change[end + 1] -= span.bytes
    out, total = [], 0
    for n in range(count):
        total += change[n]
        out.append(total)
    return out


def describe(module: Module, span: Span, at: int) -> Buffer:
    """Describes a buffer by the value that says most about what lies in it."""
    kind = next((k for k in ("argument", "output", "constant") if k in span.kinds), "temp")
    value = max(span.values, key=lambda v: (tells(v), v.start <= at <= v.end, -v.start))
    i = value.instruction
    maker = origin(module, value.computation, value.instruction)
    return Buffer(
        span.bytes,
        i.name,
        i.opcode,
        str(value.shape),
        maker.op_name,
        maker.source,
        kind,
        "" if kind == "argument" else phase(maker.op_name),
        "rematted_computation" in maker.op_name,
        span.values[0].where,
        value.shape.size,
    )


_SILENT = ("parameter", "while", "copy", "copy-start", "tuple", "broadcast", "constant", "custom-call")


def tells(value: Value) -> int:
    """How much the instruction says about the contents: a copy or a loop's parameter says little."""
    if value.kind == "argument":
        return 3
    i = value.instruction
    return (i.opcode not in _SILENT and not i.op_name.endswith("/broadcast_in_dim")) + bool(i.op_name)


def origin(module: Module, computation: Computation, i: Instruction) -> Instruction:
    """The instruction that computed what another one holds: behind an update in place, behind copies."""
    for callee in module.called(i) if i.opcode.startswith("fusion") else ():
        update = sharing.update_of(callee)
        if update is not None and update.opcode == "parameter" and update.index < len(i.operands):
            update = computation.by_name.get(i.operands[update.index])
        if update is not None and update.op_name:
            return update
    while not i.op_name and i.opcode in ("copy", "copy-start", "copy-done", "bitcast", "get-tuple-element"):
        behind = computation.operands(i)
        if not behind:
            break
        i = behind[0]
    return i


def phase(op_name: str) -> str:
    """Which pass a name stack belongs to: ``"forward"``, ``"backward"``, or ``""`` where it does not say."""
    if "transpose(jvp" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""
