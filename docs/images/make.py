"""Makes the pictures of docs/pictures.md and docs/see.md again, with the extras plot, cuda, tpu and browser.

`python docs/images/make.py`: GPT-2 small is compiled for an H100 and for a TPU v5e about fifteen times, which takes
some ten minutes on two cores. Neither is needed; Chromium is, as for the tests in a browser.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

import remat_kit as rk

HERE = Path(__file__).parent
SIZES = dict(layers=12, length=1024, width=768, heads=12, dtype="bfloat16")
PRESETS = ("none", "full", "dots", "dots_no_batch", "save_out_proj", "save_qkv_proj", "minimal_with_context")


def main() -> None:
    matplotlib.use("Agg")
    loss, args = rk.zoo.gpt(batch=16, vocab=50304, **SIZES)
    full, dots = (rk.measure(loss, *args, policy=policy, target="cuda:h100") for policy in ("full", "dots_no_batch"))
    save("timeline", lambda ax: dots.plot(ax, against=full))
    offloading = rk.residuals(loss, *args, policy="save name=*_proj; offload name=mlpwi")
    save("residuals", offloading.plot, height=4.4)
    loss, args = rk.zoo.gpt(batch=8, vocab=32768, **SIZES)
    policies = rk.compare(loss, *args, policies=PRESETS, target="tpu:v5e", budget="4GiB")
    save("policies", policies.plot)
    plans = rk.frontier(loss, *args, target="tpu:v5e", points=16, compiles=3, actions=("save", "recompute"))
    save("frontier", lambda ax: plans.plot(ax, presets=policies, budget="4GiB"))
    photograph({"residuals": offloading, "explorer": plans})


def save(name: str, draw, height: float = 5.0) -> None:
    figure = Figure(figsize=(9.5, height), layout="constrained")
    draw(figure.subplots())
    figure.savefig(HERE / f"{name}.png", dpi=100)


def photograph(results: dict) -> None:
    """The pages of results in Chromium, light and dark."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, result in results.items():
            path = result.to_html(Path(folder, f"{name}.html"))
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": 1360, "height": 900}, color_scheme=scheme)
                page.goto(path.as_uri())
                page.screenshot(path=HERE / f"{name}_{scheme}.png")
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
