"""Finding NNX modules and Variables that a function captures instead of taking them as arguments.

A captured module belongs to the trace outside the rematerialized region, so its updates could not be returned from it.
Seen are closures, defaults, partials, bound methods and globals that the code names itself; not seen is what it reaches
through the attributes of other objects or through functions of other Python modules.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from remat_kit._trace.inputs import is_dynamic


def is_stateful(value: Any) -> bool:
    """Whether a value is a Variable, a Module or another object with NNX's reference semantics."""
    # To NNX a mutable reference of JAX is a node too.
    return isinstance(value, nnx.Variable) or (nnx.graphlib.is_graph_node(value) and not is_dynamic(value))


def captured_modules(fn: Callable) -> dict[str, str]:
    """Returns the captured modules and Variables of a function as ``{name: type}``, seen through nested functions."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", fn)]
    while waiting:
        prefix, current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for name, value in _captures(current):
            where = f"{prefix}{name}"
            for leaf in jax.tree.leaves(value, is_leaf=is_stateful):
                if is_stateful(leaf):
                    found.setdefault(where, type(leaf).__name__)
                elif callable(leaf) and not inspect.isclass(leaf):
                    waiting.append((f"{where} -> ", leaf))
    return dict(sorted(found.items()))


def _captures(fn: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, functools.partial):
        for i, value in enumerate(fn.args):
            yield f"partial argument {i}", value
        yield from fn.keywords.items()
        yield "function", fn.func
        return
    if inspect.ismethod(fn):
        yield "self", fn.__self__
        fn = fn.__func__
    if not inspect.isfunction(fn):
        if (wrapped := getattr(fn, "__wrapped__", None)) is not None:  # jitted and otherwise wrapped functions
            yield "function", wrapped
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a name that is assigned after the function was defined
            continue
    for name in _global_names(fn.__code__):
        if is_stateful(value := fn.__globals__.get(name)):
            yield name, value
    defaults = fn.__defaults__ or ()
    arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (fn.__kwdefaults__ or {}).items()


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))
