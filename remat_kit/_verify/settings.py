"""Which findings are wanted: codes selected and ignored, in ``pyproject.toml`` or by comments in the source.

[tool.remat-kit.lint]
select = ["RK"]          # all of them, as without a setting
ignore = ["RK012"]

h = jax.checkpoint(layer)(h)  # remat-kit: ignore[RK007]
"""

from __future__ import annotations

import dataclasses
import linecache
import pathlib
import re
import tomllib
from collections.abc import Iterable
from typing import Any

from remat_kit._errors import RematError, near_matches
from remat_kit._verify.finding import Finding

_COMMENT = re.compile(r"#\s*remat-kit:\s*ignore(?:\[([^\]]*)\])?")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Codes, or beginnings of codes: what is selected, less what is ignored."""

    select: tuple[str, ...]
    ignore: tuple[str, ...]

    @classmethod
    def of(cls, select: Any, ignore: Any, known: Iterable[str]) -> Settings:
        """Reads both; None takes the setting of the nearest ``pyproject.toml``.

        Raises:
          RematError: for a code that does not exist, or a malformed setting.
        """
        table, path = _table() if select is None or ignore is None else ({}, None)
        if unknown := sorted(set(table) - {"select", "ignore"}):
            raise RematError(f"{path}: [tool.remat-kit.lint] takes select and ignore, found {', '.join(unknown)}.")
        known = tuple(known)
        chosen = [_codes(table.get("select", ("RK",)) if select is None else select, "select", known)]
        chosen.append(_codes(table.get("ignore", ()) if ignore is None else ignore, "ignore", known))
        return cls(*chosen)

    def wants(self, code: str) -> bool:
        """Whether findings of a code are wanted."""
        return code.startswith(self.select) and not (self.ignore and code.startswith(self.ignore))


def commented(finding: Finding) -> bool:
    """Whether a comment on the finding's source line, or alone on the line above it, ignores it."""
    where = finding.where
    if not where.file:
        return False
    here = _COMMENT.search(linecache.getline(where.file, where.line))
    above = linecache.getline(where.file, where.line - 1).strip()
    found = here or (_COMMENT.search(above) if above.startswith("#") else None)
    if found is None:
        return False
    return found[1] is None or finding.code in [c.strip() for c in found[1].split(",")]


def _codes(given: Any, what: str, known: tuple[str, ...]) -> tuple[str, ...]:
    codes = (given,) if isinstance(given, str) else given
    if not isinstance(codes, (list, tuple, set, frozenset)) or not all(isinstance(c, str) for c in codes):
        raise RematError(f"{what}= takes codes such as 'RK003', or beginnings of codes, got {given!r}.")
    for code in codes:
        if not code or not any(k.startswith(code) for k in known):
            raise RematError(f"{what}={code!r}: there is no such code.{near_matches(code, known)}")
    return tuple(sorted(codes))


def _table() -> tuple[dict[str, Any], pathlib.Path | None]:
    """The setting in the nearest ``pyproject.toml``, from the working directory upwards."""
    try:
        here = pathlib.Path.cwd()
    except OSError:
        return {}, None
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        try:
            data = tomllib.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise RematError(f"{path} cannot be read: {error}. Pass select= and ignore=, or mend it.") from error
        tool = data.get("tool", {})
        table = tool.get("remat-kit", {}) if isinstance(tool, dict) else {}
        table = table.get("lint", {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            raise RematError(f"{path}: [tool.remat-kit.lint] is a table with select and ignore, found {table!r:.80}.")
        return table, path
    return {}, None
