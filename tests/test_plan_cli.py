"""`remat-kit plan`, `frontier` and plans as policies on the command line: what they print and their exit status."""

from __future__ import annotations

import functools
import json

import pytest

import remat_kit
from tests.helpers import run

TINY = ["zoo:gpt", *(f"--set={s}" for s in ("layers=2", "batch=2", "length=6", "width=16", "heads=2", "vocab=50"))]


@functools.cache
def program():
    sizes = {"layers": 2, "batch": 2, "length": 6, "width": 16, "heads": 2, "vocab": 50}
    return remat_kit.zoo.build("gpt", **sizes, abstract=True)


@functools.cache
def peaks():
    """Compiled peaks of everything kept and of everything recomputed."""
    fn, args = program()
    return tuple(remat_kit.measure(fn, *args, policy=p, target="cpu").peak_bytes for p in ("none", "full"))


def budget():
    return str(sum(peaks()) // 2)


def test_a_plan_is_printed_and_saved(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    status, out, err = run(
        capsys, "plan", *TINY, "--budget", budget(), "--target", "cpu", "--compiles", "3", "--save", path
    )
    assert status == 0 and not err
    assert "budget" in out and "layers" in out and "compiled" in out
    plan = remat_kit.Plan.load(path)
    assert plan.within and plan.budget_bytes == int(budget()) and plan.target == "cpu"

    status, out, _ = run(capsys, "compare", *TINY, "--policy", "none", "--policy", path, "--target", "cpu", "--json")
    assert status == 0
    assert {r["peak_bytes"] for r in json.loads(out)["rows"]} >= {peaks()[0], plan.peak_bytes}
    status, out, _ = run(capsys, "residuals", *TINY, "--policy", path, "--json")
    fn, args = program()
    assert status == 0 and json.loads(out)["total_bytes"] == remat_kit.residuals(fn, *args, policy=plan).total_bytes
    status, out, _ = run(capsys, "measure", *TINY, "--policy", path, "--target", "cpu", "--json")
    assert json.loads(out)["peak_bytes"] == plan.peak_bytes


def test_json_is_the_plan(capsys):
    status, out, err = run(capsys, "plan", *TINY, "--budget", "1GiB", "--target", "cpu", "--compiles", "0", "--json")
    assert status == 0 and not err
    fn, args = program()
    wanted = remat_kit.plan(fn, *args, budget="1GiB", target="cpu", compiles=0)
    assert remat_kit.Plan.from_dict(json.loads(out)) == wanted


def test_a_budget_too_small_exits_with_1(capsys):
    status, out, _ = run(capsys, "plan", *TINY, "--budget", "1KiB", "--target", "cpu", "--compiles", "0")
    assert status == 1 and "smallest peak" in out.replace("\n", " ").lower()


def test_the_explanation_is_asked_for(capsys):
    argv = ["plan", *TINY, "--budget", "60KiB", "--target", "cpu", "--compiles", "0"]
    _, short, _ = run(capsys, *argv)
    _, long, _ = run(capsys, *argv, "--explain")
    assert len(long) > len(short) and "dot_general" in long and "peak lies in the backward pass" in long


def test_the_frontier(capsys):
    status, out, err = run(capsys, "frontier", *TINY, "--target", "cpu", "--compiles", "0", "--points", "5", "--json")
    assert status == 0 and not err
    found = [p["predicted"]["peak_bytes"] for p in json.loads(out)["plans"]]
    assert len(found) > 1 and found == sorted(set(found))
    status, out, _ = run(capsys, "frontier", *TINY, "--target", "cpu", "--compiles", "0", "--points", "3")
    assert status == 0 and "Frontier" in out and "gap" in out


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", *TINY, "--budget", "much"],
        ["plan", *TINY, "--budget", "0"],
        ["plan", *TINY, "--budget", "1MiB", "--minimize", "memory"],
        ["plan", *TINY, "--budget", "1MiB", "--compiles", "-1"],
        ["plan", *TINY, "--budget", "1MiB", "--target", "tpu:v99"],
        ["plan", "zoo:nothing", "--budget", "1MiB"],
        ["plan"],
        ["plan", *TINY, "--budget", "1GiB", "--target", "cpu", "--compiles", "0", "--save", "no/such/folder/plan.json"],
        ["frontier", *TINY, "--points", "0"],
        ["compare", *TINY, "--policy", "no_such_plan.json"],
    ],
    ids=lambda argv: " ".join(a for a in argv if not a.startswith("--set"))[:60],
)
def test_wrong_use_exits_with_2(capsys, argv):
    status, out, err = run(capsys, *argv)
    assert status == 2 and not out and err


def test_a_file_that_is_no_plan_is_wrong_use(capsys, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    status, out, err = run(capsys, "residuals", *TINY, "--policy", str(tmp_path / "plan.json"))
    assert status == 2 and not out and "plan" in err


def test_a_plan_of_another_program_is_wrong_use(capsys, tmp_path):
    path = tmp_path / "plan.json"
    fn, args = program()
    remat_kit.plan(fn, *args, budget="1GiB", target=None).save(path)
    argv = [a.replace("batch=2", "batch=4") for a in TINY]
    status, out, err = run(capsys, "residuals", *argv, "--policy", str(path))
    assert status == 2 and not out and "Plan again" in err.replace("\n", " ")
