"""The assertions for users' tests: they pass for what is as expected, and name what is not."""

from __future__ import annotations

import subprocess
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_kit as rk
from remat_kit.testing import assert_remat_in, assert_residuals, assert_same_gradients

OLD_REMAT3 = bool(jax.config.jax_remat3) and jax.__version_info__ < (0, 11)
S = jax.ShapeDtypeStruct
W, X = S((8, 8), jnp.float32), S((4, 8), jnp.float32)


def layer(w, x):
    h = rk.checkpoint_name(x @ w, "wi")
    return jnp.tanh(jnp.sin(h))


def loss(params, x):
    for w in params:
        x = layer(w, x)
    return jnp.mean(x**2)


# assert_same_gradients -------------------------------------------------------------------------------------------


def test_same_gradients_pass_and_return_the_check():
    c = assert_same_gradients(loss, [W, W], X, policy="full")
    assert isinstance(c, rk.Check) and [d.name for d in c.derivatives] == ["reverse"]
    everything = assert_same_gradients(loss, [W, W], X, policy="full", derivatives=("reverse", "forward"), seed=3)
    assert len(everything.derivatives) == 2 and everything.seed == 3


def test_keywords_of_the_function_are_handed_on():
    def fun(w, x, *, scale):
        return loss([w], x) * scale

    assert assert_same_gradients(fun, W, X, policy="full", scale=S((), jnp.float32)).made_up == ("w", "x", "scale")


def test_an_impure_function_fails_the_assertion():
    def fun(w, x):
        return loss([w], x) * time.time()

    with pytest.raises(AssertionError, match=r"not the same with remat \(full\).*\n- Traced twice.*the time"):
        assert_same_gradients(fun, W, X, policy="full")


def test_what_has_no_gradient_fails_the_assertion():
    def fun(w, x):
        return jnp.sum(jax.lax.while_loop(lambda h: jnp.sum(h) < 10, lambda h: jnp.abs(h) + 1, x @ w))

    with pytest.raises(AssertionError, match="no gradients to compare: Reverse-mode"):
        assert_same_gradients(fun, W, X)


# assert_residuals --------------------------------------------------------------------------------------------


def test_expected_residuals_pass():
    report = assert_residuals(loss, [W], X, policy="save name=wi", names=["wi"], max_bytes="128B")
    assert report.total_bytes == 128


def test_a_new_residual_is_named_with_bytes_type_and_line():
    with pytest.raises(AssertionError) as info:
        assert_residuals(loss, [W], X, names=["wi"])
    text = str(info.value)
    assert "Kept and not expected" in text and "f32[4,8]" in text and "128 B" in text
    assert "test_testing.py:" in text and "(layer)" in text


def test_a_name_that_is_no_longer_kept_is_named():
    with pytest.raises(AssertionError, match=r"Expected and not kept: 'w_i'\. Did you mean 'wi'"):
        assert_residuals(loss, [W], X, policy="save name=wi", names=["wi", "w_i"])
    with pytest.raises(AssertionError, match="Expected and not kept: 'wi'"):
        assert_residuals(loss, [W], X, policy="full", names=["wi"])


def test_nothing_may_be_expected():
    assert assert_residuals(loss, [W], X, policy="full", names=[], max_bytes=0).total_bytes == 0


def test_too_many_bytes_name_the_largest_values():
    before = rk.residuals(loss, [W, W], X).total_bytes
    assert_residuals(loss, [W, W], X, max_bytes=before)
    with pytest.raises(AssertionError, match=r"kept on the device, more than .*\n +.*f32\[4,8\], at test_testing.py"):
        assert_residuals(loss, [W, W], X, max_bytes=before - 1)


@pytest.mark.skipif(OLD_REMAT3, reason="jax_remat3 of this JAX ignores offload")
def test_offloaded_values_are_kept_and_take_no_bytes_of_the_device():
    report = assert_residuals(loss, [W], X, policy="offload name=wi", names=["wi"], max_bytes=0)
    assert report.host_bytes == 128
    with pytest.raises(AssertionError, match="on the host"):
        assert_residuals(loss, [W], X, policy="offload name=wi", names=[])


@pytest.mark.parametrize(
    "options", [{}, {"names": "wi"}, {"names": [3]}, {"max_bytes": "much"}, {"max_bytes": -1}, {"names": ["["]}]
)
def test_wrong_expectations_are_refused(options):
    with pytest.raises(rk.RematError):
        assert_residuals(loss, [W], X, **options)


# assert_remat_in -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8, name="out")(jnp.tanh(jnp.sin(nn.Dense(16, name="in")(x))))


class Net(nn.Module):
    remat: tuple[bool, ...] = (True, True)

    @nn.compact
    def __call__(self, x):
        for i, on in enumerate(self.remat):
            x = (rk.linen.remat(Block) if on else Block)(name=f"layers_{i}")(x)
        return nn.Dense(2, name="head")(x)


