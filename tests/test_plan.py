"""Plans as their users see them: gradients, budgets, files, policies, programs of all kinds."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import remat_kit as rk
from remat_kit import _naming
from remat_kit._plan.planner import Session

OLD_REMAT3 = bool(jax.config.jax_remat3) and jax.__version_info__ < (0, 11)  # ignores offloading
TRANSFORMER = {"layers": 2, "batch": 2, "width": 16, "heads": 2, "mlp_ratio": 2}
MODELS = {
    "gpt": {**TRANSFORMER, "length": 6, "vocab": 50, "dropout": 0.1, "dtype": "float32"},
    "llama": {
        **{"layers": 2, "batch": 2, "length": 6, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24, "vocab": 50},
        "dtype": "float32",
    },
    "vit": {**TRANSFORMER, "image": 8, "patch": 4, "classes": 10, "dtype": "float32"},
    "resnet": {"stages": (1, 1), "batch": 2, "image": 8, "width": 4, "classes": 10, "dtype": "float32"},
    "moe": {**TRANSFORMER, "length": 6, "vocab": 50, "experts": 4, "dtype": "float32"},
    "rnn": {"layers": 2, "batch": 2, "length": 6, "width": 16, "vocab": 50, "dtype": "float32"},
}


def stack_loss(ws, x):
    """Scanned layers with names, quick to trace."""

    def layer(x, w):
        h = checkpoint_name(jax.nn.gelu(x @ w["in"]), "hidden")
        return x + checkpoint_name(jnp.sin(h @ w["out"]), "out"), None

    return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)


def stack(batch=16, layers=4):
    """The loss above with its arguments."""
    keys = jax.random.split(jax.random.key(0), 3)
    ws = {"in": jax.random.normal(keys[0], (layers, 16, 32)), "out": jax.random.normal(keys[1], (layers, 32, 16))}
    return stack_loss, (ws, jax.random.normal(keys[2], (batch, 16)))


@functools.cache
def model(name):
    return stack() if name == "stack" else rk.zoo.build(name, **MODELS[name], abstract=False)


@functools.cache
def session(name, minimize="time", names_only=False):
    fn, args = model(name)
    return Session.open(
        fn, args, {}, target=None, actions=("save", "recompute"), minimize=minimize, names_only=names_only,
        split=False, argnums=0, has_aux=False, keep_barriers=False, compiler_options=None, timeout=60, progress=None,
    )  # fmt: skip


def predicted(name, budget, **options):
    return session(name, **options).plan(budget, 0)


@functools.cache
def ends(name, **options):
    """The smallest peak of a model's plans, and the one of everything kept."""
    return tuple(predicted(name, b, **options).peak_bytes for b in (1, "1GiB"))


def between(name, share, **options):
    low, high = ends(name, **options)
    return predicted(name, int(low + (high - low) * share), **options)


def fresh(budget, **options):
    fn, args = model("stack")
    return rk.plan(fn, *args, budget=budget, target=None, **options)


@functools.cache
def plan():
    low, high = ends("stack")
    return fresh(int(low + (high - low) * 0.4))


def gradients(fn, args, **options):
    return jax.jit(jax.value_and_grad(fn, **options))(*args)


def assert_same(wanted, got, rtol=2e-5, atol=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), wanted, got)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
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


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_plan_survives_its_file(tmp_path):
    names, whole = between("stack", 0.4, names_only=True), between("vit", 0.5)
    for p, name in ((plan(), "stack"), (names, "stack"), (whole, "vit")):
        p.save(tmp_path / "plan.json")
        again = rk.Plan.load(tmp_path / "plan.json")
        assert again == p and hash(again) == hash(p) and str(again) == str(p) and again.explain() == p.explain()
        assert rk.Plan.from_dict(json.loads(json.dumps(p.to_dict()))) == p
        fn, args = model(name)
        rk.residuals(fn, *args, policy=again)


