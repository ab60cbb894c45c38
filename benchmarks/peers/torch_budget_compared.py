"""The planner beside PyTorch's activation memory budget, on the GPT block stack of torch_budget.py.

    python benchmarks/peers/torch_budget.py --layers 1 4 12 --json torch.json   # where torch is installed
    python benchmarks/peers/torch_budget_compared.py torch.json --json out.json

For each of PyTorch's plans: what the planner recomputes when it may keep as many bytes, in FLOPs of matrix products,
and in seconds by the roofline of a TPU v5e as torch_budget.py counts them (each operation apart; or with pointwise work
free), each minimized apart; and the largest sum of kept and working bytes in the backward pass. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp

import remat_kit as rk
from remat_kit._plan import knapsack
from remat_kit._plan.graph import Graph
from remat_kit._plan.planner import Session
from remat_kit._plan.problem import Problem, Selection
from remat_kit._plan.treatment import whole

BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 8, 1024, 1024, 16, 4096
FLOPS, BANDWIDTH = 197e12, 819e9
MiB = 2**20


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm in float32, without a bias."""
    f = x.astype(jnp.float32)
    mean = f.mean(-1, keepdims=True)
    variance = jnp.square(f - mean).mean(-1, keepdims=True)
    return ((f - mean) * jax.lax.rsqrt(variance + 1e-5) * scale).astype(jnp.bfloat16)


