"""Splitting arguments and results into what JAX traces and what stays in Python.

Leaves that are numbers or arrays are dynamic; every other leaf, and every argument declared static, is
static: it is compared and hashed, never traced. The split itself (a `Spec`) is hashable.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from remat_kit._errors import RematError, near_matches

_SCALARS = (bool, int, float, complex, np.ndarray, np.generic)


class ArgumentError(RematError, ValueError):
    """An argument, or the declaration of a static one, that cannot be used as asked."""


def is_dynamic(leaf: Any) -> bool:
    """Whether JAX can trace this leaf: an array, a number, a tracer, a ref or an abstract array."""
    return (
        isinstance(leaf, _SCALARS)
        or isinstance(leaf, jax.Array)
        or isinstance(leaf, jax.ShapeDtypeStruct)
        or hasattr(leaf, "__jax_array__")
        or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    )


class Static:
    """A value that stays in Python, compared by value where it can be hashed, else by identity."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any):
        self.value = value
        try:
            self._hash: int | None = hash(value)
        except TypeError:
            self._hash = None

    def __hash__(self) -> int:
        return id(self.value) if self._hash is None else self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        if self._hash is None or other._hash is None:
            return self.value is other.value
        # True == 1 == 1.0 in Python, but a function may treat them differently.
        return type(self.value) is type(other.value) and bool(self.value == other.value)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


class _Slot:
    """Stands for a dynamic leaf in a `Spec`."""

    def __repr__(self) -> str:
        return "*"


SLOT = _Slot()


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a pytree was split. `static` holds one entry a leaf: `SLOT` or a `Static`.

    Hashable and comparable, so that it can be the key of a cache and the aux data of a pytree.
    """

    tree: Any
    static: tuple[Any, ...]

    def merge(self, leaves: Iterable[Any]) -> Any:
        """Puts dynamic leaves back between the static ones."""
        it = iter(leaves)
        full = [next(it) if s is SLOT else s.value for s in self.static]
        return jax.tree.unflatten(self.tree, [x.value if isinstance(x, Static) else x for x in full])


def split(tree: Any) -> tuple[list[Any], Spec]:
    """Splits a pytree into its dynamic leaves and the `Spec` that puts them back."""
    leaves, treedef = jax.tree.flatten(tree)
    dynamic = [is_dynamic(x) for x in leaves]
    static = tuple(SLOT if d else Static(x) for x, d in zip(leaves, dynamic, strict=True))
    return [x for x, d in zip(leaves, dynamic, strict=True) if d], Spec(treedef, static)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Result:
    """The result of a function as JAX sees it: dynamic leaves as children, the rest as aux data."""

    leaves: Sequence[Any]
    spec: Spec

    @classmethod
    def of(cls, out: Any) -> Result:
        return cls(*split(out))

    def merge(self) -> Any:
        return self.spec.merge(self.leaves)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Spec]:
        return tuple(self.leaves), self.spec

    @classmethod
    def tree_unflatten(cls, spec: Spec, leaves: Sequence[Any]) -> Result:
        return cls(tuple(leaves), spec)


@dataclasses.dataclass(frozen=True)
class StaticArguments:
    """Which arguments of a function are static, by position and by name, as `jax.jit` infers them."""

    argnums: tuple[int, ...] = ()
    argnames: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, fun: Callable[..., Any], argnums: int | Sequence[int] = (), argnames: str | Iterable[str] = ()
    ) -> StaticArguments:
        """Reads `static_argnums` and `static_argnames` against the signature of `fun`.

        Raises:
          ArgumentError: for a name that the function does not take.
          TypeError: for positions or names of the wrong type, as in JAX.
        """
        if isinstance(argnums, int) and not isinstance(argnums, bool):
            argnums = (argnums,)
        if not isinstance(argnums, tuple | list) or not all(type(i) is int for i in argnums):
            raise TypeError(
                f"the `static_argnums` argument to remat must be an int or a sequence of ints, but got {argnums!r}"
            )
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
        if not all(isinstance(n, str) for n in names):
            raise TypeError(f"the `static_argnames` argument to remat must be a str or strs, but got {argnames!r}")
        if not argnums and not names:
            return cls()
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            return cls(tuple(argnums), frozenset(names))
        keyword = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            for n in names:
                if n not in keyword:
                    raise ArgumentError(
                        f"static_argnames={n!r}: {_name(fun)} takes no argument of this name; it takes "
                        f"{', '.join(keyword) or 'none by keyword'}.{near_matches(n, keyword)}"
                    )
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
        from_names = [i for i, n in enumerate(positional) if n in names]
        from_nums = {positional[i] for i in argnums if -len(positional) <= i < len(positional)} & by_name
        return cls(tuple(dict.fromkeys([*argnums, *from_names])), frozenset(names) | from_nums)

    def wrap(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Wraps the static arguments of one call in `Static`, so that `split` leaves them alone."""
        n = len(args)
        given = {i for i in self.argnums}
        named = [i for i in given if not -n <= i < n]
        if named and not (self.argnames or kwargs):
            raise ArgumentError(
                "the `static_argnums` argument to `jax.checkpoint` / `jax.remat` can only take integer values greater "
                f"than or equal to `-len(args)` and less than `len(args)`, but got {self.argnums}, "
                f"while `len(args)` = {n} in a call of {_name(fun)}"
            )
        positions = {i % n for i in given if -n <= i < n}
        return (
            tuple(Static(x) if i in positions else x for i, x in enumerate(args)),
            {k: Static(x) if k in self.argnames else x for k, x in kwargs.items()},
        )


def _name(fun: Any) -> str:
    return getattr(fun, "__qualname__", None) or getattr(fun, "__name__", None) or repr(fun)
