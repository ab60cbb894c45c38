"""Custom rules that are told which arguments are differentiated, and keep other residuals for others of these.

JAX remembers one layout of the residuals for each call in a program, that of the trace made last.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk

W = jnp.array([0.3, 0.5])
OTHER = jnp.array([0.7, 0.9])


@jax.custom_vjp
def product(x, y):
    return x * y


def _forward(x, y):
    return x.value * y.value, (y.value if x.perturbed else None, x.value if y.perturbed else None)


def _backward(kept, ct):
    y, x = kept
    return None if y is None else ct * y, None if x is None else ct * x


product.defvjp(_forward, _backward, symbolic_zeros=True)


def loss(multiply):
    return lambda a, b: jnp.sum(multiply(jnp.sin(a) * 2, jnp.cos(b)) * a)


ORDER = (0, 1, 0, (0, 1), 1, 0)


def check(fn, plain, order=ORDER):
    """The gradients of a function, in any order of what is differentiated, are those of another."""
    for argnums in order:
        for a, b in zip(*(jax.tree.leaves(jax.grad(f, argnums)(W, OTHER)) for f in (fn, plain)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::remat_kit.RematWarning")  # jax_remat3 honours few of these policies
@pytest.mark.parametrize("policy", ["none", "full", "save op=mul", "save op=sin|custom_vjp_call*", "everything"])
def test_a_policy_keeps_apart_what_is_differentiated(policy):
    # The regions of jax_remat3 have JAX's fault: there a function is made for each gradient.
    asked = [[argnums] for argnums in ORDER] if jax.config.jax_remat3 and policy != "none" else [ORDER]
    for order in asked:
        check(rk.apply(loss(product), policy), loss(jnp.multiply), order)
        check(rk.remat(loss(product), policy=policy), loss(jnp.multiply), order)


def test_reading_a_program_leaves_its_rules_as_they_were():
    inner = jax.jit(loss(product))
    check(inner, loss(jnp.multiply))
    for policy in (None, "save op=mul", "full"):
        rk.residuals(inner, W, OTHER, policy=policy)
    rk.trace(inner, W, OTHER)
    check(inner, loss(jnp.multiply))
    check(lambda a, b: jax.vmap(inner)(a[:, None], b[:, None]).sum(), loss(jnp.multiply))


LOOPS = {
    "scan": lambda step, a: rk.scan(lambda c, _: (step(c), None), a, None, 4, segments="binomial")[0],
    "while": lambda step, a: rk.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, step(c[1])), (0, a), max_steps=9)[
        1
    ],
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_jitted_loop_called_for_different_arguments(kind, order):
    def twice(loop):
        inner = jax.jit(lambda a, b: jnp.sum(loop(lambda c: jnp.tanh(c) * b, a)))

        def fn(x, y):
            calls = [lambda: inner(x, OTHER), lambda: 3 * inner(OTHER, y)]
            return sum(calls[k]() for k in order)

        return fn

    def plain(step, a):
        for _ in range(4):
            a = step(a)
        return a

    check(twice(LOOPS[kind]), twice(plain))
    check(rk.apply(twice(LOOPS[kind]), "save op=mul|tanh"), twice(plain))
