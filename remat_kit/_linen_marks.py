"""Marks calls of Linen modules while a program is read (loaded only where Flax Linen already is)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn

from remat_kit._trace import marks


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Intercepts Linen's method calls and marks each with the module's path relative to the mark around it."""
    with nn.intercept_methods(_intercept):
        yield


def _intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    with called(context.module, context.method_name):
        return next_fun(*args, **kwargs)


def called(module: nn.Module, method: str) -> contextlib.AbstractContextManager[None]:
    """Marks one call of a module's method; see `marks.method`."""
    if module.scope is None or method == "setup":
        return contextlib.nullcontext()
    return marks.method(module, tuple(map(str, module.path)), method)
