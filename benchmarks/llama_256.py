"""A Llama-2-7B-shaped training step (32 layers, FSDP, AdamW) compiled for 256 TPU v5e chips from a laptop.

    python benchmarks/llama_256.py [--policy full] [--batch 256] [--target tpu:v5e:16x16]

Needs the extras tpu and test. Nothing is allocated: all arguments are abstract.
"""

import argparse
import resource
import time

import jax
import optax

import remat_kit as rk


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="full")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--target", default="tpu:v5e:16x16")
    options = parser.parse_args()

    start = time.perf_counter()
    target = rk.target(options.target)
    mesh = target.mesh(("fsdp",), (target.device_count,))
    loss, (params, tokens) = rk.zoo.llama(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=32,
        hidden=11008,
        vocab=32000,
        length=4096,
        batch=options.batch,
        dtype="bfloat16",
        mesh=mesh,
        abstract=True,
    )
    loss = rk.apply(loss, options.policy)
    optimizer = optax.adamw(3e-4)

    def step(params, state, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    # The optimizer's state lies as the parameters do; its step counts have no sharding of their own.
    state = jax.eval_shape(optimizer.init, params)
    state = optax.tree.map_params(
        optimizer,
        lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p.sharding),
        state,
        params,
    )
    m = rk.measure(jax.jit(step, donate_argnums=(0, 1)), params, state, tokens, grad=False, target=target)
    print(m)
    print(f"parameters: {sum(p.size for p in jax.tree.leaves(params)):,}")
    print(f"all in {time.perf_counter() - start:.0f} s; this process took at most "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")  # fmt: skip


if __name__ == "__main__":
    main()
