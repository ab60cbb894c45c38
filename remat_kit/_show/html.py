"""Results as HTML: fragments for notebooks and pages of their own. Self-contained: nothing is fetched.

A fragment holds the result as plain tables, which is what is left of it where scripts do not run, and a script that
shows it in a shadow root: residual reports and frontiers with controls, everything else as the tables are.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from remat_kit._errors import RematError
from remat_kit._plan.frontier import Frontier
from remat_kit._plan.plan import Plan
from remat_kit._show import check, comparison, embed, findings, measurement, plan, presets, program, text
from remat_kit._show.layout import COLUMNS, says_something
from remat_kit._show.parts import Line, Pairs, Part, Values
from remat_kit._target.comparison import Comparison
from remat_kit._target.measurement import Measurement
from remat_kit._trace.program import Program
from remat_kit._trace.report import Residuals, ResidualsDiff
from remat_kit._units import format_bytes
from remat_kit._verify.finding import Findings
from remat_kit._verify.result import Check

_STILL = 100  # rows of a table of values without scripts


@dataclasses.dataclass(frozen=True)
class _Shown:
    """How a kind of result is shown.

    Attributes:
      view: its parts.
      app: the script with its controls, and the function in it of the same name; empty for none.
      data: what that script reads.
    """

    view: Callable[[Any], Iterable[Part]]
    app: str = ""
    data: Callable[[Any], Any] | None = None


_SHOWN: dict[type, _Shown] = {
    Residuals: _Shown(lambda r: text.residuals_view(r, _STILL), "residuals", embed.residuals),
    ResidualsDiff: _Shown(lambda d: text.diff_view(d, _STILL)),
    Measurement: _Shown(lambda m: measurement.view(m, _STILL)),
    Comparison: _Shown(comparison.view),
    Plan: _Shown(plan.explanation),
    Frontier: _Shown(plan.frontier_view, "explorer", embed.frontier),
    Findings: _Shown(findings.view),
    Check: _Shown(lambda c: check.view(c, _STILL)),
    Program: _Shown(program.view),
    presets.Presets: _Shown(presets.view),
}


def fragment(result: Any) -> str:
    """A result as an HTML fragment. All text in it is escaped."""
    return _fragment(*_parts(result))


def write(result: Any, path: Any) -> Path:
    """Writes a result as a page of its own.

    Raises:
      RematError: where the file cannot be written, as in a folder that is not there.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise RematError(f"a page is written to a file, named by a path; got {path!r:.200}")
    shown, parts, data = _parts(result)
    title = next((p.title for p in parts if isinstance(p, Pairs)), type(result).__name__)
    inner = Markup(_fragment(shown, parts, data))
    page = _template("page.html").render(
        title=f"{title} - remat-kit", fragment=inner, style=Markup(_asset("report.css"))
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RematError(f"cannot write the page to {os.fspath(path)!r:.200}: {error}") from None
    return Path(path)


def _parts(result: Any) -> tuple[_Shown, list[Part], Any]:
    shown = next(s for kind, s in _SHOWN.items() if isinstance(result, kind))
    return shown, list(shown.view(result)), None if shown.data is None else shown.data(result)


def _fragment(shown: _Shown, parts: list[Part], data: Any) -> str:
    script = _asset("base.js") + (_asset(f"{shown.app}.js") if shown.app else "")
    style = _asset("report.css")
    return _template("fragment.html").render(
        parts=[_plain(p) for p in parts],
        data=None if data is None else Markup(embed.as_json(data)),
        # A notebook may hold reports of several versions: the script of one leaves those of the others alone.
        scope="rk-" + hashlib.sha256((script + style).encode()).hexdigest()[:10],
        script=Markup(script),
        style=Markup(embed.as_json(style)),
        app=shown.app,
    )


def _plain(part: Part) -> dict[str, Any]:
    out = {"kind": type(part).__name__, **{f.name: getattr(part, f.name) for f in dataclasses.fields(part)}}
    if isinstance(part, Values):
        cells = [r.cells for r in part.rows]
        out["columns"] = [
            dataclasses.replace(c, title=part.titles.get(c.key, c.title))
            for c in COLUMNS
            if says_something(c.key, cells)
        ]
        out |= {"shown": part.shown, "rest": part.rest, "rest_bytes": format_bytes(sum(r.bytes for r in part.rest))}
    elif isinstance(part, Line):
        out["spans"] = [(words, style) for words, style in part.spans if words.strip()]
    return out


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("remat_kit._show", "templates"),
        autoescape=True,  # for every file name: names in a report are a stranger's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)


@functools.cache
def _asset(name: str) -> str:
    """A script or style sheet, as it is."""
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]
