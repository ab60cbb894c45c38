"""The migration page: each of its blocks of remat_kit code runs, gives the gradients of the code without remat, and
rematerializes something."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_same_gradients, regions, residual_bytes
from programs import OLD_REMAT3

import remat_kit as rk

PAGE = (Path(__file__).parent.parent / "docs" / "migration.md").read_text()
OURS = "# remat_kit\n"
WIDTH, LAYERS = 8, 6


def blocks_of(page: str) -> dict[tuple[str, int], str]:
    """The page's blocks of our code, by the heading above and their number below it."""
    found: dict[tuple[str, int], str] = {}
    heading, count = "", 0
    for title, fence, code in re.findall(r"^#+ ([^\n]+)$|^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if title:
            heading, count = title, 0
        elif fence == "python" and code.startswith(OURS):
            found[heading, count] = code
            count += 1
    return found


BLOCKS = blocks_of(PAGE)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that a block of the page makes, the same without remat, and arguments; gradients of the first one."""

    remat: Callable[..., Any]
    plain: Callable[..., Any]
    args: tuple[Any, ...]
    regions: bool = True  # whether remat shows as JAX's own equation, and not as a loop with a derivative rule


CASES: dict[tuple[str, int], Callable[[str], Case]] = {}


def case(heading: str, *numbers: int) -> Callable[[Callable[[str], Case]], Callable[[str], Case]]:
    """What surrounds the blocks with these numbers below a heading; the first one if no number is given."""

    def register(make: Callable[[str], Case]) -> Callable[[str], Case]:
        CASES.update({(heading, n): make for n in numbers or (0,)})
        return make

    return register


def run(code: str, **names: Any) -> dict[str, Any]:
    """Executes a block of the page in a namespace of its own, and returns it."""
    namespace = {"rk": rk, "jax": jax, **names}
    exec(compile(code, "docs/migration.md", "exec"), namespace)
    return namespace


# The code around the blocks ---------------------------------------------------------------------------


def data() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (64, WIDTH))


def layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jnp.tanh(rk.checkpoint_name(jnp.sin(x @ params["up"]), "attn")) @ params["down"]


def layer_params(*stack: int) -> dict[str, jax.Array]:
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (*stack, WIDTH, 2 * WIDTH)) / WIDTH,
        "down": jax.random.normal(down, (*stack, 2 * WIDTH, WIDTH)) / WIDTH,
    }


def step(x: jax.Array, params: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    return layer(params, x), None


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(2 * WIDTH)(x)))


class Model(nn.Module):
    def setup(self) -> None:
        self.layers = [Layer() for _ in range(LAYERS)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for one in self.layers:
            x = one(x)
        return x


def of_class(cls: Any) -> Callable[..., Any]:
    """The loss of a Linen model, which is a class."""
    return lambda variables, x: jnp.mean(cls().apply(variables, x) ** 2)


def variables(cls: Any) -> Any:
    return cls().init(jax.random.key(0), data())


def nnx_layer(rngs: nnx.Rngs) -> nnx.Module:
    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(jnp.tanh(self.up(x)))

    return Layer()


def of_module(build: Callable[[], Any], call: Callable[[Any, jax.Array], jax.Array]) -> tuple[Callable[..., Any], Any]:
    """The loss of an NNX module as a function of its parameters, and these."""
    graph, state = nnx.split(build())
    return lambda state, x: jnp.mean(call(nnx.merge(graph, state), x) ** 2), state


# What surrounds each block ------------------------------------------------------------------------------


@case("checkpoint")
@case("Selective checkpointing", 0, 1)
@case("MLX")
@case("JAX and Flax")
def one_layer(code: str) -> Case:
    def remat(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(run(code, layer=layer, params=params, x=x)["y"] ** 2)

    return Case(remat, lambda params, x: jnp.mean(layer(params, x) ** 2), (layer_params(), data()))


@case("TensorFlow")
def a_function(code: str) -> Case:
    def f(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(layer(params, x) ** 2)

    return Case(run(code, f=f)["f"], f, (layer_params(), data()))


@case("checkpoint_sequential")
def functions_in_sequence(code: str) -> Case:
    def layers(params: Any) -> list[Callable[..., Any]]:
        return [functools.partial(layer, jax.tree.map(lambda a, i=i: a[i], params)) for i in range(LAYERS)]

    def plain(params: Any, x: jax.Array) -> jax.Array:
        for f in layers(params):
            x = f(x)
        return jnp.mean(x**2)

    def remat(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(run(code, layers=layers(params), x=x)["y"] ** 2)

    return Case(remat, plain, (layer_params(LAYERS), data()))


@case("Haliax", 0, 1)
@case("Equinox and Diffrax", 3)
def a_scan(code: str) -> Case:
    def remat(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(run(code, step=step, params=params, x=x)["y"] ** 2)

    def plain(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(step, x, params)[0] ** 2)

    return Case(remat, plain, (layer_params(LAYERS), data()), regions="binomial" not in code)


@case("Equinox and Diffrax", 2)
def a_while_loop(code: str) -> Case:
    def body(carry: tuple[jax.Array, Any, jax.Array]) -> tuple[jax.Array, Any, jax.Array]:
        n, params, x = carry
        return n + 1, params, layer(params, x)

    def cond(carry: tuple[jax.Array, Any, jax.Array]) -> jax.Array:
        return carry[0] < 20

    def plain(params: Any, x: jax.Array) -> jax.Array:
        for _ in range(20):
            x = layer(params, x)
        return jnp.mean(x**2)

    def remat(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(run(code, cond=cond, body=body, x=(0, params, x))["y"][2] ** 2)

    return Case(remat, plain, (layer_params(), data()), regions=False)


@case("A memory budget")
def a_budget(code: str) -> Case:
    loss, args = rk.zoo.gpt(layers=4, batch=2, length=16, width=16, heads=2, vocab=32, dtype="float32", abstract=False)
    without = rk.plan(loss, *args, budget="1GiB", target=None).predicted.peak_bytes
    given = 'budget="14GiB", target="tpu:v5e"'
    assert given in code
    smaller = code.replace(given, f"budget={int(0.8 * without)}, target=None")
    return Case(run(smaller, loss=loss, params=args[0], x=args[1])["loss"], loss, args)


@case("Hugging Face", 0)
def layers_of_an_nnx_model(code: str) -> Case:
    def build() -> Any:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(*(nnx_layer(rngs) for _ in range(4)))

    plain, state = of_module(build, lambda model, x: model(x))
    remat, _ = of_module(lambda: run(code, model=build())["model"], lambda model, x: model(x))
    return Case(remat, plain, (state, data()))


@case("Hugging Face", 1)
def layers_of_a_linen_model(code: str) -> Case:
    return Case(of_class(run(code, Model=Model)["Model"]), of_class(Model), (variables(Model), data()))


@case("Hugging Face", 2)
@case("Keras")
def a_linen_loss(code: str) -> Case:
    loss = of_class(Model)
    return Case(run(code, loss=loss)["loss"], loss, (variables(Model), data()))


@case("MLX", 1)
@case("JAX and Flax", 2)
def an_nnx_layer(code: str) -> Case:
    plain, state = of_module(lambda: nnx_layer(nnx.Rngs(0)), lambda module, x: module(x))
    graph, _ = nnx.split(nnx_layer(nnx.Rngs(0)))

    def remat(state: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(run(code, layer=nnx.merge(graph, state), x=x)["y"] ** 2)

    return Case(remat, plain, (state, data()))


@case("Equinox and Diffrax", 0, 1)
def an_equinox_module(code: str) -> Case:
    eqx = pytest.importorskip("equinox", exc_type=ImportError)
    keys = jax.random.split(jax.random.key(0), 3)
    mlps = [eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 2, activation=jnp.tanh, key=key) for key in keys]
    arrays, rest = eqx.partition(eqx.nn.Sequential(mlps), eqx.is_array)

    def plain(arrays: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(eqx.combine(arrays, rest))(x) ** 2)

    def remat(arrays: Any, x: jax.Array) -> jax.Array:
        module = eqx.combine(arrays, rest)
        if "rk.remat(layer)" in code:
            return jnp.mean(run(code, layer=jax.vmap(module), x=x)["y"] ** 2)
        return run(code, loss=lambda module, x: jnp.mean(jax.vmap(module)(x) ** 2))["loss"](module, x)

    return Case(remat, plain, (arrays, data()))


@case("MaxText", 0, 1)
def a_language_model(code: str) -> Case:
    loss, args = rk.zoo.gpt(layers=2, batch=2, length=8, width=16, heads=2, vocab=32, dtype="float32", abstract=False)
    return Case(run(code, loss=loss)["loss"], loss, args)


@case("JAX and Flax", 1)
def linen_layers(code: str) -> Case:
    made = run(code, Layer=Layer)

    class Both(nn.Module):
        layer: Any
        stack: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.stack(name="stack")(self.layer(name="layer")(x))

    def built(layer: Any, stack: Any) -> Callable[[], Any]:
        return functools.partial(Both, layer, stack)

    remat = built(made["RematLayer"], made["Stack"])
    plain = built(Layer, rk.linen.remat_scan(Layer, lengths=(2, 3), policy="none"))
    return Case(of_class(remat), of_class(plain), (variables(plain), data()))


# The tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heading, number", BLOCKS)
def test_what_the_page_says_computes_the_same_gradients_and_rematerializes(heading, number):
    code = BLOCKS[heading, number]
    if OLD_REMAT3 and "offload" in code:
        pytest.skip("jax_remat3 of JAX 0.10.2 ignores offloading, and remat_kit refuses it")
    case = CASES[heading, number](code)
    assert_same_gradients(case.remat, case.plain, *case.args)
    assert residual_bytes(case.remat, *case.args) < residual_bytes(case.plain, *case.args)
    if case.regions:
        assert regions(case.plain, *case.args) == 0 < regions(case.remat, *case.args)


def test_every_block_has_a_case_and_every_case_a_block():
    assert BLOCKS.keys() == CASES.keys()


def test_presets_named_on_the_page_exist():
    for name in re.findall(r'policy="(\w+)"|rk\.apply\(loss, "(\w+)"\)', PAGE):
        assert rk.policy(next(filter(None, name)))


@pytest.mark.parametrize("text", re.findall(r'"((?:save|offload|recompute) [^"]*)"', PAGE))
def test_policies_on_the_page_are_read(text):
    assert str(rk.policy(text.replace("...", "a")))


@pytest.mark.parametrize("name", ["scan", "while_loop", "sequential"])
def test_options_of_loops_named_on_the_page_exist(name):
    for call in re.findall(rf"rk\.{name}\(([^()]*)\)", PAGE):
        for option in re.findall(r"\b(\w+)=", call):
            assert option in inspect.signature(getattr(rk, name)).parameters
