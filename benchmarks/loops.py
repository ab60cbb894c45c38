"""Loops: memory and recomputation over the number of steps, and beside Equinox's checkpointed loop.

    python benchmarks/loops.py --memory                # compiled for the CPU and a TPU
    python benchmarks/loops.py --peers                 # step times and memory on the CPU, in one run
    python benchmarks/loops.py --stack                 # a deep uniform stack, as in Chen et al. 2016
    python benchmarks/loops.py --offload               # carries in the memory of a TPU's host

The machine may be shared, so read ratios of times, not the times. Results go to benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import remat_kit as rk
from remat_kit._loops import revolve

RESULTS = pathlib.Path(__file__).parent / "results"
LENGTHS = (16, 64, 256, 1024, 4096)
MiB = 2**20


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--stack", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--targets", nargs="*", default=["cpu", "tpu:v5e"])
    args = parser.parse_args()
    if args.memory:
        write("loops_memory", memory(args.targets))
    if args.peers:
        write("loops_peers", peers())
    if args.stack:
        write("loops_stack", stack())
    if args.offload:
        write("loops_offload", offload())


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Writes results and prints them as a table."""
    data = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rows": rows,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")


# Memory ---------------------------------------------------------------------------------------------------------------


def cell(h: jax.Array, _: Any) -> tuple[jax.Array, None]:
    """A step that keeps several values of the size of its carry."""
    return jnp.tanh(jnp.sin(1.1 * jnp.sin(h))), None


def modes(n: int) -> dict[str, tuple[dict[str, Any], float]]:
    """Options of `rk.scan`, and how often the forward computation of a step runs, that for its derivative included."""

    def of(c: int) -> float:
        return (n + revolve.advances(n, c) - (n - 1) + n) / n

    log = max(1, (n - 1).bit_length())
    return {
        "none": ({"policy": "none"}, 1.0),
        "full": ({}, 2.0),
        "sqrt": ({"segments": "sqrt"}, 3.0),
        "sqrt, steps kept": ({"segments": "sqrt", "policy": "none"}, 2.0),
        "binomial, default": ({"segments": "binomial"}, of(revolve.checkpoints_for(n))),
        f"binomial, log2(n) = {log}": ({"segments": "binomial", "checkpoints": log}, of(log)),
    }


def memory(targets: list[str]) -> list[dict[str, Any]]:
    """Compiled temporary bytes, as a number of carries. Carries are 32 MiB, so that no TPU keeps many on the chip."""
    h = jax.ShapeDtypeStruct((8 * MiB,), jnp.float32)
    size = 32 * MiB
    rows = []
    for target in targets:
        for n in LENGTHS:
            for name, (options, runs) in modes(n).items():

                def loss(h: Any, n: int = n, options: dict[str, Any] = options) -> Any:
                    return jnp.sum(rk.scan(cell, h, None, n, **options)[0])

                m = rk.measure(loss, h, target=target)
                held = (m.peak_bytes if m.temp_bytes is None else m.temp_bytes) / size
                rows.append({"target": target, "steps": n, "mode": name, "carries": held, "runs of a step": runs})
                print(rows[-1], flush=True)
    return rows


# Time -----------------------------------------------------------------------------------------------------------------


def side_by_side(steps: dict[str, Callable[..., Any]], *args: Any, rounds: int = 9) -> dict[str, float]:
    """Median seconds of each, taken in turns."""
    compiled = {name: jax.jit(step) for name, step in steps.items()}
    for step in compiled.values():
        jax.block_until_ready(step(*args))
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(step(*args))
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in taken.items()}


def peers() -> list[dict[str, Any]]:
    """Beside `equinox.internal.while_loop(kind="checkpointed")` and beside diffrax's solver, which runs that loop."""
    w = 0.08 * jax.random.normal(jax.random.key(0), (128, 128))  # gradients neither vanish nor grow
    h = jnp.ones((256, 128))
    rows = []
    for peer, losses_of, lengths in (
        ("equinox", beside_equinox, (64, 256, 1024)),
        ("diffrax", beside_diffrax, (64, 256)),
    ):
        for n in lengths:
            for c in (4, 8, 16, revolve.checkpoints_for(n)):
                grads = {k: jax.grad(loss, (0, 1)) for k, loss in losses_of(n, c).items()}
                values = [jax.tree.leaves(jax.jit(g)(w, h)) for g in grads.values()]
                for v in values[1:]:
                    assert all(jnp.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(values[0], v, strict=True))
                seconds = side_by_side(grads, w, h, rounds=5)
                temp = {
                    k: jax.jit(g).lower(w, h).compile().memory_analysis().temp_size_in_bytes for k, g in grads.items()
                }
                row: dict[str, Any] = {"peer": peer, "steps": n, "checkpoints": c}
                for k in ("while_loop", "scan"):
                    row[f"{k}: time"] = seconds[k] / seconds["peer"]
                    row[f"{k}: memory"] = temp[k] / temp["peer"]
                rows.append(row)
                print(row, flush=True)
    return rows


