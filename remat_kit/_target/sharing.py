"""Which results of an HLO instruction lie in the memory of its operands.

The rules are XLA's: its dataflow analysis (pointers handed on, operations in place) and buffer assignment
(an elementwise operation may write over an operand that nobody reads any more).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from remat_kit._target.hlo import Computation, Instruction, Module

Index = tuple[int, ...]
Pair = tuple[Index, int, Index]  # index in the result, number of the operand, index in the operand

FORWARDING = ("bitcast", "optimization-barrier", "domain", "add-dependency", "after-all")
_ALIASED = re.compile(r"\{([\d,\s]*)\}:\s*\((\d{1,6}),\s*\{([\d,\s]*)\}")
_LISTS = re.compile(r'"indices":\[((?:"\d{1,6}",?)+)\]')
_VIEWS = ("bitcast", "reshape", "copy")
_ELEMENTWISE = frozenset(
    "abs add and atan2 bitcast-convert cbrt ceil clamp clz compare complex convert copy cosine divide erf "
    "exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply "
    "negate not or popcnt power real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select "
    "shift-left shift-right-arithmetic shift-right-logical sign sine sqrt stochastic-convert subtract tan tanh "
    "xor bitcast".split()
)


def starts(opcode: str) -> bool:
    """Whether it begins work that a later instruction, ``...-done``, waits for."""
    return opcode.endswith("-start")


def in_place(module: Module, computation: Computation, instruction: Instruction) -> list[Pair]:
    """The results that must lie where an operand lies: updates, scatters, and fusions that end in one."""
    opcode = instruction.opcode
    result: Index = ()
    if starts(opcode) and opcode != "all-reduce-start":
        if opcode == "copy-start":
            return []
        result = (1,)
        opcode = opcode.removesuffix("-start")
    pairs: list[Pair] = []
    if opcode in ("dynamic-update-slice", "select-and-scatter-in-place"):
        pairs = [(result, 0, ())]
    elif opcode == "all-reduce-start":
        count = len(instruction.operands)
        pairs = [((n,) if count > 1 else (), n, ()) for n in range(count)]
    elif opcode == "scatter":
        count = (len(instruction.operands) - 1) // 2
        pairs = [((*result, n) if count > 1 else result, n, ()) for n in range(count)]
    elif opcode in ("fusion", "async"):
        pairs = [
            ((*result, *index), number, ())
            for callee in module.called(instruction)
            for index, number in _updated_parameters(callee)
        ]
        pairs += _listed(instruction, result)
    elif opcode == "custom-call":
        text = instruction.attributes.get("output_to_operand_aliasing", "")
        pairs = [((*result, *_index(o)), int(n), _index(i)) for o, n, i in _ALIASED.findall(text)]
        pairs += _listed(instruction, result)
    return list({p[0]: p for p in pairs}.values())


def handed_on(instruction: Instruction) -> list[Pair] | None:
    """The pairs of an operation that only hands pointers on; None for one that computes."""
    opcode, operands = instruction.opcode, len(instruction.operands)
    if opcode == "tuple":
        return [((n,), n, ()) for n in range(operands)]
    if opcode == "get-tuple-element":
        return [((), 0, (instruction.index,))]
    if opcode in FORWARDING:
        return [((), 0, ())]
    if opcode in ("copy-done", "recv-done"):
        return [((), 0, (0,))] if opcode == "copy-done" else [((0,), 0, (0,))]
    if opcode == "all-reduce-done" or opcode == "async-update" or opcode.endswith("-update"):
        return [((), 0, ())]
    if opcode.endswith("-done"):
        return [((), 0, (1,))]
    return None


def operands_of_start(instruction: Instruction) -> list[Pair]:
    """The places in the result of ``...-start`` that only point at its operands."""
    if instruction.opcode == "all-reduce-start" or not starts(instruction.opcode):
        return []
    if instruction.opcode == "copy-start":
        return [((1,), 0, ())]
    first = instruction.shape.at((0,))
    if first is not None and first.parts is not None:
        return [((0, n), n, ()) for n in range(len(instruction.operands))]
    return [((0,), 0, ())]


def overwritable(module: Module, instruction: Instruction, place: Index) -> list[int]:
    """Numbers of the operands that the result at a place may be written over, if this is their last use."""
    opcode = instruction.opcode
    numbers = range(len(instruction.operands))
    if opcode in ("sort", "triangular-solve", "cholesky", "all-reduce", "collective-permute"):
        return [0] if opcode != "sort" else list(numbers)
    if opcode in _ELEMENTWISE:
        return list(numbers)
    if opcode != "fusion":
        return []
    callees = module.called(instruction)
    if not callees:
        return []
    kind = instruction.attributes.get("kind")
    if kind == "kLoop":
        return [n for n in numbers if _elementwise_on(callees[0], n)]
    if kind == "kInput":
        return [n for n in numbers if _read_in_order(callees[0], n, place)]
    if kind == "kOutput":
        return [n for n in numbers if _added_to(callees[0], n)]
    return []


def update_of(computation: Computation) -> Instruction | None:
    """What a fused computation writes into its first update in place: the update, behind views of it."""
    for root in roots(computation):
        target = behind(computation, root, _VIEWS)
        if target.opcode == "dynamic-update-slice" and len(target.operands) > 1:
            operands = computation.operands(target)
            return behind(computation, operands[1], (*_VIEWS, "convert", "broadcast")) if len(operands) > 1 else None
    return None


def behind(computation: Computation, instruction: Instruction, opcodes: tuple[str, ...]) -> Instruction:
    """The instruction whose value is seen through operations of one operand."""
    for _ in range(len(computation.instructions)):
        operands = computation.operands(instruction)
        if instruction.opcode not in opcodes or not operands:
            break
        instruction = operands[0]
    return instruction


def roots(computation: Computation) -> tuple[Instruction, ...]:
    """The results of a fused computation, one by one."""
    root = computation.root
    return computation.operands(root) if root.opcode == "tuple" else (root,)


def _updated_parameters(computation: Computation) -> Iterator[tuple[Index, int]]:
    many = computation.root.opcode == "tuple"
    for n, root in enumerate(roots(computation)):
        target = behind(computation, root, ("bitcast",))
        if target.opcode in ("dynamic-update-slice", "scatter"):
            base = computation.operands(target)[:1]
            source = behind(computation, base[0], ("bitcast",)) if base else target
            if source.opcode == "parameter":
                yield ((n,) if many else ()), source.index


def _listed(instruction: Instruction, result: Index) -> Iterator[Pair]:
    """The pairs that the TPU compiler lists: numbers of operands, then of results, in one row."""
    count = len(instruction.operands)
    arrays = [index for index, _ in instruction.shape.arrays]
    for found in _LISTS.findall(instruction.attributes.get("backend_config", "")):
        numbers = [int(n) for n in re.findall(r"\d+", found)]
        inputs = [n for n in numbers if n < count]
        outputs = [n - count for n in numbers if n >= count]
        if inputs and outputs and outputs[0] < len(arrays):
            yield (*result, *arrays[outputs[0]]), inputs[0], ()


def _elementwise_on(computation: Computation, number: int) -> bool:
    """Whether every path from a parameter of a fused computation to its results is elementwise."""
    reached = {p.name for p in computation.parameters if p.index == number}
    for i in computation.instructions:
        if i.opcode != "parameter" and not reached.isdisjoint(i.operands):
            if i.opcode not in _ELEMENTWISE and i.opcode != "tuple":
                return False
            reached.add(i.name)
    return True


def _read_in_order(computation: Computation, number: int, place: Index) -> bool:
    """Whether a parameter of a GPU's fused reduction is read as one of its results is written.

    What the first reduction reads does not matter: it is done before other results are written.
    """
    results = roots(computation)
    if not (place[0] if place else 0) < len(results):
        return False
    reduction = next((r for r in results if behind(computation, r, ("bitcast",)).opcode == "reduce"), None)
    hero = "" if reduction is None else behind(computation, reduction, ("bitcast",)).name
    reached = {p.name for p in computation.parameters if p.index == number}
    for i in computation.instructions:
        if i.opcode == "parameter" or i.name == hero or reached.isdisjoint(i.operands):
            continue
        if i.opcode == "copy" or i.opcode not in _ELEMENTWISE and i.opcode != "tuple":
            return False
        reached.add(i.name)
    return results[place[0] if place else 0].name in reached


def _added_to(computation: Computation, number: int) -> bool:
    """Whether a parameter of a fused matrix product is only added to its result."""
    users = [i for i in computation.instructions for o in computation.operands(i) if _is(o, number)]
    return len(users) == 1 and users[0] is computation.root and users[0].opcode == "add"


def _is(instruction: Instruction, number: int) -> bool:
    return instruction.opcode == "parameter" and instruction.index == number


def _index(text: str) -> Index:
    return tuple(int(n) for n in re.findall(r"\d{1,6}", text))
