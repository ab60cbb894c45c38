"""Pickling instances of classes that were made here and that pickle would not find under their name.

A class is pickled as its recipe: the function that made it, and what that was given.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_RECIPE = "__rk_recipe__"


def by_recipe(make: Callable[..., type], *args: Any) -> dict[str, Any]:
    """What the namespace of a made class needs for its instances to be pickled and copied.

    Args:
        make: makes the class, or one like it, from ``args``. Pickle has to find it, and be able to pickle these.
    """
    return {_RECIPE: (make, args), "__reduce_ex__": _reduce_ex}


@dataclass(frozen=True)
class _Made:
    """A made class. Copies share it."""

    cls: type

    def __deepcopy__(self, memo: Any) -> _Made:
        return self

    def __reduce__(self) -> tuple:
        return _make, vars(self.cls)[_RECIPE]


def _make(make: Callable[..., type], args: tuple) -> _Made:
    return _Made(make(*args))


def _new(made: _Made, *args: Any) -> Any:
    return made.cls.__new__(made.cls, *args)


def _reduce_ex(self: Any, protocol: int) -> Any:
    reduced = object.__reduce_ex__(self, max(protocol, 2))
    cls = type(self)
    if _RECIPE not in vars(cls) or _is_found(cls) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced
    return _new, (_Made(cls), *reduced[1][1:]), *reduced[2:]


def _is_found(cls: type) -> bool:
    """Whether a class stands where its name says, as one that a decorator has made does."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls
