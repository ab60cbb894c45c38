"""Covering a Linen class or method: the covered methods run through a lifted transform, nothing else changes.

The class made is a subclass under the original's name, so automatic names, parameter trees, RNG folding and sown paths
stay what they were, and a module knows the difference only by its type.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.linen.module import wrap_method_once
from flax.linen.transforms import decorator_lift_transform

from remat_kit import _linen_marks
from remat_kit._errors import RematError, RematWarning, near_matches
from remat_kit._flax_static import DeclaredStatic
from remat_kit._linen_layers import layer_call
from remat_kit._static_args import read_names
from remat_kit._trace import marks

Lift = Callable[..., Callable]  # of a scope function, and of options= of `remat_layers` in place of its own

# Which calls are under way, as (type, scope path). Kept here and not on the module, since flax clones modules freely.
_covered: contextvars.ContextVar[frozenset] = contextvars.ContextVar("covered", default=frozenset())
_uncovered: contextvars.ContextVar[frozenset] = contextvars.ContextVar("uncovered", default=frozenset())


def cover_method(fn: Callable, lift: Lift, static: DeclaredStatic, *, in_init: bool = False) -> Callable:
    """Makes a method, or a function whose first argument is a bound module, run through ``lift``.

    A covered method that is called from another one of the same module is part of its region: it is not lifted again.

    Args:
        fn: the method or function.
        lift: the lifted transform of its scope function.
        static: its declared static arguments.
        in_init: whether it is lifted in ``init`` too. Remat need not be: nobody differentiates that, and left alone it
            gives the same initial values to the last bit.
    """
    managed = wrap_method_once(fn)
    region = region_of(managed, static.owner)

    @functools.wraps(managed)
    def covered(self, *args, **kwargs):
        if not isinstance(self, nn.Module):
            raise RematError(
                f"{static.owner} was rematerialized as a function of a Linen module, but its first argument is of type"
                f" {type(self).__name__}. Pass the module first, or use rk.remat for plain functions."
            )
        if hasattr(covered, "compact") and not hasattr(fn, "compact"):
            vars(fn)["compact"] = True  # nn.compact was written above remat and marked this wrapper only
        if self.scope is None or _key(self) in _covered.get():
            return managed(self, *args, **kwargs)
        static.check(args, kwargs)
        with layer_call(self, fn.__name__, fn, args, kwargs) as asked:
            if self.is_initializing() and not in_init:
                return region(self, *args, **kwargs)
            chosen = lift if asked is None else functools.partial(lift, options=asked)
            return run_lifted(self, region, chosen, args, kwargs)

    vars(covered)["__rk_original__"] = fn
    return covered


def region_of(managed: Callable, owner: str) -> Callable:
    """The method as it runs inside a region: on a copy of its module, whose other covered methods belong to it."""

    @functools.wraps(managed)
    def region(self, *args, **kwargs):
        with _under_way(_covered, self), marks.given(path=self.path):
            out = managed(self, *args, **kwargs)
        _refuse_modules(owner, out)
        return out

    return region


def run_lifted(self: nn.Module, region: Callable, lift: Lift, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Calls a region of a bound module through a lifted transform."""
    with _linen_marks.called(self, region.__name__):
        return decorator_lift_transform(lift, region)(self, *args, **kwargs)


def under_way(module: nn.Module) -> bool:
    """Whether a covered method of a bound module is running."""
    return _key(module) in _covered.get()


def cover_class(
    cls: type[nn.Module],
    lifts: Mapping[str, Lift],
    static: Mapping[str, DeclaredStatic],
    *,
    name: str,
    what: str,
    in_init: bool = False,
) -> type[nn.Module]:
    """Makes a subclass whose methods in ``lifts`` are covered; its other public methods warn when called directly.

    Args:
        cls: the module class.
        lifts: method name -> lifted transform of its scope function.
        static: ``Class.method`` -> its declared static arguments.
        name: the subclass's name, which automatic module names are made of.
        what: how warnings call the transform.
        in_init: as in `cover_method`.
    """
    namespace: dict[str, Any] = {"__rk_layer__": vars(cls).get("__rk_layer__", cls.__name__)}
    for method, lift in lifts.items():
        original = original_of(getattr(cls, method))
        covered = cover_method(original, lift, static[f"{cls.__name__}.{method}"], in_init=in_init)
        vars(covered).pop("compact", None)  # Linen counts the compact methods of a class; the original keeps its mark
        namespace[method] = covered
    for method in sorted(public_methods(cls) - set(lifts)):
        namespace[method] = _watched(cls.__name__, method, getattr(cls, method), tuple(lifts), what)
    return stand_in(cls, name, namespace)


