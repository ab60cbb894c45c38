"""A traced program as text: its blocks as a tree, with what they cost and what remat would keep of each."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit._trace.program import Program
from remat_kit._units import format_bytes, format_flops, printable

_WIDTH = 100


def print_program(program: Program, console: Console | None = None, *, depth: int = 3) -> None:
    """Prints the blocks of a program, nested ones indented under those around them.

    Args:
      depth: how many levels of blocks to show.
    """
    console = console or Console()
    approximately = "" if program.exact else " at least: the trip count of a while loop is not known"
    console.print(Text("Program", style="bold"))
    console.print(Text(f"{format_flops(program.flops)}{approximately}, {len(program.values)} values (predicted)\n"))
    table = Table(box=box.ASCII2 if console.options.ascii_only else box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("block", "kind"):
        table.add_column(title, overflow="fold")
    for title in ("runs", "FLOPs", "values", "inputs"):
        table.add_column(title, justify="right", no_wrap=True)
    levels: dict[str, int] = {}
    for b in program.blocks:
        levels[b.path] = level = levels.get(b.parent, -1) + 1 if b.parent != b.path else levels.get(b.path, 0)
        if level >= depth:
            continue
        name = "  " * level + printable(b.path) + (" *" if b.default else "")
        figures = (str(b.runs), format_flops(b.flops), format_bytes(b.bytes), format_bytes(b.input_bytes))
        table.add_row(*map(Text, (name, b.kind, *figures)))
    if program.blocks:
        console.print(table)
        console.print(Text("* taken where no block is named; inputs: what remat keeps of one run at the least"))


def program_to_str(program: Program) -> str:
    """Returns what `print_program` prints, without colours."""
    out = io.StringIO()
    print_program(program, Console(file=out, width=_WIDTH, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
