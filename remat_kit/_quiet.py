"""Warnings kept quiet in one thread for a while.

`warnings.catch_warnings` exchanges the filters of the whole process: of two threads inside at once, the one that leaves
last puts the other one's filters back for good. Here one filter asks what its own thread wants.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
from collections.abc import Iterator

_muted: contextvars.ContextVar[tuple[type[Warning], ...]] = contextvars.ContextVar("remat_kit_muted", default=())
_lock = threading.Lock()


class _Asks(type):
    def __subclasscheck__(cls, category: type) -> bool:
        return issubclass(category, _muted.get())


class _Muted(Warning, metaclass=_Asks):
    """Stands in a filter for the categories that the thread at hand wants to be quiet."""


_FILTER = ("ignore", None, _Muted, None, 0)


@contextlib.contextmanager
def quiet(*categories: type[Warning]) -> Iterator[None]:
    """Ignores warnings of some categories, in this thread."""
    with _lock:  # in front of what was added since; left there, where it ignores nothing by itself
        filters: list = warnings.filters  # pyright: ignore[reportAssignmentType]
        if _FILTER in filters:
            filters.remove(_FILTER)
        filters.insert(0, _FILTER)
    token = _muted.set((*_muted.get(), *categories))
    try:
        yield
    finally:
        _muted.reset(token)
