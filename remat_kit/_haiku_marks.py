"""Marks calls of Haiku modules while a program is read (loaded only where Haiku already is)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk  # pyright: ignore[reportMissingImports]

from remat_kit._trace import marks


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Intercepts Haiku's method calls and marks each with the module's path relative to the mark around it."""
    with hk.intercept_methods(_intercept):
        yield


def _intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name == "__init__":  # it has no name yet
        return next_fun(*args, **kwargs)
    with marks.method(context.module, context.module.module_name.split("/"), context.method_name):
        return next_fun(*args, **kwargs)
