"""Trains a small GPT on the reference manual that Python ships with, without and with remat_kit.

    python examples/train_gpt.py                       # a few minutes on a CPU
    python examples/train_gpt.py --small               # seconds
    python examples/train_gpt.py --policy full

The model is ordinary Flax. What remat_kit adds is one line in `GPT`, which decorates the layer; parameters, dropout
masks and the loss at every step stay the same. Needs optax.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import remat_kit as rk

VOCAB = 128  # ASCII, one token for each character


@dataclass(frozen=True)
class Config:
    layers: int = 4
    width: int = 96
    heads: int = 4
    length: int = 64
    batch: int = 32
    dropout: float = 0.05
    steps: int = 600
    learning_rate: float = 3e-3
    sample: int = 300


SMALL = Config(layers=2, width=64, heads=2, length=32, batch=16, steps=150, learning_rate=5e-3, sample=60)


class Block(nn.Module):
    """One layer. It drops out when the caller gives an rng for it, that is, in training."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        drop = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))
        causal = nn.make_causal_mask(x[..., 0])
        y = nn.MultiHeadDotProductAttention(self.heads, name="attention")(nn.LayerNorm()(x), mask=causal)
        x = x + drop(rk.checkpoint_name(y, "out_proj"))
        y = rk.checkpoint_name(nn.Dense(4 * x.shape[-1], name="wi")(nn.LayerNorm()(x)), "mlpwi")
        return x + drop(nn.Dense(x.shape[-1], name="wo")(nn.gelu(y))), None


