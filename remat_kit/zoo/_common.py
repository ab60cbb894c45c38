"""What every model's function does around its model: checking the settings, and making the arguments.

Framework-free. The mathematics that models share is in `_ops`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from remat_kit._errors import RematError, near_matches

T = TypeVar("T")

Model = tuple[Callable[..., Any], tuple[Any, ...]]
"""``(fn, args)``: a function and the positional arguments to call, differentiate or analyse it with."""

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def make(arguments: Callable[[], T], *, abstract: bool, place: Callable[[T], Any] = lambda _: None) -> T:
    """Returns ``arguments()``, compiled; or only its shapes and dtypes, where nothing is allocated or run.

    `place` gives the sharding of each leaf, from the leaves' shapes; or None where nothing is sharded.
    """
    structs = jax.eval_shape(arguments)
    placed = place(structs)
    if not abstract:
        return jax.jit(arguments, out_shardings=placed)()
    if placed is None:
        return structs
    return jax.tree.map(lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), structs, placed)


@dataclass(frozen=True)
class Check:
    """Checks of a model's settings: each raises a `RematError` that names the model, the setting and what it needs."""

    model: str

    def sizes(self, **sizes: Any) -> None:
        """Every size is a whole number of at least 1."""
        for name, size in sizes.items():
            if not _is_whole(size) or size < 1:
                raise self.error(f"{name}={size!r} is not a size. Give a whole number of at least 1.")

    def divides(self, part: str, count: int, whole: str, size: int) -> None:
        """`count` divides `size`; `part` and `whole` are what the settings are called."""
        if size % count:
            nearest = max(1, round(size / count)) * count
            raise self.error(
                f"{whole}={size} does not divide by {part}={count} ({size % count} left over). "
                f"The nearest {whole} that does is {nearest}."
            )

    def number(self, name: str, value: Any, *, low: float, below: float = float("inf")) -> None:
        """``low <= value < below``."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < below:
            span = f"at least {low:g}" if below == float("inf") else f"at least {low:g} and less than {below:g}"
            raise self.error(f"{name}={value!r} is out of range. Give a number of {span}.")

    def flags(self, **flags: Any) -> None:
        """Every flag is a bool, so that the text ``"false"`` does not count as true."""
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise self.error(f"{name}={flag!r} is neither True nor False.")

    def seed(self, seed: Any) -> None:
        """`seed` is a whole number that fits in 32 bits without a sign."""
        if not _is_whole(seed) or not 0 <= seed < 2**32:
            raise self.error(f"seed={seed!r} is not a seed. Give a whole number from 0 to 2**32 - 1.")

    def dtype(self, dtype: DTypeLike, setting: str = "dtype", of: str = "activations") -> jnp.dtype:
        """Returns the dtype `of` activations or parameters, which is one that a network is trained in."""
        try:
            name = jnp.dtype(dtype).name
        except TypeError:
            name = str(dtype)
        if name not in _DTYPES:
            raise self.error(
                f"{setting}={name!r} is not a dtype of {of}.{near_matches(name, _DTYPES)} "
                f"Give one of {', '.join(_DTYPES)}."
            )
        if name == "float64" and not jax.config.read("jax_enable_x64"):
            raise self.error(f"{setting}='float64' needs jax.config.update('jax_enable_x64', True).")
        return jnp.dtype(name)

    def error(self, text: str) -> RematError:
        """Returns an error, to raise, that says `text` of the model."""
        return RematError(f"zoo.{self.model}: {text}")


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
