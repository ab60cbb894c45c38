"""Real values for abstract arguments: random, the same for the same seed, in ranges that most functions take.

Floats are normal numbers, divided by the root of a matrix's rows so that deep models neither saturate nor vanish;
integers are 0 or 1, which are positions in any table; masks and keys are random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._errors import RematError
from remat_kit._trace import jaxprs

_RAW_KEYS = (2, 4)  # words of a raw key of JAX's generators


def fill(leaves: Sequence[Any], seed: int, *, positive: bool = False) -> list[Any]:
    """The same leaves with random arrays in place of the abstract ones.

    Args:
      positive: whether floats are positive and integers 1: for functions that divide by them, or take a root.
    """
    return [made(x, seed, i, positive) if is_abstract(x) else x for i, x in enumerate(leaves)]


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf stands for an array without being one."""
    real = isinstance(leaf, (jax.Array, np.ndarray, np.generic)) or hasattr(leaf, "__jax_array__")
    return hasattr(leaf, "shape") and not real and not jaxprs.is_ref(jaxprs.aval_of(leaf))


def made(x: Any, seed: int, number: int, positive: bool = False) -> Any:
    """A random array of the type of an abstract one, placed as its sharding says.

    Raises:
      RematError: for a sharding on devices that are not here.
    """
    rng = np.random.default_rng((seed, number))
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype)).shape
        data = rng.integers(0, 2**32, words, np.uint32)
        value = jax.random.wrap_key_data(data, impl=jaxprs.key_impl(x.dtype))
    else:
        value = jnp.asarray(_numbers(rng, x.shape, x.dtype, positive), x.dtype)
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return value
    try:
        return jax.device_put(value, sharding)
    except (ValueError, TypeError, RuntimeError) as error:
        raise RematError(
            f"check runs the function, and its abstract arguments are sharded over devices that are not here: "
            f"{str(error).splitlines()[0][:200].rstrip('.')}. Leave the shardings out, or give a mesh of real devices."
        ) from error


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, positive: bool) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.inexact):
        scale = 1 / math.sqrt(max(shape[-2], 1)) if len(shape) > 1 else 0.5
        values = rng.standard_normal(shape) * scale
        if positive:
            return np.abs(values)
        return (
            values + 1j * rng.standard_normal(shape) * scale if jnp.issubdtype(dtype, jnp.complexfloating) else values
        )
    if dtype == np.uint32 and shape and shape[-1] in _RAW_KEYS:
        return rng.integers(0, 2**32, shape, np.uint32)
    return np.ones(shape, np.int8) if positive else rng.integers(0, 2, shape, np.int8)


def nudged(leaves: Sequence[Any], eps: float, seed: int) -> list[Any]:
    """The same leaves with each floating or complex number changed at random by up to a relative `eps`."""
    return [_nudged(x, eps, seed, i) for i, x in enumerate(leaves)]


def _nudged(x: Any, eps: float, seed: int, number: int) -> Any:
    aval = jaxprs.aval_of(x)
    if not jaxprs.is_inexact(aval):
        return x
    factors = 1 + eps * np.random.default_rng((seed, number)).uniform(-1, 1, aval.shape)
    if isinstance(x, (float, complex)):
        return type(x)(x * factors)
    value = (np.asarray(x) * factors).astype(aval.dtype)
    return jax.device_put(value, x.sharding) if isinstance(x, jax.Array) else value
