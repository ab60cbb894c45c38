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


@contextlib.contextmanager
def called(module: nn.Module, method: str) -> Iterator[None]:
    """Marks one call of a module's method, except of `setup`, private ones, and of the module that is running."""
    frames = marks.frames()
    private = method == "setup" or method.startswith("_") != (method == "__call__")
    if not frames or module.scope is None or private:
        yield
        return
    path, above = tuple(map(str, module.path)), frames[-1].path
    if path == above and frames[-1].module is not None:  # it calls on; or a lifted transform's inner call
        yield
        return
    name = "/".join(path[len(above) :] if above is not None and path[: len(above)] == above else path)
    if method != "__call__" and name:
        name += "." + method
    with marks.mark(name, module=module, path=path):
        yield
