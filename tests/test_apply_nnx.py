"""NNX modules as arguments of apply, residuals and trace: state is updated as without remat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_kit as rk

# Sown values are one of the kinds of state that must come through; NNX prefers nnx.capture now.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        h = jnp.tanh(self.norm(self.linear(x)))
        self.sow(nnx.Intermediate, "mean", jnp.mean(h))
        return x + self.dropout(h)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(8, rngs) for _ in range(3)])

    def __call__(self, x):
        for b in self.blocks:
            x = b(x)
        return x


def loss(model, x):
    return jnp.sum(model(x) ** 2)


@pytest.fixture
def models():
    return Net(nnx.Rngs(0)), Net(nnx.Rngs(0))


X = jnp.linspace(-1, 1, 32).reshape(4, 8)


def assert_same_state(a, b):
    a, b = nnx.state(a), nnx.state(b)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["full", "dots", "save op=tanh", {"blocks/1": "full", "blocks/*": "none"}])
def test_state_is_updated_once_as_without_remat(models, policy):
    plain, other = models
    applied = rk.apply(loss, policy)
    for _ in range(2):  # the second call uses the cached program
        np.testing.assert_allclose(loss(plain, X), applied(other, X), rtol=1e-5)
        assert_same_state(plain, other)


def test_gradients_inside_nnx_transforms(models):
    plain, other = models
    applied = rk.apply(loss, "full")
    step = lambda f: nnx.jit(lambda m, x: nnx.value_and_grad(f)(m, x))  # noqa: E731
    (va, ga), (vb, gb) = step(loss)(plain, X), step(applied)(other, X)
    np.testing.assert_allclose(va, vb, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ga, gb)
    assert_same_state(plain, other)


def test_reports_find_the_layers_and_differentiate_parameters_only(models):
    model, _ = models
    before = jax.tree.map(lambda x: x, nnx.state(model, nnx.Param, nnx.BatchStat, nnx.RngCount))
    report = rk.residuals(loss, model, X, policy="full")
    assert report.blocks == ("blocks/0", "blocks/1", "blocks/2")
    assert report.total_bytes < rk.residuals(loss, model, X).total_bytes
    after = nnx.state(model, nnx.Param, nnx.BatchStat, nnx.RngCount)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(before), jax.tree.leaves(after))
    assert [b.path for b in rk.trace(loss, model, X).default_blocks] == ["blocks/0", "blocks/1", "blocks/2"]


def test_abstract_modules_allocate_nothing():
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    report = rk.residuals(loss, model, jax.ShapeDtypeStruct((4, 8), jnp.float32), policy="dots")
    assert report.by("op")["dot_general"] == 3 * 4 * 8 * 4


def test_modules_anywhere_in_the_arguments_and_shared_ones(models):
    plain, other = models

    def both(models, x):
        return jnp.sum(models["a"](x) + models["b"](2 * x))

    applied = rk.apply(both, "full")
    np.testing.assert_allclose(both({"a": plain, "b": plain}, X), applied({"a": other, "b": other}, X), rtol=1e-5)
    assert_same_state(plain, other)


def test_results_may_hold_modules(models):
    plain, other = models
    same, value = rk.apply(lambda m, x: (m, loss(m, x)), "full")(other, X)
    assert same is other
    np.testing.assert_allclose(value, loss(plain, X), rtol=1e-5)