def test_a_changed_program_is_refused_unless_asked(tmp_path):
    plan().save(tmp_path / "plan.json")
    fn, args = stack(batch=24)
    strict, loose = rk.Plan.load(tmp_path / "plan.json"), rk.Plan.load(tmp_path / "plan.json", strict=False)
    with pytest.raises(rk.RematError, match=r"float32\[24,16\], and was float32\[16,16\].*strict=False"):
        rk.apply(fn, strict)(*args)
    assert_same(gradients(fn, args), gradients(rk.apply(fn, loose), args))
    for p in (strict, loose):
        vit, args = model("vit")
        with pytest.raises(rk.RematError, match="layers"):
            jax.eval_shape(rk.apply(vit, p), *args)


# A block more lies in what was the rest behind the blocks; with strict=False it must be noticed all the same.
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_blocks_is_refused(strict, layers):
    p = rk.Plan.from_dict(between("vit", 0.3).to_dict(), strict=strict)
    other = rk.zoo.build("vit", **{**MODELS["vit"], "layers": layers}, abstract=True)
    with pytest.raises(rk.RematError):
        jax.eval_shape(rk.apply(other[0], p), *other[1])


def paths(data, at=()):
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items)[:3] if isinstance(data, list) else items:
        yield from paths(value, (*at, key))


def replaced(data, at, value):
    if not at:
        return value
    data = copy.deepcopy(data)
    inner = data
    for key in at[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return data


DEEP = functools.reduce(lambda x, _: [x], range(10_000), [])
HOSTILE = [
    None,
    True,
    -1,
    10**400,
    2**63,
    float("nan"),
    float("inf"),
    -0.5,
    "",
    "x",
    "\ud800",
    [],
    [[]],
    {},
    {"a": 1},
    DEEP,
]


@functools.cache
def saved():
    return between("vit", 0.3).to_dict()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_files_of_strangers_are_plans_or_clear_errors(data):
    at = data.draw(st.sampled_from(list(paths(saved()))))
    value = data.draw(st.sampled_from([*HOSTILE, *[KeyError] * bool(at)]))
    broken = replaced(saved(), at, value)
    try:
        p = rk.Plan.from_dict(broken)
    except rk.RematError as error:
        assert len(str(error)) < 2000
        return
    str(p), p.explain(), p.to_dict(), p.gap, p.cost  # what is taken can be shown


# Whole numbers beyond the floats once ended in an OverflowError.
@pytest.mark.parametrize("at", [("bound",), ("predicted", "seconds"), ("blocks", 0, "seconds")])
def test_numbers_beyond_floats_are_refused(at):
    with pytest.raises(rk.RematError):
        rk.Plan.from_dict(replaced(saved(), at, 10**400))


@pytest.mark.parametrize("at", [("minimize",), ("blocks", 0, "kind"), ("actions", 0)])
def test_words_that_mean_nothing_are_refused(at):
    with pytest.raises(rk.RematError):
        rk.Plan.from_dict(replaced(saved(), at, "banana"))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"schema": "other"}', "NaN", "\x00", '"' + "9" * 5000, "9" * 5000]
)
def test_files_that_are_no_plans(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(rk.RematError):
        rk.Plan.load(tmp_path / "plan.json")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**33)
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary", tmp_path / "huge", None, "a\x00b"):
        with pytest.raises(rk.RematError):
            rk.Plan.load(path)
    with pytest.raises(rk.RematError):
        plan().save(tmp_path / "no" / "folder")


