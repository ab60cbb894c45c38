"""Public reports on Flax layers under remat, in one model of scanned layers; more in test_linen.py and test_nnx.py."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_kit as rk

# Parameter names: https://github.com/huggingface/transformers/issues/17399; flags by keyword and BatchNorm:
# https://github.com/google/flax/issues/1455, https://github.com/google/flax/pull/2389,
# https://github.com/google/flax/issues/3602; dropout: https://github.com/huggingface/transformers/pull/17843,
# https://github.com/google/flax/issues/4971; sown losses: https://github.com/AI-Hypercomputer/maxtext/pull/3664

X = jnp.sin(jnp.arange(32.0)).reshape(4, 8)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = jnp.sin(nn.Dense(8)(x))
        x = nn.BatchNorm(momentum=0.9)(x, use_running_average=not train)
        x = nn.Dropout(0.5)(x, deterministic=not train)
        self.sow("losses", "aux", jnp.mean(x**2))
        return x


class Stack(nn.Module):
    layer: type

    @nn.compact
    def __call__(self, x, train: bool):
        layers = nn.scan(
            lambda block, x: (block(x, train=train), None),
            variable_axes={"params": 0, "batch_stats": 0, "losses": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return layers(self.layer(), x)[0]


REMAT = rk.linen.remat("dots")(Layer)


def loss(layer, variables, params):
    y, updates = Stack(layer).apply(
        {**variables, "params": params}, X, train=True, rngs=KEYS, mutable=["batch_stats", "losses"]
    )
    return jnp.sum(y) + sum(jnp.sum(x) for x in jax.tree.leaves(updates["losses"])), updates


def test_scanned_layers_with_batchnorm_dropout_and_sown_losses_are_the_same_with_remat():
    variables = Stack(Layer).init(KEYS, X, train=True)
    variables.pop("losses")
    assert jax.tree.structure(Stack(REMAT).init(KEYS, X, train=True)["params"]) == jax.tree.structure(
        variables["params"]
    )
    plain, remat = (
        jax.jit(jax.value_and_grad(functools.partial(loss, layer, variables), has_aux=True))(variables["params"])
        for layer in (Layer, REMAT)
    )
    assert jax.tree.structure(plain) == jax.tree.structure(remat)  # the paths of sown values too
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), remat, plain)
    (_, updates), _ = remat
    assert [x.shape for x in jax.tree.leaves(updates["losses"])] == [(3,)]  # once for each layer


def test_the_mask_in_the_replay_is_the_one_of_the_forward_pass():
    variables = Stack(Layer).init(KEYS, X, train=True)
    params = variables["params"]
    along = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), params)

    @jax.jit
    def both(params):
        def f(p):
            return loss(REMAT, {"batch_stats": variables["batch_stats"]}, p)[0]

        moved = [f(jax.tree.map(lambda p, d, e=e: p + e * d, params, along)) for e in (1e-2, -1e-2)]
        slopes = jax.tree.map(lambda g, d: jnp.sum(g * d), jax.grad(f)(params), along)
        return (moved[0] - moved[1]) / 2e-2, sum(jax.tree.leaves(slopes))

    difference, slope = both(params)
    np.testing.assert_allclose(difference, slope, rtol=0.03, atol=0.05)


# self is not counted: https://github.com/google/flax/issues/3946, https://github.com/google/flax/issues/3630 ----


def test_the_first_argument_after_self_is_number_zero():
    by_number = rk.linen.remat(static_argnums=1)(Layer)()  # train
    variables = by_number.init(KEYS, X, True)
    assert by_number.apply(variables, X, False).shape == X.shape
    assert by_number.apply(variables, X, train=False).shape == X.shape
    with pytest.raises(rk.RematError, match="not self"):
        rk.linen.remat(static_argnums=3)(Layer)


# Decoding: https://github.com/google/flax/issues/4819; stacks: https://github.com/google/flax/pull/3267,
# https://github.com/google/flax/pull/2837 --------------------------------------------------------------------


def test_one_level_of_remat_scan_keeps_the_layers_inputs_only():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x, shift):
            return jnp.sin(nn.Dense(8)(jnp.sin(nn.Dense(8)(x)))) + shift

    stack = rk.linen.remat_scan(Plain, length=5)()
    variables = stack.init(KEYS, X, 1.0)
    report = rk.residuals(lambda v: jnp.sum(stack.apply(v, X, 1.0)), variables)
    assert report.total_bytes == 5 * X.nbytes


def test_rematerialized_modules_in_a_decoding_loop():
    class Model(nnx.Module):
        def __init__(self, layer, rngs):
            self.a, self.b = layer(8, 8, rngs=rngs), layer(8, 8, rngs=rngs)

        def __call__(self, x):
            return jnp.sin(self.b(jnp.sin(self.a(x))))

    @nnx.jit
    def decode(model, x):
        def body(carry):
            model, x, i = carry
            return model, model(x), i + 1

        return nnx.while_loop(lambda c: c[2] < 4, body, (model, x, 0))[1]

    plain, remat = Model(nnx.Linear, nnx.Rngs(0)), Model(rk.nnx.remat(nnx.Linear), nnx.Rngs(0))
    np.testing.assert_allclose(decode(remat, X), decode(plain, X), rtol=1e-5)
