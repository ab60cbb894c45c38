"""What JAX traces of arguments and results, and what stays in Python.

Leaves that are numbers or arrays are dynamic; every other leaf is static: compared and hashed, never traced.
`seal` hides static leaves inside the structure of a pytree, so that JAX sees only what it can trace and still
tells calls apart by the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import sys
import types
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from remat_kit._errors import RematError
from remat_kit._trace import jaxprs

_NUMBERS = (bool, int, float, complex)
_NO_NUMBERS = "OSUMm"  # NumPy's kinds of objects, texts and times


def is_dynamic(leaf: Any) -> bool:
    """Whether JAX can trace this leaf: an array, a number, a tracer, a ref or an abstract array."""
    if isinstance(leaf, (type, enum.Enum)):
        return False
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in _NO_NUMBERS
    if isinstance(leaf, (*_NUMBERS, jax.Array)) or hasattr(leaf, "__jax_array__"):
        return True
    return isinstance(getattr(leaf, "shape", None), tuple) and hasattr(leaf, "dtype") and not callable(leaf)


def is_value(x: Any) -> bool:
    """Whether an object is its value: two that compare equal are interchangeable, now and later.

    True for what is hashed by value, and for classes, modules and functions that close over nothing. Any other object
    may hold arrays, or be changed between two calls.
    """
    if isinstance(x, tuple):
        return all(map(is_value, x))
    if isinstance(x, types.MethodType):
        return is_value(x.__self__)
    try:
        hash(x)
    except TypeError:
        return False
    if type(x).__hash__ is not object.__hash__ or isinstance(x, (type, types.ModuleType, types.BuiltinFunctionType)):
        return True
    fun = inspect.unwrap(x) if callable(x) else x  # jitted functions, custom rules
    return isinstance(fun, types.FunctionType) and fun.__closure__ is None


class Static:
    """A value that stays in Python, as a pytree without leaves. Compared by value where it is one, else by identity."""

    __slots__ = ("_hash", "is_value", "value")

    def __init__(self, value: Any):
        self.value = value
        self.is_value = is_value(value)
        self._hash = hash(value) if self.is_value else id(value)

    def release(self) -> None:
        """Lets go of an object that is no value, after its last use: JAX's caches keep structures for long."""
        if not self.is_value:
            self.value = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        if self.value is other.value:
            return True
        # True == 1 == 1.0 in Python, but a function may treat them differently.
        return self.is_value and other.is_value and type(self.value) is type(other.value) and self.value == other.value

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


jax.tree_util.register_pytree_node(Static, lambda s: ((), s), lambda s, _: s)


def _is_static(x: Any) -> bool:
    return isinstance(x, Static)


def seal(tree: Any) -> Any:
    """The same pytree with each static leaf in a `Static`."""
    tree = _seal_settings(tree)
    leaves, treedef = jax.tree.flatten(tree)
    if all(map(is_dynamic, leaves)):
        return tree
    return jax.tree.unflatten(treedef, [x if is_dynamic(x) else Static(x) for x in leaves])


def _seal_settings(tree: Any) -> Any:
    """The same pytree with the Python numbers of Equinox modules in a `Static` each.

    There they are settings, such as `Dropout.inference`: Equinox's transforms trace arrays only.
    """
    if "equinox._module" not in sys.modules:
        return tree
    module = sys.modules["equinox._module"].Module

    def sealed(x: Any) -> Any:
        return jax.tree.map(lambda y: Static(y) if type(y) in _NUMBERS else y, x) if isinstance(x, module) else x

    return jax.tree.map(sealed, tree, is_leaf=lambda x: isinstance(x, module))


def unseal(tree: Any) -> Any:
    """Undoes `seal`, and takes out what was put into a `Static` by hand."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_static)
    if not any(map(_is_static, leaves)):
        return tree
    return jax.tree.unflatten(treedef, [x.value if _is_static(x) else x for x in leaves])


def statics(tree: Any) -> list[Static]:
    """The static leaves of a sealed pytree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_static) if _is_static(x)]


def reusable(tree: Any) -> bool:
    """Whether what was traced for this sealed pytree may serve later calls: all its static leaves are values."""
    return all(s.is_value for s in statics(tree))


def holds_tracer(x: Any) -> bool:
    """Whether an object that is no pytree holds a value that is being traced: in a field, a closure or a partial."""
    held: list[Any] = list(getattr(x, "__dict__", {}).values())
    if dataclasses.is_dataclass(x):
        held += [getattr(x, f.name, None) for f in dataclasses.fields(x)]
    if isinstance(x, functools.partial):
        held += [*x.args, *x.keywords.values()]
    for cell in getattr(x, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a name that is not assigned yet
            held.append(cell.cell_contents)
    return any(map(jaxprs.is_tracer, jax.tree.leaves(held)))


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a pytree was split: its structure with the static leaves inside. Hashable: a key of caches.

    Attributes:
      tree: the structure.
      reusable: whether what was traced for it may serve later calls.
    """

    tree: Any
    reusable: bool = dataclasses.field(default=True, compare=False)

    @classmethod
    def of(cls, sealed: Any) -> Spec:
        """The structure of a sealed pytree."""
        return cls(jax.tree.structure(sealed), reusable(sealed))

    def merge(self, leaves: Iterable[Any]) -> Any:
        """Puts dynamic leaves back between the static ones."""
        return unseal(jax.tree.unflatten(self.tree, leaves))


def split(tree: Any) -> tuple[list[Any], Spec]:
    """Splits a pytree into its dynamic leaves and the `Spec` that puts them back.

    Raises:
      RematError: for a negative size, which JAX lets through in a `jax.ShapeDtypeStruct`.
    """
    sealed = seal(tree)
    leaves = jax.tree.leaves(sealed)
    for leaf in leaves:
        if any(isinstance(n, int) and n < 0 for n in getattr(leaf, "shape", ())):
            raise RematError(f"an argument has the shape {leaf.shape}: sizes are from 0 on.")
    return leaves, Spec.of(sealed)
