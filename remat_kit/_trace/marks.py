"""Marks: while the toolkit reads a program, calls of modules and marked functions leave their path on it.

A mark is a `jax.named_scope` with a reserved prefix, relative to the mark around it, so that a cached
inner `jax.jit` composes to the right path. Outside a reading nothing is marked and programs are unchanged.
JAX's caches see a reading through a user context: a warm `jax.jit` is traced again for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

PREFIX = "rk:"  # one call of a module or a marked function
_NUMBER = "@"
BLOCK = "rk#"  # one block of a rewritten program
CALLED = ("flax.nnx", "equinox._module")  # libraries whose modules are seen by their `__call__`

_reading = jax.make_user_context(default_value=None)


@dataclasses.dataclass(frozen=True)
class Frame:
    """One open mark: the module that is running (if one is), its absolute path, and the reading's counter."""

    module: Any = None
    path: tuple[str, ...] | None = None
    count: Iterator[int] = dataclasses.field(default_factory=itertools.count)


_frames: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar("remat_kit_frames", default=())


def reading() -> bool:
    """Whether a program is being read in this thread."""
    return bool(_frames.get())


def frames() -> tuple[Frame, ...]:
    """The open marks, outermost first; the first stands for the program itself."""
    return _frames.get()


@contextlib.contextmanager
def read(modules: Sequence[Any] = ()) -> Iterator[None]:
    """Marks module calls and marked functions in everything traced inside.

    Paths start anew in a reading inside another one, so that a block sees the same paths in both.

    Args:
      modules: what the program is given: the NNX and Equinox modules in it are where paths start.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_reading("program" if modules else "block"))  # apart in JAX's caches
        if "flax.linen" in sys.modules:
            from remat_kit import _linen_marks

            stack.enter_context(_linen_marks.marking())
        if "haiku._src.module" in sys.modules:
            from remat_kit import _haiku_marks

            stack.enter_context(_haiku_marks.marking())
        if any(library in sys.modules for library in CALLED):
            from remat_kit import _call_marks

            stack.enter_context(_call_marks.marking())
        token = _frames.set((Frame(module=tuple(modules)),))
        stack.callback(_frames.reset, token)
        yield


@contextlib.contextmanager
def mark(name: str, module: Any = None, path: tuple[str, ...] | None = None) -> Iterator[None]:
    """Marks what is traced inside as one call of `name`; does nothing outside a reading.

    Args:
      name: relative to the mark around it. Each call gets a number of its own, so that two calls of one name
        can be told apart. An empty name only hides the scopes before it.
      module: the module that is running, for the paths of its children.
      path: its absolute path, where the framework knows one.
    """
    open_marks = _frames.get()
    if not open_marks:
        yield
        return
    above = open_marks[-1]
    frame = Frame(module, above.path if path is None else path, above.count)
    token = _frames.set((*open_marks, frame))
    try:
        with jax.named_scope(f"{PREFIX}{name}{_NUMBER}{next(above.count)}"):
            yield
    finally:
        _frames.reset(token)


@contextlib.contextmanager
def method(module: Any, path: Sequence[str], called: str) -> Iterator[None]:
    """Marks one call of a method of a module whose absolute path the framework knows.

    Private methods are not marked, nor is what the module that is running calls of itself.
    """
    frames, path = _frames.get(), tuple(path)
    above = frames[-1].path if frames else None
    private = called.startswith("_") != (called == "__call__")
    if not frames or private or (path == above and frames[-1].module is not None):
        yield
        return
    name = "/".join(path[len(above) :] if above is not None and path[: len(above)] == above else path)
    if called != "__call__" and name and called.isidentifier():  # a lambda is no method
        name += "." + called
    with mark(name, module=module, path=path):
        yield


@contextlib.contextmanager
def given(module: Any = None, path: tuple[str, ...] | None = None) -> Iterator[None]:
    """Names what paths start from, where it is put together only inside a reading.

    Args:
      module: an NNX or Equinox module, or a tuple of those that may be called.
      path: the absolute path of a Linen module.
    """
    open_marks = _frames.get()
    if not open_marks:
        yield
        return
    token = _frames.set((*open_marks, dataclasses.replace(open_marks[-1], module=module, path=path)))
    try:
        yield
    finally:
        _frames.reset(token)


def split(scopes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits name scopes into the marks among them and the ordinary scopes after the last mark.

    Scopes before a mark come from the framework on its way to the marked call; they say nothing more.
    """
    marks: list[str] = []
    rest: list[str] = []
    for s in scopes:
        if s.startswith(PREFIX):
            if not s.startswith(PREFIX + _NUMBER):
                marks.append(s[len(PREFIX) :])
            rest = []
        elif "->" not in s:  # the subscripts of an einsum are not a place
            rest.append(s)
    return tuple(marks), tuple(rest)


def name(mark: str) -> str:
    """The name in a mark, without the number of the call."""
    return mark.rsplit(_NUMBER, 1)[0]


def unnumbered(scopes: Sequence[str]) -> tuple[str, ...]:
    """Name scopes with the calls' numbers taken from the marks: the same for two calls of one module."""
    return tuple(s.rsplit(_NUMBER, 1)[0] if s.startswith(PREFIX) else s for s in scopes)


def path(scopes: Sequence[str]) -> str:
    """The module path that name scopes stand for: the marked calls among them, then the scopes after the last."""
    called, rest = split([s for s in scopes if not s.startswith(BLOCK)])
    return "/".join((*map(name, called), *rest))


def plain(scopes: Sequence[str]) -> tuple[str, ...]:
    """Name scopes without the toolkit's own: marks become plain scopes where the framework has left none."""
    out: list[str] = []
    for s in scopes:
        if s.startswith(PREFIX):
            label = name(s[len(PREFIX) :])
            if label and (not out or out[-1] != label.rsplit("/", 1)[-1]):
                out.append(label)
        elif not s.startswith(BLOCK):
            out.append(s)
    return tuple(out)
