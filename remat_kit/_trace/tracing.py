"""From a function and its arguments, real or abstract, to a program. Nothing is allocated or run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax

from remat_kit._errors import RematError
from remat_kit._trace import marks
from remat_kit._trace.inputs import Spec, seal, split


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function traced at the types of its arguments.

    Attributes:
      jaxpr: the program, closed, on the dynamic leaves of ``(args, kwargs)``.
      inputs: how the arguments were split.
      outputs: how the result is put together from the program's outputs.
      labels: for each input of the program, its path: ``"params['dense']['kernel']"``.
      argnums: for each input, the position of its argument, or its keyword.
    """

    jaxpr: Any
    inputs: Spec
    outputs: Spec
    labels: tuple[str, ...]
    argnums: tuple[int | str, ...]


def trace(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Traces a function, with calls of modules and marked functions marked.

    Args:
      args, kwargs: arrays, `jax.ShapeDtypeStruct`s, numbers, or pytrees of these; other leaves are static.

    Raises:
      RematError: if `fun` is not callable.
      Whatever the function itself raises.
    """
    if not callable(fun):
        raise RematError(f"expected a function to trace, got {type(fun).__name__}: {fun!r:.80}")
    if inspect.isgeneratorfunction(fun) or inspect.iscoroutinefunction(fun) or inspect.isasyncgenfunction(fun):
        raise RematError(f"expected a function that returns its results; {fun.__name__} is a generator or coroutine.")
    leaves, spec = split((args, kwargs))

    def flat(*xs: Any) -> Any:
        a, k = spec.merge(xs)
        with marks.read(modules=(a, k)):
            return seal(fun(*a, **k))

    flat.__name__ = getattr(fun, "__name__", "function")
    flat.__qualname__ = getattr(fun, "__qualname__", flat.__name__)
    jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    names, argnums = labels(fun, args, kwargs)
    return Traced(jaxpr, spec, Spec.of(out), names, argnums)


def labels(fun: Any, args: Any, kwargs: Any) -> tuple[tuple[str, ...], tuple[int | str, ...]]:
    """The path of each dynamic leaf of a call's arguments, and the position or keyword of its argument."""
    try:
        names = [p.name for p in inspect.signature(fun).parameters.values() if p.kind in (0, 1)]
    except (TypeError, ValueError):
        names = []
    paths, _ = jax.tree_util.tree_flatten_with_path(seal((args, kwargs)))
    out, argnums = [], []
    for path, _ in paths:
        where, rest = path[1], path[2:]
        if path[0].idx == 0:
            position = where.idx
            argnums.append(position)
            head = names[position] if position < len(names) else f"args[{position}]"
        else:
            argnums.append(where.key)
            head = str(where.key)
        out.append(head + jax.tree_util.keystr(rest))
    return tuple(out), tuple(argnums)
