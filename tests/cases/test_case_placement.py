"""Public reports of remat that is in place and saves nothing: around a whole function or loop, or merged by XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk

OPTIMIZED = True
MERGED = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA of this JAX merges recomputation on CPU, that of jax.checkpoint too"
)


def compiled(fun, *args) -> tuple[int, float]:
    """Temporary bytes and FLOPs of the compiled gradient."""
    program = jax.jit(jax.grad(fun)).lower(*args).compile()
    return program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["flops"]


# Around a loop or in it: https://github.com/apple/axlearn/pull/1171, https://github.com/jax-ml/jax/issues/27748,
# https://github.com/jax-ml/jax/issues/20877 --------------------------------------------------------------------

STEPS, WIDTH = 64, 32
MATRIX = jnp.sin(jnp.arange(float(WIDTH**2))).reshape(WIDTH, WIDTH) * 0.1
START = jnp.ones(WIDTH)


def looped(x):
    return jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(jnp.sin(h @ MATRIX)), None), x, None, length=STEPS)[0])


def test_apply_puts_remat_into_the_loop_where_it_saves_memory():
    report = rk.residuals(looped, START, policy="full")
    assert report.blocks == ("scan",)
    assert report.total_bytes == STEPS * START.nbytes  # the carried value of each step
    assert report.total_bytes < rk.residuals(looped, START).total_bytes

    applied = rk.apply(looped, "full")
    np.testing.assert_allclose(jax.grad(applied)(START), jax.grad(looped)(START), rtol=1e-5)
    plain, around, inside = (compiled(f, START)[0] for f in (looped, rk.remat(looped), applied))
    assert inside < 0.7 * plain
    assert around > inside  # keeps nothing, by its residuals, but holds the whole loop while it is replayed


# A whole loss, and prevent_cse: https://github.com/jax-ml/jax/issues/12792, https://github.com/jax-ml/jax/issues/13999,
# https://github.com/google/flax/pull/1499 ----------------------------------------------------------------------

WEIGHTS = [jnp.eye(32) * 0.9 for _ in range(9)]
BATCH = jnp.ones((128, 32))


def layer(w, x):
    return jnp.tanh(jnp.sin(x @ w))


def network(ws, x, wrap=lambda f: f):
    for w in ws:
        x = wrap(layer)(w, x)
    return jnp.sum(x)


@MERGED
def test_apply_cuts_a_network_into_blocks_and_saves_memory_that_one_region_does_not():
    blocks = rk.residuals(network, WEIGHTS, BATCH, policy="full").blocks
    assert len(blocks) > 1
    functions = network, rk.remat(network), rk.apply(network, "full")
    (plain, _), (whole, _), (cut, _) = (compiled(f, WEIGHTS, BATCH) for f in functions)
    assert cut < 0.8 * plain
    assert cut < whole


@MERGED
def test_recomputation_outside_a_loop_is_protected_from_being_merged():
    _, plain = compiled(network, WEIGHTS, BATCH)
    _, per_layer = compiled(lambda ws, x: network(ws, x, rk.remat), WEIGHTS, BATCH)
    assert per_layer > 1.2 * plain  # the products are there a second time
