"""Plans against presets: at each preset's compiled peak, over a range of budgets; budgets kept, predictions checked.

    python benchmarks/plans.py                                   # all programs and targets, hours
    python benchmarks/plans.py --programs gpt --targets tpu:v5e  # one of them
    python benchmarks/plans.py --table                           # the tables of what is in benchmarks/results

One run compiles everything that it compares. Peaks are compiled, FLOPs counted on the differentiated program with trip
counts, seconds those of the roofline of the compiled program. Results go to benchmarks/results/plans, one JSON file for
each program and target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import time
from typing import Any

import jax

import remat_kit as rk
from remat_kit._plan.planner import Session
from remat_kit._target.measurement import Measurement

RESULTS = pathlib.Path(__file__).parent / "results" / "plans"
MiB = 2**20

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", dict(layers=8, batch=8, length=1024, width=1024, heads=16)),
    "gpt_unrolled": ("gpt_nnx", dict(layers=4, batch=8, length=1024, width=512, heads=8)),
    "llama": ("llama", dict(layers=4, batch=8, length=1024, width=512, heads=8)),
    "vit": ("vit", dict(layers=4, batch=128, image=64, patch=4, width=512, heads=8)),
    "resnet": ("resnet", dict(batch=128)),
    "moe": ("moe", dict(layers=2, batch=8, length=1024, width=512, heads=8)),
}
TARGETS = ("tpu:v5e", "cuda:h200", "cpu")


def main() -> None:
    """Runs what was asked for, or prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--budgets", type=int, default=20, help="budgets between full's and none's peak")
    parser.add_argument("--minimize", nargs="*", default=["flops", "time"], choices=["flops", "time"])
    parser.add_argument("--actions", nargs="*", default=["save", "recompute"])
    parser.add_argument("--compiles", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="only print the tables of the kept results")
    args = parser.parse_args()
    if not args.table:
        for program in args.programs:
            for target in args.targets:
                run(program, target, args)
    print(tables())


def run(program: str, target: str, args: argparse.Namespace) -> None:
    """Measures one program on one target and writes what came of it."""
    name, settings = PROGRAMS[program]
    fn, fn_args = getattr(rk.zoo, name)(**settings)
    data: dict[str, Any] = {
        "program": program,
        "settings": settings,
        "target": target,
        "actions": args.actions,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "remat_kit": rk.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "presets": presets(fn, fn_args, target),
        "runs": {},
    }
    for minimize in args.minimize:
        data["runs"][minimize] = plans(fn, fn_args, target, minimize, data["presets"], args)
        write(data)


def write(data: dict[str, Any]) -> None:
    """Writes the results of one program on one target."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    offload = "-offload" if "offload" in data["actions"] else ""
    path = RESULTS / f"{data['program']}-{data['target'].replace(':', '_')}{offload}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")


def presets(fn: Any, args: Any, target: str) -> dict[str, Any]:
    """Compiled figures of each preset that keeps nothing in host memory."""
    found: dict[str, Any] = {}
    for name, policy in rk.presets.items():
        if rk.Action.OFFLOAD in policy.actions:
            continue
        try:
            m = rk.measure(fn, *args, policy=name, target=target)
        except rk.RematError as error:
            found[name] = {"refused": str(error)}
            continue
        found[name] = figures(m)
        say(f"{target} {name}", m)
    return found


def figures(m: Measurement) -> dict[str, Any]:
    """What is compared."""
    return {
        "peak": m.peak_bytes,
        "flops": m.flops,
        "seconds": m.roofline_seconds,
        "fits": m.fits,
        "host": m.host_bytes,
        "compile_seconds": m.compile_seconds,
    }


def plans(fn: Any, fn_args: Any, target: str, minimize: str, known: dict[str, Any], args: Any) -> dict[str, Any]:
    """Plans at the presets' peaks and over a range of budgets."""
    start = time.perf_counter()
    session = Session.open(fn, fn_args, {}, target=target, actions=args.actions, minimize=minimize)
    opened = time.perf_counter() - start
    sound = {k: v for k, v in known.items() if "refused" not in v}
    full, none = sound["full"]["peak"], sound["none"]["peak"]
    n = max(args.budgets - 1, 1)
    budgets = [int(full + (none - full) * k / n) for k in range(args.budgets)]
    out: dict[str, Any] = {"open_seconds": opened, "at_presets": {}, "budgets": []}
    peaks: set[int] = set()
    for name, preset in sorted(sound.items(), key=lambda item: (item[1]["peak"], item[1]["flops"])):
        if preset["peak"] in peaks:  # several presets are one on a program that lacks some of their names
            continue
        peaks.add(preset["peak"])
        out["at_presets"][name] = one(session, preset["peak"], args.compiles, sound, minimize)
        say(f"{target} {minimize} at {name}", out["at_presets"][name])
    for budget in budgets:
        out["budgets"].append(one(session, budget, args.compiles, sound, minimize))
        say(f"{target} {minimize} {budget / MiB:.0f} MiB", out["budgets"][-1])
    first = session.trials[0]
    out["trials"] = [{"predicted": t.selection.peak, "peak": t.peak} for t in session.trials]
    out["first_error"] = abs(first.selection.peak / first.peak - 1)
    return out


