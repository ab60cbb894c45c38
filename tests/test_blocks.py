"""Which blocks a program has, what they are called, and which are taken where the user names none."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk
from remat_kit._rewrite import Choice, rewrite
from remat_kit._trace.blocks import Candidate

X = jnp.linspace(-1, 1, 48).reshape(3, 16)
WS = [jnp.eye(16) * (0.5 + i / 20) for i in range(9)]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.Dense(16)(jnp.tanh(nn.Dense(32)(nn.LayerNorm()(x))))
        return x + h, None


class Scanned(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(1)(stack(name="layers")(x, None)[0])


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = Layer(name=f"layer_{i}")(x)[0]
        return x


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Stack(name="decoder")(Stack(name="encoder")(x) + x)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = Layer(name="layer")
        for _ in range(3):
            x = layer(x)[0]
        return x


class Decorated(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("first", "second"):
            x = rk.linen.remat(Layer, policy="dots")(name=name)(x)[0]
        return x


def linen(module):
    variables = jax.eval_shape(lambda: module.init(jax.random.key(0), X))
    return lambda v, x: jnp.sum(module.apply(v, x)), (variables, X)


def chunked_layers(ws, x):
    def layer(x, w):
        chunks = jax.lax.scan(lambda c, chunk: (c, jnp.tanh(chunk @ w)), 0.0, x.reshape(3, 1, 16))[1]
        return chunks.reshape(3, 16), None

    return jnp.sum(jax.lax.scan(layer, x, jnp.stack(ws))[0])


@jax.jit
def jitted_layer(w, x):
    return jnp.tanh(jnp.sin(x @ w))


def jitted_layers(ws, x):
    for w in ws:
        x = jitted_layer(w, x)
    return jnp.sum(x)


def marked_layers(ws, x):
    @rk.remat("none", block="mlp")
    def mlp(w, x):
        return jnp.tanh(jnp.sin(x @ w))

    for w in ws[:3]:
        x = mlp(w, x)
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (lambda: linen(Scanned(False)), ("layers",)),
        (lambda: linen(Scanned(True)), ("layers",)),
        (lambda: linen(EncoderDecoder()), tuple(f"{s}/layer_{i}" for s in ("encoder", "decoder") for i in range(3))),
        (lambda: linen(Tied()), ("layer", "layer#2", "layer#3")),
        (lambda: linen(Decorated()), ("first", "second")),
        (lambda: (chunked_layers, (WS, X)), ("scan",)),
        (lambda: (jitted_layers, (WS, X)), tuple(f"segment_{i}" for i in range(5))),
        (lambda: (marked_layers, (WS, X)), ("mlp", "mlp#2", "mlp#3")),
        (lambda: (lambda w, x: jnp.sum(jnp.sin(x @ w[0])), (WS, X)), ("whole",)),
    ],
    ids=[
        "scanned",
        "scanned-remat",
        "encoder-decoder",
        "tied",
        "decorated",
        "nested-scans",
        "jitted",
        "marked",
        "whole",
    ],
)
def test_default_blocks(make, blocks):
    fun, args = make()
    assert rk.residuals(fun, *args).blocks == blocks
    full = rk.residuals(fun, *args, policy="full")
    assert full.blocks == blocks
    assert full.total_bytes < rk.residuals(fun, *args, policy="none").total_bytes


def test_a_warm_jit_cache_does_not_hide_modules():
    module = Stack()
    variables = module.init(jax.random.key(0), X)
    apply = jax.jit(module.apply)
    apply(variables, X)  # traced, without marks
    report = rk.residuals(lambda v, x: jnp.sum(apply(v, x)), variables, X, policy="full")
    assert report.blocks == ("layer_0", "layer_1", "layer_2")


def test_one_call_of_a_shared_module_can_be_chosen():
    fun, args = linen(Tied())
    assert rk.residuals(fun, *args, policy={"layer#2": "full"}).blocks == ("layer#2",)


def test_paths_are_the_same_in_every_run():
    for make in (lambda: linen(EncoderDecoder()), lambda: (chunked_layers, (WS, X))):
        fun, args = make()
        assert [b.path for b in rk.trace(fun, *args).blocks] == [b.path for b in rk.trace(fun, *args).blocks]


def test_equations_that_are_no_unit_are_refused_with_the_reason():
    """A group that hands a value out and takes back what is made of it cannot be one jax.checkpoint."""
    traced = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.sin(x))))(1.0)
    group = Candidate("module", "layer", (), (), traced.jaxpr, (0, 2))
    with pytest.raises(rk.RematError, match="'layer' cannot be one unit"):
        jax.make_jaxpr(rewrite(traced, Choice(((group, rk.policy("full")),))))(1.0)
    apart = jax.make_jaxpr(lambda x: jnp.sin(x) + jnp.cos(x))(1.0)  # cos stands between, but needs nothing of it
    group = Candidate("module", "layer", (), (), apart.jaxpr, (0, 2))
    moved = rewrite(apart, Choice(((group, rk.policy("full")),)))
    np.testing.assert_allclose(moved(1.0)[0], np.sin(1.0) + np.cos(1.0), rtol=1e-6)


def test_layers_that_nn_scan_calls_through_a_lambda_keep_their_name():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(16, name="layers")
            scan = nn.scan(
                lambda m, c, _: (jnp.sin(m(c)), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=4,
            )
            return scan(layer, x, None)[0]

    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 16)))
    report = rk.residuals(lambda p, x: jnp.sum(model.apply(p, x)), params, jnp.ones((2, 16)), policy={"layers": "full"})
    assert report.blocks == ("layers",)