def stand_in(cls: type[nn.Module], name: str, namespace: Mapping[str, Any]) -> type[nn.Module]:
    """A subclass that passes for the class itself, with what is in ``namespace`` replaced."""
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__ if name == cls.__name__ else name,
        "__doc__": cls.__doc__,
        # The dataclass transform would write these anew and so replace what the user has written.
        **{key: getattr(cls, key) for key in ("__init__", "__eq__", "__hash__")},
        **namespace,
    }
    return types.new_class(name, (cls,), exec_body=lambda made: made.update(body))


def original_of(fn: Callable) -> Callable:
    """The method below earlier coverings: covering again replaces, it does not nest."""
    while "__rk_original__" in getattr(fn, "__dict__", {}):
        fn = vars(fn)["__rk_original__"]
    return fn


def check_methods(cls: type[nn.Module], methods: Any) -> tuple[str, ...]:
    """Returns the method names of a covering as a tuple, or raises RematError for one that cannot be covered."""
    names = read_names("methods", methods)
    if not names:
        raise RematError(f"methods is empty, so nothing of {cls.__name__} would be rematerialized.")
    known = public_methods(cls)
    for name in names:
        attribute = inspect.getattr_static(cls, name, None)
        if name == "setup" or attribute is None or not inspect.isfunction(attribute):
            found = "setup creates submodules and computes nothing" if name == "setup" else "it has no such method"
            raise RematError(
                f"methods has {name!r}, which remat cannot cover on {cls.__name__}: {found}"
                f" (methods: {', '.join(sorted(known)) or 'none'}).{near_matches(str(name), known)}"
            )
        if hasattr(attribute, "nowrap"):
            raise RematError(
                f"methods has {name!r}, but {cls.__name__}.{name} is marked nn.nowrap and so is no module method."
                f" Remove the mark, or decorate the method that calls it."
            )
    return names


def public_methods(cls: type[nn.Module]) -> set[str]:
    """The user's own methods that compute something: not inherited from flax, private, nowrap, or a field's default."""
    fields = {f.name for f in dataclasses.fields(cls)}
    found: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module or base in nn.Module.__mro__:
            continue
        for name, attribute in vars(base).items():
            public = name == "__call__" or not (name.startswith("_") or name == "setup" or hasattr(nn.Module, name))
            if public and isinstance(attribute, types.FunctionType) and name not in fields:
                if not hasattr(attribute, "nowrap"):
                    found.add(name)
    return found


def _watched(owner: str, method: str, fn: Callable, methods: tuple[str, ...], what: str) -> Callable:
    told: list[bool] = []

    @functools.wraps(fn)
    def watched(self, *args, **kwargs):
        bound = isinstance(self, nn.Module) and self.scope is not None
        if bound and not told and _key(self) not in _covered.get() | _uncovered.get():
            told.append(True)
            warnings.warn(
                f"{owner}.{method} runs without remat: {what} covers {', '.join(methods)} only. Name it in methods=,"
                f" for example methods={(*methods, method)}.",
                RematWarning,
                stacklevel=2,
            )
        with _under_way(_uncovered, self) if bound else contextlib.nullcontext():
            return fn(self, *args, **kwargs)

    vars(watched).pop("compact", None)
    return watched


def _key(module: nn.Module) -> tuple[type, tuple[str, ...]]:
    assert module.scope is not None
    return type(module), module.scope.path


@contextlib.contextmanager
def _under_way(calls: contextvars.ContextVar[frozenset], module: nn.Module):
    if module.scope is None:
        yield
        return
    token = calls.set(calls.get() | {_key(module)})
    try:
        yield
    finally:
        calls.reset(token)


def _refuse_modules(owner: str, out: Any) -> None:
    for leaf in jax.tree.leaves(out):
        if isinstance(leaf, (nn.Module, nn.Variable)):
            raise RematError(
                f"{owner} returned a {type(leaf).__name__}, which lives in a scope inside the rematerialized region and"
                f" is of no use outside. Return arrays, or create the module in the caller and pass it in."
            )
