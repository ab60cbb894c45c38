"""Marks calls of NNX modules while a program is read (loaded only where Flax NNX already is).

NNX leaves no name stack and offers no interception, so the classes' `__call__` is wrapped for the time of
a reading; the wrappers do nothing in other threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from remat_kit._trace import marks

_lock = threading.RLock()
_depth = 0
_patched: list[tuple[type, Callable[..., Any]]] = []


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Wraps `__call__` of every NNX module class until the last reading ends."""
    global _depth
    with _lock:
        if _depth == 0:
            for cls in _subclasses(nnx.Module):
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


def _subclasses(cls: type) -> Iterator[type]:
    seen, todo = set(), [cls]
    while todo:
        for sub in type.__subclasses__(todo.pop()):
            if sub not in seen:
                seen.add(sub)
                todo.append(sub)
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
    """Attribute path of a module inside its parent (or inside the program's arguments), else its class name."""
    roots = [x for x in parent if isinstance(x, nnx.Module)] if isinstance(parent, tuple) else [parent]
    if len(roots) == 1 and roots[0] is module:
        return ""
    for root in roots:
        found = _search(root, module, set())
        if found is not None:
            return "/".join(found)
    return type(module).__name__


def _search(node: Any, module: Any, seen: set[int]) -> tuple[str, ...] | None:
    if id(node) in seen:
        return None
    seen.add(id(node))
    if isinstance(node, nnx.Variable):
        return None
    if isinstance(node, list | tuple):
        items = [(str(i), x) for i, x in enumerate(node)]
    elif isinstance(node, dict):
        items = [(str(k), x) for k, x in node.items()]
    elif isinstance(node, nnx.Module):
        items = [(k, x) for k, x in vars(node).items() if not k.startswith("_pytree__")]
    else:
        return None
    for key, x in items:
        if x is module:
            return (key,)
    for key, x in items:
        found = _search(x, module, seen)
        if found is not None:
            return (key, *found)
    return None