def test_the_same_plan_in_another_process():
    code = f"""
import json, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_plan
print(json.dumps(test_plan.fresh({plan().budget_bytes}).to_dict()))
"""
    env = {**os.environ, "JAX_REMAT3": str(int(bool(jax.config.jax_remat3))), "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    assert rk.Plan.from_dict(json.loads(out)) == plan() == fresh(plan().budget_bytes)


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


@pytest.mark.parametrize("points", [0, -1, 1.5, True, 10**9])
def test_points_that_cannot_be_planned(points):
    with pytest.raises(rk.RematError, match="points"):
        rk.frontier(*_call(), target=None, points=points)


# --- programs of all kinds --------------------------------------------------------------------------------------------


def chain(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def single(w, x):
    return jnp.sum(jnp.sin(x @ w))


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (jnp.clip(x, -1, 1), jnp.abs(x) <= 1), lambda inside, g: (jnp.where(inside, g, 0.1 * g),))


def custom(ws, x):
    for w in ws:
        x = clipped(jnp.sin(x @ w) * 2)
    return jnp.sum(x**2)


def conditional(ws, x):
    for w in ws:
        x = jax.lax.cond(jnp.sum(x) > 0, lambda y: jnp.tanh(y), lambda y: jnp.sin(y * y), x @ w)
    return jnp.sum(x**2)


def with_while(ws, x):
    n = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, jnp.sum(x > 1e6))
    for w in ws:
        x = jnp.tanh(x @ w) / n
    return jnp.sum(x**2)


def with_ref(ws, x):
    seen = jax.new_ref(jnp.zeros(()))
    for w in ws:
        x = jnp.tanh(x @ w)
        seen[...] += jax.lax.stop_gradient(jnp.sum(x))
    return jnp.sum(x**2) + 0 * seen[...]


def sharded(ws, x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    def body(w, y):
        return jnp.sin(y @ w)

    for w in ws:
        x = body(w, x)
    return jnp.sum(x**2)


def complex_layers(ws, x):
    for w in ws:
        x = jnp.sin(x @ (w + 0.1j * w))
    return jnp.sum(jnp.abs(x) ** 2)


def remat_inside(ws, x):
    layer = jax.checkpoint(lambda w, y: jnp.tanh(jnp.sin(y @ w) @ w))
    for w in ws:
        x = layer(w, x)
    return jnp.sum(x**2)


def sampled(ws, x):
    key = jax.random.key(3)
    for i, w in enumerate(ws):
        x = jnp.tanh(x @ w)
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape), x, 0)
    return jnp.sum(x**2)


WS = [w for w in jax.random.normal(jax.random.key(0), (6, 16, 16)) / 4]
X = jax.random.normal(jax.random.key(1), (32, 16))
KINDS = [chain, custom, conditional, with_while, with_ref, sharded, complex_layers, remat_inside, sampled]


