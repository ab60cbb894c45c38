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
    module, method = context.module, context.method_name
    if (
        not marks.reading()
        or module.scope is None
        or method == "setup"
        or method.startswith("_") != (method == "__call__")
    ):
        return next_fun(*args, **kwargs)
    path = tuple(str(p) for p in module.path)
    above = marks.frames()[-1].path
    if path == above:  # the module itself, calling on; or a lifted transform's inner call
        return next_fun(*args, **kwargs)
    relative = path[len(above) :] if above is not None and path[: len(above)] == above else path
    name = "/".join(relative)
    if method != "__call__" and name:
        name += "." + method
    with marks.mark(name, module=module, path=path):
        return next_fun(*args, **kwargs)
