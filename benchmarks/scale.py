"""Deep unrolled programs: what reports, lint and plans cost by the number of equations.

    python benchmarks/scale.py                                   # up to 100,000 equations, each in its own process
    python benchmarks/scale.py --equations 1000 10000 --verbs lint

CPU time is counted, as the machine may be shared; `grad` is JAX alone, tracing the loss and its derivative. Nothing is
compiled or run. Memory is the peak of the process, JAX and all imports included.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import platform
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import remat_kit as rk

RESULTS = pathlib.Path(__file__).parent / "results" / "scale.json"
VERBS = {
    "grad": lambda fn, *args: jax.make_jaxpr(jax.grad(fn))(*args),
    "residuals": rk.residuals,
    "lint": rk.lint,
    "apply": lambda fn, *args: jax.make_jaxpr(jax.grad(rk.apply(fn, "full")))(*args),
    "plan": lambda fn, *args: rk.plan(fn, *args, budget="1GiB", target=None),
}


def layers(equations: int) -> tuple[Any, tuple[Any, ...]]:
    """Transformer layers as plain functions in a Python loop, 36 equations each: nothing tells where a layer ends."""
    sizes = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "o": (1, 1), "up": (1, 4), "down": (4, 1)}
    width = 64

    def layer(p: Any, x: Any) -> Any:
        h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        attention = jax.nn.softmax((h @ p["q"]) @ (h @ p["k"]).swapaxes(-1, -2))
        x = x + attention @ (h @ p["v"]) @ p["o"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens]
        for p in params["layers"]:
            x = layer(p, x)
        return (x**2).mean()

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    each = [{k: array(a * width, b * width) for k, (a, b) in sizes.items()} for _ in range(equations // 36)]
    return loss, ({"embedding": array(256, width), "layers": each}, jax.ShapeDtypeStruct((8, 32), jnp.int32))


def chain(equations: int) -> tuple[Any, tuple[Any, ...]]:
    """Elementwise operations one behind the other: no layers and no products."""

    def loss(x: Any) -> Any:
        for _ in range(equations // 2):
            x = jnp.sin(x) * 1.1
        return x.sum()

    return loss, (jax.ShapeDtypeStruct((64,), jnp.float32),)


PROGRAMS = {"layers": layers, "chain": chain}


def main() -> None:
    """Measures each cell in a fresh process and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equations", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--verbs", nargs="*", default=list(VERBS), choices=list(VERBS))
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--one", nargs=3, metavar=("PROGRAM", "VERB", "EQUATIONS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one[0], args.one[1], int(args.one[2]))))
        return
    rows = []
    print("| program | verb | " + " | ".join(f"{n:,} equations" for n in args.equations) + " |")
    print("|---|---|" + "---|" * len(args.equations))
    for program in args.programs:
        for verb in args.verbs:
            cells = [in_a_process(program, verb, n) for n in args.equations]
            rows += cells
            shown = [f"{c['seconds']:.1f} s, {c['MiB']:,.0f} MiB" if c else "failed" for c in cells]
            print(f"| {program} | {verb} | " + " | ".join(shown) + " |", flush=True)
    versions = {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in ("jax", "flax")}
    RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


def in_a_process(program: str, verb: str, equations: int) -> dict[str, Any] | None:
    """One cell, or None where the process failed."""
    command = [sys.executable, __file__, "--one", program, verb, str(equations)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def measured(program: str, verb: str, equations: int) -> dict[str, Any]:
    """CPU seconds and peak memory of one call, after a small one that imports and sets up everything."""
    small, args = PROGRAMS[program](72)
    VERBS[verb](small, *args)
    fn, args = PROGRAMS[program](equations)
    start = time.process_time()
    VERBS[verb](fn, *args)
    return {
        "program": program,
        "verb": verb,
        "equations": equations,
        "seconds": time.process_time() - start,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    main()
