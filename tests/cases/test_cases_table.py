"""Every public report in one table: what the toolkit makes of it. ``pytest -s`` shows it.

The details of each are tested in the other files of this folder and in those of Flax, loops, lint and check.
"""

from __future__ import annotations

import re

import outcomes_of_calls  # noqa: F401
import outcomes_of_flax  # noqa: F401
import outcomes_of_policies  # noqa: F401
from case import CASES, Case
from rich import box
from rich.console import Console
from rich.table import Table

OPTIMIZED = True  # some reports are on what the compiler makes


def outcome(case: Case) -> str:
    """What a case comes to; an error that is not expected is an outcome too, and a wrong one."""
    try:
        return case.run()
    except Exception as error:
        return f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def test_every_reported_case_ends_right():
    outcomes = [outcome(c) for c in CASES]
    right = [re.fullmatch(c.right, o) is not None for c, o in zip(CASES, outcomes, strict=True)]
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, highlight=False)
    for column, ratio in (("case", 4), ("report", 4), ("outcome", 11), ("", 1)):
        table.add_column(column, ratio=ratio, overflow="fold")
    for c, o, ok in zip(CASES, outcomes, right, strict=True):
        title = f"{c.title} ({c.under})" if c.under else c.title
        table.add_row(title, "\n".join(c.links), o, "ok" if ok else "WRONG", style="" if ok else "red")
    Console(width=150, markup=False).print(table)
    wrong = [
        f"{c.title} ({', '.join(c.links)})\n    {o}\n    expected {c.right}"
        for c, o, ok in zip(CASES, outcomes, right, strict=True)
        if not ok
    ]
    assert not wrong, f"{len(wrong)} of {len(CASES)} outcomes are not the right one:\n" + "\n".join(wrong)


def test_there_are_28_reports_each_with_links_of_its_own():
    assert len(CASES) == len({c.links for c in CASES}) == len({c.title for c in CASES}) == 28
    for link in {link for c in CASES for link in c.links}:
        assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", link), link
