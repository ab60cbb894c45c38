"""Outcomes of public reports on Flax modules under remat: parameters, flags, state, masks, sown values, stacks."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from case import SAME, case, equal, same, told
from flax import nnx
from helpers import residual_bytes

import remat_kit as rk

X = jnp.sin(jnp.arange(32.0)).reshape(4, 8)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Layer(nn.Module):
    """Everything that reports on Linen are about."""

    @nn.compact
    def __call__(self, x, scale=None, *, train: bool = False):
        x = jnp.sin(nn.Dense(8)(x))
        x = nn.BatchNorm(momentum=0.9)(x, use_running_average=not train)
        x = nn.Dropout(0.5)(x, deterministic=not train)
        self.sow("losses", "aux", jnp.mean(x**2))
        return x if scale is None else x * scale


class Stack(nn.Module):
    layer: Any

    @nn.compact
    def __call__(self, x, train: bool):
        for _ in range(2):
            x = self.layer()(x, train=train)
        return x


REMAT = rk.linen.remat(Layer)


@functools.cache
def variables() -> dict[str, Any]:
    """Parameters and statistics of the plain model."""
    made = Stack(Layer).init(KEYS, X, True)
    return {"params": made["params"], "batch_stats": made["batch_stats"]}


def step(layer, params=None, mutable=("batch_stats", "losses")):
    """The loss and what the model updates, in training."""
    given = {**variables(), "params": variables()["params"] if params is None else params}
    y, updates = Stack(layer).apply(given, X, True, rngs=KEYS, mutable=list(mutable))
    return jnp.sum(y**2), updates


# Linen ---------------------------------------------------------------------------------------------------------------


@case(
    "static_argnums of a module counts self",
    "google/flax#3946",
    "google/flax#3630",
    right=r"number 1 is the flag: by position and by keyword as without remat; number 0: refused: .*'x'.*array.*; "
    r"number 2: refused: .*not self.*",
)
def static_positions() -> str:
    class Flagged(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))

    by_number = rk.linen.remat(static_argnums=1)(Flagged)()
    made = by_number.init(KEYS, X, True)
    want = Flagged().apply(made, X, False)
    calls = {
        "by position": lambda: by_number.apply(made, X, False),
        "by keyword": lambda: by_number.apply(made, X, train=False),
    }
    right = " and ".join(equal(name, want, call()) for name, call in calls.items())
    array = told(lambda: rk.linen.remat(static_argnums=0)(Flagged)().apply(made, X, False))
    beyond = told(lambda: rk.linen.remat(static_argnums=2)(Flagged))
    return f"number 1 is the flag: {right} as without remat; number 0: {array}; number 2: {beyond}"


@case(
    "nn.remat renames parameters",
    "huggingface/transformers#17399",
    right=r"Layer_0, Layer_1; same initial values; weights from without remat: same outputs",
)
def parameter_names() -> str:
    plain, remat = (Stack(layer).init(KEYS, X, True)["params"] for layer in (Layer, REMAT))
    outputs = [Stack(layer).apply(variables(), X, False) for layer in (Layer, REMAT)]
    return (
        f"{', '.join(remat)}; {equal('same initial values', plain, remat)}; weights from without remat: "
        f"{equal('same outputs', *outputs)}"
    )


@case(
    "keyword flags of a rematerialized module become tracers",
    "google/flax#1455",
    "google/flax#2389",
    "huggingface/transformers#22897",
    right=rf"train=True {SAME}; train=False {SAME}; scale= is differentiated: {SAME}",
)
def keyword_arguments() -> str:
    made = {k: v for k, v in Layer().init(KEYS, X).items() if k != "losses"}

    def loss(scale, layer, train):
        return jnp.sum(layer().apply(made, X, scale, train=train, rngs=KEYS, mutable=["batch_stats"])[0] ** 2)

    def by_keyword(scale, layer):
        return jnp.sum(layer().apply(made, X, scale=scale, train=False) ** 2)

    flags = [
        f"train={train} {same(lambda s, t=train: loss(s, Layer, t), lambda s, t=train: loss(s, REMAT, t), 2.0)}"
        for train in (True, False)
    ]
    scale = same(lambda s: by_keyword(s, Layer), lambda s: by_keyword(s, REMAT), 2.0)
    return f"{'; '.join(flags)}; scale= is differentiated: {scale}"


@case(
    "running statistics may be updated twice or lost",
    "google/flax#1455",
    "google/flax#3602",
    right=r"new statistics: same, by the formula: same; gradients and statistics under jit: same; not mutable: "
    r"same outputs",
)
def batch_statistics() -> str:
    (_, plain), (_, remat) = step(Layer), step(REMAT)
    x = jnp.sin(X @ variables()["params"]["Layer_0"]["Dense_0"]["kernel"])  # the bias is zero at first
    once = 0.9 * 0.0 + 0.1 * jnp.mean(x, 0)
    mean = remat["batch_stats"]["Layer_0"]["BatchNorm_0"]["mean"]
    both = [
        jax.jit(jax.value_and_grad(functools.partial(step, layer), has_aux=True))(variables()["params"])
        for layer in (Layer, REMAT)
    ]
    read = [Stack(layer).apply(variables(), X, False) for layer in (Layer, REMAT)]
    return (
        f"new statistics: {equal('same', plain['batch_stats'], remat['batch_stats'])}, by the formula: "
        f"{equal('same', once, mean)}; gradients and statistics under jit: {equal('same', *both)}; not mutable: "
        f"{equal('same outputs', *read)}"
    )


@case(
    "the dropout mask of the replay, or with remat, may be another one",
    "huggingface/transformers#17843",
    "google/flax#4971",
    right=f"mask as without remat, half dropped; masks written out: {SAME}",
)
def dropout_masks() -> str:
    class Drop(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(jnp.sin(jnp.sin(x)))

    class Two(nn.Module):
        layer: Any

        @nn.compact
        def __call__(self, x):
            return self.layer()(self.layer()(x))

    def loss(x, layer):
        y: Any = Two(layer).apply({}, x, rngs=KEYS)
        return jnp.sum(y**2)

    start = jnp.full_like(X, 0.7)  # no layer makes a zero of it: what is zero was dropped
    _, seen = Two(Drop).apply({}, start, rngs=KEYS, capture_intermediates=True, mutable=["intermediates"])
    masks = [seen["intermediates"][f"Drop_{i}"]["__call__"][0] != 0 for i in range(2)]

    def written_out(x):
        return jnp.sum(functools.reduce(lambda x, kept: jnp.where(kept, 2 * jnp.sin(jnp.sin(x)), 0), masks, x) ** 2)

    plain, remat = (Two(layer).apply({}, start, rngs=KEYS) for layer in (Drop, rk.linen.remat(Drop)))
    dropped = jnp.mean(~masks[0])
    return (
        f"{equal('mask as without remat', plain, remat)}, {'half' if 0.2 < dropped < 0.8 else dropped} dropped; masks "
        f"written out: {same(written_out, lambda x: loss(x, rk.linen.remat(Drop)), X)}"
    )


@case(
    "sown losses move, vanish or count twice",
    "AI-Hypercomputer/maxtext#3664",
    "NVIDIA/Megatron-LM#1330",
    right=r"sown once at Layer_0/aux, Layer_1/aux, same as without remat; gradient through them: same; nnx: sown "
    r"1 time, same",
)
def sown_values() -> str:
    def with_losses(params, layer):
        return sum(jax.tree.leaves(step(layer, params)[1]["losses"]))

    plain, remat = (step(layer)[1]["losses"] for layer in (Layer, REMAT))
    places = [f"{layer}/{name}" for layer, sown in remat.items() for name, values in sown.items() if len(values) == 1]
    through = [jax.grad(with_losses)(variables()["params"], layer) for layer in (Layer, REMAT)]
    models = [NnxLayer(nnx.Rngs(0)), rk.nnx.remat(NnxLayer)(nnx.Rngs(0))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NNX prefers nnx.capture now
        for model in models:
            nnx.grad(lambda m: jnp.sum(m(X)))(model)
    sown = [jax.tree.leaves(nnx.state(model, nnx.Intermediate)) for model in models]
    return (
        f"sown once at {', '.join(places)}, {equal('same as without remat', plain, remat)}; gradient through them: "
        f"{equal('same', *through)}; nnx: sown {len(sown[1])} time, {equal('same', *sown)}"
    )


@case(
    "remat_scan takes one argument, and with one level does no remat",
    "google/flax#3267",
    "google/flax#2837",
    right=rf"one level keeps 512 bytes, two 256, none \d{{4,}}, jax\.vjp as much; with an extra argument {SAME} as "
    r"layer by layer",
)
def stacks() -> str:
    class Shifted(nn.Module):
        @nn.compact
        def __call__(self, x, shift):
            return jnp.sin(nn.Dense(8, name="d")(jnp.sin(x))) + shift

    def loss(variables, **options):
        return jnp.sum(rk.linen.remat_scan(Shifted, **options)().apply(variables, X, 0.5))

    def by_hand(variables):
        layers = [jax.tree.map(lambda p, i=i: p[i], variables) for i in range(4)]
        y: Any = functools.reduce(lambda x, v: Shifted().apply(v, x, 0.5), layers, X)
        return jnp.sum(y)

    one = rk.linen.remat_scan(Shifted, length=4)().init(KEYS, X, 0.5)
    two = jax.tree.map(lambda p: p.reshape(2, 2, *p.shape[1:]), one)
    rows = [
        (one, {"length": 4}),
        (two, {"lengths": (2, 2)}),
        (one, {"length": 4, "policy": "none"}),
    ]
    sizes = []
    for variables, options in rows:
        fun = functools.partial(loss, **options)
        ours, jaxs = rk.residuals(fun, variables).total_bytes, residual_bytes(fun, variables)
        sizes.append(f"{ours}" if ours == jaxs else f"{ours} (jax.vjp {jaxs})")
    return (
        f"one level keeps {sizes[0]} bytes, two {sizes[1]}, none {sizes[2]}, jax.vjp as much; with an extra argument "
        f"{same(by_hand, functools.partial(loss, length=4), one)} as layer by layer"
    )


# NNX -----------------------------------------------------------------------------------------------------------------


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        h = jnp.sin(self.dense(x))
        self.sow(nnx.Intermediate, "aux", jnp.mean(h**2))
        return h


@case(
    "modules under nnx.remat fail in a decoding loop",
    "google/flax#4819",
    right=rf"while_loop: same outputs; fori_loop: same outputs; gradient: {SAME}",
)
def decoding_loops() -> str:
    class Model(nnx.Module):
        def __init__(self, layer, rngs):
            self.a, self.b = layer(8, 8, rngs=rngs), layer(8, 8, rngs=rngs)

        def __call__(self, x):
            return jnp.sin(self.b(jnp.sin(self.a(x))))

    plain, remat = Model(nnx.Linear, nnx.Rngs(0)), Model(rk.nnx.remat(nnx.Linear), nnx.Rngs(0))
    want = functools.reduce(lambda x, _: plain(x), range(4), X)
    whiled = nnx.while_loop(lambda c: c[2] < 4, lambda c: (c[0], c[0](c[1]), c[2] + 1), (remat, X, 0))[1]
    counted = nnx.fori_loop(0, 4, lambda _, c: (c[0], c[0](c[1])), (remat, X))[1]

    def loss(model):
        graph, params = nnx.split(model)
        return lambda params: jnp.sum(nnx.merge(graph, params)(X)), params

    (f, params), (g, _) = loss(plain), loss(remat)
    gradients = [jax.value_and_grad(h)(params) for h in (f, g)]
    return (
        f"while_loop: {equal('same outputs', want, whiled)}; fori_loop: {equal('same outputs', want, counted)}; "
        f"gradient: {equal(SAME, *gradients)}"
    )
