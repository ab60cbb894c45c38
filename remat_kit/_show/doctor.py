"""What `remat-kit doctor` found, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_REMAT = {
    "classic": "classic (jax_remat3 is off; JAX_REMAT3=1 turns it on)",
    "jax_remat3": "jax_remat3 (the newer one, on)",
}


def print_facts(facts: Mapping[str, Any], console: Console) -> None:
    """Prints the facts that `remat_kit._doctor.examine` returns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")

    def row(label: str, text: str, style: str = "") -> None:
        grid.add_row(Text(label), Text(text, style=style))

    row("remat-kit", facts["remat_kit"])
    row("python", f"{facts['python']} on {facts['platform']}")
    for name, version in facts["packages"].items():
        if version:
            row(name, version)
    devices = ", ".join(f"{d['count']} x {d['kind']} ({d['platform']})" for d in facts["devices"])
    row("devices", devices or "none")
    row("remat", _REMAT[facts["remat"]])
    for name, limits in facts["limits"].items():
        row("limits", f"of {name}: {'; '.join(limits) or 'none found'}", "yellow" if limits else "")
    for missing in facts["missing"]:
        row("missing", f"{', '.join(missing['packages'])}, for {missing['for']}: {missing['install']}")
    for problem in facts["problems"]:
        row("problem", problem, "bold red")
    console.print(grid)