def linen(net):
    params = jax.eval_shape(net.init, jax.random.key(0), X)
    return lambda params, x: jnp.mean(net.apply(params, x) ** 2), params


def test_decorated_linen_layers():
    fun, params = linen(Net())
    assert assert_remat_in("layers_*", fun, params, X) == ("layers_0", "layers_1")


def test_layers_without_remat_are_listed():
    fun, params = linen(Net((True, False, False)))
    with pytest.raises(AssertionError) as info:
        assert_remat_in("layers_*", fun, params, X)
    text = str(info.value)
    assert "2 of 3 blocks that match 'layers_*' are not rematerialized" in text
    assert "layers_1 is in no jax.checkpoint region and keeps" in text and "layers_2" in text
    assert "layers_0" not in text
    assert assert_remat_in("layers_*", fun, params, X, policy={"layers_*": "full"})


def test_a_block_that_is_not_there():
    fun, params = linen(Net())
    with pytest.raises(AssertionError, match=r"no block of the program matches 'layer_0'.*Did you mean 'layers_0'"):
        assert_remat_in("layer_0", fun, params, X)


@pytest.mark.parametrize("around", [False, True])
def test_scanned_linen_layers(around):
    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Block(name="block")(x), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            step = rk.linen.remat(Step) if around else Step
            layers = nn.scan(step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return layers(name="layers")(x, None)[0]

    fun, params = linen(Scanned())
    if around:
        assert "layers" in assert_remat_in("layers", fun, params, X)
    else:
        with pytest.raises(AssertionError, match="layers is in no jax.checkpoint region"):
            assert_remat_in("layers", fun, params, X)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.out = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.out(jnp.tanh(jnp.sin(self.inner(x))))


class NnxNet(nnx.Module):
    def __init__(self, rngs, blocks):
        self.layers = nnx.List([block(rngs) for block in blocks])

    def __call__(self, x):
        for one in self.layers:
            x = one(x)
        return x


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


def test_nnx_layers():
    decorated = rk.nnx.remat(NnxBlock)
    model = NnxNet(nnx.Rngs(0), [decorated, decorated])
    assert assert_remat_in("layers/*", nnx_loss, model, X) == ("layers/0", "layers/1")
    with pytest.raises(AssertionError, match="layers/1 is in no jax.checkpoint region"):
        assert_remat_in("layers/*", nnx_loss, NnxNet(nnx.Rngs(0), [decorated, NnxBlock]), X)


def test_marked_functions():
    def fun(w, x, remat):
        policy = "full" if remat else "none"
        for i in range(2):
            x = rk.remat(layer, policy=policy, block=f"mlp_{i}")(w, x)
        return jnp.mean(x**2)

    assert assert_remat_in("mlp_*", lambda w, x: fun(w, x, True), W, X) == ("mlp_0", "mlp_1")
    with pytest.raises(AssertionError, match="mlp_0 is in no jax.checkpoint region"):
        assert_remat_in("mlp_*", lambda w, x: fun(w, x, False), W, X)


def test_what_lies_in_a_rematerialized_block_is_rematerialized():
    fun, params = linen(Net())
    assert "layers_0/in" in assert_remat_in("layers_*/*", fun, params, X)


def test_two_regions_that_do_all_of_a_block():
    def fun(w, x):
        def block(x):
            x = rk.remat(layer)(w, x)
            return rk.remat(layer)(w, x)

        for i in range(2):
            x = rk.remat(block, policy="none", block=f"layers_{i}")(x)
        return jnp.mean(x**2)

    assert assert_remat_in("layers_*", fun, W, X) == ("layers_0", "layers_1")


@pytest.mark.skipif(OLD_REMAT3, reason="jax_remat3 of this JAX ignores this policy")
def test_a_region_that_keeps_everything_is_no_remat():
    def fun(w, x):
        for i in range(2):
            run = rk.remat(layer, policy=jax.checkpoint_policies.everything_saveable, block=f"layers_{i}")
            x = run(w, x)
        return jnp.mean(x**2)

    with pytest.raises(AssertionError, match="layers_0 is rematerialized, but keeps all of its"):
        assert_remat_in("layers_*", fun, W, X)


def test_wrong_globs_are_refused():
    for glob in (3, "", "["):
        with pytest.raises(rk.RematError):
            assert_remat_in(glob, loss, [W], X)


# The module ----------------------------------------------------------------------------------------------------


def test_neither_pytest_nor_flax_is_loaded():
    code = "import sys, remat_kit.testing; print([m for m in ('pytest', 'flax', 'rich') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_it_is_found_as_an_attribute():
    assert rk.testing.assert_residuals is assert_residuals and "testing" in dir(rk)
