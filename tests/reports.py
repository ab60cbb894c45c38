"""Results to look at: residual reports made by hand, and one of every kind, also with a stranger's names."""

from __future__ import annotations

import dataclasses
import functools
import math
import random

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import remat_kit as rk
from remat_kit._plan.plan import Measured
from remat_kit._trace.report import Kind, Residual, Residuals

HOSTILE = "[bold red]x[/bold red]\x1b[31m\n<script>alert(1)</script>{{ 7 * 7 }}"
HOSTILE_IN_PAGES = (
    HOSTILE,
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "\u2028alert(3)//",
    '"><img src=x onerror=alert(4)>',
    "javascript:alert(5)",
    "'); alert(6); ('",
    "\u202egnp.exe",
    "\ud800 & &amp;",
)


def residual(action=Kind.SAVED, names=(), op="dot_general", shape=(8, 16), dtype="bfloat16", **more):
    size = more.pop("bytes", 2 * math.prod(shape))
    flops = None if action in (Kind.ARGUMENT, Kind.CONSTANT) else more.pop("recompute_flops", 100)
    return Residual(
        action, names, op, shape, dtype, size, more.pop("global_bytes", size), recompute_flops=flops, **more
    )


def report(*entries, **more):
    return Residuals(tuple(entries), **more)


FULL = report(
    residual(names=("attn_out",), shape=(12, 8, 1024), trips=12, path="decoder/layers/attention", needed_by=("mul",)),
    residual(op="tanh", shape=(4096,), path="decoder/mlp", source="models/gpt.py:41 (mlp)"),
    *(residual(op="exp", shape=(64,), path=f"layers_{i}/mlp") for i in range(12)),
    residual(op="reshape", shape=(12, 8192), alias_of="attn_out", recompute_flops=0),
    residual(Kind.OFFLOADED, ("mlp_up",), shape=(8, 8)),
    residual(Kind.ARGUMENT, op="input", shape=(100,)),
    residual(Kind.CONSTANT, op="input", shape=(10,), names=("table",)),
    policy="dots",
    blocks=("decoder/layers",),
    notes=("something to know",),
)

HOSTILE_REPORT = report(
    *(
        residual(Kind.SAVED, (n,), n, path=f"{n}/inner", source=n, needed_by=(n,), alias_of=n * (i % 2), block=n)
        for i, n in enumerate(HOSTILE_IN_PAGES)
    ),
    policy=HOSTILE,
    blocks=HOSTILE_IN_PAGES,
    notes=HOSTILE_IN_PAGES,
)


def many(n: int = 10_000, layers: int = 48) -> Residuals:
    """A report of a large program: layers that are alike in most of what they keep."""
    draw = random.Random(0)
    ops = ("dot_general", "mul", "tanh", "exp", "sub", "add", "convert_element_type", "transpose")

    def one(layer: int, k: int) -> Residual:
        size = 4 * draw.randrange(1, 2000) if k % 3 == 0 else 4096 * (k + 1)
        return residual(
            Kind.OFFLOADED if k % 17 == 3 else Kind.SAVED,
            (f"activation_{k}",) if k % 5 == 0 else (),
            ops[k % len(ops)],
            (size // 4,),
            "float32",
            bytes=size,
            block=f"decoder/layers_{layer}",
            path=f"decoder/layers_{layer}/module_{k % 13}/part_{k % 7}/step_{k}",
            source=f"model.py:{k + 10} (function_{k % 9})",
            needed_by=("mul", "tanh"),
            recompute_flops=draw.randrange(10**9),
        )

    return report(*(one(i % layers, i // layers) for i in range(n)), policy="dots")


def loss(ws, x):
    """Blocks of a layer with named values."""

    def layer(w, x):
        h = checkpoint_name(jax.nn.gelu(x @ w["up"]), "hidden")
        return x + checkpoint_name(jnp.sin(h @ w["down"]), "out")

    for i, w in enumerate(ws):
        x = rk.remat(layer, block=f"layer_{i}")(w, x)
    return jnp.mean(x**2)


def arguments(layers=4, batch=512):
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"up": jax.random.normal(keys[0], (16, 64)), "down": jax.random.normal(keys[1], (64, 16))}
    return [w] * layers, jax.random.normal(keys[2], (batch, 16))


@functools.cache
def frontier(names_only=False) -> rk.Frontier:
    """A frontier as for a target: the plans at its ends carry figures as if compiled."""
    found = rk.frontier(loss, *arguments(), target=None, points=6, names_only=names_only, progress=False)

    def compiled(p: rk.Plan) -> rk.Plan:
        peak, q = p.peak_bytes, p.predicted
        made = Measured(peak, peak // 2, q.argument_bytes, q.output_bytes, q.host_bytes, q.flops, q.seconds)
        return dataclasses.replace(p, measured=made)

    first, *inner, last = found.plans
    plans = (compiled(first), *inner, compiled(last))
    return dataclasses.replace(found, plans=plans, target="cpu", memory_bytes=last.peak_bytes - 1)


RESULTS = "residuals diff measurement comparison plan frontier findings check program presets".split()
HOSTILES = "residuals diff measurement comparison plan frontier check".split()


@functools.cache
def results() -> dict[str, object]:
    """One result of each kind that has a page."""
    args = arguments(2, 8)
    kept = rk.residuals(loss, *args)
    return {
        "residuals": kept,
        "diff": kept.diff(rk.residuals(loss, *args, policy="names")),
        "measurement": rk.measure(loss, *args, policy="names", target="cpu", against="none"),
        "comparison": rk.compare(loss, *args, policies=("none", "full"), target="cpu", progress=False),
        "plan": frontier()[0],
        "frontier": frontier(),
        "findings": rk.lint(loss, *args, policy="dots"),
        "check": rk.check(loss, *args, policy="names"),
        "program": rk.trace(loss, *args),
        "presets": rk.presets,
    }


@functools.cache
def hostile_results() -> dict[str, object]:
    """Results whose names are all a stranger's."""
    found, bad = results(), "".join(HOSTILE_IN_PAGES)
    measured, compared, plan, check = found["measurement"], found["comparison"], found["plan"], found["check"]

    def plans(p: rk.Plan) -> rk.Plan:
        values = lambda b: tuple(dataclasses.replace(v, label=v.label + bad, source=bad) for v in b.values)  # noqa: E731
        blocks = tuple(dataclasses.replace(b, path=b.path + bad, values=values(b)) for b in p.blocks)
        predicted = dataclasses.replace(p.predicted, binding=bad)
        rivals = tuple(dataclasses.replace(r, name=r.name + bad) for r in p.rivals)
        return dataclasses.replace(p, blocks=blocks, target=bad, predicted=predicted, rivals=rivals, notes=(bad,))

    held = tuple(dataclasses.replace(h, name=bad, path=bad, op=bad, source=bad) for h in measured.held)
    named = dataclasses.replace(compared.rows[0], name=bad)
    return {
        "residuals": HOSTILE_REPORT,
        "diff": HOSTILE_REPORT.diff(FULL),
        "measurement": dataclasses.replace(
            measured, policy=bad, target=bad, held=held, notes=(bad,), differences=(bad,)
        ),
        "comparison": dataclasses.replace(compared, target=bad, rows=(named,), best=bad, refused={bad: bad}),
        "plan": plans(plan),
        "frontier": dataclasses.replace(found["frontier"], plans=tuple(map(plans, found["frontier"])), target=bad),
        "check": dataclasses.replace(check, policy=bad, blocks=(bad,), impurities=(bad,), findings=(bad,)),
    }
