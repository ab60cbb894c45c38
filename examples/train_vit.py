"""Trains a vision transformer on scikit-learn's handwritten digits, without and with remat_kit.

    python examples/train_vit.py                       # about a minute on a CPU
    python examples/train_vit.py --small               # seconds
    python examples/train_vit.py --policy full

The model is ordinary Flax and knows nothing of remat_kit: `rk.apply` makes the loss function over, block by block.
Parameters and the loss at every step stay the same. Needs optax and scikit-learn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import remat_kit as rk


@dataclass(frozen=True)
class Config:
    layers: int = 6
    width: int = 64
    heads: int = 4
    batch: int = 64
    steps: int = 300
    learning_rate: float = 1e-3


SMALL = Config(layers=2, width=32, heads=2, batch=64, steps=100, learning_rate=1e-2)


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attention")(nn.LayerNorm()(x))
        y = nn.Dense(4 * x.shape[-1], name="wi")(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1], name="wo")(nn.gelu(y))


class ViT(nn.Module):
    """Images ``[batch, 8, 8]`` to logits ``[batch, 10]``, by way of 16 patches of 2 x 2 pixels."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        c = self.config
        x = nn.Conv(c.width, (2, 2), strides=2, name="patches")(images[..., None])
        x = x.reshape(x.shape[0], 16, c.width)
        x = x + self.param("positions", nn.initializers.normal(0.5), (16, c.width))
        for i in range(c.layers):
            x = Block(c.heads, name=f"layers_{i}")(x)
        return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(1))


@dataclass(frozen=True)
class Run:
    """What one training run came to.

    Attributes:
      losses: training loss before each step, in nats.
      val_accuracy, test_accuracy: shares of images after the last step; test images play no part in any choice.
      residual_bytes: what the backward pass keeps for one batch; predicted by remat_kit from the program.
      temp_bytes, total_bytes: compiled, from XLA: temporaries of a training step, and these with its
        arguments and outputs less the outputs that overwrite arguments.
      step_ms: median time of a step.
    """

    losses: np.ndarray
    val_accuracy: float
    test_accuracy: float
    residual_bytes: int
    temp_bytes: int
    total_bytes: int
    step_ms: float


@dataclass(frozen=True)
class Digits:
    """Images ``[n, 8, 8]`` between -1 and 1 and their labels, in three parts."""

    train: tuple[np.ndarray, np.ndarray]
    val: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    @classmethod
    def load(cls, seed: int) -> Digits:
        data = load_digits()
        images, labels = (data.images / 8 - 1).astype(np.float32), data.target.astype(np.int32)
        x, x_rest, y, y_rest = train_test_split(images, labels, test_size=0.3, random_state=seed, stratify=labels)
        half = {"test_size": 0.5, "random_state": seed, "stratify": y_rest}
        x_val, x_test, y_val, y_test = train_test_split(x_rest, y_rest, **half)
        return cls((x, y), (x_val, y_val), (x_test, y_test))

    def batches(self, config: Config, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields training batches, drawn with replacement."""
        images, labels = self.train
        random = np.random.default_rng(seed)
        for _ in range(config.steps):
            i = random.integers(0, len(images), config.batch)
            yield images[i], labels[i]


@partial(jax.jit, static_argnums=0)
def initialize(config: Config, key: jax.Array) -> Any:
    return ViT(config).init(key, jnp.zeros((1, 8, 8)))


@partial(jax.jit, static_argnums=0)
def predict(config: Config, params: Any, images: jax.Array) -> jax.Array:
    return ViT(config).apply(params, images).argmax(-1)


def train(config: Config, digits: Digits, policy: str | None, seed: int) -> Run:
    """Trains one model; everything but the policy is the same from one call to the next."""

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = ViT(config).apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    trained = loss if policy is None else rk.apply(loss, policy)  # all that remat_kit adds

    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, config.steps // 10, config.steps, peak / 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(trained)(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def accuracy(params: Any, part: tuple[np.ndarray, np.ndarray]) -> float:
        return float((np.asarray(predict(config, params, part[0])) == part[1]).mean())

    params = initialize(config, jax.random.key(seed))
    state = optimizer.init(params)
    first = next(digits.batches(config, seed))

    print(f"\n--- {'without remat_kit' if policy is None else f'with policy {policy}'}\n")
    report = rk.residuals(loss, params, *first, policy=policy)
    report.print(top=8)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, *first).compile()
    m = compiled.memory_analysis()

    losses, seconds = [], []
    for i, batch in enumerate(digits.batches(config, seed)):
        begin = time.perf_counter()
        params, state, value = compiled(params, state, *batch)
        losses.append(float(value))
        seconds.append(time.perf_counter() - begin)
        if i % (config.steps // 5) == 0 or i == config.steps - 1:
            print(f"step {i:4}  loss {losses[-1]:.4f}  validation accuracy {accuracy(params, digits.val):.1%}")

    return Run(
        losses=np.array(losses),
        val_accuracy=accuracy(params, digits.val),
        test_accuracy=accuracy(params, digits.test),
        residual_bytes=report.total_bytes,
        temp_bytes=m.temp_size_in_bytes,
        total_bytes=m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes,
        step_ms=1e3 * float(np.median(seconds)),
    )


def main(argv: list[str] | None = None) -> tuple[Run, Run]:
    """Trains without and with remat, checks that both are the same training, and returns both runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="dots", help="of the second run; `remat-kit policies` lists them")
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps, for a quick look")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = SMALL if args.small else Config()
    if args.steps is not None:
        config = replace(config, steps=max(10, args.steps))

    digits = Digits.load(args.seed)
    plain, remat = (train(config, digits, policy, args.seed) for policy in (None, args.policy))

    def row(title: str, form: str, *values: float) -> None:
        print(f"{title:38}" + "".join(f"{format(v, form):>16}" for v in values))

    print(f"\n{'':38}{'without':>16}{'with remat':>16}")
    row("residuals, predicted (MiB)", ".2f", plain.residual_bytes / 2**20, remat.residual_bytes / 2**20)
    row("temporaries, compiled for CPU (MiB)", ".2f", plain.temp_bytes / 2**20, remat.temp_bytes / 2**20)
    row("all of the step, compiled (MiB)", ".2f", plain.total_bytes / 2**20, remat.total_bytes / 2**20)
    row("one step, timed (ms)", ".1f", plain.step_ms, remat.step_ms)
    for i in np.linspace(0, config.steps - 1, 6, dtype=int):
        row(f"training loss at step {i}", ".5f", plain.losses[i], remat.losses[i])
    row("validation accuracy", ".1%", plain.val_accuracy, remat.val_accuracy)
    row("test accuracy", ".1%", plain.test_accuracy, remat.test_accuracy)
    print(f"largest difference of the loss curves: {np.abs(plain.losses - remat.losses).max():.1e}")
    if remat.temp_bytes > 0.95 * plain.temp_bytes:
        print("XLA merged the recomputation with the forward pass: on CPUs, jaxlib 0.10.2 does so outside of loops.")
    np.testing.assert_allclose(plain.losses, remat.losses, rtol=1e-2, atol=1e-3)
    return plain, remat


if __name__ == "__main__":
    main()
