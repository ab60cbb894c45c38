"""Small programs and plans for them, made once for all tests that look at plans."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import remat_kit as rk
from remat_kit._plan.planner import Session

OLD_REMAT3 = bool(jax.config.jax_remat3) and jax.__version_info__ < (0, 11)  # ignores offloading
TRANSFORMER = {"layers": 2, "batch": 2, "width": 16, "heads": 2, "mlp_ratio": 2}
MODELS = {
    "gpt": {**TRANSFORMER, "length": 6, "vocab": 50, "dropout": 0.1, "dtype": "float32"},
    "llama": {
        **{"layers": 2, "batch": 2, "length": 6, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24, "vocab": 50},
        "dtype": "float32",
    },
    "vit": {**TRANSFORMER, "image": 8, "patch": 4, "classes": 10, "dtype": "float32"},
    "resnet": {"stages": (1, 1), "batch": 2, "image": 8, "width": 4, "classes": 10, "dtype": "float32"},
    "moe": {**TRANSFORMER, "length": 6, "vocab": 50, "experts": 4, "dtype": "float32"},
    "rnn": {"layers": 2, "batch": 2, "length": 6, "width": 16, "vocab": 50, "dtype": "float32"},
}


def stack_loss(ws, x):
    """Scanned layers with names, quick to trace."""

    def layer(x, w):
        h = checkpoint_name(jax.nn.gelu(x @ w["in"]), "hidden")
        return x + checkpoint_name(jnp.sin(h @ w["out"]), "out"), None

    return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)


def stack(batch=16, layers=4):
    """The loss above with its arguments."""
    keys = jax.random.split(jax.random.key(0), 3)
    ws = {"in": jax.random.normal(keys[0], (layers, 16, 32)), "out": jax.random.normal(keys[1], (layers, 32, 16))}
    return stack_loss, (ws, jax.random.normal(keys[2], (batch, 16)))


@functools.cache
def model(name):
    return stack() if name == "stack" else rk.zoo.build(name, **MODELS[name], abstract=False)


@functools.cache
def session(name, minimize="time", names_only=False):
    fn, args = model(name)
    return Session.open(
        fn, args, {}, target=None, actions=("save", "recompute"), minimize=minimize, names_only=names_only,
        split=False, argnums=0, has_aux=False, keep_barriers=False, compiler_options=None, timeout=60, progress=None,
    )  # fmt: skip


def predicted(name, budget, **options):
    return session(name, **options).plan(budget, 0)


@functools.cache
def ends(name, **options):
    """The smallest peak of a model's plans, and the one of everything kept."""
    return tuple(predicted(name, b, **options).peak_bytes for b in (1, "1GiB"))


def between(name, share, **options):
    low, high = ends(name, **options)
    return predicted(name, int(low + (high - low) * share), **options)


def fresh(budget, **options):
    fn, args = model("stack")
    return rk.plan(fn, *args, budget=budget, target=None, **options)


@functools.cache
def plan():
    low, high = ends("stack")
    return fresh(int(low + (high - low) * 0.4))


def gradients(fn, args, **options):
    return jax.jit(jax.value_and_grad(fn, **options))(*args)


def assert_same(wanted, got, rtol=2e-5, atol=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), wanted, got)
