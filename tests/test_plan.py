"""Plans as their users see them: gradients, budgets, policies and frontiers."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk
from remat_kit._plan import planner
from tests.plans import (
    MODELS,
    assert_same,
    between,
    ends,
    fresh,
    gradients,
    model,
    plan,
    predicted,
    stack,
)

# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(m, marks=pytest.mark.slow if m != "gpt" else ()) for m in MODELS])
def test_gradients_of_plans_equal_those_without_remat(name):
    fn, args = model(name)
    wanted = gradients(fn, args)
    plans = [between(name, share) for share in (0, 0.4)]
    assert all(p.within for p in plans) and plans[0].predicted.recompute_flops > plans[1].predicted.recompute_flops
    for p in plans:
        assert_same(wanted, gradients(rk.apply(fn, p), args))


def test_gradients_of_a_plan_of_names_equal_those_without_remat():
    fn, args = model("gpt")
    p = between("gpt", 0.4, names_only=True)
    assert p.within and p.saved_names
    assert_same(gradients(fn, args), gradients(rk.apply(fn, p), args))


def test_a_plan_keeps_what_it_says():
    fn, args = model("stack")
    p = plan()
    kept = [rk.residuals(fn, *args, policy=q).total_bytes for q in ("full", p, "none")]
    assert kept[0] < kept[1] < kept[2]
    loop = p.blocks[0]
    assert loop.path == "scan" and loop.kept_bytes <= kept[1] <= sum(b.kept_bytes for b in p.blocks) + 16


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_more_memory_never_costs_more():
    low, high = ends("stack")
    plans = [predicted("stack", int(low + (high - low) * k / 6)) for k in range(7)]
    assert all(p.within and p.peak_bytes <= p.budget_bytes for p in plans)
    costs = [p.cost for p in plans]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
    assert all(0 <= p.bound <= p.cost and 0 <= p.gap for p in plans)


def test_a_plan_costs_no_more_than_any_preset_that_fits():
    for name in ("stack", "vit"):
        for minimize in ("flops", "time"):
            for rival in between(name, 0.5, minimize=minimize).rivals:
                if rival.peak_bytes < ends(name)[0]:
                    continue
                p = predicted(name, rival.peak_bytes, minimize=minimize)
                assert p.within and p.cost <= (rival.flops if minimize == "flops" else rival.seconds) * (1 + 1e-4)


def test_without_need_nothing_is_recomputed():
    p = predicted("stack", "1GiB", minimize="flops")
    assert p.within and p.predicted.recompute_flops == 0 and p.gap == 0


def test_a_budget_too_small_is_an_answer():
    p = predicted("stack", 1000)
    assert not p.within and p.peak_bytes > 1000
    text = str(p)
    assert "smallest peak" in text
    for part in ("arguments", "outputs", "kept", "backward pass"):
        assert part in text
    q = p.predicted
    parts = q.argument_bytes + q.output_bytes + q.other_bytes + q.kept_bytes + q.working_bytes
    assert parts == q.peak_bytes == p.peak_bytes
    assert predicted("stack", p.peak_bytes).within


def test_budgets_are_bytes_or_text():
    low, high = ends("stack")
    n = (low + high) // 2
    assert fresh(n) == fresh(f"{n}B") == fresh(np.int64(n))


@pytest.mark.parametrize("budget", [0, -1, "0", "much", "12 lightyears", 1.5, float("nan"), True, [1], "1e400", ""])
def test_budgets_that_cannot_be_read(budget):
    with pytest.raises(rk.RematError):
        predicted("stack", budget)


@pytest.mark.parametrize("budget", [None, 0.5])
def test_without_a_target_the_budget_is_in_bytes(budget):
    with pytest.raises(rk.RematError, match="bytes"):
        predicted("stack", budget)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"minimize": "memory"}, "minimize"),
        ({"minimize": None}, "minimize"),
        ({"actions": "save"}, "actions"),
        ({"actions": ("keep",)}, "action"),
        ({"actions": 3}, "actions"),
        ({"actions": ("offload",)}, "offload"),
        ({"compiles": -1}, "compiles"),
        ({"compiles": 1.5}, "compiles"),
        ({"compiles": True}, "compiles"),
        ({"target": "tpu:v99"}, "v99"),
        ({"compiler_options": {"xla_x": 1}}, "compiler"),
    ],
)
def test_settings_that_cannot_be_read(options, said):
    with pytest.raises(rk.RematError, match=said):
        rk.plan(*_call(), **{"budget": "1MiB", "target": None, **options})


def _call():
    fn, args = model("stack")
    return fn, *args


def test_recomputing_alone_is_allowed():
    p = fresh(plan().budget_bytes, actions=("recompute",))
    assert {r.action for b in p.blocks for r in b.policy.rules} == set()
    assert p.cost >= plan().cost


# --- compiled ---------------------------------------------------------------------------------------------------------


@functools.cache
def compiled():
    fn, args = stack(batch=256)
    none, full = (rk.measure(fn, *args, policy=p, target="cpu").peak_bytes for p in ("none", "full"))
    return fn, args, none, rk.plan(fn, *args, budget=(none + full) // 2, target="cpu", compiles=3)


def test_the_compiled_program_keeps_within_the_budget():
    fn, args, none, p = compiled()
    assert p.measured is not None and p.within and p.peak_bytes == p.measured.peak_bytes <= p.budget_bytes
    assert 1 <= len(p.attempts) <= 3 and any(a.peak_bytes == p.peak_bytes for a in p.attempts)
    assert rk.measure(fn, *args, policy=p, target="cpu").peak_bytes == p.peak_bytes
    comparison = rk.compare(fn, *args, policies=("none", p), target="cpu")
    assert {r.measurement.peak_bytes for r in comparison.rows} == {none, p.peak_bytes}


def test_shares_of_the_memory_are_budgets():
    fn, args = stack()
    whole = rk.plan(fn, *args, target="tpu:v5e", compiles=0)
    half = rk.plan(fn, *args, budget=0.5, target="tpu:v5e", compiles=0)
    assert half.budget_bytes == whole.budget_bytes // 2 > 2**32 and whole.within


def test_the_largest_batch_of_plans_is_no_smaller_than_that_of_a_policy():
    none = compiled()[2]
    planned = rk.max_batch(lambda n: stack(batch=n), target="cpu", budget=none, limit=1024, compiles=3)
    fixed = rk.max_batch(lambda n: stack(batch=n), target="cpu", budget=none, limit=1024, policy="full")
    assert planned.batch >= fixed.batch > 256
    assert planned.plan is not None and planned.measurement.peak_bytes <= none
    json.dumps(planned.to_dict())


# --- as policies, and what is shown -----------------------------------------------------------------------------------


def test_policies_of_blocks():
    p = plan()
    assert [b.path for b in p.blocks] == ["scan", "rest_0"]
    policy = p.policy_for("scan")
    assert policy.remat and rk.policy(str(policy)) == policy
    with pytest.raises(KeyError):
        p.policy_for("nothing")


def test_the_explanation_names_values():
    p = plan()
    text = p.explain()
    layers = p.blocks[0]
    assert {"save", "recompute"} == {v.action for v in layers.values}
    for v in layers.values[:5]:
        assert v.label in text
    assert "preset" in text and "peak lies in the backward pass" in text
    largest = {v.label: v for v in layers.values}
    assert any("dot_general" in label for label in largest)


def test_names_become_the_policy_of_jax():
    fn, args = model("stack")
    p = between("stack", 0.4, names_only=True)
    native = eval(p.as_jax(), {"jax": jax})
    if jax.config.jax_remat3:  # which may not honour JAX's own policies; the text form is the same thing
        native = str(p.blocks[0].policy)
    mine, theirs = (rk.residuals(fn, *args, policy=q) for q in (p, native))
    assert mine.total_bytes == theirs.total_bytes < rk.residuals(fn, *args, policy="none").total_bytes
    assert p.as_jax() in str(p).replace("\n", "") or p.saved_names[0] in str(p)
    assert "remat_policy: custom" in p.as_maxtext() or "custom" in p.as_maxtext()
    for call in (plan().as_jax, plan().as_maxtext):
        with pytest.raises(rk.RematError, match="names_only"):
            call()


def test_rivals_of_a_plan_of_names_are_the_presets_themselves():
    """What a preset recomputes does not depend on what the plan may choose among."""
    plain = {r.name: r.flops for r in between("stack", 0.4).rivals}
    named = {r.name: r.flops for r in between("stack", 0.4, names_only=True).rivals}
    for name in set(plain) & set(named):
        assert plain[name] == named[name]


def test_names_need_names():
    with pytest.raises(rk.RematError, match="checkpoint_name"):
        rk.plan(lambda w: jnp.sum(jnp.tanh(w) @ w), jnp.ones((4, 4)), budget="1MiB", target=None, names_only=True)


def test_what_else_takes_a_policy_takes_a_plan():
    fn, args = model("stack")
    p = plan()
    report = rk.residuals(fn, *args, policy=p)
    assert report.policy == p.title
    m = rk.measure(fn, *args, policy=p, target="cpu")
    assert "plan for" in m.policy


def test_a_plan_in_the_wrong_place_says_where_it_goes():
    fn, args = rk.zoo.gpt(layers=2, batch=2, length=64, width=64, heads=2, vocab=128)
    p = rk.plan(fn, *args, budget=1, target=None)
    with pytest.raises(rk.RematError, match="policy_for"):
        rk.policy(p)
    assert len(repr(p)) < 100


# --- frontiers --------------------------------------------------------------------------------------------------------


def test_along_a_frontier_peaks_rise_and_costs_fall():
    fn, args = model("vit")
    f = rk.frontier(fn, *args, target=None, points=8)
    peaks, costs = [p.peak_bytes for p in f], [p.cost for p in f]
    assert len(f) > 3 and peaks == sorted(set(peaks)) and costs == sorted(set(costs), reverse=True)
    assert abs(peaks[0] - ends("vit")[0]) <= 0.01 * peaks[0]
    assert f.within(peaks[2]) == f[2] and f.within(peaks[2] - 1) == f[1] and f.within(peaks[0] - 1) is None
    assert f.within("1GiB") == f[len(f) - 1]
    json.dumps(f.to_dict())
    assert len(f.rows()) == len(f) and "Frontier" in str(f)
    for p in f:
        jax.eval_shape(jax.grad(rk.apply(fn, p)), *args)


def test_a_plan_that_the_compiler_refuses_is_left_out_of_the_frontier(monkeypatch):
    fn, args = rk.zoo.gpt(layers=2, batch=2, length=64, width=64, heads=2, vocab=128)
    refused = []
    compiled = planner.Session.compiled

    def refuse_the_second(self, selection):
        refused.append(selection.key)
        if len(refused) == 2:
            raise rk.RematError("XLA cannot compile this one.")
        return compiled(self, selection)

    monkeypatch.setattr(planner.Session, "compiled", refuse_the_second)
    with pytest.warns(rk.RematWarning, match=r"1 of 3 plans .* left out: XLA cannot compile this one"):
        f = rk.frontier(fn, *args, target="cpu", points=3, compiles=3)
    assert 1 <= len(f) <= 2 and all(p.measured for p in f)


@pytest.mark.parametrize("points", [0, -1, 1.5, True, 10**9])
def test_points_that_cannot_be_planned(points):
    with pytest.raises(rk.RematError, match="points"):
        rk.frontier(*_call(), target=None, points=points)


# --- offloading ------------------------------------------------------------------------------------------------------


def test_where_there_is_room_nothing_is_offloaded():
    fn, args = rk.zoo.gpt(layers=2, batch=2, length=64, width=64, heads=2, vocab=128)
    p = rk.plan(fn, *args, budget="10GiB", target="tpu:v5e", compiles=0)
    assert p.predicted.host_bytes == 0


def test_actions_that_a_target_cannot_take_are_said():
    fn, args = model("stack")
    settings = {"budget": "1MiB", "target": None}
    named = rk.plan(fn, *args, actions=("save", "offload"), **settings)
    assert "offload" not in named.actions and any("nothing is offloaded" in note for note in named.notes)
    assert not rk.plan(fn, *args, **settings).notes
