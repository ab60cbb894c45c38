"""How often the loops of a compiled program run, and with them each of its computations.

XLA for CPUs and GPUs writes trip counts down; that for TPUs does not, and there they are read from the loop:
a counter that starts at a constant, is compared with a constant, and grows by a constant.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from remat_kit._target.hlo import Computation, Instruction, Module

_INTEGER = re.compile(r"-?\d{1,18}")
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier", "bitcast-convert")
_SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
_MOST_STEPS = 200  # of reading one loop: real counters take a dozen


@dataclasses.dataclass(frozen=True)
class _Carried:
    """What a loop carries at a place of its tuple, plus a constant; the whole tuple without a place."""

    index: int | None = None
    added: int = 0


_Known = int | _Carried | None


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a `while` of a computation runs its body; None when it cannot be told."""
    if loop.known_trip_count is not None:
        return loop.known_trip_count
    conditions, bodies = module.called(loop, "condition"), module.called(loop, "body")
    initial = computation.operands(loop)[:1]
    if not conditions or not bodies or not initial:
        return None
    return _Reader(module).trips(computation, initial[0], conditions[0], bodies[0])


def runs(module: Module) -> Mapping[str, int]:
    """How often each computation runs in one run of the module.

    A loop of unknown trip count counts once (`unknown_loops` names them), and every branch of a conditional
    counts as if it were taken.
    """
    found = dict.fromkeys(module.computations, 0)
    found[module.entry.name] = 1
    for caller in reversed(tuple(module.computations.values())):
        times = found[caller.name]
        for i in caller.instructions if times else ():
            if i.opcode.endswith(("-done", "-update")):
                continue
            known = trip_count(module, caller, i) if i.opcode == "while" else None
            trips = 1 if known is None else known
            for role, names in i.calls.items():
                for name in names:
                    if name in found:
                        found[name] += times * (trips + 1 if role == "condition" else trips)
    return found


def unknown_loops(module: Module) -> tuple[str, ...]:
    """Names of the loops whose trip count cannot be told."""
    return tuple(
        i.name
        for c in module.computations.values()
        for i in c.instructions
        if i.opcode == "while" and trip_count(module, c, i) is None
    )


class _Reader:
    """Reads integers off a program, each as a constant or as what a loop carries plus a constant."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.left = _MOST_STEPS

    def trips(
        self, computation: Computation, initial: Instruction, condition: Computation, body: Computation
    ) -> int | None:
        owner, test, arguments = self._unfused(condition, condition.root, [_Carried()])
        sides = [self.value(owner, o, arguments) for o in owner.operands(test)]
        if test.opcode != "compare" or len(sides) != 2:
            return None
        direction = test.attributes.get("direction", "")
        found = self._counted(computation, initial, body, sides, direction)
        if found is None:
            found = self._counted(computation, initial, body, sides[::-1], _SWAPPED.get(direction, direction))
        return found

    def _counted(
        self, computation: Computation, initial: Instruction, body: Computation, sides: list[_Known], direction: str
    ) -> int | None:
        """The trip count of a loop that compares a counter, the first side, with a limit, the second."""
        counter, limit = sides
        if not isinstance(counter, _Carried) or counter.index is None:
            return None
        whole = [_Carried()]
        step = self.element(body, body.root, counter.index, whole)
        start = self.element(computation, initial, counter.index, [])
        if isinstance(limit, _Carried) and limit.index is not None:
            kept = self.element(body, body.root, limit.index, whole) == _Carried(limit.index)
            first = self.element(computation, initial, limit.index, []) if kept else None
            limit = _plus(first, limit.added)
        if not isinstance(step, _Carried) or step.index != counter.index:
            return None
        if not isinstance(start, int) or not isinstance(limit, int):
            return None
        return _trips(start + counter.added, limit, step.added, direction)

    def value(self, owner: Computation, i: Instruction, arguments: Sequence[_Known]) -> _Known:
        """The value of an instruction, given those of its computation's parameters."""
        self.left -= 1
        if self.left < 0:
            return None
        operands = owner.operands(i)
        if i.opcode == "constant":
            return int(i.literal) if _INTEGER.fullmatch(i.literal) else None
        if i.opcode == "parameter":
            return arguments[i.index] if 0 <= i.index < len(arguments) else None
        if i.opcode in _SAME and operands:
            return self.value(owner, operands[0], arguments)
        if i.opcode == "get-tuple-element" and operands:
            return self.element(owner, operands[0], i.index, arguments)
        if i.opcode in ("fusion", "call"):
            inner = [self.value(owner, o, arguments) for o in operands]
            for callee in self.module.called(i)[:1]:
                return self.value(callee, callee.root, inner)
        if i.opcode in ("add", "subtract") and len(operands) == 2:
            a, b = (self.value(owner, o, arguments) for o in operands)
            if i.opcode == "subtract":
                return _plus(a, -b) if isinstance(b, int) else None
            return _plus(a, b) if isinstance(b, int) else _plus(b, a) if isinstance(a, int) else None
        return None

    def element(self, owner: Computation, i: Instruction, index: int, arguments: Sequence[_Known]) -> _Known:
        """The value at one place of an instruction's tuple."""
        self.left -= 1
        operands = owner.operands(i)
        if self.left < 0:
            return None
        if i.opcode == "tuple":
            return self.value(owner, operands[index], arguments) if 0 <= index < len(operands) else None
        if i.opcode in _SAME and operands:
            return self.element(owner, operands[0], index, arguments)
        if i.opcode == "fusion":
            inner = [self.value(owner, o, arguments) for o in operands]
            for callee in self.module.called(i)[:1]:
                return self.element(callee, callee.root, index, inner)
        whole = self.value(owner, i, arguments) if i.opcode == "parameter" else None
        return _Carried(index) if whole == _Carried() else None

    def _unfused(
        self, owner: Computation, i: Instruction, arguments: Sequence[_Known]
    ) -> tuple[Computation, Instruction, Sequence[_Known]]:
        """The instruction behind fusions and copies, with its computation and that one's arguments."""
        for _ in range(len(self.module.computations)):
            callees, operands = self.module.called(i), owner.operands(i)
            if i.opcode in _SAME and operands:
                i = operands[0]
            elif i.opcode in ("fusion", "call") and callees:
                arguments = [self.value(owner, o, arguments) for o in operands]
                owner, i = callees[0], callees[0].root
            else:
                break
        return owner, i, arguments


def _plus(value: _Known, number: int) -> _Known:
    if isinstance(value, _Carried):
        return dataclasses.replace(value, added=value.added + number) if value.index is not None else None
    return value + number if value is not None else None


def _trips(start: int, limit: int, step: int, direction: str) -> int | None:
    if direction in ("GT", "GE"):
        start, limit, step, direction = -start, -limit, -step, _SWAPPED[direction]
    if direction == "LE":
        limit, direction = limit + 1, "LT"
    if direction == "LT":
        return 0 if start >= limit else -(-(limit - start) // step) if step > 0 else None
    if direction == "NE" and step and (limit - start) % step == 0 and (limit - start) // step >= 0:
        return (limit - start) // step
    return None