class GPT(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch, length, VOCAB]``; `policy` None is the model without remat."""

    config: Config
    policy: str | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        embed = nn.Embed(VOCAB, c.width, embedding_init=nn.initializers.normal(0.05), name="tokens")
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.05), (c.length, c.width))
        layer = Block if self.policy is None else rk.linen.remat(Block, policy=self.policy)  # all that remat_kit adds
        rngs = {"params": True, "dropout": True}
        layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs=rngs, length=c.layers)
        x, _ = layers(c.heads, c.dropout, name="layers")(x, None)
        return embed.attend(nn.LayerNorm()(x))


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Returns training and validation text as ASCII codes: of each ten sections of the manual, one validates."""
    sections = [topics[name].encode("ascii", "ignore") for name in sorted(topics)]
    train = b"".join(s for i, s in enumerate(sections) if i % 10 != 9)
    return np.frombuffer(train, np.uint8), np.frombuffer(b"".join(sections[9::10]), np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Returns one piece of text for each start, ``[starts, length + 1]``: inputs and targets are one apart."""
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


@dataclass(frozen=True)
class Run:
    """What one training run came to.

    Attributes:
      losses: training loss before each step, nats for each character.
      val_loss, val_accuracy: on the validation text: nats, and how often the likeliest next character was right.
      residual_bytes: what the backward pass keeps for one batch; predicted by remat_kit from the program.
      temp_bytes, total_bytes: compiled, from XLA: temporaries of a training step, and these with its
        arguments and outputs less the outputs that overwrite arguments.
      step_ms: median time of a step.
      sample: text that the model wrote.
    """

    losses: np.ndarray
    val_loss: float
    val_accuracy: float
    residual_bytes: int
    temp_bytes: int
    total_bytes: int
    step_ms: float
    sample: str


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# Remat is for training: these take the model without it, and the parameters of either.


@partial(jax.jit, static_argnums=0)
def initialize(config: Config, key: jax.Array) -> Any:
    return GPT(config).init(key, jnp.zeros((1, config.length), jnp.int32))["params"]


@partial(jax.jit, static_argnums=0)
def evaluate(config: Config, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the loss in nats, and how often the likeliest next character was right."""
    logits = GPT(config).apply({"params": params}, tokens[:, :-1])
    return cross_entropy(logits, tokens), (logits.argmax(-1) == tokens[:, 1:]).mean()


@partial(jax.jit, static_argnums=0)
def write(config: Config, params: Any, context: jax.Array, key: jax.Array) -> jax.Array:
    """Returns characters that the model writes after a context of ``[length]`` tokens."""

    def character(context: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = GPT(config).apply({"params": params}, context[None])[0, -1]
        new = jax.random.categorical(key, logits / 0.7)
        return jnp.append(context[1:], new), new

    return jax.lax.scan(character, context, jax.random.split(key, config.sample))[1]


def train(config: Config, policy: str | None, seed: int) -> Run:
    """Trains one model; everything but the policy is the same from one call to the next."""
    model = GPT(config, policy)
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, config.steps // 10, config.steps, peak / 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, tokens[:, :-1], rngs={"dropout": key}), tokens)

    def step(params: Any, state: Any, tokens: jax.Array, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    text, val_text = texts()
    starts = np.random.default_rng(seed).integers(0, len(text) - config.length, (config.steps, config.batch))
    init_key, dropout_key, sample_key = jax.random.split(jax.random.key(seed), 3)
    params = initialize(config, init_key)
    state = optimizer.init(params)
    first = windows(text, starts[0], config.length)

    print(f"\n--- {'without remat_kit' if policy is None else f'with policy {policy}'}\n")
    report = rk.residuals(loss, params, first, dropout_key)
    report.print(top=8)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, first, dropout_key).compile()
    m = compiled.memory_analysis()

    losses, seconds = [], []
    for i in range(config.steps):
        begin = time.perf_counter()
        batch, key = windows(text, starts[i], config.length), jax.random.fold_in(dropout_key, i)
        params, state, value = compiled(params, state, batch, key)
        losses.append(float(value))
        seconds.append(time.perf_counter() - begin)
        if i % (config.steps // 5) == 0 or i == config.steps - 1:
            print(f"step {i:4}  loss {losses[-1]:.3f}")

    spread = np.linspace(0, len(val_text) - config.length - 1, 40 * config.batch, dtype=int).reshape(40, -1)
    val = np.mean([evaluate(config, params, windows(val_text, s, config.length)) for s in spread], axis=0)
    written = write(config, params, val_text[: config.length].astype(np.int32), sample_key)
    return Run(
        losses=np.array(losses),
        val_loss=float(val[0]),
        val_accuracy=float(val[1]),
        residual_bytes=report.total_bytes,
        temp_bytes=m.temp_size_in_bytes,
        total_bytes=m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes,
        step_ms=1e3 * float(np.median(seconds)),
        sample=bytes(np.asarray(written, np.uint8)).decode("ascii"),
    )


def main(argv: list[str] | None = None) -> tuple[Run, Run]:
    """Trains without and with remat, checks that both are the same training, and returns both runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="dots_no_batch", help="of the second run; `remat-kit policies` lists them")
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps, for a quick look")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = SMALL if args.small else Config()
    if args.steps is not None:
        config = replace(config, steps=max(10, args.steps))

    plain, remat = train(config, None, args.seed), train(config, args.policy, args.seed)

    def row(title: str, form: str, *values: float) -> None:
        print(f"{title:38}" + "".join(f"{format(v, form):>16}" for v in values))

    print(f"\n{'':38}{'without':>16}{'with remat':>16}")
    row("residuals, predicted (MiB)", ".2f", plain.residual_bytes / 2**20, remat.residual_bytes / 2**20)
    row("temporaries, compiled for CPU (MiB)", ".2f", plain.temp_bytes / 2**20, remat.temp_bytes / 2**20)
    row("all of the step, compiled (MiB)", ".2f", plain.total_bytes / 2**20, remat.total_bytes / 2**20)
    row("one step, timed (ms)", ".1f", plain.step_ms, remat.step_ms)
    for i in np.linspace(0, config.steps - 1, 6, dtype=int):
        row(f"training loss at step {i}", ".5f", plain.losses[i], remat.losses[i])
    row("validation loss (bits a character)", ".3f", plain.val_loss / np.log(2), remat.val_loss / np.log(2))
    row("validation accuracy", ".1%", plain.val_accuracy, remat.val_accuracy)
    print(f"largest difference of the loss curves: {np.abs(plain.losses - remat.losses).max():.1e}")
    np.testing.assert_allclose(plain.losses, remat.losses, rtol=1e-3)
    print(f"\nThe model with remat writes:\n\n{remat.sample}")
    return plain, remat


if __name__ == "__main__":
    main()
