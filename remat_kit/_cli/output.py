"""What commands write: results to standard output, progress, warnings and errors to standard error."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from remat_kit._errors import RematError, RematWarning

if TYPE_CHECKING:
    from rich.console import Console


def show(args: argparse.Namespace, data: Callable[[], Any], table: Callable[[Console], None]) -> int:
    """Writes a result: JSON where that was asked for, else a table."""
    if args.json:
        print(json.dumps(data(), indent=2))
    else:
        from rich.console import Console

        # a pipe has no width: COLUMNS says it, else a line that fits an editor
        width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 100
        table(Console(width=width))
    return 0


def present(args: argparse.Namespace, result: Any, table: Callable[[Console], None]) -> int:
    """Writes a result as `show` does, and the files that were asked for."""
    write_files(args, result)
    return show(args, result.to_dict, table)


def check_files(args: argparse.Namespace) -> None:
    """Refuses files that could not be written, before the work that would be lost.

    Raises:
      RematError: for a folder, a folder that is not there, an ending that says no format, one file asked for twice.
    """
    asked = {
        key: path for key in ("html", "plot", "timeline", "save") if (path := getattr(args, key, None)) is not None
    }
    for key, path in asked.items():
        what, folder = f"--{key} {path}", os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.path.basename(path):
            raise RematError(f"{what}: this is a folder or no name at all; name a file.")
        if not os.path.isdir(folder):
            raise RematError(f"{what}: there is no folder {folder!r}.")
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise RematError(f"{what}: no permission to write there.")
        if list(asked.values()).count(path) > 1:
            raise RematError(f"{what}: the same file is asked for twice.")
    if "plot" in asked:
        _check_picture(args, asked["plot"])
    if not asked.get("timeline", ".json").endswith(".json"):
        raise RematError(f"--timeline {asked['timeline']}: name a file such as step.json or step.speedscope.json.")


def _check_picture(args: argparse.Namespace, path: str) -> None:
    if getattr(args, "diff", None) is not None:
        raise RematError("--plot: there is no picture of a --diff; leave one of them out, or write --html.")
    from remat_kit._show import plots  # noqa: F401, says what to install where matplotlib is missing

    from matplotlib.backend_bases import FigureCanvasBase  # isort: skip

    known = FigureCanvasBase.get_supported_filetypes()
    if os.path.splitext(path)[1][1:].lower() not in known:
        raise RematError(f"--plot {path}: the ending says the format, one of {', '.join(known)}: picture.png, say.")


def write_files(args: argparse.Namespace, result: Any) -> None:
    """Writes a result to the files that were asked for, and says so."""
    asked = {key: path for key in ("html", "plot", "timeline") if (path := getattr(args, key, None)) is not None}
    for key, path in asked.items():
        if key == "html":
            result.to_html(path)
        elif key == "plot":
            save_plot(result, path)
        elif result.timeline is None:
            raise RematError(f"--timeline: the compiler for {result.target} does not say in which order things run.")
        else:
            result.timeline.save(path)
        print(f"remat-kit: wrote {path}", file=sys.stderr)


def save_plot(result: Any, path: str) -> None:
    """Writes a result's picture, in the format that the file's name ends in.

    Raises:
      RematError: where it cannot be written, or without matplotlib.
    """
    if not hasattr(result, "plot"):
        raise RematError(f"there is no picture of a {type(result).__name__}: leave --plot out, or write --html.")
    figure = result.plot().figure
    try:
        figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as e:
        raise RematError(f"the picture {path!r} cannot be written: {e}. Name a file such as picture.png.") from e


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Says on a terminal's standard error what is going on, and takes it away again.

    What the user's program prints meanwhile goes to standard error: standard output is for the result.
    """
    if not sys.stderr.isatty():
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(f"{what} ...")), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def told(name: str, doing: str) -> Iterator[None]:
    """The program is the user's: what it raises is told, not shown as ours."""
    from remat_kit._load import describe

    try:
        yield
    except RematError:
        raise
    except Exception as e:
        raise RematError(f"{doing} {name} failed: {describe(e)}. --traceback shows more.") from e


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Writes warnings without the source lines that they come from."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        place = "" if issubclass(category, RematWarning) else f"{filename}:{lineno}: {category.__name__}: "
        print(f"remat-kit: warning: {place}{message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
