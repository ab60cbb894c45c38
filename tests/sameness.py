"""Whether a program with remat is still the same function: values and gradients, in several ways of running it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import OLD_REMAT3, ONCE, Program, is_float, without

import remat_kit as rk

# What is refused by design: names that the program does not have or JAX ignores, gradients taken inside, paths where a
# function is seen alone, and a block that lies in another one.
REFUSED = "|".join(
    [
        "no value of the program is named",
        "jax_remat3 ignores names",
        "contains its own gradient",
        "selects by module path",
        "decides nothing",
    ]
)
# What plain `jax.checkpoint` fails with under JAX 0.10.2's newer implementation of remat, all to do with values that
# have no derivative: a scan that stacks one, a custom_vjp with constants in a while loop, a while loop over one that an
# earlier region returned.
OLD_FAULTS = (
    "Expected cotangent type",
    "differentiation of a custom_vjp function with respect to a closed-over value",
    "Reverse-mode differentiation does not work for lax.while_loop",
)


@contextlib.contextmanager
def possibly_refused() -> Iterator[None]:
    """Ends a test quietly where a policy is refused by design."""
    try:
        yield
    except rk.RematError as e:
        if not re.search(REFUSED, str(e)):
            raise


def applied(program: Program, policy: Any) -> Callable[..., Any] | None:
    """The function with a policy applied, or None where the policy names what the program does not have."""
    fn, args = program.fn, program.args()
    try:
        rk.residuals(fn, *args, policy=policy, has_aux=program.aux)
    except rk.RematError as e:
        assert re.search(REFUSED, str(e)), e
        with pytest.raises(rk.RematError, match=REFUSED):
            jax.eval_shape(rk.apply(fn, policy), *args)
        return None
    return rk.apply(fn, policy)


def same(a: Any, b: Any) -> None:
    """Two results agree leaf by leaf, as far as the rounding of their types allows."""
    xs, ys = jax.tree.leaves(a), jax.tree.leaves(b)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(xs, ys, strict=True):
        x, y = jnp.asarray(x), jnp.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not is_float(x):
            bits = jax.random.key_data if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray
            np.testing.assert_array_equal(bits(x), bits(y))
            continue
        rounding = 3e-2 if x.dtype == jnp.bfloat16 else 1e-3
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        if np.all(np.isfinite(x)):
            largest = max(1.0, float(np.max(np.abs(x), initial=0)))
            np.testing.assert_allclose(x, y, rtol=rounding, atol=rounding * largest)


def gradient(program: Program, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The value and gradient of a program's function."""
    return jax.value_and_grad(fn, has_aux=program.aux)


def made_for(program: Program, way: str) -> Program:
    """The program, without the steps that cannot be run in a way."""
    return dataclasses.replace(program, steps=without(program.steps, *ONCE)) if way == "twice" else program


def check_same(program: Program, new: Callable[..., Any], way: str) -> None:
    """Another form of a program's function has its results and gradients."""
    fn, args = program.fn, program.args()
    if way == "eager":
        same(fn(*args), new(*args))
        same(gradient(program, fn)(*args), gradient(program, new)(*args))
    elif way == "jit":
        same(jax.jit(gradient(program, fn))(*args), jax.jit(gradient(program, new))(*args))
    elif way == "vmap":
        batch = (args[0], jnp.stack([args[1], 0.5 * args[1]]), *args[2:])
        each = (None, 0, None, None)

        def results(f):
            return jax.vmap(gradient(program, f), each)

        same(results(fn)(*batch), results(new)(*batch))
    else:

        def twice(f):
            first = lambda p, *xs: jax.tree.leaves(f(p, *xs))[0]  # noqa: E731
            return jax.grad(lambda p, *xs: sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(jax.grad(first)(p, *xs))))

        same(twice(fn)(*args), twice(new)(*args))


WAYS = ("eager", "jit", "jit", "twice", *([] if OLD_REMAT3 else ["vmap"]))
