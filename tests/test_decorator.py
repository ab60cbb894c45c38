"""The decorator itself: its forms, what it refuses, methods and callable objects, and how long it keeps things."""

import functools
import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name as name

import remat_kit as rk

JAX = jax.checkpoint_policies


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_forms_of_the_decorator():
    def f(x, y=2.0):
        """Doc."""
        return jnp.sin(x) * y

    forms = [
        rk.remat(f),
        rk.remat("dots")(f),
        rk.remat(rk.policy("dots"))(f),
        rk.remat()(f),
        rk.remat(f, policy="dots"),
        rk.remat(policy=JAX.dots_saveable)(f),
        rk.checkpoint(f),
        functools.partial(rk.remat, policy="full", prevent_cse=True)(f),
    ]
    for g in forms:
        assert (g.__name__, g.__doc__, str(inspect.signature(g))) == ("f", "Doc.", "(x, y=2.0)")
        close(jax.grad(g)(1.0), jax.grad(f)(1.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rk.remat("dots", policy="full"), "two policies"),
        (lambda: rk.remat("dotz"), "dots"),
        (lambda: rk.remat(policy="save nam=x"), "nam"),
        (lambda: rk.remat(3), "function or a policy"),
        (lambda: rk.remat({"mlp": "dots"}), "function or a policy"),
        (lambda: rk.remat(jnp.sin, block=3), "block="),
        (lambda: rk.remat(dict), "class dict"),
        (lambda: rk.remat(JAX.dots_saveable), r"policy=\.\.\."),
        (lambda: rk.remat(JAX.save_only_these_names("a")), r"policy=\.\.\."),
        (lambda: rk.remat(JAX.save_only_these_names), "call it"),
        (lambda: rk.remat(staticmethod(jnp.sin)), "@staticmethod"),
        (lambda: rk.remat(policy="dots")(classmethod(jnp.sin)), "@classmethod"),
        (lambda: rk.remat(lambda x: (yield x)), "generator"),
        (lambda: rk.remat(coroutine), "coroutine"),
    ],
)
def test_wrong_use_is_refused_at_decoration(make, message):
    with pytest.raises(rk.RematError, match=message):
        make()


async def coroutine(x):
    return x


def test_methods():
    class Layer:
        def __init__(self, w):
            self.w = w

        @rk.remat("dots")
        def __call__(self, x):
            return jnp.sin(jnp.sin(self.w * x))

        @rk.remat(policy="save name=s", static_argnames="flag")
        def other(self, x, flag=True):
            return name(jnp.sin(self.w * x) if flag else x, "s")

        @staticmethod
        @rk.remat
        def plain(x):
            return jnp.sin(x)

    layer = Layer(2.0)
    close(jax.grad(layer)(1.0), jax.grad(lambda x: jnp.sin(jnp.sin(2.0 * x)))(1.0))
    close(jax.grad(layer.other)(1.0), 2 * jnp.cos(2.0))
    assert layer.other(1.0, flag=False) == 1.0 == layer.other(1.0, False)
    assert layer.plain(1.0) == Layer.plain(1.0) == jnp.sin(1.0)
    layer.w = 3.0  # objects change: nothing traced before may be used again
    assert layer(1.0) == jnp.sin(jnp.sin(3.0))
    # What the object holds may be traced: the gradient reaches it.
    close(jax.grad(lambda w: Layer(w)(1.0))(2.0), jax.grad(lambda w: jnp.sin(jnp.sin(w)))(2.0))


def test_bound_methods_partials_and_callable_objects():
    class Scale:
        factor = 2.0

        def scaled(self, x):
            return jnp.sin(self.factor * x)

        def __call__(self, x):
            return self.scaled(x)

    scale = Scale()
    for f in (scale.scaled, scale, functools.partial(lambda a, x: jnp.sin(a * x), 2.0)):
        close(jax.grad(rk.remat(f))(1.0), 2 * jnp.cos(2.0))
    for f in (jnp.sin, jax.nn.relu, jax.jit(jnp.sin), jax.nn.gelu):
        close(jax.grad(rk.remat(f))(1.0), jax.grad(f)(1.0))


def test_none_is_the_function_itself():
    seen = []

    @rk.remat("none")
    def f(x):
        seen.append(type(x))
        return x * 2

    assert f(3) == 6 and seen == [int]


# Memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "save name=s", "save op=sin"])
def test_nothing_outlives_the_function(policy):
    def make():
        big = jnp.ones((8,)) + 1

        def f(x):
            return jnp.sum(name(jnp.sin(x * big), "s"))

        g = rk.remat(f, policy=policy)
        g(1.0), jax.grad(g)(1.0), jax.grad(rk.remat(f, policy=policy))(1.0)
        return weakref.ref(f), weakref.ref(big)

    function, array = make()
    gc.collect()
    assert function() is None
    assert array() is None


def test_nothing_outlives_an_object_whose_method_is_wrapped():
    class Layer:
        def __init__(self):
            self.w = jnp.ones(3) + 1

        @rk.remat
        def __call__(self, x):
            return jnp.sum(jnp.sin(self.w * x))

    layer = Layer()
    jax.grad(layer)(1.0), layer(1.0)
    alive = weakref.ref(layer), weakref.ref(layer.w)
    del layer
    gc.collect()
    assert [r() for r in alive] == [None, None]
