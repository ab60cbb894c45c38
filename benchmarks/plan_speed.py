"""How long planning takes, tracing apart, by the number of layers; and the step time of a plan beside `full`.

    python benchmarks/plan_speed.py                 # seconds to trace, open and solve, in this process
    python benchmarks/plan_speed.py --step          # a plan at full's compiled peak beside full, run side by side

The machine may be shared, so read how the seconds grow and the ratio of the two steps, not the seconds themselves.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from typing import Any

import jax

import remat_kit as rk
from remat_kit import _adapters, _loss
from remat_kit._plan.problem import Problem
from remat_kit._plan.rates import Rates
from remat_kit._plan.stages import stages
from remat_kit._trace import jaxprs

RESULTS = pathlib.Path(__file__).parent / "results"


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 24, 48, 96])
    parser.add_argument("--step", action="store_true", help="time steps instead")
    args = parser.parse_args()
    if args.step:
        found = steps()
        (RESULTS / "plan_step.json").write_text(json.dumps(found, indent=1) + "\n")
        print(found)
        return
    rows = [solved("gpt, 12 layers scanned", *rk.zoo.gpt(layers=12))]
    rows += [solved(f"gpt_nnx, {n} layers unrolled", *rk.zoo.gpt_nnx(layers=n)) for n in args.layers]
    (RESULTS / "plan_speed.json").write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1) + "\n")
    print("| program | equations | trace | open | solve a budget | gap | again, % of the step |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['program']} | {r['equations']} | {r['trace']:.2f} s | {r['open']:.2f} s | {r['solve']:.2f} s | "
            f"{r['gap']:.2%} | {r['again']:.1%} |"
        )


def solved(name: str, fn: Any, args: Any) -> dict[str, Any]:
    """Seconds to plan for half the way between the smallest peak and that without remat, tracing apart."""
    start = time.perf_counter()
    rates = Rates.of(rk.target("tpu:v5e"))
    with _adapters.adapted(fn, args, {}) as call:
        loss = _loss.read(call, None, 0, False)
        owner = jaxprs.opened(loss.traced.jaxpr)
        sizes = [jaxprs.nbytes(v.aval) for v in owner.invars]
        program = stages(loss, sizes, rates)  # differentiates the program to find its blocks, and each block once
    traced = time.perf_counter()
    problem = Problem(program, rates, "time", frozenset({"save", "recompute"}))
    opened = time.perf_counter()
    least, none = problem.least().peak, problem.without_remat().peak
    found = problem.solve((least + none) / 2)
    end = time.perf_counter()
    assert found is not None
    return {
        "program": name,
        "equations": len(owner.eqns),
        "trace": traced - start,
        "open": opened - traced,
        "solve": end - opened,
        "gap": (found.cost - found.bound) / problem.whole_cost,
        "again": problem.extra(found)[0]
        / sum(sum(o.flops for o in s.graph.ops) * s.trips for s in program.stages if s.graph),
    }


def steps(rounds: int = 15) -> dict[str, Any]:
    """Seconds of one step on this machine's CPU, a plan at full's compiled peak and `full` in turn."""
    fn, args = rk.zoo.gpt(
        layers=6, batch=4, length=256, width=384, heads=6, vocab=2048, dtype="float32", abstract=False
    )
    full = rk.measure(fn, *args, policy="full", target="cpu")
    plan = rk.plan(fn, *args, budget=full.peak_bytes, target="cpu")
    run = {
        "full": jax.jit(jax.value_and_grad(rk.apply(fn, "full"))),
        "plan": jax.jit(jax.value_and_grad(rk.apply(fn, plan))),
    }
    seconds: dict[str, list[float]] = {k: [] for k in run}
    for f in run.values():
        jax.block_until_ready(f(*args))
    for _ in range(rounds):
        for k, f in run.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            seconds[k].append(time.perf_counter() - start)
    found = {k: statistics.median(v) for k, v in seconds.items()}
    peaks = {"full": full.peak_bytes, "plan": plan.peak_bytes}
    return {"seconds": found, "ratio": found["plan"] / found["full"], "peak_bytes": peaks, "jax": jax.__version__}


if __name__ == "__main__":
    main()