def layer(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One pre-norm block, its attention written out; softmax and gelu in float32."""
    h = norm(x, p["scale1"])
    shape = (BATCH, LENGTH, HEADS, WIDTH // HEADS)
    q, k, v = (jnp.transpose((h @ p[w]).reshape(shape), (0, 2, 1, 3)) for w in ("wq", "wk", "wv"))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) * 0.125
    i = jnp.arange(LENGTH)
    s = jnp.where(i[:, None] >= i[None, :], s, jnp.finfo(jnp.bfloat16).min)
    f = s.astype(jnp.float32)
    e = jnp.exp(f - jax.lax.stop_gradient(f.max(-1, keepdims=True)))
    weights = (e / e.sum(-1, keepdims=True)).astype(jnp.bfloat16)
    o = jnp.transpose(jnp.einsum("bhqk,bhkd->bhqd", weights, v), (0, 2, 1, 3)).reshape(BATCH, LENGTH, WIDTH)
    x = x + o @ p["wo"]
    g = (norm(x, p["scale2"]) @ p["w_in"]).astype(jnp.float32)
    a = 0.5 * g * (1 + jnp.tanh(0.79788456 * (g + 0.044715 * g**3)))
    return x + a.astype(jnp.bfloat16) @ p["w_out"]


def stack(layers: int) -> tuple[Any, tuple[Any, ...]]:
    """The loss of a stack and its abstract arguments."""
    bf16 = jnp.bfloat16
    sizes = dict(
        scale1=(WIDTH,), wq=(WIDTH, WIDTH), wk=(WIDTH, WIDTH), wv=(WIDTH, WIDTH), wo=(WIDTH, WIDTH), scale2=(WIDTH,),
        w_in=(WIDTH, HIDDEN), w_out=(HIDDEN, WIDTH),
    )  # fmt: skip
    params = {
        "layers": [{k: jax.ShapeDtypeStruct(s, bf16) for k, s in sizes.items()} for _ in range(layers)],
        "scale": jax.ShapeDtypeStruct((WIDTH,), bf16),
    }

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for i, p in enumerate(params["layers"]):
            x = rk.remat("full", block=f"layer_{i}")(layer)(p, x)
        return norm(x, params["scale"]).astype(jnp.float32).sum()

    return loss, (params, jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), bf16))


def price(graph: Graph, how: str) -> None:
    """Sets what running each operation again costs: "flops" of products, "unfused" or "fused" seconds."""
    for op in graph.ops:
        flops = op.flops if op.form == "product" else 0
        seconds = max(flops / FLOPS, op.moved / BANDWIDTH) if op.form != "alias" else 0.0
        if how == "fused" and op.form not in ("product", "reduce"):
            seconds = 0.0
        op.seconds = float(flops) / 1e15 if how == "flops" else seconds


def problem(layers: int, how: str) -> tuple[Problem, float]:
    """The planner's model of a stack, and how long making it took once it was traced."""
    fn, args = stack(layers)
    session = Session.open(fn, args, {}, target=None, actions=("save", "recompute"))
    old = session.problem
    for graph in {id(s.graph): s.graph for s in old.stages if s.graph is not None}.values():
        price(graph, how)
        object.__setattr__(graph, "choices", tuple(_free(c) for c in graph.choices))
    start = time.perf_counter()
    made = Problem(old.program, old.rates, "time", frozenset({"save", "recompute"}), points=32)
    return made, time.perf_counter() - start


def _free(choice: Any) -> Any:
    return type(choice)(choice.label, choice.facts, choice.ops, choice.bytes, 0.0)


def at_bytes(p: Problem, kept: int) -> Selection | None:
    """The cheapest selection that keeps so many bytes at the most, whatever its peak."""
    best = None
    for _ in range(4):
        treatments = [[whole(s, x) for x in f.points] for s, f in p.active]
        options = [
            [knapsack.Option(t.kept_bytes(s), 0, t.cost(s, "time")) for t in ts]
            for (s, _), ts in zip(p.active, treatments, strict=True)
        ]
        answer = knapsack.solve(options, kept)
        if answer is None:
            return best
        taken = iter(ts[k] for ts, k in zip(treatments, answer.taken, strict=True))
        chosen = tuple(next(taken) if s.graph is not None else None for s in p.stages)
        peak = knapsack.peak_of([t.option(s, "time") for s, t in zip(p.stages, chosen, strict=True) if t is not None])
        found = Selection(chosen, peak, answer.cost)
        if best is not None and found.cost >= best.cost * (1 - 1e-9):
            break
        best = found
        left = kept - answer.peak
        same = {}
        for (_, f), t in zip(p.active, (t for t in chosen if t is not None), strict=True):
            same.setdefault((id(f), t), [f, t, 0])[2] += 1
        for f, t, n in same.values():
            f.at(min(t.parts[0][1].kept_bytes + left / n, f.points[-1].kept_bytes))
    return best


def main() -> None:
    """Reads PyTorch's figures and writes the planner's beside them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", type=pathlib.Path, help="what torch_budget.py wrote")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    data = json.loads(args.torch.read_text())
    out: list[dict[str, Any]] = []
    for layers in dict.fromkeys(r["layers"] for r in data["rows"]):
        models = {how: problem(layers, how) for how in ("flops", "unfused", "fused")}
        for row in (r for r in data["rows"] if r["layers"] == layers):
            start = time.perf_counter()
            found = {how: at_bytes(p, row["saved_bytes"]) for how, (p, _) in models.items()}
            seconds = time.perf_counter() - start
            mine = {how: None if s is None else s.cost for how, s in found.items()}
            flops = found["flops"]
            out.append(
                {
                    **row,
                    "our_recompute_flops": None if mine["flops"] is None else mine["flops"] * 1e15,
                    "our_roofline_seconds_unfused": mine["unfused"],
                    "our_roofline_seconds_fused": mine["fused"],
                    "our_backward_peak_bytes": None if flops is None else flops.peak,
                    "our_solve_seconds": seconds,
                    "our_model_seconds": sum(t for _, t in models.values()),
                }
            )
    if args.json:
        made = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "torch": data["torch"], "rows": out}
        args.json.write_text(json.dumps(made, indent=1) + "\n")
    print(table(out))


def table(rows: list[dict[str, Any]]) -> str:
    """The figures in Markdown, PyTorch's first in each pair."""
    lines = [
        "| layers | budget | saved MiB | GFLOP again | ms, operations apart | ms, pointwise free | backward peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:

        def pair(key: str, scale: float, digits: int, r: dict[str, Any] = r) -> str:
            mine = r[f"our_{key}"]
            ours = "-" if mine is None else f"{mine * scale:.{digits}f}"
            return f"{r[key] * scale:.{digits}f} / {ours}"

        lines.append(
            f"| {r['layers']} | {r['budget']} | {r['saved_bytes'] / MiB:.0f} | {pair('recompute_flops', 1e-9, 0)} | "
            f"{pair('roofline_seconds_unfused', 1e3, 2)} | {pair('roofline_seconds_fused', 1e3, 2)} | "
            f"{pair('backward_peak_bytes', 1 / MiB, 0)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
