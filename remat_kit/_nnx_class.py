"""Covering NNX classes and functions: covered, they run in a rematerialized region on copies of their modules.

The class made is a subclass under the original's name. What the region changes is written back to the caller's modules.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from remat_kit._errors import RematError, near_matches
from remat_kit._flax_static import DeclaredStatic, seal, split_arrays, unseal
from remat_kit._layers import is_method
from remat_kit._nnx_capture import captured_modules, is_stateful
from remat_kit._policy import Policy
from remat_kit._trace import marks
from remat_kit._wrap import remat

_TAG = "remat_kit"
# The modules (by id) whose covered method is under way: their other covered methods belong to the same region.
_covered: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("covered", default=frozenset())


@dataclass(frozen=True)
class Options:
    """How a region is rematerialized: as in `rk.remat`."""

    policy: Policy
    prevent_cse: bool | None = None
    block: str | None = None


def cover_class(cls: type, methods: Sequence[str], options: Options, static: Mapping[str, DeclaredStatic]) -> type:
    """Makes a subclass whose methods are covered.

    Args:
        cls: the module class.
        methods: the names of the covered methods.
        options: how they are rematerialized.
        static: ``Class.method`` -> its declared static arguments.
    """
    covered = {m: _cover_method(original_method(cls, m), options, static[f"{cls.__name__}.{m}"]) for m in methods}
    return stand_in(cls, covered)


def stand_in(cls: type, namespace: Mapping[str, Any]) -> type:
    """A subclass that passes for the class itself, with what is in ``namespace`` replaced."""
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, **namespace}
    pytree = cls._pytree__is_pytree  # type: ignore[attr-defined]  # a subclass does not inherit it
    return types.new_class(cls.__name__, (cls,), {"pytree": pytree}, lambda made: made.update(body))


def original_method(cls: type, name: str) -> Callable:
    """The method of a class below earlier coverings, or RematError: covering again replaces, it does not nest."""
    known = [n for n, _ in inspect.getmembers(cls, is_method) if not hasattr(nnx.Module, n) or n == "__call__"]
    # Not getattr_static, which finds the metaclass's own __call__.
    method = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    if method is None or not is_method(method):
        raise RematError(
            f"methods has {name!r}, but {cls.__name__} has no such method"
            f" (methods: {', '.join(known) or 'none'}).{near_matches(str(name), known)}"
        )
    return getattr(method, "__rk_original__", method)


def _cover_method(fn: Callable, options: Options, static: DeclaredStatic) -> Callable:
    @functools.wraps(fn)
    def region(self, *args, **kwargs):
        token = _covered.set(_covered.get() | {id(self)})
        try:
            return fn(self, *args, **kwargs)
        finally:
            _covered.reset(token)

    @functools.wraps(fn)
    def covered(self, *args, **kwargs):
        if id(self) in _covered.get():
            return fn(self, *args, **kwargs)
        static.check(args, kwargs)
        _refuse_captured(static.owner, fn)
        return _run(region, options, static.owner, (self, *args), kwargs)

    vars(covered)["__rk_original__"] = fn
    return covered


def cover_function(target: Callable, options: Options, static: DeclaredStatic) -> Callable:
    """Makes a function of modules, a bound method or a module run in a rematerialized region."""
    fn, first, keywords = _unbind(target)
    if "__rk_original__" in getattr(fn, "__dict__", {}):
        fn = vars(fn)["__rk_original__"]

    @functools.wraps(target)
    def covered(*args, **kwargs):
        static.check(args, kwargs)
        _refuse_captured(static.owner, fn)
        return _run(fn, options, static.owner, (*first, *args), {**keywords, **kwargs})

    if not first and not keywords:
        vars(covered)["__rk_original__"] = fn
    return covered


def _unbind(target: Callable) -> tuple[Callable, tuple, dict[str, Any]]:
    """Takes bound methods and partials apart, so that what they hold is passed as arguments."""
    if isinstance(target, functools.partial):
        fn, args, keywords = _unbind(target.func)
        return fn, (*args, *target.args), {**keywords, **target.keywords}
    if inspect.ismethod(target) and is_stateful(target.__self__):
        return target.__func__, (target.__self__,), {}
    if isinstance(target, nnx.Module):
        return type(target).__call__, (target,), {}  # type: ignore[attr-defined]
    return target, (), {}


def _run(fn: Callable, options: Options, owner: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls ``fn`` in a rematerialized region on copies of the modules, then writes their new state back."""
    with nnx.update_context(_TAG):
        pure = nnx.to_tree((args, kwargs), ctxtag=_TAG)
        _refuse_references(owner, pure)
        arrays, rebuild = split_arrays(pure)

        def region(arrays):
            args, kwargs = nnx.from_tree(rebuild(arrays), ctxtag=_TAG, is_inner=True)
            with marks.given(tuple(jax.tree.leaves((args, kwargs), is_leaf=is_stateful))):
                out = fn(*args, **kwargs)
            return seal(nnx.to_tree((_modules_only((args, kwargs)), out), ctxtag=_TAG))

        region.__qualname__ = owner  # what messages call it
        wrapped = remat(region, policy=options.policy, prevent_cse=options.prevent_cse, block=options.block)
        _, out = nnx.from_tree(unseal(wrapped(arrays)), ctxtag=_TAG, is_inner=False)
    return out


def _modules_only(tree: Any) -> Any:
    return nnx.extract.clear_non_graph_nodes(tree)


def _refuse_captured(owner: str, fn: Callable) -> None:
    captured = captured_modules(fn)
    if captured:
        listing = ", ".join(f"{name} ({kind})" for name, kind in captured.items())
        raise RematError(
            f"{owner} captures {listing} instead of taking it as an argument, so updates made inside the rematerialized"
            f" region would be lost. Pass it in: rk.nnx.remat(lambda module, x: module(x))(module, x)."
        )


def _refuse_references(owner: str, pure: Any) -> None:
    for leaf in jax.tree.leaves(pure, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        if isinstance(leaf, nnx.Variable) and leaf.ref:
            raise RematError(
                f"{owner} was given a {type(leaf).__name__} that holds a mutable reference (ref=True): what a"
                f" rematerialized region writes to it would be lost or written twice. Create it without ref=True."
            )
