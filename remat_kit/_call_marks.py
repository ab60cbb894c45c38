"""Marks calls of NNX and Equinox modules while a program is read (loaded only where one of the two already is).

Neither offers interception, so the classes' `__call__` is wrapped for the time of a reading; the wrappers do nothing in
other threads.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from remat_kit._trace import marks

_lock = threading.RLock()
_depth = 0
_patched: list[tuple[type, Callable[..., Any]]] = []


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Wraps `__call__` of every module class until the last reading ends."""
    global _depth
    with _lock:
        if _depth == 0:
            for cls in _subclasses(*_bases()):
                call = cls.__dict__.get("__call__")
                if callable(call):
                    _patched.append((cls, call))
                    type.__setattr__(cls, "__call__", _wrapped(call))
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                while _patched:
                    cls, call = _patched.pop()
                    type.__setattr__(cls, "__call__", call)


def _bases() -> tuple[type, ...]:
    return tuple(sys.modules[library].Module for library in marks.CALLED if library in sys.modules)


def _subclasses(*classes: type) -> Iterator[type]:
    seen, todo = set(), [*classes]
    while todo:
        for sub in type.__subclasses__(todo.pop()):
            if sub not in seen:
                seen.add(sub)
                todo.append(sub)
                if not sub.__module__.startswith(("equinox._", "equinox.internal")):  # what its transforms return
                    yield sub


def _wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        frames = marks.frames()
        if not frames or frames[-1].module is self:
            return call(self, *args, **kwargs)
        with marks.mark(_path(frames[-1].module, self), module=self):
            return call(self, *args, **kwargs)

    return marked


def _path(parent: Any, module: Any) -> str:
    """Attribute path of a module inside its parent (or inside the program's arguments), else its class name.

    Transforms and loops hand Equinox's modules on as new objects: these are known by their class.
    """
    bases = _bases()
    roots = [parent] if isinstance(parent, bases) else list(_outermost(parent, bases))
    if len(roots) == 1 and roots[0] is module:
        return ""
    for root in roots:
        found = _search(root, module, bases, set())
        if found is not None:
            return "/".join(found)
    return type(module).__name__


def _outermost(tree: Any, bases: tuple[type, ...]) -> Iterator[Any]:
    """The modules in lists, tuples and dicts, but not in other modules."""
    if isinstance(tree, bases):
        yield tree
    elif isinstance(tree, list | tuple | dict):
        for _, x in _children(tree, bases):
            yield from _outermost(x, bases)


def _search(node: Any, module: Any, bases: tuple[type, ...], seen: set[int]) -> tuple[str, ...] | None:
    if id(node) in seen:
        return None
    seen.add(id(node))
    items = _children(node, bases)
    for key, x in items:
        if x is module:
            return (key,)
    for key, x in items:
        found = _search(x, module, bases, seen)
        if found is not None:
            return (key, *found)
    return None


def _children(node: Any, bases: tuple[type, ...]) -> list[tuple[str, Any]]:
    if isinstance(node, list | tuple):
        return [(str(i), x) for i, x in enumerate(node)]
    if isinstance(node, dict):
        return [(str(k), x) for k, x in node.items()]
    if isinstance(node, bases):
        return [(k, x) for k, x in vars(node).items() if not k.startswith("_pytree__")]
    return []
