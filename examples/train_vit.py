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
from dataclasses import dataclass, replace
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
    batch: int = 128
    steps: int = 400
    learning_rate: float = 2e-3


SMALL = Config(layers=3, width=32, heads=2, batch=64, steps=60, learning_rate=5e-3)


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
        x = x + self.param("positions", nn.initializers.normal(0.02), (16, c.width))
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
        x_val, x_test, y_val, y_test = train_test_split(x_rest, y_rest, test_size=0.5, random_state=seed, stratify=y_rest)
        return cls((x, y), (x_val, y_val), (x_test, y_test))


def train(config: Config, digits: Digits, policy: str | None, seed: int) -> Run:
    """Trains one model; everything but the policy is the same from one call to the next."""
    model = ViT(config)
    predict = jax.jit(model.apply)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    trained = loss if policy is None else rk.apply(loss, policy)  # all that remat_kit adds

    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.steps // 10, config.steps, config.learning_rate / 20
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(trained)(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def accuracy(params: Any, part: tuple[np.ndarray, np.ndarray]) -> float:
        return float((np.asarray(predict(params, part[0])).argmax(-1) == part[1]).mean())

    images, labels = digits.train
    rows = np.random.default_rng(seed).integers(0, len(images), (config.steps, config.batch))
    params = jax.jit(model.init)(jax.random.key(seed), images[:1])
    state = optimizer.init(params)
    first = (images[rows[0]], labels[rows[0]])

    print(f"\n--- {'without remat_kit' if policy is None else f'with policy {policy}'}\n")
    report = rk.residuals(loss, params, *first, policy=policy)
    report.print(top=8)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, *first).compile()
    m = compiled.memory_analysis()

    losses, seconds = [], []
    for i, r in enumerate(rows):
        begin = time.perf_counter()
        params, state, value = compiled(params, state, images[r], labels[r])
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

    print(f"\n{'':38}{'without':>16}{args.policy:>16}")
    row("residuals, predicted (MiB)", ".2f", plain.residual_bytes / 2**20, remat.residual_bytes / 2**20)
    row("temporaries, compiled for CPU (MiB)", ".2f", plain.temp_bytes / 2**20, remat.temp_bytes / 2**20)
    row("all of the step, compiled (MiB)", ".2f", plain.total_bytes / 2**20, remat.total_bytes / 2**20)
    row("one step, timed (ms)", ".1f", plain.step_ms, remat.step_ms)
    for i in np.linspace(0, config.steps - 1, 6, dtype=int):
        row(f"training loss at step {i}", ".5f", plain.losses[i], remat.losses[i])
    row("validation accuracy", ".1%", plain.val_accuracy, remat.val_accuracy)
    row("test accuracy", ".1%", plain.test_accuracy, remat.test_accuracy)
    print(f"largest difference of the loss curves: {np.abs(plain.losses - remat.losses).max():.1e}")
    np.testing.assert_allclose(plain.losses, remat.losses, rtol=1e-2, atol=1e-3)
    return plain, remat


if __name__ == "__main__":
    main()
