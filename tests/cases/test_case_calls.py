"""Public reports of calls that failed, or changed, when a function was rematerialized: guards for our decorators."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import remat_kit as rk
from remat_kit import RematError

OLD = jax.__version_info__ < (0, 11)


def apply(policy):
    return lambda f: rk.apply(f, policy)


def assert_close(got, want, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 1e-5, "atol": 1e-6, **tolerance}), got, want)


# Weak types in a scan: https://github.com/jax-ml/jax/issues/9836 ------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "matmuls", "save op=sin|dot_general"])
def test_weakly_typed_scanned_inputs_and_carries(implementation, policy):
    scanned = jnp.arange(15).reshape(5, 3) / 1.0
    assert scanned.weak_type

    def loss(wrap, m, x, extra):
        def step(carry, e):
            h, m = carry
            h = jnp.sin(h @ m)
            return (h, m), jnp.sum(h**2) + 0 * e[0]

        return jnp.sum(jax.lax.scan(wrap(step), (x, m), extra)[1])

    def carried(wrap, s):
        return jax.lax.scan(wrap(lambda c, _: (jnp.sin(c), None)), s * 1.0, None, length=3)[0]

    args = jnp.eye(3) * 0.9, jnp.ones(3), scanned
    plain = functools.partial(loss, lambda f: f)
    want = jax.jit(jax.grad(plain, argnums=(0, 1)))(*args)
    for fun in (functools.partial(loss, rk.remat(policy)), rk.apply(plain, policy)):
        assert_close(jax.jit(jax.grad(fun, argnums=(0, 1)))(*args), want)
    plain = functools.partial(carried, lambda f: f)
    for fun in (functools.partial(carried, rk.remat(policy)), rk.apply(plain, policy)):
        assert_close(jax.grad(fun)(2.0), jax.grad(plain)(2.0))
        assert fun(2.0).weak_type == plain(2.0).weak_type


# Static flags: https://github.com/jax-ml/jax/issues/18405, https://github.com/eelregit/pmwd/issues/27 ----------


def flagged(x, flag=False):
    return jnp.sum(jnp.sin(x)) if flag else jnp.sum(jnp.cos(x))


@pytest.mark.parametrize(
    "static",
    [{"static_argnums": 1}, {"static_argnums": (1,)}, {"static_argnames": "flag"}, {"static_argnames": ("flag",)}],
)
@pytest.mark.parametrize("policy", ["full", "save op=sin|cos"])
def test_a_static_flag_by_position_by_keyword_and_by_default(implementation, static, policy):
    x = jnp.arange(3.0)
    fun = rk.remat(flagged, policy=policy, **static)
    assert fun(x, True) == fun(x, flag=True) == flagged(x, True)
    assert fun(x) == fun(x, False) == flagged(x)
    assert_close(jax.grad(fun)(x, True), jnp.cos(x))
    assert_close(jax.grad(fun)(x, flag=True), jnp.cos(x))
    assert_close(jax.grad(fun)(x), -jnp.sin(x))
    assert jax.jit(fun, static_argnames="flag")(x, flag=True) == flagged(x, True)


@pytest.mark.parametrize("static", [{"static_argnames": "flg"}, {"static_argnames": ("x", "flg")}])
def test_an_unknown_static_name_raises_at_once(static):
    with pytest.raises(RematError, match="'flg'.*takes no argument of this name.*Did you mean 'flag'"):
        rk.remat(flagged, **static)


def test_a_flag_that_is_not_declared_may_still_be_no_number():
    fun = rk.remat(lambda x, mode="sin": getattr(jnp, mode)(x).sum())
    assert_close(jax.grad(fun)(jnp.ones(3), mode="cos"), -jnp.sin(jnp.ones(3)))


# checkify: https://github.com/jax-ml/jax/issues/23867 ---------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: jax.jit(rk.remat(f)),
        rk.remat,
        lambda f: jax.grad(rk.remat(f)),
        lambda f: rk.remat(jax.jit(f)),
        lambda f: jax.grad(rk.remat(f, policy="save op=log")),
        lambda f: jax.grad(rk.apply(f, "full")),
        lambda f: jax.jit(jax.grad(rk.apply(f, "save op=log"))),
    ],
    ids=["jit of remat", "remat", "grad", "remat of jit", "policy", "apply", "jit of apply"],
)
def test_checks_inside_a_rematerialized_function(implementation, wrap):
    def fun(x):
        checkify.check(jnp.all(x > 0), "need positive input")
        return jnp.sum(jnp.log(x))

    checked = checkify.checkify(wrap(fun))
    assert "need positive input" in checked(jnp.array([-1.0, 2.0]))[0].get()
    assert checked(jnp.array([1.0, 2.0]))[0].get() is None


# while and fori loops: https://github.com/jax-ml/jax/pull/27353 ------------------------------------------------


def until(x, y):
    def body(c):
        i, _, b, d = c
        return i + 1, jnp.sin(b), jnp.cos(d), d * y  # what depends on y grows from step to step

    return jax.lax.while_loop(lambda c: c[0] < 4, body, (0, x, x + 0.0, x + 1.0))[1]


# What a while loop makes inside cannot be saved, and the toolkit says so.
@pytest.mark.filterwarnings("ignore:the rule 'save op=sin' matches no value:remat_kit.RematWarning")
@pytest.mark.parametrize("wrap", [rk.remat, rk.remat("save op=sin"), apply("full"), apply("save op=sin")])
def test_a_while_loop_in_forward_mode_and_the_plain_error_in_reverse(implementation, wrap):
    fun = wrap(until)
    _, want = jax.jvp(lambda y: until(0.5, y), (0.9,), (1.0,))
    assert_close(jax.linearize(lambda y: fun(0.5, y), 0.9)[1](1.0), want)
    assert_close(jax.jvp(lambda y: fun(0.5, y), (0.9,), (1.0,))[1], want)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for lax.while_loop"):
        jax.grad(fun, argnums=1)(0.5, 0.9)


@pytest.mark.parametrize("wrap", [rk.remat, apply("full")])
def test_a_fori_loop_with_static_bounds_in_reverse_mode(implementation, wrap):
    def fun(y):
        return jax.lax.fori_loop(0, 4, lambda _, h: jnp.sin(h) * y, y)

    assert_close(jax.grad(wrap(fun))(0.9), jax.grad(fun)(0.9))


# bfloat16: https://github.com/jax-ml/jax/issues/8702, https://github.com/jax-ml/jax/pull/22244 -----------------


@pytest.mark.parametrize("policy", ["full", "save op=exp"])
def test_bfloat16_gradients_agree_to_its_precision_but_not_to_the_bit(implementation, policy):
    x = jnp.asarray(np.random.default_rng(0).random(512), jnp.bfloat16)

    def loss(x, wrap):
        return wrap(lambda x: jax.nn.softmax(x.astype(jnp.float32) * 3))(x + 1)[:7].sum()

    want = jax.jit(jax.grad(functools.partial(loss, wrap=lambda f: f)))(x)
    for wrap in (rk.remat(policy), apply(policy)):
        got = jax.jit(jax.grad(functools.partial(loss, wrap=wrap)))(x)
        assert got.dtype == jnp.bfloat16
        # Excess precision may be kept in one program and not in the other: a few units in the last place of 2**-8.
        assert_close(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=8 * 2.0**-8, atol=1e-7)


# vmap with unmapped arguments: https://github.com/jax-ml/jax/pull/39909 ----------------------------------------


@pytest.mark.parametrize("policy", ["full", "names", "dots", "dots_no_batch", "matmuls"])
@pytest.mark.parametrize("wrap", [lambda p: rk.remat(policy=p), apply], ids=["remat", "apply"])
def test_vmap_with_unmapped_arguments(implementation, wrap, policy):
    named = implementation == "classic" or not OLD  # else JAX cannot vmap over names, the function's own included
    if not named and policy in ("names", "matmuls"):
        pytest.skip("jax_remat3 of this JAX cannot vmap over names")
    w, b, x = jnp.ones((5, 5)) * 0.2, jnp.ones(5) * 0.1, jnp.sin(jnp.arange(35.0)).reshape(7, 5)

    def fun(w, b, x):
        h = jnp.tanh(x @ w + b)
        if named:
            h = rk.checkpoint_name(h, "h")
        return jnp.sum(jnp.sin(h @ w)), h

    @functools.partial(jax.jit, static_argnums=0)
    def grads(f):
        inner = jax.vmap(jax.grad(f, argnums=(0, 2), has_aux=True), in_axes=(None, None, 0))(w, b, x)
        outer = jax.grad(lambda w: jnp.sum(jax.vmap(f, (None, None, 0))(w, b, x)[0]))(w)
        return inner, outer, jax.vmap(lambda i, w: f(w, b, x[0])[0], (0, None), None, axis_size=7)(jnp.arange(7), w)

    assert_close(grads(wrap(policy)(fun)), grads(fun))


def test_bytes_are_reported_after_batching():
    x, w = jnp.ones((7, 5)), jnp.ones((5, 5)) * 0.2
    report = rk.residuals(lambda w: jnp.sum(jax.vmap(lambda v: jnp.sum(jnp.sin(v @ w)))(x)), w, policy="dots")
    assert [e.shape for e in report.entries if e.action == "saved"] == [(7, 5)]


# Integers, masks, keys, numpy arrays: https://github.com/patrick-kidger/equinox/pull/497,
# https://github.com/jax-ml/jax/issues/12706 --------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [rk.remat, rk.remat("save op=sin"), apply("full")])
def test_arguments_that_have_no_gradient(implementation, wrap):
    table, tokens, mask = jnp.linspace(0, 1, 40).reshape(10, 4), jnp.array([1, 5, 7]), jnp.array([True, False, True])
    keys = jax.random.split(jax.random.key(0), 3)

    def fun(table, tokens, mask, keys):
        noise = jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys)
        return jnp.sum(jnp.sin(table[tokens] * mask[:, None] + noise))

    wrapped = wrap(fun)
    assert_close(
        jax.jit(jax.grad(wrapped))(table, tokens, mask, keys), jax.jit(jax.grad(fun))(table, tokens, mask, keys)
    )
    wrapped = wrap(jax.jit(fun))
    cotangents = jax.vjp(wrapped, table, tokens, mask, keys)[1](1.0)
    assert [c.dtype for c in cotangents] == [jnp.float32, *[jax.dtypes.float0] * 3]
    assert jax.grad(wrapped, argnums=(0, 1), allow_int=True)(table, tokens, mask, keys)[1].dtype == jax.dtypes.float0


@pytest.mark.parametrize("wrap", [rk.remat, apply("full")])
def test_numpy_arrays_and_python_numbers(implementation, wrap):
    x = np.linspace(0, 1, 6, dtype=np.float32)
    assert_close(jax.grad(wrap(lambda x, s: jnp.sum(jnp.sin(x * s))))(x, 2), 2 * np.cos(2 * x))