@pytest.mark.parametrize("fn", [single, *KINDS], ids=lambda f: f.__name__)
def test_programs_of_every_kind(fn):
    if fn is sharded and OLD_REMAT3:
        pytest.skip("this JAX has no shard_map in regions of the newer remat")
    args = (WS[0] if fn is single else WS, X)
    wanted = gradients(fn, args)
    low, high = (rk.plan(fn, *args, budget=b, target=None, compiles=0).peak_bytes for b in (1, "1GiB"))
    for budget in (low, (low + high) // 2):
        p = rk.plan(fn, *args, budget=budget, target=None)
        assert p.within and p.peak_bytes <= budget
        with warnings.catch_warnings():  # of rules in forward rules that the newer remat ignores
            if jax.config.jax_remat3:
                warnings.simplefilter("ignore", rk.RematWarning)
            assert_same(wanted, gradients(rk.apply(fn, p), args), rtol=1e-4, atol=1e-5)
        p.explain()
        assert rk.Plan.from_dict(json.loads(json.dumps(p.to_dict()))) == p


def test_segments_of_a_program_without_blocks():
    fn, args = chain, (WS, X)
    low = rk.plan(fn, *args, budget=1, target=None).peak_bytes
    p = rk.plan(fn, *args, budget=low, target=None)
    assert len(p.blocks) > 1 and {b.kind for b in p.blocks} == {"segment"}
    assert p.predicted.recompute_flops > 0
    assert low < rk.plan(fn, *args, budget="1GiB", target=None).peak_bytes


@jax.custom_vjp
def gate(x):
    return jnp.sin(x) * x


gate.defvjp(lambda x: (gate(x), x), lambda x, g: (g * jnp.cos(x),))


# Rules that call their own function are common; each call was once followed into the rule until Python's stack ended.
def test_forward_rules_that_call_their_own_function(monkeypatch):
    fn = lambda w, x: jnp.sum(jnp.tanh(gate(x @ w)) @ w)  # noqa: E731
    depth = 0
    visit = _naming._visit

    def counted(*args):
        nonlocal depth
        depth += 1
        yield from visit(*args)

    monkeypatch.setattr(_naming, "_visit", counted)
    p = rk.plan(fn, WS[0], X, budget=1, target=None)
    assert depth < 100
    assert_same(gradients(fn, (WS[0], X)), gradients(rk.apply(fn, p), (WS[0], X)))


def test_nothing_to_keep():
    for fn in (lambda x: jnp.sum(x), lambda x: jnp.sum(x * 2.0), lambda x: x):
        p = rk.plan(fn, jnp.float32(3.0), budget="1MiB", target=None)
        assert p.within and p.predicted.recompute_flops == 0
        assert gradients(rk.apply(fn, p), (jnp.float32(3.0),)) == gradients(fn, (jnp.float32(3.0),))
        p.explain()


# The search for the smallest peak did not end below 1024 bytes.
def test_programs_of_less_than_a_kibibyte():
    p = rk.plan(chain, [jnp.ones((4, 4))] * 6, jnp.ones((2, 4)), budget=1, target=None)
    assert not p.within and p.peak_bytes > 0


def test_auxiliary_results_and_other_arguments():
    def fn(x, ws, *, scale):
        return chain(ws, x) * scale, {"mean": jnp.mean(x)}

    p = rk.plan(fn, X, WS, budget=1, target=None, argnums=(0, 1), has_aux=True, scale=2.0)
    wanted = gradients(functools.partial(fn, scale=2.0), (X, WS), argnums=(0, 1), has_aux=True)
    assert_same(wanted, gradients(functools.partial(rk.apply(fn, p), scale=2.0), (X, WS), argnums=(0, 1), has_aux=True))
    only = rk.plan(fn, X, WS, budget=1, target=None, argnums=1, has_aux=True, scale=2.0)
    assert only.predicted.output_bytes < p.predicted.output_bytes


def test_abstract_arguments_give_the_same_plan():
    fn, args = model("stack")
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    assert rk.plan(fn, *abstract, budget=plan().budget_bytes, target=None) == plan()


def test_double_precision():
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (WS, X))
        low = rk.plan(chain, *args, budget=1, target=None).peak_bytes
        p = rk.plan(chain, *args, budget=low, target=None)
        assert p.predicted.recompute_flops > 0
        assert_same(gradients(chain, args), gradients(rk.apply(chain, p), args), rtol=1e-12, atol=1e-12)
        assert low > 1.8 * rk.plan(chain, WS, X, budget=1, target=None).peak_bytes


def test_modules_as_arguments():
    fn, (module, *data) = rk.zoo.gpt_nnx(**TRANSFORMER, length=6, vocab=50, dtype="float32", abstract=False)
    p = rk.plan(fn, module, *data, budget=1, target=None)
    p = rk.plan(fn, module, *data, budget=p.peak_bytes, target=None)
    assert p.within and any("layers" in b.path or "scan" in b.path for b in p.blocks)
    assert sum(b.policy.remat for b in p.blocks) > 0
    from flax import nnx

    a, b = (nnx.value_and_grad(f)(module, *data) for f in (fn, rk.apply(fn, p)))
    assert_same(jax.tree.leaves(a), jax.tree.leaves(b))


