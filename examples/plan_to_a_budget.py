"""Trains a Flax model within a budget of memory: remat_kit plans for it, and the loss at every step stays the same.

    python examples/plan_to_a_budget.py                     # less than a minute on a CPU
    python examples/plan_to_a_budget.py --share 0.5         # of the memory that the gradient takes without a plan
    python examples/plan_to_a_budget.py --minimize flops --save plan.json

The model is ordinary Flax and knows nothing of remat_kit. `rk.plan` compiles a few candidates for the device that JAX
uses here and takes the cheapest that keeps within the budget; `rk.apply` makes the loss over. Needs optax.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import remat_kit as rk


@dataclass(frozen=True)
class Config:
    layers: int = 4
    width: int = 96
    heads: int = 4
    length: int = 128
    batch: int = 16
    vocab: int = 64
    steps: int = 20


SMALL = Config(layers=4, width=64, heads=2, length=64, batch=16, steps=8)


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        causal = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attention")(nn.LayerNorm()(x), mask=causal)
        y = nn.Dense(4 * x.shape[-1], name="wi")(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1], name="wo")(nn.gelu(y)), None


class Transformer(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch, length, vocab]``."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        x = nn.Embed(c.vocab, c.width, name="tokens")(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (c.length, c.width))
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
        x, _ = layers(c.heads, name="layers")(x, None)
        return nn.Dense(c.vocab, name="head")(nn.LayerNorm()(x))


@dataclass(frozen=True)
class Run:
    """What one training run came to.

    Attributes:
      losses: training loss before each step, in nats.
      peak_bytes: of the whole step with its optimizer, compiled.
      step_ms: median time of a step.
    """

    losses: np.ndarray
    peak_bytes: int
    step_ms: float


@dataclass(frozen=True)
class Answer:
    """The plan, and the training without and with it."""

    plan: rk.Plan
    without: rk.Measurement
    plain: Run
    planned: Run


def batches(config: Config, seed: int) -> np.ndarray:
    """Returns sequences ``[steps, batch, length + 1]`` that count upwards, each from a random token on."""
    first = np.random.default_rng(seed).integers(0, config.vocab, (config.steps, config.batch, 1))
    return ((first + np.arange(config.length + 1)) % config.vocab).astype(np.int32)


def train(config: Config, loss: Callable[..., jax.Array], tokens: np.ndarray, seed: int) -> Run:
    """Trains one model; everything but the loss function is the same from one call to the next."""
    optimizer = optax.adamw(3e-3)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.jit(Transformer(config).init)(jax.random.key(seed), tokens[0, :, :-1])
    state = optimizer.init(params)
    step = jax.jit(step, donate_argnums=(0, 1))
    peak = rk.measure(step, params, state, tokens[0], grad=False).peak_bytes
    losses, seconds = [], []
    for batch in tokens:
        begin = time.perf_counter()
        params, state, value = step(params, state, batch)
        losses.append(float(value))
        seconds.append(time.perf_counter() - begin)
    return Run(np.array(losses), peak, 1e3 * float(np.median(seconds)))


def main(argv: list[str] | None = None) -> Answer:
    """Plans for a share of the memory that the gradient takes, trains without and with the plan, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.35, help="of the gradient's peak without a plan: the budget")
    parser.add_argument("--minimize", choices=("time", "flops"), default="time", help="what recomputing costs")
    parser.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--steps", type=int, help="steps to train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps")
    args = parser.parse_args(argv)
    config = SMALL if args.small else Config()
    config = replace(config, steps=args.steps or config.steps)
    tokens = batches(config, args.seed)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = Transformer(config).apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    # Shapes are enough to plan with.
    params = jax.eval_shape(Transformer(config).init, jax.random.key(args.seed), tokens[0, :, :-1])
    batch = jax.ShapeDtypeStruct(tokens.shape[1:], jnp.int32)
    without = rk.measure(loss, params, batch)
    budget = int(args.share * without.peak_bytes)
    print(f"Value and gradient take {without.peak_bytes / 2**20:.1f} MiB at the peak (compiled).\n")

    plan = rk.plan(loss, params, batch, budget=budget, minimize=args.minimize)
    print(plan.explain())
    if args.save:
        plan.save(args.save)

    plain = train(config, loss, tokens, args.seed)
    planned = train(config, rk.apply(loss, plan), tokens, args.seed)
    for name, run in (("without the plan", plain), ("with the plan", planned)):
        print(
            f"{name:16}  whole step {run.peak_bytes / 2**20:6.1f} MiB (compiled)  {run.step_ms:6.1f} ms  "
            f"loss {run.losses[0]:.5f} -> {run.losses[-1]:.5f}"
        )
    largest = np.abs(plain.losses - planned.losses).max()
    print(f"largest difference of the loss curves: {largest:.2g}")
    if largest > 1e-3:
        raise SystemExit("the loss curves differ")
    return Answer(plan, without, plain, planned)


if __name__ == "__main__":
    main()
