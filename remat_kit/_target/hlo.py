"""Reading XLA's optimized, scheduled programs from their text, ``compiled.as_text()``.

Text in, data out: nothing of XLA is needed. An attribute that is not known is kept as text, an instruction
that cannot be read is left out, and only a text that is no program at all is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from remat_kit._errors import RematError
from remat_kit._target import hlo_shapes
from remat_kit._target.hlo_shapes import Shape

_STRING = r'"(?:[^"\\]|\\.)*"'
_PARENS = re.compile(rf"{_STRING}|[()]")
_BRACES = re.compile(rf"{_STRING}|[{{}}\[\]()]")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(){}=,]+) (?=\(|\{)")
_NAMED = re.compile(r"\s+(ROOT )?%?([^\s(){}=,]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ATTRIBUTE = re.compile(r"[,\s]*([A-Za-z_][\w.\-]*)=")
_VALUE = re.compile(rf"{_STRING}|(?:\[[^\]]*\]|[^,\s{{\[])+")
_REFERENCE = re.compile(r"%([^\s(){}=,]+)")
_WORD = re.compile(r"[^\s(){}=,%]+")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d{1,18})')
_ALIAS = re.compile(r"\{([\d,\s]*)\}:\s*\((\d{1,9}),\s*\{([\d,\s]*)\}")
_FIELD = re.compile(rf"(\w+)=({_STRING}|[^\s{{}}]+)")
_ESCAPE = re.compile(r"\\([0-7]{3}|.)", re.DOTALL)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_DEEPEST = 100  # calls in calls; programs of JAX nest their loops a dozen deep
_CALLEES = (
    "calls", "to_apply", "condition", "body", "branch_computations", "true_computation", "false_computation",
    "called_computations", "select", "scatter", "async_wrapped_computation",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Frame:
    """One call in the Python code that an instruction came from."""

    file: str
    line: int
    function: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction.

    Attributes:
      name: unique in its computation.
      opcode: XLA's name of the operation, ``"fusion"``.
      shape: of its result.
      operands: names of instructions of the same computation.
      literal: the text between the parentheses, for constants and parameters.
      attributes: everything after the operands, by name, as text.
      calls: names of the computations that it runs, by the attribute that names them.
      op_name: the name stack of the program that was lowered; empty when XLA made the instruction up.
      frames: the Python calls that it came from, the innermost first.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...] = ()
    literal: str = ""
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    calls: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    op_name: str = ""
    frames: tuple[Frame, ...] = ()

    @property
    def called(self) -> tuple[str, ...]:
        """Names of all computations that it runs."""
        return tuple(c for names in self.calls.values() for c in names)

    @property
    def custom_call_target(self) -> str:
        return _unquoted(self.attributes.get("custom_call_target", ""))

    @property
    def backend_config(self) -> str:
        """JSON as a rule; what is in it is the backend's affair."""
        text = self.attributes.get("backend_config", "")
        return _unquoted(text) if text.startswith('"') else text

    @property
    def known_trip_count(self) -> int | None:
        """The trip count of a `while`, where XLA has written it down."""
        found = _TRIPS.search(self.backend_config)
        return int(found[1]) if found else None

    @property
    def index(self) -> int:
        """The number of a `get-tuple-element` or a `parameter`; -1 where there is none."""
        text = self.literal if self.opcode == "parameter" else self.attributes.get("index", "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1

    @property
    def source(self) -> tuple[str, int] | None:
        """File and line of the innermost call outside JAX and the libraries on it, else of the innermost call."""
        own = [f for f in self.frames if not _LIBRARY.search(f.file)]
        frame = next(iter(own or self.frames), None)
        return (frame.file, frame.line) if frame else None


# Their lines are nobody's own: libraries on JAX, this package (the zoo's models are their users'), console scripts.
_LIBRARY = re.compile(
    r"(site|dist)-packages[/\\](jax|jaxlib|flax|optax|equinox|haiku|haliax)[/\\]|"
    + re.escape(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    + r"[/\\](?!zoo[/\\])|[/\\]bin[/\\][^/\\.]+$"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A list of instructions, in the order in which they run when the module is scheduled.

    Attributes:
      name: unique in its module.
      instructions: in the order of the text.
      root: the instruction whose value the computation returns.
      parameters: in the order of their numbers.
    """

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction
    parameters: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {i.name: i for i in self.instructions}

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The operands that are instructions of this computation (all of them, in a text that is whole)."""
        return tuple(self.by_name[o] for o in instruction.operands if o in self.by_name)


@dataclasses.dataclass(frozen=True)
class Alias:
    """A result that shares the memory of a donated argument."""

    output: tuple[int, ...]
    parameter: int
    index: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program.

    Attributes:
      name: ``"jit_step"``.
      computations: by name, callees before their callers.
      entry: the computation that is run.
      is_scheduled: whether the instructions stand in the order in which they run.
      num_partitions: devices that the program is cut up over. Shapes are those of one device.
      input_output_alias: the donated arguments.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: Computation
    is_scheduled: bool = False
    num_partitions: int = 1
    input_output_alias: tuple[Alias, ...] = ()

    def called(self, instruction: Instruction, role: str = "") -> tuple[Computation, ...]:
        """The computations that an instruction runs: all, or those of one attribute, ``"body"``."""
        names = instruction.calls.get(role, ()) if role else instruction.called
        return tuple(self.computations[n] for n in names if n in self.computations)


def parse(text: str | None) -> Module:
    """Reads the text of an HLO module, in time linear in its length.

    Raises:
      RematError: for a text that is no HLO module (None: a backend that gives none), that is cut off before its entry
        computation, or whose computations call themselves.
    """
    if not isinstance(text, str) or not text.lstrip().startswith("HloModule"):
        start = f"{text[:60]!r}" if isinstance(text, str) else type(text).__name__
        raise RematError(f"not the text of an HLO module: it begins with {start}. Give it compiled.as_text().")
    lines = text.splitlines()
    header = next(n for n, line in enumerate(lines) if line.strip())
    name = lines[header].split(None, 1)[1:] or [""]
    name, _, rest = name[0].partition(",")
    settings = dict(_attributes(rest, 0))
    frames = _Frames(lines)
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    opened: tuple[str, bool] | None = None
    body: list[tuple[Instruction, bool]] = []
    for line in lines[header + 1 :]:
        if line.startswith("}") or (opened and not line[:1].isspace() and _HEADER.match(line)):
            if opened and body:
                done = _computation(opened[0], body)
                computations[done.name] = done
                entry = done if opened[1] else entry
            opened, body = None, []
        if opened:
            if (found := _instruction(line, frames)) is not None:
                body.append(found)
        elif line.rstrip().endswith("{") and (head := _HEADER.match(line)):
            opened = head[2], bool(head[1])
    if entry is None:
        raise RematError(
            f"the HLO module {name!r} has no complete ENTRY computation in its {len(lines)} lines. Is the text cut off?"
        )
    _check_calls(name, computations)
    partitions = settings.get("num_partitions", "")
    return Module(
        name,
        computations,
        entry,
        settings.get("is_scheduled") == "true",
        int(partitions) if partitions.isascii() and partitions.isdecimal() and len(partitions) < 10 else 1,
        tuple(
            Alias(_index(out), int(number), _index(inner))
            for out, number, inner in _ALIAS.findall(settings.get("input_output_alias", ""))
        ),
    )


def _computation(name: str, body: list[tuple[Instruction, bool]]) -> Computation:
    """A computation of the instructions with names of their own; each reads only what stands before it.

    So it is in every text that XLA writes. In a damaged one it keeps whoever follows operands from going in circles.
    """
    instructions: dict[str, Instruction] = {}
    root = None
    for i, is_root in body:
        if i.name in instructions:
            continue
        if not all(o in instructions for o in i.operands):
            i = dataclasses.replace(i, operands=tuple(o for o in i.operands if o in instructions))
        instructions[i.name] = i
        root = i if is_root and root is None else root
    found = tuple(instructions.values())
    parameters = sorted((i for i in found if i.opcode == "parameter"), key=lambda i: i.index)
    return Computation(name, found, root if root is not None else found[-1], tuple(parameters))


def _instruction(line: str, frames: _Frames) -> tuple[Instruction, bool] | None:
    """One line as an instruction and whether it is the root; None for a line that is none."""
    named = _NAMED.match(line)
    if named is None:
        return None
    start = named.end()
    end = _closing(line, start, _PARENS) if line.startswith("(", start) else line.find(" ", start)
    code = _OPCODE.match(line, end) if end > 0 else None
    if code is None:
        return None
    close = _closing(line, code.end() - 1, _PARENS)
    inner = line[code.end() : close - 1]
    opcode = code[1]
    attributes = dict(_attributes(line, close))
    metadata = dict(_FIELD.findall(attributes.pop("metadata", "")))
    leaf = opcode in ("constant", "parameter")
    return (
        Instruction(
            named[2],
            opcode,
            hlo_shapes.parse(line[start:end]),
            () if leaf else _operands(inner),
            inner if leaf else "",
            attributes,
            {k: tuple(_names(attributes[k])) for k in _CALLEES if k in attributes},
            _unquoted(metadata.get("op_name", "")),
            frames.of(metadata),
        ),
        bool(named[1]),
    )


def _operands(text: str) -> tuple[str, ...]:
    if "%" in text:
        return tuple(_REFERENCE.findall(text))
    # texts printed without % give the name last, after the shape: "f32[2]{0} x"
    return tuple(w[-1] for part in text.split(", ") if (w := _WORD.findall(part)))


def _names(text: str) -> list[str]:
    return _REFERENCE.findall(text) or _WORD.findall(text)


def _closing(text: str, start: int, brackets: re.Pattern[str]) -> int:
    """The position after the bracket that closes the one at `start`; the end of a text that is cut off."""
    depth = 0
    for found in brackets.finditer(text, start):
        mark = found[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth <= 0:
                return found.end()
    return len(text)


def _attributes(text: str, start: int) -> Iterator[tuple[str, str]]:
    """``key=value`` pairs from a position on; values in brackets are taken whole."""
    while (key := _ATTRIBUTE.match(text, start)) is not None:
        at = key.end()
        if text.startswith("{", at):
            start = _closing(text, at, _BRACES)
        else:
            value = _VALUE.match(text, at)
            start = value.end() if value else at
        yield key[1], text[at:start]


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,9}", text))


def _unquoted(text: str) -> str:
    """The content of a C string literal; other text as it is."""
    if not text.startswith('"'):
        return text
    text = text[1:-1] if text.endswith('"') and len(text) > 1 else text[1:]
    if "\\" not in text:
        return text
    kinds = {"n": "\n", "t": "\t", "r": "\r"}

    def plain(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code, 8) & 0xFF) if len(code) == 3 else kinds.get(code, code)

    changed = _ESCAPE.sub(plain, text)
    try:  # bytes of UTF-8 are escaped one by one
        return changed.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return changed


class _Frames:
    """The tables of files, functions, locations and stack frames at the head of a text."""

    def __init__(self, lines: list[str]) -> None:
        rows: dict[str, dict[int, Any]] = {t: {} for t in _TABLES}
        table: dict[int, Any] | None = None
        for line in lines:
            if line in rows:
                table = rows[line]
            elif table is not None and line[:1].isdigit():
                number, _, value = line.partition(" ")
                if number.isascii() and number.isdecimal() and len(number) < 10:
                    table[int(number)] = _unquoted(value) if value.startswith('"') else dict(_FIELD.findall(value))
            elif line.startswith(("%", "ENTRY")):
                break
            else:
                table = None
        self._rows = rows
        frames = [f for f in rows["StackFrames"].values() if isinstance(f, dict)]
        # 0 stands for "no parent"; newer texts print every parent as one more than its number
        self._shift = 0 if any(f.get("parent_frame_id", "0") == "0" for f in frames) else 1
        self._known: dict[str, tuple[Frame, ...]] = {}

    def of(self, metadata: Mapping[str, str]) -> tuple[Frame, ...]:
        """The frames that an instruction's metadata stand for, the innermost first."""
        if "source_file" in metadata:
            return (Frame(_unquoted(metadata["source_file"]), _whole(metadata.get("source_line"))),)
        key = metadata.get("stack_frame_id", "")
        if key and key not in self._known:
            self._known[key] = tuple(self._walk(_whole(key)))
        return self._known.get(key, ())

    def _row(self, table: str, number: int) -> dict[str, str]:
        row = self._rows[table].get(number)
        return row if isinstance(row, dict) else {}

    def _walk(self, number: int) -> Iterator[Frame]:
        seen: set[int] = set()
        while number not in seen and (frame := self._row("StackFrames", number)):
            seen.add(number)
            place = self._row("FileLocations", _whole(frame.get("file_location_id")))
            file = self._rows["FileNames"].get(_whole(place.get("file_name_id")))
            function = self._rows["FunctionNames"].get(_whole(place.get("function_name_id")))
            if isinstance(file, str):
                yield Frame(file, _whole(place.get("line")), function if isinstance(function, str) else "")
            number = _whole(frame.get("parent_frame_id")) - self._shift


def _whole(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _check_calls(name: str, computations: Mapping[str, Computation]) -> None:
    """Every walk of a module follows calls: one that calls itself, or endlessly others, would not end."""
    depth: dict[str, int] = {}
    for caller, computation in computations.items():
        depth[caller] = 0
        for i in computation.instructions:
            for callee in i.called:
                if callee in computations and (callee == caller or callee not in depth):
                    raise RematError(
                        f"the HLO module {name!r} is damaged: {caller!r} calls {callee!r}, which comes after it. "
                        "XLA prints callees first."
                    )
                depth[caller] = max(depth[caller], depth.get(callee, 0) + 1)
        if depth[caller] > _DEEPEST:
            raise RematError(f"the HLO module {name!r} is damaged: calls are nested more than {_DEEPEST} deep.")