@pytest.mark.skipif(OLD_REMAT3, reason="this JAX ignores offloading under the newer remat")
def test_what_is_offloaded_hides_behind_computation():
    def fn(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.sin(x @ w) @ w, None), x, ws)[0].astype(jnp.float32))

    abstract = (
        jax.ShapeDtypeStruct((8, 16384, 16384), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192, 16384), jnp.bfloat16),
    )
    least = rk.plan(fn, *abstract, budget=1, target="tpu:v5e", compiles=0)
    with_host = rk.plan(fn, *abstract, budget=least.peak_bytes, target="tpu:v5e", compiles=0)
    without = rk.plan(fn, *abstract, budget=least.peak_bytes, target="tpu:v5e", compiles=0, actions=("save",))
    assert with_host.within and with_host.predicted.host_bytes > 0
    assert not without.within or without.cost > with_host.cost
    small = (jax.random.normal(jax.random.key(0), (8, 16, 16)), X)
    jax.eval_shape(jax.grad(rk.apply(fn, with_host)), *abstract)
    loose = rk.Plan.from_dict(with_host.to_dict(), strict=False)
    assert_same(gradients(fn, small), gradients(rk.apply(fn, loose), small))


# --- single values ----------------------------------------------------------------------------------------------------


def attention(w, x):
    def layer(x, w):
        scores = jax.nn.softmax((x @ w) @ (x @ w).T)
        return scores @ x, None

    return jnp.sum(jax.lax.scan(layer, x, w)[0])


def test_values_by_label():
    ws, x = jnp.ones((3, 8, 8)), jnp.ones((4, 8))
    full = rk.residuals(attention, ws, x, policy="full").total_bytes
    one = rk.residuals(attention, ws, x, policy="save value=exp")
    assert one.total_bytes - full == 3 * 4 * 4 * 4
    first, both = (
        rk.residuals(attention, ws, x, policy=f"save value={label}").total_bytes - full
        for label in ("dot_general", "dot_general | dot_general#2".replace(" ", ""))
    )
    assert first == 3 * 4 * 8 * 4 and both == 2 * first
    text = "save value=dot_general#2; offload value=exp; recompute rest"
    assert str(rk.policy(text)) == str(rk.policy(str(rk.policy(text)))) and rk.policy(
        str(rk.policy(text))
    ) == rk.policy(text)
    assert rk.save(value="a/b#2") == rk.policy("save value=a/b#2")


def test_unknown_values_are_named():
    with pytest.warns(rk.RematWarning, match="dot_general#2"):
        rk.residuals(attention, jnp.ones((3, 8, 8)), jnp.ones((4, 8)), policy="save value=dot_genral#2")


def test_equal_layers_have_equal_labels():
    fn, args = rk.zoo.build("vit", **{**MODELS["vit"], "layers": 4}, abstract=True)
    p = rk.plan(fn, *args, budget=1, target=None, actions=("recompute",))
    labels = [[v.label for v in b.values] for b in p.blocks if b.kind != "segment" and b.policy.remat]
    assert len(labels) > 1 and all(x == labels[0] for x in labels)
    assert len(labels[0]) == len(set(labels[0])) > 5
    assert not any(label.startswith("layers_") for label in labels[0])


# --- programs that are other programs, and blocks that stay as they are -----------------------------------------------


def test_another_number_of_iterations_is_refused():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, m: (jnp.tanh(h @ m), None), x, w)[0] ** 2)

    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    p = rk.plan(loss, jax.ShapeDtypeStruct((4, 8, 8), jnp.float32), x, budget=1, target=None)
    with pytest.raises(rk.RematError, match="scan of 6 iterations, and was one of 4"):
        rk.residuals(loss, jax.ShapeDtypeStruct((6, 8, 8), jnp.float32), x, policy=p)


