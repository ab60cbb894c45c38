"""What every result has in common: it shows itself in a notebook and writes itself as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class HtmlView:
    """A result that `remat_kit._show` knows as HTML."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from remat_kit._show import html

        return html.fragment(self)

    def to_html(self, path: Any) -> Path:
        """Writes a page of its own: one file that needs no network, UTF-8.

        Args:
          path: of the file; a file that is there is replaced.

        Returns:
          The path.

        Raises:
          RematError: where the file cannot be written, as in a folder that is not there.
        """
        from remat_kit._show import html

        return html.write(self, path)
