"""Makes the pictures of docs/pictures.md again: `python docs/images/make.py`, with the extras plot and cuda.

GPT-2 small is compiled for an H100 about ten times, which takes some minutes on two cores. No GPU is needed.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

import remat_kit as rk

HERE = Path(__file__).parent
TARGET = "cuda:h100"
PRESETS = ("none", "full", "dots", "dots_no_batch")
SIZES = dict(layers=12, length=1024, width=768, heads=12, vocab=50304, dtype="bfloat16")


def main() -> None:
    matplotlib.use("Agg")
    loss, args = rk.zoo.gpt(batch=16, **SIZES)
    full, dots = (rk.measure(loss, *args, policy=policy, target=TARGET) for policy in ("full", "dots_no_batch"))
    offloading = rk.residuals(loss, *args, policy="save name=*_proj; offload name=mlpwi")
    policies = rk.compare(loss, *args, policies=PRESETS, target=TARGET, budget="12GiB")
    plans = rk.frontier(loss, *args, target=TARGET, points=8, compiles=3)
    save("residuals", offloading.plot, height=4.4)
    save("timeline", lambda ax: dots.plot(ax, against=full))
    save("policies", policies.plot)
    save("frontier", lambda ax: plans.plot(ax, presets=policies, budget="12GiB"))


def save(name: str, draw, height: float = 5.0) -> None:
    figure = Figure(figsize=(9.5, height), layout="constrained")
    draw(figure.subplots())
    figure.savefig(HERE / f"{name}.png", dpi=100)


if __name__ == "__main__":
    main()
