"""Equinox and Haiku: their modules are blocks as Flax's are, and policies leave values, gradients and state alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_gradients, regions, residual_bytes

import remat_kit as rk

eqx = pytest.importorskip("equinox", exc_type=ImportError)
hk = pytest.importorskip("haiku", exc_type=ImportError)

WIDTH, LAYERS = 8, 3
X = jax.random.normal(jax.random.key(1), (3, 6, WIDTH))


def default_paths(fn: Any, *args: Any) -> list[str]:
    return [block.path for block in rk.trace(fn, *args).default_blocks]


# Equinox ----------------------------------------------------------------------------------------------


class Layer(eqx.Module):
    norm: Any
    attention: Any
    dropout: Any
    mlp: Any

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=first)
        self.dropout = eqx.nn.Dropout(0.3)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jnp.tanh, key=second)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        y = jax.vmap(self.norm)(x)
        x = x + self.dropout(self.attention(y, y, y), key=key)
        return x + jax.vmap(self.mlp)(x)


class Net(eqx.Module):
    layers: list[Layer]
    head: Any

    def __init__(self, key: jax.Array):
        *keys, last = jax.random.split(key, LAYERS + 1)
        self.layers = [Layer(k) for k in keys]
        self.head = eqx.nn.Linear(WIDTH, 1, key=last)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        for layer, k in zip(self.layers, jax.random.split(key, LAYERS), strict=True):
            x = layer(x, k)
        return jax.vmap(self.head)(x)


NET = Net(jax.random.key(0))
ARRAYS, REST = eqx.partition(NET, eqx.is_array)
KEYS = jax.random.split(jax.random.key(2), len(X))


def loss_of_module(net: Net, x: jax.Array, keys: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(net)(x, keys) ** 2)


def loss_of_arrays(arrays: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
    return loss_of_module(eqx.combine(arrays, REST), x, keys)


def test_layers_of_an_equinox_module_are_blocks_named_by_their_fields():
    assert default_paths(loss_of_module, NET, X, KEYS) == [f"layers/{i}" for i in range(LAYERS)]
    paths = [block.path for block in rk.trace(loss_of_module, NET, X, KEYS).blocks]
    assert {"layers/0/attention/query_proj", "layers/2/mlp", "head"} <= set(paths)


def test_an_equinox_module_put_together_inside_is_known_by_its_class():
    assert default_paths(loss_of_arrays, ARRAYS, X, KEYS) == [f"Net/layers/{i}" for i in range(LAYERS)]

    def rebuilt(net: Net, x: jax.Array, keys: jax.Array) -> jax.Array:
        call = eqx.filter_vmap(lambda net, x, k: net(x, k), in_axes=(None, 0, 0))
        return jnp.mean(call(net, x, keys) ** 2)

    assert default_paths(rebuilt, NET, X, KEYS) == [f"Net/layers/{i}" for i in range(LAYERS)]


@pytest.mark.parametrize(
    "policy",
    ["full", "dots", "save path=**/mlp/** op=dot_general", {"Net/layers/0": "none", "Net/layers/*": "full"}],
)
def test_policies_leave_an_equinox_model_as_it_was(policy):
    remat = rk.apply(loss_of_arrays, policy)
    assert_same_gradients(remat, loss_of_arrays, ARRAYS, X, KEYS)
    held, plain = residual_bytes(remat, ARRAYS, X, KEYS), residual_bytes(loss_of_arrays, ARRAYS, X, KEYS)
    assert held < 0.75 * plain
    assert rk.residuals(loss_of_arrays, ARRAYS, X, KEYS, policy=policy).total_bytes == held
    assert rk.residuals(loss_of_arrays, ARRAYS, X, KEYS).total_bytes == plain
    blocks = LAYERS - 1 if isinstance(policy, dict) else LAYERS
    assert regions(remat, ARRAYS, X, KEYS) == blocks


def test_equinox_transforms_take_what_apply_returns():
    remat = rk.apply(loss_of_module, {"layers/*": "dots"})
    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(remat))(NET, X, KEYS)
    expected, expected_grads = eqx.filter_jit(eqx.filter_value_and_grad(loss_of_module))(NET, X, KEYS)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), grads, expected_grads)


def test_numbers_in_equinox_modules_stay_settings():
    class Scaled(eqx.Module):
        weight: jax.Array
        power: int
        invert: bool

        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(self.power):  # neither works with a traced number
                x = jnp.tanh(x @ self.weight)
            return -x if self.invert else x

    module = Scaled(jnp.eye(WIDTH), 3, True)

    def f(module: Scaled, x: jax.Array) -> jax.Array:
        return jnp.sum(module(x))

    np.testing.assert_allclose(rk.apply(f, "full")(module, X[0]), f(module, X[0]), rtol=1e-6)
    np.testing.assert_allclose(rk.remat(f)(module, X[0]), f(module, X[0]), rtol=1e-6)
    assert rk.residuals(f, module, X[0], policy="full").total_bytes < rk.residuals(f, module, X[0]).total_bytes
    doubled = rk.remat(lambda module: eqx.tree_at(lambda m: m.weight, module, 2 * module.weight))(module)
    assert (doubled.power, doubled.invert) == (3, True)
    np.testing.assert_array_equal(doubled.weight, 2 * module.weight)


def test_scanned_layers_of_an_equinox_stack_are_one_block():
    stack = eqx.filter_vmap(Layer)(jax.random.split(jax.random.key(0), LAYERS))
    arrays, rest = eqx.partition(stack, eqx.is_array)

    def loss(arrays: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return jax.vmap(eqx.combine(layer, rest))(x, keys), None

        return jnp.mean(jax.lax.scan(step, x, arrays)[0] ** 2)

    (block,) = rk.trace(loss, arrays, X, KEYS).default_blocks
    assert (block.path, block.kind) == ("Layer", "scan")
    remat = rk.apply(loss, "full")
    assert_same_gradients(remat, loss, arrays, X, KEYS)
    assert residual_bytes(remat, arrays, X, KEYS) < 0.3 * residual_bytes(loss, arrays, X, KEYS)


def test_a_reading_leaves_equinox_classes_as_they_were():
    before = [cls.__dict__["__call__"] for cls in (Layer, Net, eqx.nn.MLP)]
    rk.trace(loss_of_module, NET, X, KEYS)
    assert [cls.__dict__["__call__"] for cls in (Layer, Net, eqx.nn.MLP)] == before


# Haiku ------------------------------------------------------------------------------------------------


class Block(hk.Module):
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        init = hk.initializers.VarianceScaling(1.0)
        y = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(2, WIDTH // 2, model_size=WIDTH, w_init=init)(y, y, y)
        y = hk.nets.MLP([4 * WIDTH, WIDTH], activation=jnp.tanh)(x)
        y = hk.BatchNorm(True, True, 0.9)(y, is_training=train)
        return x + (hk.dropout(hk.next_rng_key(), 0.3, y) if train else y)


def network(x: jax.Array) -> jax.Array:
    for _ in range(LAYERS):
        x = Block()(x, train=True)
    return hk.Linear(1)(x)


MODEL = hk.transform_with_state(network)
PARAMS, STATE = MODEL.init(jax.random.key(0), X)


def loss_with_state(params: Any, state: Any, key: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    y, state = MODEL.apply(params, state, key, x)
    return jnp.mean(y**2), state


def haiku_loss(params: Any, state: Any, key: jax.Array, x: jax.Array) -> jax.Array:
    return loss_with_state(params, state, key, x)[0]


HAIKU_ARGS = (PARAMS, STATE, jax.random.key(3), X)
BLOCKS = ["block", "block_1", "block_2"]


def test_haiku_modules_are_blocks_named_as_their_parameters():
    assert default_paths(haiku_loss, *HAIKU_ARGS) == BLOCKS
    paths = {block.path for block in rk.trace(haiku_loss, *HAIKU_ARGS).blocks}
    assert set(PARAMS) <= paths


@pytest.mark.parametrize("policy", ["full", "dots", {"block": "none", "block_*": "full"}, "save path=**/mlp/**"])
def test_policies_leave_a_haiku_model_as_it_was(policy):
    remat = rk.apply(haiku_loss, policy)
    assert_same_gradients(remat, haiku_loss, *HAIKU_ARGS)
    held, plain = residual_bytes(remat, *HAIKU_ARGS), residual_bytes(haiku_loss, *HAIKU_ARGS)
    assert held < 0.75 * plain
    assert rk.residuals(haiku_loss, *HAIKU_ARGS, policy=policy).total_bytes == held
    assert regions(remat, *HAIKU_ARGS) == (LAYERS - 1 if isinstance(policy, dict) else LAYERS)


def test_haiku_state_is_the_same_and_changes_once():
    remat = jax.jit(jax.grad(rk.apply(loss_with_state, "full"), has_aux=True))
    plain = jax.jit(jax.grad(loss_with_state, has_aux=True))
    (_, state), (_, expected) = remat(*HAIKU_ARGS), plain(*HAIKU_ARGS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, expected)
    assert state["block/batch_norm/~/mean_ema"]["counter"] == 1


def test_repeated_calls_and_other_methods_of_haiku_modules():
    class Coder(hk.Module):
        def encode(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(hk.Linear(WIDTH, name="encoder")(x))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(hk.Linear(WIDTH, name="decoder")(self.encode(x)))

    def function(x: jax.Array) -> jax.Array:
        coder = Coder()
        return coder.encode(coder(coder(x)))

    model = hk.without_apply_rng(hk.transform(function))
    params = model.init(jax.random.key(0), X)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(params, x) ** 2)

    paths = [block.path for block in rk.trace(loss, params, X).blocks]
    assert {"coder", "coder#2", "coder.encode", "coder/decoder"} <= set(paths)
    assert_same_gradients(rk.apply(loss, {"coder*": "full"}), loss, params, X)


def test_a_haiku_layer_stack_is_one_block():
    def function(x: jax.Array) -> jax.Array:
        return hk.experimental.layer_stack(LAYERS)(lambda x: jnp.tanh(hk.nets.MLP([4 * WIDTH, WIDTH], name="mlp")(x)))(
            x
        )

    model = hk.without_apply_rng(hk.transform(function))
    params = model.init(jax.random.key(0), X)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(params, x) ** 2)

    remat = rk.apply(loss, "full")
    assert len(default_paths(loss, params, X)) == 1
    assert_same_gradients(remat, loss, params, X)
    assert residual_bytes(remat, params, X) < 0.5 * residual_bytes(loss, params, X)