def beside_equinox(n: int, c: int) -> dict[str, Callable[..., Any]]:
    """n steps of a recurrent cell with c checkpoints."""
    import equinox.internal as eqxi

    return loops(n, c, functools.partial(eqxi.while_loop, kind="checkpointed"), lambda w, y: jnp.tanh(jnp.sin(y @ w)))


def beside_diffrax(n: int, c: int) -> dict[str, Callable[..., Any]]:
    """n steps of Euler's method with c checkpoints."""
    import diffrax

    def solve(w: Any, y: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(jnp.sin(y @ w)))
        solution = diffrax.diffeqsolve(
            term, diffrax.Euler(), 0.0, 1.0, 1.0 / n, y, w, max_steps=n + 1, saveat=diffrax.SaveAt(t1=True),
            adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=c),
        )  # fmt: skip
        assert solution.ys is not None
        return jnp.sum(solution.ys[0])

    return loops(n, c, None, lambda w, y: y + jnp.tanh(jnp.sin(y @ w)) / n) | {"peer": solve}


def loops(n: int, c: int, peer: Any, step: Callable[[Any, Any], Any]) -> dict[str, Callable[..., Any]]:
    """The sum of the state after n steps, by this package's loops and by a while loop of a peer, if there is one."""

    def counted(loop: Any) -> Callable[..., Any]:
        def loss(w: Any, y: Any) -> Any:
            body = lambda s: (s[0] + 1, step(w, s[1]))  # noqa: E731
            return jnp.sum(loop(lambda s: s[0] < n, body, (0, y), max_steps=n, checkpoints=c)[1])

        return loss

    def scanned(w: Any, y: Any) -> Any:
        return jnp.sum(rk.scan(lambda y, _: (step(w, y), None), y, None, n, segments="binomial", checkpoints=c)[0])

    return ({"peer": counted(peer)} if peer else {}) | {"while_loop": counted(rk.while_loop), "scan": scanned}


def stack() -> list[dict[str, Any]]:
    """A stack of 64 equal layers with several values each: activation memory and step time against no remat."""
    w = 0.1 * jax.random.normal(jax.random.key(0), (64, 256, 256))
    x = jnp.ones((1024, 256))

    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(jax.nn.gelu(h @ w)), None

    named: dict[str, dict[str, Any]] = {
        "none": {"policy": "none"},
        "full": {},
        "sqrt": {"segments": "sqrt"},
        "sqrt, steps kept": {"segments": "sqrt", "policy": "none"},
        "binomial, default": {"segments": "binomial"},
    }
    losses = {k: (lambda w, x, o=o: jnp.sum(rk.scan(layer, x, w, **o)[0] ** 2)) for k, o in named.items()}
    grads = {k: jax.grad(loss) for k, loss in losses.items()}
    seconds = side_by_side(grads, w, x)
    temp = {k: jax.jit(g).lower(w, x).compile().memory_analysis().temp_size_in_bytes for k, g in grads.items()}
    return [
        {
            "mode": k,
            "temporary MiB": temp[k] / MiB,
            "less by": temp["none"] / temp[k],
            "time": seconds[k] / seconds["none"],
        }
        for k in named
    ]


def offload() -> list[dict[str, Any]]:
    """32 layers over 16 MiB of activations on a TPU v5e, with carries kept on the device and on the host."""
    args = (jax.ShapeDtypeStruct((32, 512, 512), jnp.bfloat16), jax.ShapeDtypeStruct((16384, 512), jnp.bfloat16))

    def loss(ws: Any, x: Any, **options: Any) -> Any:
        out = rk.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, ws, **options)[0]
        return jnp.mean(out.astype(jnp.float32) ** 2)

    named: dict[str, dict[str, Any]] = {
        "carries kept": {},
        "carries offloaded": {"offload_carry": True},
        "sqrt": {"segments": "sqrt"},
        "sqrt, carries offloaded": {"segments": "sqrt", "offload_carry": True},
    }
    rows = []
    for name, options in named.items():
        m = rk.measure(functools.partial(loss, **options), *args, target="tpu:v5e")
        rows.append({
            "mode": name, "peak MiB": m.peak_bytes / MiB, "host MiB": (m.host_bytes or 0) / MiB,
            "roofline ms": 1e3 * (m.roofline_seconds or 0),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
