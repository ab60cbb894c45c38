"""A traced program as text: its blocks as a tree, with what they cost and what remat would keep of each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from remat_kit._show.draw import draw, to_str
from remat_kit._show.parts import Part, line, table
from remat_kit._trace.program import Program
from remat_kit._units import format_bytes, format_flops, printable

_DEPTH = 3


def view(program: Program, depth: int = _DEPTH) -> Iterator[Part]:
    """The blocks of a program, nested ones indented under those around them.

    Args:
      depth: how many levels of blocks to show.
    """
    approximately = "" if program.exact else " at least: the trip count of a while loop is not known"
    yield line("Program", "bold")
    yield line(f"{format_flops(program.flops)}{approximately}, {len(program.values)} values (predicted)\n")
    rows = []
    levels: dict[str, int] = {}
    for b in program.blocks:
        levels[b.path] = level = levels.get(b.parent, -1) + 1 if b.parent != b.path else levels.get(b.path, 0)
        if level >= depth:
            continue
        name = "  " * level + printable(b.path) + (" *" if b.default else "")
        figures = (str(b.runs), format_flops(b.flops), format_bytes(b.bytes), format_bytes(b.input_bytes))
        rows.append((name, b.kind, *figures))
    if program.blocks:
        yield table(["block", "kind", "runs", "FLOPs", "values", "inputs"], rows, right=range(2, 6))
        yield line("* taken where no block is named; inputs: what remat keeps of one run at the least")


def print_program(program: Program, console: Console | None = None, *, depth: int = _DEPTH) -> None:
    """Prints the blocks of a program, `depth` levels of them."""
    draw(view(program, depth), console)


def program_to_str(program: Program) -> str:
    """Returns what `print_program` prints, without colours."""
    return to_str(view(program))
