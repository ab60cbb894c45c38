"""Deep programs: many layers, long chains, many levels of nesting."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layers(count, width=32):
    """A transformer of plain functions in a Python loop: 36 equations for each layer."""
    sizes = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "o": (1, 1), "up": (1, 4), "down": (4, 1)}

    def layer(p, x):
        h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        attention = jax.nn.softmax((h @ p["q"]) @ (h @ p["k"]).swapaxes(-1, -2))
        x = x + attention @ (h @ p["v"]) @ p["o"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss(params, x):
        for p in params:
            x = layer(p, x)
        return (x**2).mean()

    params = [{k: array(a * width, b * width) for k, (a, b) in sizes.items()} for _ in range(count)]
    return loss, (params, array(4, 16, width))


def chain(count):
    """Elementwise operations one behind the other, two equations for each: no blocks, no matrix products."""

    def loss(w, x):
        x = w * x
        for _ in range(count):
            x = jnp.sin(x) * 1.1
        return x.sum()

    return loss, (array(8), array(8))


def nested(level, depth):
    """A function wrapped in a level again and again, innermost a sine."""
    f = jnp.sin
    for _ in range(depth):
        f = level(f)
    return (lambda w, x: f(x * w).sum()), (array(4), array(4))


def in_jit(f):
    return jax.jit(lambda x: jnp.sin(f(x)))


def in_scan(f):
    return lambda x: jax.lax.scan(lambda c, _: (jnp.sin(f(c)), None), x, None, length=2)[0]


def in_cond(f):
    return lambda x: jax.lax.cond(x[0] > 0, lambda x: jnp.sin(f(x)), lambda x: x, x)


def in_checkpoint(f):
    return jax.checkpoint(lambda x: jnp.sin(f(x)))


def tree(depth):
    """Parameters in dictionaries in dictionaries, two arrays on each level."""
    params = {"w": array(4)}
    for _ in range(depth):
        params = {"inner": params, "w": array(4)}

    def loss(params, x):
        while "inner" in params:
            x = jnp.sin(x) * params["w"]
            params = params["inner"]
        return (x * params["w"]).sum()

    return loss, (params, array(4))
