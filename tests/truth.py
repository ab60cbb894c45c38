"""What reverse mode really holds, read off `jax.vjp` itself: the figures that residual reports are held against.

Nothing here knows remat_kit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes of the distinct values that a pullback holds: made by the forward pass, given to it, closed over."""

    made: int
    arguments: int
    constants: int


def held(fun: Callable[..., Any], *args: Any, has_aux: bool = False) -> Held:
    """Reads off `jax.vjp` what the pullback of a function with respect to its first argument holds.

    Args:
        fun: a function of pytrees of arrays.
        *args: real or abstract arrays.
        has_aux: whether `fun` returns a pair whose second is not differentiated.
    """

    def pullback(*xs: Any) -> Any:
        out = jax.vjp(lambda first: fun(first, *xs[1:]), xs[0], has_aux=has_aux)
        return out[:2]

    closed, (result, _) = jax.make_jaxpr(pullback, return_shape=True)(*args)
    jaxpr = getattr(closed, "jaxpr", closed)
    leaves = jaxpr.outvars[len(jax.tree.leaves(result)) :]
    distinct = dict.fromkeys(v for v in leaves if not isinstance(v, Literal))
    given, closed_over = set(jaxpr.invars), set(jaxpr.constvars)
    return Held(
        made=sum(nbytes(v.aval) for v in distinct if v not in given and v not in closed_over),
        arguments=sum(nbytes(v.aval) for v in distinct if v in given),
        constants=sum(nbytes(v.aval) for v in distinct if v in closed_over),
    )


def nbytes(aval: Any) -> int:
    """Bytes of a value; a typed key of the default generator is two 32-bit words."""
    itemsize = 8 if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.dtype.itemsize
    return math.prod(aval.shape) * itemsize
