"""Compiles for a chip that is not there with JAX alone, in a process of its own: what measuring is compared with.

    python tests/by_hand.py PROGRAM TARGET POLICY...

PROGRAM is the name of a function in this file, from a policy's name and a mesh (or None) to a step and its arguments.
Prints a JSON object of `memory_analysis()` by policy.
"""

import functools
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_LOG_DIR="disabled",
    TPU_STDERR_LOG_LEVEL="3",
    TPU_MIN_LOG_LEVEL="3",
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import remat_kit as rk  # noqa: E402
from remat_kit._target.chips import CHIPS  # noqa: E402

POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload_dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}

SMALL = {"layers": 4, "batch": 4, "length": 256, "width": 512, "heads": 8, "vocab": 2048, "dtype": "bfloat16"}
LARGE = {"layers": 8, "batch": 8, "length": 1024, "width": 1024, "heads": 16, "dtype": "bfloat16"}


def gpt(policy, devices=None, **sizes):
    """The zoo's GPT with a policy applied; what is by hand here is the compile (in `layers` the remat is, too)."""
    fn, args = rk.zoo.gpt(**(sizes or SMALL), abstract=True)
    return jax.value_and_grad(rk.apply(fn, policy)), args


def gpt_large(policy, devices=None):
    return gpt(policy, **LARGE)


def layers(policy, mesh):
    """Scanned layers, the weights split over one axis of the mesh, the batch over the other."""

    def loss(w, x):
        def body(x, w):
            h = jax.nn.gelu(x @ w["in"])
            h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, PartitionSpec("data", "model")))
            return x + h @ w["out"], None

        if policy != "none":
            body = jax.checkpoint(body, policy=POLICIES[policy], prevent_cse=False)
        return jnp.sum(jax.lax.scan(body, x, w)[0].astype(jnp.float32) ** 2)

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    w = {"in": array((None, "data", "model"), 4, 512, 2048), "out": array((None, "model", "data"), 4, 2048, 512)}
    return jax.value_and_grad(loss), (w, array(("data", None), 4096, 512))


def topology(target):
    """The devices of a target, asked of JAX."""
    parts = target.split(":")
    chip = CHIPS[":".join(parts[:2])]
    if parts[0] == "cuda":
        n = parts[2] if len(parts) > 2 else "1"
        return topologies.get_topology_desc(platform="cuda", target_config=chip.topology, topology=f"1x1x{n}").devices
    return topologies.get_topology_desc(
        f"{chip.name}:{parts[2] if len(parts) > 2 else chip.topology}", platform="tpu", **chip.options
    ).devices


def placed(sharding, a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def main(program, target, *policies):
    devices = topology(target)
    found = {}
    for policy in policies:
        if program.startswith("gpt"):
            step, args = globals()[program](policy)
            sharding = NamedSharding(Mesh(np.array(devices[:1]), ("one",)), PartitionSpec())
            args = jax.tree.map(functools.partial(placed, sharding), args)
        else:
            mesh = Mesh(np.array(devices[:8]).reshape(4, 2), ("data", "model"))
            step, args = globals()[program](policy, mesh)
        memory = jax.jit(step).lower(*args).compile().memory_analysis()
        found[policy] = {k: getattr(memory, k) for k in dir(memory) if k.endswith("bytes")}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
