"""Residual reports as HTML for notebooks: one self-contained table, without scripts or outside files."""

from __future__ import annotations

import functools

import jinja2

from remat_kit._show import rows as _rows
from remat_kit._show.layout import COLUMNS
from remat_kit._trace.report import Residuals


def residuals_to_html(report: Residuals) -> str:
    """Returns an HTML fragment: head, table of what is kept (largest first), totals and notes.

    All text of the report is escaped.
    """
    tables = [
        ("", _rows.kept(report)),
        ("Aliases: views of values that are kept as well", _rows.aliases(report)),
        ("Constants that the function closes over", _rows.constants(report)),
    ]
    return _template().render(
        head=_rows.head(report),
        tables=[(title, rows) for title, rows in tables if rows],
        columns=COLUMNS,
        totals=_rows.totals(report),
        notes=report.notes,
    )


@functools.cache
def _template() -> jinja2.Template:
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("remat_kit._show", "templates"),
        autoescape=True,  # for every file name: names in a report are a stranger's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return env.get_template("residuals.html")