def one(session: Session, budget: int, compiles: int, known: dict[str, Any], minimize: str) -> dict[str, Any]:
    """A plan for one budget, beside the best preset within it."""
    start = time.perf_counter()
    predicted = session.plan(budget, 0)
    solved = time.perf_counter() - start
    before = len(session.trials)
    plan = session.plan(budget, compiles)
    assert plan.measured is not None
    key = "flops" if minimize == "flops" else "seconds"
    within = {k: v for k, v in known.items() if v["peak"] <= budget}
    best = min(within, key=lambda k: (within[k][key] or within[k]["flops"], within[k]["peak"]), default=None)
    cost = plan.measured.flops if minimize == "flops" else plan.measured.seconds
    rival = None if best is None else within[best][key]
    return {
        "budget": budget,
        "predicted": plan.predicted.peak_bytes,
        "expected": predicted.predicted.corrected_bytes,
        "trials_before": before,
        "peak": plan.measured.peak_bytes,
        "within": plan.within,
        "flops": plan.measured.flops,
        "seconds": plan.measured.seconds,
        "host": plan.measured.host_bytes,
        "gap": plan.gap,
        "best_preset": best,
        "ratio": cost / rival if cost and rival else None,
        "solve_seconds": solved,
        "compiles": len(plan.attempts),
        "attempts": [[a.predicted_bytes, a.peak_bytes] for a in plan.attempts],
    }


def say(what: str, x: Any) -> None:
    """A line of progress."""
    d = figures(x) if isinstance(x, Measurement) else x
    ms = f"{d['seconds'] * 1e3:.2f} ms" if d["seconds"] else "-"
    more = f" ratio {d['ratio']:.4f} to {d['best_preset']}" if d.get("ratio") else ""
    within = "" if d.get("within", True) else " OVER"
    print(f"{what}: peak {d['peak'] / MiB:.0f} MiB, {d['flops'] / 1e12:.4f} TFLOP, {ms}{more}{within}", flush=True)


def tables() -> str:
    """The tables of all kept results, in Markdown."""
    rows = [json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json"))]
    lines = ["| program | target | minimize | at presets' peaks: cost, worst | over budgets: mean, worst | kept | "
             "first prediction off | later ones off, median | gap, worst |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for d in rows:
        for minimize, r in d["runs"].items():
            at = [x["ratio"] for x in r["at_presets"].values() if x["ratio"]]
            over = [x["ratio"] for x in r["budgets"] if x["ratio"]]
            every = [*r["at_presets"].values(), *r["budgets"]]
            later = [
                abs(x["attempts"][0][1] / x["expected"] - 1) for x in every if x["attempts"] and x["trials_before"] > 1
            ]
            kept = f"{sum(x['within'] for x in every)} of {len(every)}"
            lines.append(
                f"| {title(d)} | {d['target']} | {minimize} | {worst(at)} | {mean(over)}, {worst(over)} | {kept} | "
                f"{r['first_error']:.1%} | {median(later)} | {max(x['gap'] for x in every):.2%} |"
            )
    return "\n".join(lines)


def title(d: dict[str, Any]) -> str:
    """What the tables call a program."""
    return d["program"] + ", offload" * ("offload" in d.get("actions", ()))


def worst(xs: list[float]) -> str:
    """The largest of some ratios."""
    return f"{max(xs):.3f}" if xs else "-"


def mean(xs: list[float]) -> str:
    """Their mean."""
    return f"{statistics.fmean(xs):.3f}" if xs else "-"


def median(xs: list[float]) -> str:
    """The median of some shares."""
    return f"{statistics.median(xs):.1%}" if xs else "-"


if __name__ == "__main__":
    main()
