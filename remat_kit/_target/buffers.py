"""The buffers of a compiled program: which values share memory, and when each buffer is taken.

Loop bodies, branches and called computations stand in one line of time, once, where they run, as XLA's buffer
assignment flattens a schedule. What shares memory with what is in `sharing.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from remat_kit._errors import RematError
from remat_kit._target import sharing
from remat_kit._target.hlo import Computation, Instruction, Module
from remat_kit._target.hlo_shapes import Shape

Tree = dict[tuple[int, ...], "Value"]  # the values of one instruction, by index in nested tuples
_PHIS = ("while", "conditional")


@dataclasses.dataclass(eq=False)
class Value:
    """One array that an instruction defines; `end` grows with its uses."""

    shape: Shape
    instruction: Instruction
    computation: Computation
    where: str
    start: int
    end: int
    kind: str = "temp"


@dataclasses.dataclass(eq=False)
class Span:
    """One buffer.

    Attributes:
      bytes: its size.
      space: memory space, as in `hlo_shapes.Shape`.
      values: that share it, in order of time.
      intervals: of the instructions, both ends included, at which it is taken; sorted and apart.
      kinds: those of its values.
    """

    bytes: int
    space: int
    values: list[Value]
    intervals: list[tuple[int, int]]

    @property
    def kinds(self) -> set[str]:
        return {v.kind for v in self.values}


@dataclasses.dataclass(eq=False)
class _Group:
    """Values that share a buffer; `start`, `end` and `fixed` are for telling fast what cannot be joined."""

    values: list[Value]
    start: int = 0
    end: int = 0
    fixed: bool = False  # holds an argument or a constant, which nothing else may be written over

    def close(self) -> None:
        """Sums up the values once their lives are known."""
        self.start, self.end = min(v.start for v in self.values), max(v.end for v in self.values)
        self.fixed = any(v.kind in ("argument", "constant") for v in self.values)

    def overlaps(self, other: _Group, at: int) -> bool:
        """Whether both are live at one time, other than in the instruction where `other` ends and this one begins."""
        if self.end < other.start or other.end < self.start or other.end == self.start == at:
            return False
        return any(
            a.start <= b.end and b.start <= a.end and not a.start == b.end == at
            for a in self.values
            for b in other.values
        )


class Program:
    """The values of a module on one line of time.

    Attributes:
      steps: the instructions in the order in which they run: names, and the computation (empty for the entry).
      loops: each loop, the computation it stands in, and its steps from the first up to its own.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.steps: list[tuple[str, str]] = []
        self.loops: list[tuple[Instruction, Computation, int, int]] = []
        self.most = 1000 + 64 * sum(len(c.instructions) for c in module.computations.values())
        self.groups: dict[Value, _Group] = {}
        self.reuses: dict[Value, list[Value]] = {}

    def run(self) -> None:
        """Lines up the whole module, and decides what shares memory.

        Raises:
          RematError: when computations are shared by so many calls that lining them up would take too long.
        """
        entry = self.module.entry
        self.arguments = [
            {index: self._new(shape, p, entry, "", "argument") for index, shape in p.shape.arrays}
            for p in entry.parameters
        ]
        result = self._computation(entry, self.arguments, "")
        if not self.steps:  # a program that hands back an argument
            self._step(entry.root, "")
        last = len(self.steps) - 1
        donated = {(a.parameter, a.index): result.get(a.output) for a in self.module.input_output_alias}
        for parameter, tree in zip(entry.parameters, self.arguments, strict=True):
            for index, value in tree.items():
                output = donated.get((parameter.index, index))
                if output is None:
                    value.end = last
                else:
                    self._join(value, output)
        for value in result.values():
            value.end = last
            value.kind = value.kind if value.kind == "argument" else "output"
        for group in self._groups():
            if any(v.kind == "constant" for v in group.values):
                group.values[0].start, group.values[0].end = 0, last
            group.close()

    def _computation(self, computation: Computation, arguments: Sequence[Tree], where: str) -> Tree:
        """Lines up a computation's instructions; returns the values of its root."""
        known: dict[str, Tree] = {}
        for i in computation.instructions:
            if i.opcode == "parameter":
                known[i.name] = arguments[i.index] if 0 <= i.index < len(arguments) else {}
                continue
            trees = [known.get(o, {}) for o in i.operands]
            known[i.name] = self._instruction(computation, i, trees, where)
        return known.get(computation.root.name, {})

    def _instruction(self, computation: Computation, i: Instruction, operands: list[Tree], where: str) -> Tree:
        result: Tree = {}
        if i.opcode == "while":
            first = len(self.steps)
            result = self._while(i, operands)
            self.loops.append((i, computation, first, len(self.steps)))
        elif i.opcode == "conditional":
            self._conditional(i, operands, result)
        elif i.opcode in ("call", "async-start"):
            for callee in self.module.called(i)[:1]:
                inner = self._computation(callee, operands, callee.name)
                result = inner if i.opcode == "call" else {(1, *index): v for index, v in inner.items()}
        now = self._step(i, where)
        handed = sharing.handed_on(i)
        pairs = sharing.operands_of_start(i) if handed is None else handed
        for place, number, index in pairs:
            for at, value in (operands[number] if number < len(operands) else {}).items():
                if at[: len(index)] == index:
                    result[*place, *at[len(index) :]] = value
        if i.opcode not in ("tuple", "get-tuple-element"):
            for tree in operands:
                for value in tree.values():
                    value.end = max(value.end, now)
        new = {index: shape for index, shape in i.shape.arrays if index not in result or i.opcode in _PHIS}
        kind = "constant" if i.opcode == "constant" else "temp"
        for index, shape in new.items():
            value = self._new(shape, i, computation, where, kind, now)
            if index in result:
                self._join(value, result[index])
            result[index] = value
        if new and handed is None:
            self._share(computation, i, operands, result)
        return result

    def _share(self, computation: Computation, i: Instruction, operands: list[Tree], result: Tree) -> None:
        done = set()
        for place, number, index in sharing.in_place(self.module, computation, i):
            operand = operands[number].get(index) if number < len(operands) else None
            if operand is not None and place in result:
                done.add(place)
                self._join(result[place], operand)
        for place, value in result.items():
            if place not in done:
                inputs = [operands[n].get(()) for n in sharing.overwritable(self.module, i, place)]
                if found := [v for v in inputs if v is not None]:
                    self.reuses[value] = found

    def _while(self, i: Instruction, operands: list[Tree]) -> Tree:
        """A loop: the initial values, the body's parameter, its root and the result lie in one place."""
        initial = operands[0] if operands else {}
        for condition in self.module.called(i, "condition"):
            self._computation(condition, [initial], condition.name)
        for value in initial.values():
            value.end = max(value.end, len(self.steps))
        carried = initial
        for body in self.module.called(i, "body"):
            start = len(self.steps)
            parameter = body.parameters[0] if body.parameters else i
            carried = {
                index: self._new(v.shape, parameter, body, body.name, start=start) for index, v in initial.items()
            }
            root = self._computation(body, [carried], body.name)
            for index, value in carried.items():
                self._join(value, initial[index])
                if index in root:
                    root[index].end = max(root[index].end, len(self.steps) - 1)
                    self._join(value, root[index])
        return dict(carried)

    def _conditional(self, i: Instruction, operands: list[Tree], result: Tree) -> None:
        for n, branch in enumerate(self.module.called(i)):
            inner = self._computation(branch, operands[n + 1 : n + 2], branch.name)
            for index, value in inner.items():
                value.end = max(value.end, len(self.steps) - 1)
                if index in result:
                    self._join(value, result[index])
                result[index] = value

    def _step(self, i: Instruction, where: str) -> int:
        if len(self.steps) > self.most:
            raise RematError(
                f"cannot line up the instructions of {self.module.name!r}: its computations are called from so many "
                f"places that they come to more than {self.most} steps."
            )
        self.steps.append((i.name, where))
        return len(self.steps) - 1

    def _new(
        self, shape: Shape, i: Instruction, computation: Computation, where: str, kind: str = "temp", start: int = 0
    ) -> Value:
        value = Value(shape, i, computation, where, start, start, kind)
        self.groups[value] = _Group([value])
        return value

    def _join(self, a: Value, b: Value) -> None:
        first, second = self.groups[a], self.groups[b]
        if first is second or a.shape.space != b.shape.space:
            return
        if len(first.values) < len(second.values):
            first, second = second, first
        first.values += second.values
        first.start, first.end = min(first.start, second.start), max(first.end, second.end)
        first.fixed |= second.fixed
        for v in second.values:
            self.groups[v] = first

    def share(self, spans: Iterable[Span]) -> list[Span]:
        """The buffers of some spans once instructions write over operands among them, as in XLA's heap."""
        among = {id(self.groups[s.values[0]]) for s in spans}
        for value, operands in self.reuses.items():
            self._reuse(value, operands, among)
        return [_span(g) for g in {id(g): g for g in (self.groups[s.values[0]] for s in spans)}.values()]

    def written_over(self, before: Span, after: Span, step: int) -> bool:
        """Whether an instruction that begins one span there may write it over an operand in the other."""
        return any(
            v.start == step and o.end == step and o.shape.nbytes == v.shape.nbytes and o in before.values
            for v in after.values
            for o in self.reuses.get(v, ())
        )

    def _reuse(self, value: Value, operands: list[Value], among: set[int]) -> None:
        """Writes a result over the first operand that ends with it, if they are alike."""
        group = self.groups[value]
        for operand in operands:
            other = self.groups[operand]
            if other is group or id(group) not in among:
                return
            alike = operand.shape.nbytes == value.shape.nbytes and operand.shape.space == value.shape.space
            free = id(other) in among and not other.fixed and operand.end == value.start
            if alike and free and not group.overlaps(other, value.start):
                self._join(value, operand)
                among.add(id(self.groups[value]))
                return

    def _groups(self) -> Iterator[_Group]:
        return iter({id(g): g for g in self.groups.values()}.values())

    def spans(self) -> list[Span]:
        """The buffers of the program, where only what must share memory shares it."""
        return [_span(g) for g in self._groups()]


def _span(group: _Group) -> Span:
    values = sorted(group.values, key=lambda v: v.start)
    intervals: list[tuple[int, int]] = []
    for v in values:
        if intervals and v.start <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], v.end)
        else:
            intervals.append((v.start, v.end))
    return Span(max(v.shape.nbytes for v in values), values[0].shape.space, values, intervals)
