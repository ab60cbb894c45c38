"""Loops and placements of remat that users have stumbled over, each with what it ought to do."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import held, regions

import remat_kit as rk

OPTIMIZED = True  # what the compiler makes of it is looked at

X = jnp.linspace(0, 1, 4096)


@contextlib.contextmanager
def flags(**values):
    before = {k: getattr(jax.config, k) for k in values}
    for k, v in values.items():
        jax.config.update(k, v)
    try:
        yield
    finally:
        for k, v in before.items():
            jax.config.update(k, v)


def thrice():
    """A custom rule that calls the function itself, and is deliberately not its derivative."""

    @jax.custom_vjp
    def fn(x):
        return jnp.sin(x)

    fn.defvjp(lambda x: (fn(x), jnp.cos(x)), lambda c, g: (3.0 * c * g,))
    return fn


@pytest.mark.parametrize("remat3", [False, True])
@pytest.mark.parametrize("custom_vjp3", [False, True])
def test_a_custom_rule_that_calls_its_own_function(remat3, custom_vjp3):
    """jax pull request 38914."""
    if custom_vjp3 and (not remat3 or not hasattr(jax.config, "jax_custom_vjp3")):
        pytest.skip("this JAX has no such combination")
    with flags(jax_remat3=remat3, **({"jax_custom_vjp3": True} if custom_vjp3 else {})):
        for policy in ("full", "dots", "save name=y"):
            fn = thrice()
            wrapped = rk.remat(lambda x, fn=fn: rk.checkpoint_name(fn(x), "y"), policy=policy)
            np.testing.assert_allclose(jax.grad(wrapped)(1.0), 3 * np.cos(1.0), rtol=1e-6)
            np.testing.assert_allclose(jax.grad(jax.grad(wrapped))(1.0), -3 * np.sin(1.0), rtol=1e-6)
            scanned = lambda x, fn=fn, p=policy: rk.scan(  # noqa: E731
                lambda c, _: (rk.checkpoint_name(fn(c), "y"), None), x, None, 2, policy=p
            )[0]
            np.testing.assert_allclose(jax.grad(scanned)(1.0), 9 * np.cos(1.0) * np.cos(np.sin(1.0)), rtol=1e-6)


def body(h, _):
    return jnp.tanh(jnp.sin(jnp.sin(h) * 1.1)), None


def test_where_remat_goes_around_a_scan():
    """axlearn 1171, jax 27748, 20877: remat of a whole scan keeps little between the passes, but all of it in one."""

    def loss(scan):
        return lambda x: jnp.sum(scan(x)[0])

    losses = {
        "scan": loss(lambda x: jax.lax.scan(body, x, None, 64)),
        "remat(scan)": loss(rk.remat(lambda x: jax.lax.scan(body, x, None, 64))),
        "rk.scan": loss(lambda x: rk.scan(body, x, None, 64)),
        "sqrt": loss(lambda x: rk.scan(body, x, None, 64, segments="sqrt")),
        "binomial": loss(lambda x: rk.scan(body, x, None, 64, segments="binomial", checkpoints=4)),
    }
    between = {k: held(fn, X) for k, fn in losses.items()}
    peak = {k: rk.measure(fn, X, target="cpu").peak_bytes for k, fn in losses.items()}
    assert between["remat(scan)"] < 0.5 * between["scan"] and peak["remat(scan)"] >= 0.95 * peak["scan"]
    assert peak["rk.scan"] < 0.4 * peak["scan"]
    assert peak["sqrt"] < 0.4 * peak["rk.scan"] and peak["binomial"] < 0.6 * peak["sqrt"]
    for fn in losses.values():
        np.testing.assert_allclose(jax.grad(fn)(X), jax.grad(losses["scan"])(X), rtol=1e-5)


def test_while_and_cond_inside_remat():
    """jax 27353, 37888: forward mode goes through, names in a branch are kept, and the report says which."""

    def with_while(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) * x), (0, x))[1]

    wrapped = rk.remat(with_while)
    np.testing.assert_allclose(jax.jvp(wrapped, (0.5,), (1.0,)), jax.jvp(with_while, (0.5,), (1.0,)))
    with pytest.raises(ValueError, match=r"Reverse-mode differentiation does not work for lax\.while_loop"):
        jax.grad(wrapped)(0.5)
    mine = lambda x: rk.while_loop(  # noqa: E731
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) * x), (0, x), max_steps=5
    )[1]
    np.testing.assert_allclose(jax.grad(rk.remat(mine))(0.5), jax.jvp(with_while, (0.5,), (1.0,))[1], rtol=1e-6)

    def with_cond(x, flag):
        one = lambda x: rk.checkpoint_name(jnp.sin(jnp.exp(x)), "one")  # noqa: E731
        return jnp.sum(jnp.sin(jax.lax.cond(flag, one, lambda x: jnp.cos(x), x)))

    named = rk.remat(with_cond, policy="save name=one")
    np.testing.assert_allclose(jax.grad(named)(X, True), jax.grad(with_cond)(X, True), rtol=1e-6)
    if not jax.config.jax_remat3:
        assert "one" in {n for e in rk.residuals(named, X, True).entries for n in e.names}


@pytest.mark.filterwarnings("ignore:prevent_cse is ignored by jax_remat3:remat_kit.RematWarning")
def test_whole_function_and_prevent_cse():
    """jax 12792, 13999, flax 1499: neither saves anything once compiled, and the report says so."""
    ws = [0.9 * jnp.eye(64)] * 8
    x = jnp.ones((256, 64))

    def loss(ws, x, wrap=lambda f: f):
        for w in ws:
            x = wrap(lambda w, x: jnp.tanh(jnp.sin(x @ w)))(w, x)
        return jnp.sum(x)

    whole = rk.measure(rk.remat(loss), ws, x, target="cpu")
    plain = rk.measure(loss, ws, x, target="cpu")
    assert whole.peak_bytes >= 0.9 * plain.peak_bytes
    by_hand = lambda ws, x: loss(ws, x, lambda f: rk.remat(f, prevent_cse=False))  # noqa: E731
    merged = rk.measure(by_hand, ws, x, target="cpu")
    assert merged.peak_bytes >= 0.9 * plain.peak_bytes
    for fn in (rk.remat(loss), by_hand):
        said = str(rk.compare(fn, ws, x, policies=(None, "none"), target="cpu"))
        assert "No effect on the peak" in said or "merged recomputation" in said


def test_an_nnx_layer_under_remat_in_a_decoding_loop():
    """flax 4819: harmless where nothing is differentiated."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            run = rk.nnx.remat(lambda m, x: jnp.tanh(m(x)))
            return run(self.b, run(self.a, x))

    model, x = Model(nnx.Rngs(0)), jnp.ones((2, 8))
    looped = nnx.jit(lambda m, x: nnx.fori_loop(0, 4, lambda i, c: (c[0], c[0](c[1])), (m, x))[1])(model, x)
    wanted = x
    for _ in range(4):
        wanted = model(wanted)
    np.testing.assert_allclose(looped, wanted, rtol=1e-5)


def test_one_level_of_remat_scan_rematerializes_and_takes_arguments():
    """flax 3267, 2837."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            return jnp.sin(jnp.tanh(nn.Dense(16, name="d")(x))) * mask

    class Model(nn.Module):
        stack: object

        @nn.compact
        def __call__(self, x, mask):
            return self.stack(Block)(name="s")(x, mask)

    x, mask = jnp.ones((64, 16)), jnp.ones((64, 1))
    one, plain = (Model(lambda b, p=p: rk.linen.remat_scan(b, 16, policy=p)) for p in ("full", "none"))
    params = plain.init(jax.random.key(0), x, mask)
    loss = lambda m: lambda v: jnp.sum(m.apply(v, x, mask))  # noqa: E731
    assert regions(loss(one), params) == 1 and held(loss(one), params) < 0.6 * held(loss(plain), params)
