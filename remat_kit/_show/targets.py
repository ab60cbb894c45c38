"""What can be compiled for, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from remat_kit._show.tables import console_of, line, table
from remat_kit._target.target import TargetInfo
from remat_kit._units import format_bytes


def print_targets(targets: Sequence[TargetInfo], console: Console | None = None) -> None:
    """Prints one line for each target: its name, memory, and what to install for it."""
    console = console_of(console)
    rows = [
        [t.spec, t.title, "-" if t.memory_bytes is None else format_bytes(t.memory_bytes), t.missing or "ready"]
        for t in targets
    ]
    table(console, ["target", "devices", "memory", ""], rows, right=(2,))
    line(
        console, "More than one: tpu:v5e:4x4 (a topology), tpu:v5p:2x2x1, cuda:h100:8. Memory: what a program can have"
    )
    line(
        console, "of one device; of a GPU's, JAX takes three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."
    )
