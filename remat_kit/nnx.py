"""Rematerialization of Flax NNX modules: `remat` for a class, a method, or a function of modules.

State updates (BatchNorm statistics, RNG counters, sown values, new attributes) reach the caller's objects once, as they
do without remat. Import it as ``from remat_kit import nnx`` or use ``rk.nnx``; Flax is loaded only then.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from remat_kit._errors import RematError, near_matches
from remat_kit._flax_static import DeclaredStatic, resolve_static, seal, split_arrays, unseal
from remat_kit._nnx_capture import captured_modules, is_stateful
from remat_kit._override import Wanted
from remat_kit._policy import Policy
from remat_kit._static_args import read_names
from remat_kit._trace import marks
from remat_kit._wrap import check_options
from remat_kit._wrap import remat as remat_function

__all__ = ["remat"]

_TAG = "remat_kit"
# The modules (by id) whose covered method is under way: their other covered methods belong to the same region.
_covered: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("covered", default=frozenset())


@dataclass(frozen=True)
class _Options:
    policy: Policy
    prevent_cse: bool | None
    block: str | None


def remat(
    target_or_policy: Any = None,
    /,
    *,
    policy: Any = None,
    prevent_cse: bool | None = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    methods: str | Iterable[str] = ("__call__",),
    block: str | None = None,
) -> Any:
    """Makes an NNX module, or a function of modules, recompute its intermediates in the backward pass.

        @rk.nnx.remat("dots")
        class Block(nnx.Module): ...

        run = rk.nnx.remat(lambda block, x: block(x))     # modules are arguments, anywhere in them
        y = rk.nnx.remat(self.block)(x)                   # a module or a bound method: the module is passed along

    A decorated class has the original's name and is a subclass of it. Arguments that are no arrays (flags, strings,
    Python numbers, None) are static without being declared, by position, by keyword and at their defaults. Two
    references to one module stay one module, and a module in the result that was passed in is the caller's own object.

    Args:
        target_or_policy: a module class, a function, a bound method or a module; or the policy, and the result is a
            decorator.
        policy: what is kept, as in `rk.remat`; None means ``"full"``, ``"none"`` leaves the target without remat.
        prevent_cse: as in `rk.remat`; None chooses by context.
        static_argnums: positions to check for being static. They count the caller's arguments: those of a method start
            after ``self``, those of a function at its first parameter; negative ones count from the end.
        static_argnames: the same by name. A declared argument that holds an array is refused.
        methods: the covered methods of a class. A covered method that another one calls belongs to its region; other
            methods run without remat, and so do methods that a subclass overrides.
        block: a name for reports and `rk.override`.

    Returns:
        What was given, rematerialized; or a decorator. Decorating again replaces the earlier remat.

    Raises:
        RematError: at decoration for an unknown method, argument name, position or policy; at the call for modules or
            Variables that the function captures instead of taking them as arguments, for Variables with ``ref=True``,
            and for arrays in static arguments.
    """
    check_options(prevent_cse, block)
    if target_or_policy is None or isinstance(target_or_policy, (str, Policy)):
        if target_or_policy is not None and policy is not None:
            raise RematError(f"two policies were given: {target_or_policy!r} and policy={policy!r}. Give one of them.")
        policy = target_or_policy if policy is None else policy
        chosen = Wanted.of(policy).policy  # here, so that a typo is seen where it stands
        return functools.partial(
            remat,
            policy=chosen,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            methods=methods,
            block=block,
        )
    target = target_or_policy
    options = _Options(Wanted.of(policy).policy, prevent_cse, block)
    if inspect.isclass(target):
        return _cover_class(target, options, static_argnums, static_argnames, methods)
    _check_function(target)
    if isinstance(target, nnx.Module):
        target = target.__call__  # type: ignore[operator]
    owner = getattr(target, "__qualname__", None) or type(target).__name__
    static = resolve_static({owner: target}, static_argnums, static_argnames, skip=0)[owner]
    return _cover_function(target, options, static)


def _cover_class(cls: type, options: _Options, argnums: Any, argnames: Any, methods: Any) -> type:
    if not issubclass(cls, nnx.Module):
        hint = " Use rk.linen.remat for Linen modules." if "linen" in str(cls.__mro__) else ""
        raise RematError(f"rk.nnx.remat takes an nnx.Module class or a function of modules; got {cls!r}.{hint}")
    names = read_names("methods", methods)
    if not names:
        raise RematError(f"methods is empty, so nothing of {cls.__name__} would be rematerialized.")
    originals = {name: _original_method(cls, name) for name in names}
    functions = {f"{cls.__name__}.{name}": fn for name, fn in originals.items()}
    static = resolve_static(functions, argnums, argnames)
    covered = {name: _cover_method(fn, options, static[f"{cls.__name__}.{name}"]) for name, fn in originals.items()}
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, **covered}
    pytree = cls._pytree__is_pytree  # a subclass does not inherit it
    return types.new_class(cls.__name__, (cls,), {"pytree": pytree}, lambda body: body.update(namespace))


def _original_method(cls: type, name: str) -> Callable:
    known = [n for n, _ in inspect.getmembers(cls, inspect.isfunction) if not hasattr(nnx.Module, n) or n == "__call__"]
    # Not getattr_static, which finds the metaclass's own __call__.
    method = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    if not inspect.isfunction(method):
        raise RematError(
            f"methods has {name!r}, but {cls.__name__} has no such method"
            f" (methods: {', '.join(known) or 'none'}).{near_matches(str(name), known)}"
        )
    return vars(method).get("__rk_original__", method)


def _cover_method(fn: Callable, options: _Options, static: DeclaredStatic) -> Callable:
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


def _cover_function(target: Callable, options: _Options, static: DeclaredStatic) -> Callable:
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


def _run(fn: Callable, options: _Options, owner: str, args: tuple, kwargs: dict[str, Any]) -> Any:
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
        wrapped = remat_function(region, policy=options.policy, prevent_cse=options.prevent_cse, block=options.block)
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


def _check_function(target: Any) -> None:
    if not callable(target):
        raise RematError(f"rk.nnx.remat takes an nnx.Module class or a function of modules; got {target!r}.")
    module = getattr(target, "__module__", None) or type(target).__module__
    if module.partition(".")[0] == "jax":
        raise RematError(f"rk.nnx.remat got {target!r} as its function. If it is meant as the policy, write policy=...")
