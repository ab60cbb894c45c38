"""How far two arrays are apart, and how far rounding alone may put them apart.

XLA keeps intermediates at a higher precision where it fuses, and JAX rounds what remat saves (`reduce_precision`), so
that a function with and without remat is equal up to rounding, not to the bit. How much rounding matters depends on
the function: it is measured, by what a change of the arguments' last bits does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._trace import jaxprs, survey

# How many roundings of the largest value, and how many times the effect of rounding the arguments, pass.
SAFETY = 8


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far two arrays are apart.

    Attributes:
      error: the largest difference of two entries; inf where one is no number, or infinite, and the other is not.
      size: the largest finite magnitude in the first.
      ulps: the largest difference in units of the last place of the larger entry; 0 for what is no float.
      differing: how many entries are not equal.
    """

    error: float
    size: float
    ulps: float
    differing: int

    @property
    def relative(self) -> float:
        """The error relative to the size."""
        return 0.0 if self.error == 0 else self.error / self.size if self.size else float("inf")


def distance(a: Any, b: Any, dtype: Any = None) -> Distance:
    """Compares two arrays of one shape. Entries that are not numbers are equal to each other, and so are infinities.

    Args:
      dtype: whose last place counts; that of `a` by default.
    """
    dtype = jnp.dtype(a.dtype if dtype is None and not _is_key(a) else dtype or np.uint32)
    x, y = as_numbers(a), as_numbers(b)
    if x.shape != y.shape:
        return Distance(float("inf"), _size(x), float("inf"), max(x.size, y.size))
    if not x.size:
        return Distance(0.0, 0.0, 0.0, 0)
    with np.errstate(all="ignore"):
        equal = (x == y) | (np.isnan(x) & np.isnan(y))
        finite = np.isfinite(x) & np.isfinite(y)
        apart = np.where(equal, 0.0, np.where(finite, np.abs(np.subtract(x, y, dtype=_difference(x))), np.inf))
        ulps = 0.0
        if jnp.issubdtype(dtype, jnp.inexact):
            ulps = float(np.max(np.where(apart == 0, 0.0, apart / _last_place(np.maximum(abs(x), abs(y)), dtype))))
    return Distance(float(np.max(apart)), _size(x), ulps, int(np.sum(~equal)))


def as_numbers(x: Any) -> np.ndarray:
    """An array in the widest type of its kind, so that comparisons are exact; keys as their words."""
    if _is_key(x):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(_difference(x))
    return x.astype(np.uint64 if jnp.issubdtype(x.dtype, np.unsignedinteger) else np.int64)


def _difference(x: np.ndarray) -> Any:
    return np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _size(x: np.ndarray) -> float:
    magnitudes = np.abs(x[np.isfinite(x)])
    return float(magnitudes.max()) if magnitudes.size else 0.0


def _last_place(magnitude: np.ndarray, dtype: Any) -> np.ndarray:
    info = jnp.finfo(dtype)
    exponents = np.floor(np.log2(np.maximum(magnitude, float(info.tiny))))
    return float(info.eps) * np.exp2(exponents)


def rounding(dtype: Any) -> float:
    """The relative distance of neighbouring numbers of a type; 0 for exact ones."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def computing_eps(jaxpr: Any) -> float:
    """The rounding of the coarsest type that a closed program computes in.

    Types of 8 bits and fewer do not count: they are storage, and products of them are summed in wider ones.
    """
    avals = [v.aval for p in survey.programs(jaxpr) for e in p.eqns for v in (*e.invars, *e.outvars)]
    types = {jnp.dtype(a.dtype) for a in avals if jaxprs.is_inexact(a)}
    return max((rounding(t) for t in types if t.itemsize > 1), default=0.0)


def allowed(plain: Distance, dtype: Any, computing: float, noise: float) -> float:
    """The largest difference of two entries that passes as rounding.

    Args:
      plain: of the array without remat, for its size.
      computing: see `computing_eps`.
      noise: what a change of the arguments' last bits does to an entry, at most.
    """
    own = rounding(dtype)
    eps = max(own, computing) if own else 0.0
    return SAFETY * (eps * plain.size + noise)
