"""Asks, before any accelerator is there, which policy lets a GPT train on a chip, and how large the batch can be.

    python examples/will_it_fit.py                          # for a TPU v5e or an H100, else this CPU; some minutes
    python examples/will_it_fit.py --target tpu:v6e --policy dots_no_batch --policy full
    python examples/will_it_fit.py --target cpu --small     # seconds

Nothing is trained and nothing is allocated: arguments are abstract, and XLA compiles for the chip. Needs optax, and
`pip install 'remat-kit[tpu]'` or `'remat-kit[cuda]'` for chips that are not here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

import remat_kit as rk

OFFLOAD = "save name=*_proj; offload name=mlpwi"  # attention's products stay, the MLP's wide ones go to the host


@dataclass(frozen=True)
class Config:
    """A GPT of the size of GPT-2, its batch, the largest batch to look for and its steps, policies to compare."""

    layers: int = 12
    batch: int = 16
    length: int = 1024
    width: int = 768
    heads: int = 12
    vocab: int = 50304
    multiple: int = 8
    limit: int = 512
    policies: tuple[str, ...] = ("none", "full", "dots", "dots_no_batch", OFFLOAD)


SMALL = Config(4, 4, 64, 64, 4, 512, multiple=1, limit=64, policies=("none", "full", "dots"))
SMALL_MEMORY = 12 * 2**20  # of an imagined device that the small model does not fit into without remat


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
      policies: the comparison of policies on the gradient of the loss.
      largest: the largest batch of the whole step, under the best policy.
      step: the whole step at the batch that was asked for, under the best policy.
    """

    policies: rk.Comparison
    largest: rk.MaxBatch
    step: rk.Measurement


def model(config: Config, batch: int) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """Returns the loss of a GPT, without remat, and abstract ``(params, tokens)`` for it."""
    return rk.zoo.gpt(
        layers=config.layers,
        batch=batch,
        length=config.length,
        width=config.width,
        heads=config.heads,
        vocab=config.vocab,
    )


def train_step(
    config: Config, optimizer: optax.GradientTransformation, policy: str, batch: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a whole training step whose loss is under a policy, and its abstract arguments.

    Parameters and optimizer state are donated: the step writes the new ones where the old ones were.
    """
    loss, (params, tokens) = model(config, batch)
    loss = rk.apply(loss, policy)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1)), (params, jax.eval_shape(optimizer.init, params), tokens)


def bytes_of(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def default_target() -> str:
    """Returns the first of a TPU, a GPU and this machine's CPU that can be compiled for here."""
    usable = {t.spec for t in rk.targets() if t.usable}
    return next(spec for spec in ("tpu:v5e", "cuda:h100", "cpu") if spec in usable)


def main(argv: list[str] | None = None) -> Answer:
    """Compares policies, finds the largest batch under the best of them, and measures the whole step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="what to compile for; `remat-kit targets` lists it")
    parser.add_argument("--policy", action="append", help="one to compare (repeatable), a preset or a policy as text")
    parser.add_argument("--batch", type=int, help="examples in one step")
    parser.add_argument("--memory-gib", type=float, help="what a step may take, if not all of the device's memory")
    parser.add_argument("--small", action="store_true", help="a tiny model and little memory, for a quick look")
    args = parser.parse_args(argv)
    config = SMALL if args.small else Config()
    batch = args.batch or config.batch
    target = rk.target(args.target or default_target())
    memory = int(args.memory_gib * 2**30) if args.memory_gib else SMALL_MEMORY if args.small else target.memory_bytes
    if memory is None:
        parser.error(f"the memory of {target} is not known: pass --memory-gib")
    optimizer = optax.adamw(3e-4, weight_decay=0.1)

    loss, (params, tokens) = model(config, batch)
    state = jax.eval_shape(optimizer.init, params)
    print(f"Parameters {bytes_of(params) / 2**20:.1f} MiB, optimizer state {bytes_of(state) / 2**20:.1f} MiB\n")

    # The optimizer's state lies in memory all the while: what is left is for the loss and its gradient.
    budget = memory - bytes_of(state)
    policies = rk.compare(loss, params, tokens, policies=args.policy or config.policies, target=target, budget=budget)
    policies.print()
    best = policies.best
    if not best:  # try the one that takes least: a smaller batch may fit
        best = min(policies.rows, key=lambda row: row.measurement.peak_bytes).name

    print(f"\n--- the largest batch of a whole step under {best}\n")
    largest = rk.max_batch(
        lambda n: train_step(config, optimizer, best, n),
        target=target,
        grad=False,
        budget=memory,
        multiple=config.multiple,
        limit=config.limit,
    )
    print(largest)

    print(f"\n--- a whole step with a batch of {batch} under {best}\n")
    step, step_args = train_step(config, optimizer, best, batch)
    measured = rk.measure(step, *step_args, target=target, grad=False)
    measured.print()
    return Answer(policies, largest, measured)


if __name__ == "__main__":
    main()
