"""What a view is made of: lines, labelled figures and tables of finished text.

Results become parts once; `draw.py` prints parts to a terminal and `html.py` puts them into a page, so that both show
the same cells. Styles are rich's words, which the page's style sheet knows as class names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from remat_kit._show.rows import Row


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of text, in pieces of one style each; an empty one is a gap."""

    spans: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A title and `(label, text)` under it."""

    title: str
    rows: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Figures:
    """`(label, figure, remark)`, the figures below each other."""

    rows: tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns of text.

    Attributes:
      right: which columns are figures.
      whole: which others are not to be folded.
      bold: which rows stand out.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    bold: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Values:
    """Rows of a residual report, whose columns are chosen by the room there is.

    Attributes:
      top: how many to show; None for all.
      titles: titles of columns by key, where they are others than usual.
    """

    rows: tuple[Row, ...]
    top: int | None = None
    titles: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def shown(self) -> tuple[Row, ...]:
        return self.rows if self.top is None else self.rows[: max(self.top, 0)]

    @property
    def rest(self) -> tuple[Row, ...]:
        return self.rows[len(self.shown) :]


Part = Line | Pairs | Figures | Table | Values
GAP = Line(())


def line(text: str, style: str = "") -> Line:
    """A line of one style."""
    return Line(((text, style),))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[int] = (),
    whole: Iterable[int] = (),
    bold: Iterable[int] = (),
) -> Table:
    """A `Table` of any sequences."""
    return Table(tuple(columns), tuple(map(tuple, rows)), frozenset(right), frozenset(whole), frozenset(bold))
