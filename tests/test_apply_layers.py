"""apply on Flax models as they are, by layer: Linen in every way of putting layers together, NNX in lists and scans."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_kit as rk
from tests.helpers import assert_same, held, regions, residual_bytes
from tests.linen_models import Attribute, Compact, Mapped, Nested, Scanned, Setup, Tied, training


@pytest.mark.parametrize(
    ("model", "policies", "rematerialized"),
    [
        (Compact, {"Block_0": "full", "Block_*": "dots"}, 3),
        (Setup, {"layers_[0-1]": "full", "layers_*": "none"}, 2),
        (Nested, {"encoder/*": rk.every(2, "full"), "decoder/layers_*": "full"}, 5),
        (Attribute, {"layer*": "full"}, 2),  # two calls of one module, "layer" and "layer#2"
        (Tied, {"Block_0": "full", "**": "none"}, 1),
        (Scanned, {"layers@0:1": "full", "layers": "dots"}, 2),
        (Scanned, {"layers": rk.every(3, "full")}, 1),
        (Mapped, {"VmapBlock_0": "full"}, 1),
    ],
)
def test_layers_of_linen_models(model, policies, rematerialized):
    plain, params, _ = training(model())
    remat = rk.apply(plain, policies)
    loss = lambda fn: lambda p: fn(p)[0]  # noqa: E731
    assert regions(loss(remat), params) == rematerialized
    assert held(loss(remat), params) < held(loss(plain), params)
    grads = [jax.jit(jax.value_and_grad(fn, has_aux=True))(params) for fn in (plain, remat)]
    assert_same(*grads)  # with statistics, dropout, sown and captured values


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(jnp.tanh(self.dense(x)))


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(Layer))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


BATCH = jax.random.normal(jax.random.key(0), (64, 8))  # its layers keep more than their weights are


def loss(model):
    return jnp.sum(model(BATCH) ** 2)


@pytest.mark.parametrize(
    ("model", "policies", "rematerialized"),
    [
        (Listed, {"layers/[0-1]": "full", "layers/*": "dots"}, 4),
        (Listed, rk.every(2, "full"), 2),
        (Stacked, "full", 1),
        (Stacked, {"Layer@0:2": "full", "Layer": "dots"}, 2),
        (Stacked, {"Layer": rk.every(2, "full")}, 1),
    ],
)
def test_layers_of_nnx_models(model, policies, rematerialized):
    as_module = nnx.jit(nnx.grad(rk.apply(loss, policies)))(model(nnx.Rngs(0)))
    assert_same(as_module, nnx.jit(nnx.grad(loss))(model(nnx.Rngs(0))))

    graph, params, rest = nnx.split(model(nnx.Rngs(0)), nnx.Param, ...)
    plain = lambda params, rest: loss(nnx.merge(graph, params, rest, copy=True))  # noqa: E731
    if isinstance(policies, dict):  # a model that is merged inside goes by its class, and so does the scan in it
        policies = {f"Listed/{glob}".replace("Listed/Layer", "Stacked"): p for glob, p in policies.items()}
    remat = rk.apply(plain, policies)
    assert regions(remat, params, rest) == rematerialized
    assert residual_bytes(remat, params, rest) < residual_bytes(plain, params, rest)
    assert_same(jax.grad(remat)(params, rest), jax.grad(plain)(params, rest))
