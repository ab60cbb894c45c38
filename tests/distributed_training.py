"""One process of a training run on several: started by `test_distributed`, writes what it saw as JSON.

python tests/distributed_training.py ADDRESS COUNT NUMBER FILE
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import remat_kit as rk
from remat_kit import linen

LAYERS, WIDTH, BATCH, STEPS, RATE = 2, 16, 32, 3, 0.02
NO_GLOO = 77  # exit status


class Block(nn.Module):
    """A residual block of a perceptron."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Net(nn.Module):
    """Some blocks and a number for each example."""

    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x = self.block()(x)
        return nn.Dense(1)(x)[:, 0]


def loss_of(block):
    def loss(params, x, y):
        return jnp.mean((Net(block).apply({"params": params}, x) - y) ** 2)

    return loss


def given():
    """Parameters and a batch, the same in every process."""
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda p: random.normal(size=p.shape, scale=0.2).astype(np.float32), params)
    return params, x, np.sin(x.sum(1))


def losses_of(loss, params, x, y):
    """The losses of a few steps of gradient descent."""

    @jax.jit
    def step(params, x, y):
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        return value, jax.tree.map(lambda p, g: p - RATE * g, params, gradient)

    found = []
    for _ in range(STEPS):
        value, params = step(params, x, y)
        found.append(float(value))
    return found


def sharded(mesh, tree):
    """Arrays of which each device holds a part: of their first dimension, where that can be divided."""

    def put(x):
        parts = "data" if x.ndim and x.shape[0] % mesh.size == 0 else None
        sharding = NamedSharding(mesh, PartitionSpec(parts))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def main(address, count, number, file):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, number, initialization_timeout=60)
    try:
        mesh = Mesh(np.array(jax.devices()), ("data",))
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        print(error)
        sys.exit(NO_GLOO)
    args = sharded(mesh, given())
    loss = loss_of(Block)
    least = rk.plan(loss, *args, budget=1, target=None)
    plan = rk.plan(loss, *args, budget=least.predicted.corrected_bytes, target=None)
    assert plan.within and not least.within
    ways = {
        "decorated": loss_of(linen.remat("dots_no_batch")(Block)),
        "applied": rk.apply(loss, "full"),
        "planned": rk.apply(loss, plan),
    }
    found = {
        "processes": jax.process_count(),
        "devices": [jax.device_count(), jax.local_device_count()],
        "parts": len({str(s.index) for s in jax.tree.leaves(args[0])[0].global_shards}),
        "plan": plan.to_dict(),
        "again": plan.predicted.recompute_flops,
        "kept": {k: rk.residuals(f, *args).total_bytes for k, f in {"plain": loss, **ways}.items()},
        "losses": {k: losses_of(f, *args) for k, f in ways.items()},
    }
    pathlib.Path(file).write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
