"""Fits the columns of a table into a terminal: which are shown, how wide, and what is cut from long cells.

Works on finished text only; `rows.py` says what the cells are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rich.cells import cell_len

GAP = 2  # blanks between two columns


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
      key: of the cells in `Row.cells`.
      smallest: the width below which it is left out (the essential ones are cut further).
      comfort: the width it gets before less important columns are considered.
      keep: which end of a long cell survives: "start" or "end".
    """

    key: str
    title: str
    smallest: int
    comfort: int
    right: bool = False
    keep: str = "start"
    essential: bool = False


# In order of importance: on a narrow terminal the last ones go first. The second group is considered only when the
# cells of the first are shown whole.
_FIRST: Sequence[Column] = (
    Column("bytes", "bytes", 6, 10, right=True, essential=True),
    Column("what", "what", 8, 16, essential=True),
    Column("action", "kept", 4, 5),
    Column("bar", "", 5, 5),
    Column("where", "where", 12, 18, keep="end"),
    Column("shape", "shape", 12, 18),
    Column("worth", "B/FLOP", 6, 10, right=True),
)
_SECOND: Sequence[Column] = (
    Column("alias", "alias of", 8, 20, keep="end"),
    Column("share", "share", 5, 5, right=True),
    Column("flops", "recompute", 9, 12, right=True),
    Column("needed", "needed by", 10, 16),
    Column("source", "source", 14, 30, keep="end"),
    Column("trips", "trips", 5, 6, right=True),
    Column("op", "op", 8, 16),
)
_READING = (  # from left to right
    *("bytes", "share", "bar", "what", "op", "shape", "trips", "where", "action", "flops", "worth", "alias"),
    *("needed", "source"),
)
_BY_KEY = {c.key: c for c in (*_FIRST, *_SECOND)}
COLUMNS: Sequence[Column] = tuple(_BY_KEY[key] for key in _READING)
_WIDEST_BAR = 12


def fit(
    cells: Sequence[Mapping[str, str]], width: int, titles: Mapping[str, str] | None = None
) -> list[tuple[Column, int]]:
    """Chooses columns and their widths so that a line takes at most `width` cells.

    Args:
      cells: the table's rows. A column that is empty, or says the same as another one, is left out.
      width: of the terminal, in cells.
      titles: titles by key, where they are others than the columns' own.

    Returns:
      `(column, width)` in reading order.
    """
    chosen: dict[str, int] = {}
    entitled: dict[str, Column] = {}
    left = width + GAP
    for group in (_FIRST, _SECOND):
        columns = [dataclasses.replace(c, title=(titles or {}).get(c.key, c.title)) for c in group]
        natural = {c.key: _natural(c, cells) for c in columns if says_something(c.key, cells)}
        for column in columns:
            if column.key not in natural:
                continue
            least = min(natural[column.key], column.smallest)
            if not column.essential and left < least + GAP:
                continue
            entitled[column.key] = column
            chosen[column.key] = max(1, min(natural[column.key], column.comfort, left - GAP))
            left -= chosen[column.key] + GAP
        for column in columns:  # what is left goes to the cells that were cut, the most important first
            if column.key in chosen and left > 0:
                more = max(0, min(left, natural[column.key] - chosen[column.key]))
                chosen[column.key] += more
                left -= more
    return [(entitled[key], chosen[key]) for key in _READING if key in chosen]


def _natural(column: Column, cells: Sequence[Mapping[str, str]]) -> int:
    if column.key == "bar":
        return _WIDEST_BAR
    return max(cell_len(column.title), *(cell_len(row.get(column.key, "")) for row in cells))


def says_something(key: str, cells: Sequence[Mapping[str, str]]) -> bool:
    """Whether a column is worth its room: it is not empty, and does not say the same as another one."""
    if key == "bar":
        return any(row.get("share", "") for row in cells)
    if key == "op":
        return any(row.get("op", "") not in ("", row.get("what", "")) for row in cells)
    values = {row.get(key, "") for row in cells} - {"", "-"}
    if key == "action":  # "saved" everywhere goes without saying
        return "host" in values
    return bool(values)


def shorten(text: str, width: int, keep: str = "start", dots: str = "…") -> str:
    """Cuts text to a width in terminal cells, marking the place.

    >>> shorten("decoder/layers/mlp", 9, keep="end"), shorten("dot_general", 6)
    ('…yers/mlp', 'dot_g…')
    """
    if cell_len(text) <= width:
        return text
    room = width - cell_len(dots)
    if room <= 0:
        return dots[:width]
    characters = text if keep == "start" else text[::-1]
    out, used = "", 0
    for c in characters:
        used += cell_len(c)
        if used > room:
            break
        out += c
    return out + dots if keep == "start" else dots + out[::-1]


def bar(share: float, width: int, ascii_only: bool = False) -> str:
    """Draws a share (0 to 1) as a bar of at most `width` cells; any share above zero is visible.

    >>> bar(0.5, 8), bar(0.001, 8), bar(0.0, 8), bar(1.0, 3, ascii_only=True)
    ('████', '▏', '', '###')
    """
    if share <= 0 or width <= 0:
        return ""
    if ascii_only:
        return "#" * max(1, min(width, round(share * width)))
    eighths = max(1, min(8 * width, round(share * width * 8)))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
