"""What remat_kit adds to the time of tracing, beside plain JAX and remat by hand. Nothing is compiled or run.

    python benchmarks/rewrite_cost.py                  # prints a Markdown table
    python benchmarks/rewrite_cost.py --layers 24 --repeats 9

Each figure is the median CPU time of fresh runs, with JAX's caches and remat_kit's cleared before each. The ways are
measured in turn, round after round, so that a machine that is busy for a while slows all of them down.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import gc
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

import remat_kit as rk
from remat_kit import _rewrite

POLICY = "dots"  # JAX has it
NAMES = "save op=dot_general; save name=mlpwi; recompute rest"  # JAX does not: values are named one by one
Wrap = Callable[[Any], Any]


def plain(layer: Any) -> Any:
    return layer


class Layer(nn.Module):
    """A transformer layer, in the form of a scan body."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(nn.LayerNorm()(x))
        y = rk.checkpoint_name(nn.Dense(4 * x.shape[-1], name="wi")(nn.LayerNorm()(x)), "mlpwi")
        return x + nn.Dense(x.shape[-1], name="wo")(nn.gelu(y)), None


class Stack(nn.Module):
    layers: int
    scanned: bool
    wrap: Wrap = plain

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = self.wrap(Layer)
        if self.scanned:
            layer = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            return layer(name="layers")(x, None)[0]
        for i in range(self.layers):
            x, _ = layer(name=f"layers_{i}")(x, None)
        return x


def linen(layers: int, scanned: bool) -> Callable[[Wrap], tuple[Any, Any]]:
    """A Flax model, its layers unrolled or scanned: from a wrapper of the layer class to ``(loss, args)``."""
    x = jax.ShapeDtypeStruct((8, 64, 128), jnp.float32)
    params = jax.eval_shape(Stack(layers, scanned).init, jax.random.key(0), x)

    def build(wrap: Wrap) -> tuple[Any, Any]:
        model = Stack(layers, scanned, wrap)
        return (lambda params, x: (model.apply(params, x) ** 2).mean()), (params, x)

    return build


def functions(layers: int) -> Callable[[Wrap], tuple[Any, Any]]:
    """The same layer as a plain function of arrays, called in a Python loop."""
    x = jax.ShapeDtypeStruct((8, 64, 128), jnp.float32)
    width, shapes = 128, {"qkv": (3, 128, 4, 32), "out": (4, 32, 128), "wi": (128, 512), "wo": (512, 128)}
    params = [{k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()} for _ in range(layers)]

    def norm(x: jax.Array) -> jax.Array:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def build(wrap: Wrap) -> tuple[Any, Any]:
        def layer(p: Any, x: jax.Array) -> jax.Array:
            q, k, v = jnp.einsum("bld,cdhf->cblhf", norm(x), p["qkv"])
            weights = jax.nn.softmax(jnp.einsum("blhf,bmhf->bhlm", q, k) / (width // 4) ** 0.5)
            x = x + jnp.einsum("bhlm,bmhf,hfd->bld", weights, v, p["out"])
            return x + jax.nn.gelu(rk.checkpoint_name(norm(x) @ p["wi"], "mlpwi")) @ p["wo"]

        wrapped = wrap(layer)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            for p in params:
                x = wrapped(p, x)
            return (x**2).mean()

        return loss, (params, x)

    return build


@dataclass(frozen=True)
class Way:
    """One row: how the layer is wrapped, and what is done with the loss (timed)."""

    title: str
    wrap: dict[str, Wrap]
    run: Callable[[Any, Any], Any]


def grad(loss: Any, args: Any) -> Any:
    return jax.make_jaxpr(jax.grad(loss))(*args)


def applied(policy: Any) -> Callable[[Any, Any], Any]:
    return lambda loss, args: grad(rk.apply(loss, policy), args)


def ways() -> list[Way]:
    native = jax.checkpoint_policies.dots_saveable
    none = {"linen": plain, "functions": lambda f: rk.remat(f, policy="none", block="layer")}
    bare = {"linen": plain, "functions": plain}
    hand = {
        "linen": lambda m: nn.remat(m, policy=native, prevent_cse=True),
        "functions": lambda f: jax.checkpoint(f, policy=native),
    }

    def ours(policy: str) -> dict[str, Wrap]:
        return {
            "linen": lambda m: rk.linen.remat(m, policy=policy),
            "functions": lambda f: rk.remat(f, policy=policy),
        }

    return [
        Way("plain", bare, grad),
        Way("`jax.checkpoint` / `nn.remat` by hand", hand, grad),
        Way("`rk.remat` / `rk.linen.remat`, policy of JAX", ours(POLICY), grad),
        Way("`rk.remat` / `rk.linen.remat`, by names", ours(NAMES), grad),
        Way("`rk.apply`, policy of JAX", none, applied(POLICY)),
        Way("`rk.apply`, by names", none, applied(NAMES)),
        Way("`rk.apply`, policy of JAX, blocks by path", none, applied({"layer*": POLICY})),
        Way("`rk.residuals`, as written", none, lambda loss, args: rk.residuals(loss, *args)),
        Way("`rk.residuals`, policy of JAX", none, lambda loss, args: rk.residuals(loss, *args, policy=POLICY)),
    ]


def seconds(build: Any, kind: str, way: Way) -> float:
    """Returns the CPU seconds of one fresh run."""
    loss, args = build(way.wrap[kind])
    jax.clear_caches()
    _rewrite._functions.clear()  # or a second run would find the first one's block functions
    gc.collect()
    begin = time.process_time()
    way.run(loss, args)
    return time.process_time() - begin


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", metavar="MODEL:ROW", help="cProfile of one cell instead, for instance 0:4")
    args = parser.parse_args(argv)
    models = [
        (f"Flax Linen, {args.layers} layers unrolled", "linen", linen(args.layers, False)),
        (f"Flax Linen, {args.layers} layers scanned", "linen", linen(args.layers, True)),
        (f"functions, {args.layers} layers unrolled", "functions", functions(args.layers)),
    ]
    rows = ways()
    if args.profile:
        model, row = (int(n) for n in args.profile.split(":"))
        seconds(models[model][2], models[model][1], rows[row])
        profile = cProfile.Profile()
        profile.runcall(seconds, models[model][2], models[model][1], rows[row])
        pstats.Stats(profile).sort_stats("cumtime").print_stats(60)
        return

    times: dict[tuple[int, int], list[float]] = {}
    for i in range(args.repeats + 1):
        for m, (_, kind, build) in enumerate(models):
            for w, way in enumerate(rows):
                taken = seconds(build, kind, way)
                if i:  # the first round warms Python up
                    times.setdefault((m, w), []).append(taken)

    print(
        f"{datetime.date.today()}, Python {platform.python_version()}, JAX {jax.__version__}, Flax {flax.__version__},"
        f" remat_kit {rk.__version__}, {'jax_remat3' if _remat3() else 'classic remat'},"
        f" {os.cpu_count()} CPU cores; CPU time, median of {args.repeats} runs.\n"
    )
    print("| | " + " | ".join(title for title, _, _ in models) + " |")
    print("|---|" + "---|" * len(models))
    for w, way in enumerate(rows):
        cells = []
        for m in range(len(models)):
            value, base = statistics.median(times[m, w]), statistics.median(times[m, 0])
            cells.append(f"{value / base:.1f} x" if w else f"1 ({value:.2f} s)")
        print(f"| {way.title} | " + " | ".join(cells) + " |")


def _remat3() -> bool:
    return bool(getattr(jax.config, "jax_remat3", False))


if __name__ == "__main__":
    main()