def test_the_same_operations_wired_otherwise_are_another_program():
    def first(w, x):
        return jnp.sum(jax.lax.scan(lambda h, m: (jnp.tanh(jnp.sin(h @ m) * h + h), None), x, w)[0])

    def second(w, x):
        def body(h, m):
            s = jnp.sin(h @ m)
            return jnp.tanh(h * s + s), None

        return jnp.sum(jax.lax.scan(body, x, w)[0])

    args = (jax.ShapeDtypeStruct((4, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32))
    p = rk.plan(first, *args, budget=1, target=None)
    rk.residuals(first, *args, policy=p)
    with pytest.raises(rk.RematError, match="computes something else"):
        rk.residuals(second, *args, policy=p)


@pytest.mark.skipif(OLD_REMAT3, reason="programs of this JAX's newer remat hold what lowering drops")
def test_what_is_saved_of_an_operation_with_several_results_is_not_made_again():
    def loss(w, x):
        def body(h, m):
            return jnp.tanh(jnp.linalg.solve(m + 4 * jnp.eye(8), h.T).T), None

        return jnp.sum(jax.lax.scan(body, x, w)[0])

    args = (jax.random.normal(jax.random.key(0), (3, 8, 8)) / 8, jnp.ones((4, 8)))

    def lu_calls(policy):
        program = jax.make_jaxpr(jax.grad(rk.apply(loss, {"scan": policy})))(*args)
        return str(program).count("= lu ") + str(program).count("= lu\n") + str(program).count("= lu[")

    assert lu_calls("save value=lu|lu#2|lu#3") == lu_calls("none") < lu_calls("full")
    got = jax.grad(rk.apply(loss, {"scan": "save value=lu|lu#3"}))(*args)
    np.testing.assert_allclose(got, jax.grad(loss)(*args), rtol=1e-5, atol=1e-6)


def test_blocks_that_make_references_stay_as_they_are():
    def loss(w, x):
        for m in w:
            r = jax.new_ref(x)
            r[...] = jnp.sin(r[...] @ m)
            x = r[...]
        return jnp.sum(x)

    w, x = [jnp.eye(4)] * 4, jnp.ones((2, 4))
    p = rk.plan(loss, w, x, budget=1, target=None)
    assert any("mutable reference" in note for note in p.notes)
    np.testing.assert_allclose(jax.grad(rk.apply(loss, p))(w, x)[0], jax.grad(loss)(w, x)[0], rtol=1e-6)


def test_where_there_is_room_nothing_is_offloaded():
    fn, args = rk.zoo.gpt(layers=2, batch=2, length=64, width=64, heads=2, vocab=128)
    p = rk.plan(fn, *args, budget="10GiB", target="tpu:v5e", compiles=0)
    assert p.predicted.host_bytes == 0


def test_a_plan_in_the_wrong_place_says_where_it_goes():
    fn, args = rk.zoo.gpt(layers=2, batch=2, length=64, width=64, heads=2, vocab=128)
    p = rk.plan(fn, *args, budget=1, target=None)
    with pytest.raises(rk.RematError, match="policy_for"):
        rk.policy(p)
    assert len(repr(p)) < 100


def test_modules_may_bear_the_names_of_parts_and_of_the_rest():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(8)(jnp.tanh(nn.Dense(8)(x)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jnp.sin(x) @ jnp.eye(8)
            for name in ("rest_0", "rest_1", "a@0:2"):
                x = Layer(name=name)(x)
            return jnp.sum(jnp.cos(x) ** 2)

    x = jnp.ones((4, 8))
    params = Model().init(jax.random.key(0), x)
    p = rk.plan(Model().apply, params, x, budget=1, target=None)
    paths = [b.path for b in p.blocks]
    assert len(paths) == len(set(paths)) and {"rest_0", "rest_1", "a@0:2"} < set(paths)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        jax.grad(Model().apply)(params, x),
        jax.grad(rk.apply(Model().apply, p))(params, x),
    )


def test_actions_that_a_target_cannot_take_are_said():
    fn, args = model("stack")
    settings = {"budget": "1MiB", "target": None}
    named = rk.plan(fn, *args, actions=("save", "offload"), **settings)
    assert "offload" not in named.actions and any("nothing is offloaded" in note for note in named.notes)
    assert not rk.plan(fn, *args, **settings).notes
