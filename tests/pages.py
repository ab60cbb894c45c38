"""Documentation as programs: the blocks of code of a page, run in order in one namespace, and what they print.

A page's conventions:

- Python blocks are one program. A title (```` ```python title="net.py" ````) begins a new file, which is also written
  to the working directory; without one, lines are counted on from the block before.
- Of blocks in `shell`, lines that begin with `remat-kit` are run; others install or make something and are not.
- A block without a language, or in `text`, is what the block of code before it prints. A line `...` is any lines.
- `<!-- not run: why -->` before a block of code, `<!-- not compared: why -->` and `<!-- figures vary: why -->` before
  an output say so. In the last, words are compared and numbers are not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import linecache
import re
import shlex
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from remat_kit._cli import main

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|not compared|figures vary): (?P<why>[^\n]*?) -->\n\n?)?"
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?( [KMGT]?i?B\b| [kMGTP]?FLOP\b| [mun]?s\b)?")


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block of a page, or one cell of a notebook.

    Attributes:
      kind: ``python``, ``shell`` or ``output``; any other language by its name.
      text: what is between the fences.
      title: the file that it begins.
      mark: ``not run``, ``not compared`` or ``figures vary``, with the reason in `why`.
      line: of the page, from 1.
    """

    kind: str
    text: str
    title: str
    mark: str
    why: str
    line: int


def paths() -> list[str]:
    """All pages that are run here, from the root of the checkout; those of lint codes are run by test_lint."""
    found = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/notebooks/*.ipynb")]
    return ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in found)]


def blocks(path: str) -> list[Block]:
    """The blocks of a page in order."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        return [Block("python", "".join(c["source"]) + "\n", "", "", "", i) for i, c in enumerate(cells)]
    kinds = {"": "output", "text": "output", "console": "shell", "bash": "shell"}
    return [
        Block(
            kinds.get(m["language"], m["language"]),
            m["text"],
            m["title"] or "",
            m["mark"] or "",
            m["why"] or "",
            text.count("\n", 0, m.start()) + 1,
        )
        for m in _BLOCK.finditer(text)
    ]


def said(text: str, figures: bool) -> str:
    """What of an output is compared: its words, and its numbers if asked for; not blanks and rules."""
    text = re.sub(r"[─╌-]{3,}", "", text)
    if not figures:
        text = re.sub(r"[▏▎▍▌▋▊▉█]", "", _NUMBER.sub("#", text))
    return " ".join(text.split())


def differs(shown: str, printed: str, figures: bool) -> str:
    """What is wrong with an output on a page, or nothing. Lines `...` of the page stand for any lines."""
    at, whole = 0, said(printed, figures)
    pieces = [said(piece, figures) for piece in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    for i, piece in enumerate(pieces):
        found = whole.find(piece, at)
        if found < 0 or (i == 0 and found):
            return f"the page shows\n{piece}\n\nprinted was\n{whole[at:]}"
        at = found + len(piece)
    return "" if not pieces[-1] or at == len(whole) else f"the page does not show\n{whole[at:]}"


class Page:
    """A page that is being run.

    Args:
      path: of the page, from the root of the checkout.
      smaller: texts in its code that are replaced before it runs, by others: sizes, targets. What is printed after
        that is not compared, up to the next block with a title.
      compare: whether outputs are compared at all.
    """

    def __init__(self, path: str, smaller: Mapping[str, str], compare: bool) -> None:
        self.path, self.smaller, self.compare = path, smaller, compare
        self.module = types.ModuleType("a_page")
        self.file, self.lines, self.shrunk = f"{Path(path).stem}.py", 0, False
        self.compared = 0

    def run(self) -> Iterator[str]:
        """Runs the blocks; yields what is wrong with an output."""
        sys.modules[self.module.__name__] = self.module  # dataclasses look themselves up there
        printed = ""
        for block in blocks(self.path):
            if block.kind == "python":
                printed = "" if block.mark == "not run" else self._python(block)
            elif block.kind == "shell":
                printed = "" if block.mark == "not run" else _shell(self._smaller(block.text))
            elif block.kind == "output" and printed:
                if self.compare and not self.shrunk and block.mark != "not compared":
                    self.compared += 1
                    if wrong := differs(block.text, printed, figures=block.mark != "figures vary"):
                        yield f"{self.path}:{block.line}: {wrong}"
                printed = ""

    def _smaller(self, text: str) -> str:
        made = text
        for old, new in self.smaller.items():
            made = made.replace(old, new)
        self.shrunk |= made != text
        return made

    def _python(self, block: Block) -> str:
        if block.title:
            self.file, self.lines, self.shrunk = block.title, 0, False
        code = self._smaller(block.text)
        if block.title:
            Path(block.title).write_text(code)
        # What is not compared needs no optimizations, with which the compiler takes several times as long.
        jax.config.update("jax_disable_most_optimizations", self.shrunk or not self.compare)
        source = "\n" * self.lines + code
        linecache.cache[self.file] = (len(source), None, source.splitlines(keepends=True), self.file)
        self.lines += code.count("\n")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, self.file, "exec"), vars(self.module))
        return out.getvalue()


def _shell(text: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for line in re.sub(r"\\\n", " ", text).splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["remat-kit"]:
                assert main(words[1:]) in (0, 1), f"wrong use: {line}"
    return out.getvalue()
