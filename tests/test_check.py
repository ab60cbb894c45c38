"""check: equal functions pass; what differs is named, and what makes a function impure; what JAX lacks is no fault."""

from __future__ import annotations

import json
import random
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import remat_kit as rk
from remat_kit import _apply
from remat_kit._verify import random_values, tolerance

OLD_REMAT3 = bool(jax.config.jax_remat3) and jax.__version_info__ < (0, 11)
S = jax.ShapeDtypeStruct
W, X = S((8, 8), jnp.float32), S((4, 8), jnp.float32)
PARAMS = {"a": W, "b": W}


def layer(w, x):
    return jnp.tanh(jnp.sin(x @ w))


def loss(params, x):
    return jnp.mean(layer(params["b"], layer(params["a"], x)) ** 2)


def written(params, x):
    run = rk.remat(layer)
    return jnp.mean(run(params["b"], run(params["a"], x)) ** 2)


# Equal functions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fun", "policy"), [(written, None), (loss, "full"), (loss, "save op=dot_general")])
def test_all_derivatives_of_a_pure_function_are_the_same(fun, policy):
    c = rk.check(fun, PARAMS, X, policy=policy)
    assert c.ok and c and not c.findings and not c.failures
    assert [d.status for d in c.derivatives] == ["same"] * 4
    assert c.made_up == ("params['a']", "params['b']", "x")
    labels = [(x.kind, x.label) for x in c.compared if x.derivative == "reverse"]
    assert labels == [("loss", "loss"), ("gradient", "params['a']"), ("gradient", "params['b']")]
    assert c.regions > 0 and 0 <= c.bytes_after < c.bytes_before
    c.raise_for_failures()


def test_residual_figures_are_those_of_residuals():
    c = rk.check(loss, PARAMS, X, policy="full", derivatives="reverse")
    assert c.bytes_before == rk.residuals(loss, PARAMS, X).total_bytes
    assert c.bytes_after == rk.residuals(loss, PARAMS, X, policy="full").total_bytes


def test_a_plan_is_checked():
    loss, args = rk.zoo.gpt(layers=2, batch=2, length=6, width=16, heads=2, mlp_ratio=2, vocab=50)
    plan = rk.plan(loss, *args, budget="1GiB")
    c = rk.check(loss, *args, plan=plan, derivatives="reverse")
    assert c.ok and c.policy == str(_apply.Rules.of(plan))


def test_real_arguments_are_used_as_they_are():
    params = {"a": jnp.eye(8), "b": jnp.eye(8)}
    x = jnp.full((4, 8), 0.3)
    c = rk.check(loss, params, x, policy="full", derivatives="reverse")
    assert c.made_up == ()
    assert c.compared[0].size == pytest.approx(float(loss(params, x)), rel=1e-6)


def test_made_up_values_depend_on_the_seed_only():
    first, again, other = (
        rk.check(loss, PARAMS, X, policy="full", derivatives="reverse", seed=s).compared[0].size for s in (0, 0, 1)
    )
    assert first == again != other


def test_values_are_made_up_for_every_type():
    def fun(w, ids, mask, key, raw, table, scale):
        h = table[ids] * mask[:, None] + jax.random.normal(key, (3, 8)) + jax.random.uniform(raw, (3, 8))
        return jnp.sum(jnp.abs(jnp.sin(h @ w).astype(jnp.complex64) * scale))

    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (W, S((3,), jnp.int32), S((3,), bool), key, S((2,), jnp.uint32), S((2, 8), jnp.bfloat16))
    c = rk.check(fun, *args, S((8,), jnp.complex64), policy="full", argnums=(0, 5, 6), derivatives="reverse")
    assert c.ok, c
    assert len(c.made_up) == 7
    assert [x.dtype for x in c.compared] == ["float32", "float32", "bfloat16", "complex64"]
    assert all(x.size > 0 for x in c.compared)


def test_integers_are_positions_and_keys_are_not_all_alike():
    ids = np.asarray(random_values.made(S((50,), jnp.int32), 0, 0))
    assert set(ids) == {0, 1}
    keys = random_values.made(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3)), 0, 0)
    assert len({tuple(k) for k in np.asarray(jax.random.key_data(keys))}) == 3


def test_values_are_positive_where_the_loss_needs_it():
    c = rk.check(lambda v, x: jnp.sum(jnp.sqrt(v) * jnp.sin(x)), S((8,), jnp.float32), X, policy="full")
    assert c.ok and any("all positive" in f for f in c.findings)
    assert all(np.isfinite(x.size) and x.size > 0 for x in c.compared)


def test_leaves_without_numbers_to_differentiate_are_skipped():
    def fun(params, x):
        return jnp.sum(params["table"][params["step"]] * jnp.sin(x))

    c = rk.check(fun, {"table": S((4, 8), jnp.float32), "step": S((), jnp.int32)}, X, policy="full")
    assert c.ok and c.skipped == ("params['step']",)
    assert {x.label for x in c.compared if x.kind == "gradient"} == {"params['table']"}


# Rounding ----------------------------------------------------------------------------------------------------


@pytest.fixture
def optimized():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_bfloat16_is_the_same_up_to_rounding_and_no_bitwise_claim_is_made(optimized):
    # https://github.com/jax-ml/jax/issues/8702
    x = jnp.asarray(np.random.default_rng(0).random(4096), jnp.bfloat16)

    @jax.checkpoint
    def soft(x):
        return jax.nn.softmax(x.astype(jnp.float32) * 3)

    c = rk.check(lambda x: soft(x + 1)[:7].sum(), x, derivatives="reverse", reference="float32")
    gradient = c.compared[-1]
    assert c.ok and gradient.label == "x" and gradient.dtype == "bfloat16"
    if jax.__version_info__ >= (0, 11):  # earlier ones happen to round alike here
        assert gradient.differing > 0 and gradient.ulps >= 1
    assert gradient.error <= gradient.tolerance < gradient.size / 4
    assert gradient.plain_error is not None and gradient.remat_error is not None


def test_the_tolerance_follows_the_type():
    tolerances = {}
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        params = jax.tree.map(lambda w, dtype=dtype: S(w.shape, dtype), PARAMS)
        c = rk.check(loss, params, S(X.shape, dtype), policy="full", derivatives="reverse")
        assert c.ok, c
        tolerances[dtype] = c.compared[1].tolerance / c.compared[1].size
    assert tolerances[jnp.float32] < 1e-4 < tolerances[jnp.float16] < tolerances[jnp.bfloat16] < 0.5


def test_64_bit_types():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda w: S(w.shape, jnp.float64), PARAMS)
        c = rk.check(loss, params, S(X.shape, jnp.float64), policy="full", derivatives="reverse")
        assert c.ok and c.compared[1].dtype == "float64"
        assert c.compared[1].tolerance < 1e-12 * c.compared[1].size


def test_the_reference_shows_what_both_are_off():
    c = rk.check(loss, PARAMS, X, policy="full", derivatives="reverse", reference="float64")
    assert c.ok and c.reference == "float64"
    for x in c.compared:
        assert 0 < x.plain_error < 1e-6 * x.size and 0 < x.remat_error < 1e-6 * x.size
    assert not jax.config.jax_enable_x64


def test_a_reference_that_draws_other_random_numbers_is_none():
    def fun(w, x, key):
        return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x @ w), 0))

    key = jax.random.key(0)
    c = rk.check(fun, W, X, key, policy="full", derivatives="reverse", reference="float64")
    assert c.ok and c.reference is None
    assert any("draws other random numbers at float64" in f for f in c.findings)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.complex64, jnp.int32, jnp.bool_])
def test_distance(dtype):
    a = jnp.asarray([0, 1, 1], dtype)
    assert tolerance.distance(a, a).error == 0
    d = tolerance.distance(a, jnp.asarray([0, 1, 0], dtype))
    assert (d.error, d.size, d.differing) == (1, 1, 1)
    if jnp.issubdtype(dtype, jnp.inexact):
        eps = float(jnp.finfo(dtype).eps)
        assert tolerance.distance(a, a * jnp.asarray(1 + eps, dtype)).ulps == pytest.approx(1)


def test_distance_of_what_is_no_number():
    nan, inf = float("nan"), float("inf")
    a = jnp.asarray([nan, inf, -inf, 2.0])
    assert tolerance.distance(a, a).error == 0
    for i, x in enumerate([1.0, -inf, inf, nan]):
        d = tolerance.distance(a, a.at[i].set(x))
        assert d.error == inf and d.differing == 1 and d.size == 2


# Differences -------------------------------------------------------------------------------------------------


def broken(monkeypatch, change):
    """Makes `apply` return a program whose results are changed."""
    real = _apply.rewrite

    def rewrite(jaxpr, choice):
        run = real(jaxpr, choice)
        return lambda *args: change(run(*args))

    monkeypatch.setattr(_apply, "rewrite", rewrite)


def slope(factor):
    """The identity, with a derivative that is too large."""

    @jax.custom_jvp
    def same(x):
        return x

    same.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))
    return same


def test_another_loss_is_found(monkeypatch):
    broken(monkeypatch, lambda out: [x * 1.0001 for x in out])
    c = rk.check(loss, PARAMS, X, policy="full", derivatives="reverse")
    assert not c and c.first_difference.label == "loss"
    assert "The loss (f32[]) differs" in c.failures[0]
    assert c.first_difference.relative_error == pytest.approx(1e-4, rel=0.05)
    with pytest.raises(rk.CheckError, match=r"not the same with remat \(full\).*made up \(seed 0\)"):
        c.raise_for_failures()
    assert issubclass(rk.CheckError, rk.RematError) and issubclass(rk.CheckError, AssertionError)


@pytest.mark.parametrize("reference", [None, "float64"])
def test_another_gradient_is_found(monkeypatch, reference):
    broken(monkeypatch, lambda out: [slope(1.001)(out[0])])
    c = rk.check(loss, PARAMS, X, policy="full", reference=reference)
    assert [d.status for d in c.derivatives] == ["different"] * 4
    assert c.first_difference.label == "params['a']" and c.first_difference.kind == "gradient"
    text = str(c)
    assert "The gradient of params['a'] (f32[8,8]) differs" in text and "1 more differ (params['b'])" in text
    if reference:
        assert c.first_difference.remat_error > 100 * c.first_difference.plain_error


def test_a_users_tolerance_is_taken(monkeypatch):
    broken(monkeypatch, lambda out: [x * 1.0001 for x in out])
    assert rk.check(loss, PARAMS, X, policy="full", derivatives="reverse", rtol=1e-3).ok
    assert not rk.check(loss, PARAMS, X, policy="full", derivatives="reverse", rtol=1e-5).ok


def test_remat_that_writes_twice_is_found():
    # https://github.com/jax-ml/jax/pull/39438
    def count(x, ref):
        ref[...] += 1.0
        return jnp.sum(jnp.sin(jnp.sin(x)))

    ref = jax.new_ref(jnp.zeros(()))
    c = rk.check(jax.checkpoint(count), jnp.arange(3.0), ref, derivatives="reverse")
    assert not c
    if not jax.config.jax_remat3 or not OLD_REMAT3:
        assert c.first_difference is None or c.first_difference.label == "ref"
    assert ref[...] == 0  # what the runs wrote is undone
    with pytest.raises(rk.RematError, match="writes to a mutable reference"):
        rk.check(count, jnp.arange(3.0), ref, policy="full")


def test_a_custom_rule_that_depends_on_python_state_is_found():
    traces = []

    @jax.custom_vjp
    def odd(x):
        return jnp.sin(x)

    def forward(x):
        traces.append(None)
        return jnp.sin(x), jnp.cos(x) * len(traces)

    odd.defvjp(forward, lambda cos, g: (cos * g,))
    c = rk.check(lambda x: jnp.sum(odd(odd(x))), S((8,), jnp.float32), policy="full", derivatives="reverse")
    assert not c and ".forward)" in c.impurities[0] and "Python state" in c.impurities[0]


# Purity ------------------------------------------------------------------------------------------------------

calls = []
kept = []


def counter(y):
    calls.append(None)
    return y * len(calls)


def clock(y):
    return y * time.time()


def global_generator(y):
    return y * np.random.normal(size=y.shape).astype(np.float32)


def python_generator(y):
    return y * random.random()


def leaking(y):
    kept.append(jnp.cos(y))
    return y


def in_scan(inner):
    return lambda y: jax.lax.scan(lambda h, _: (inner(h), None), y, None, length=2)[0]


@pytest.mark.parametrize("nested", [lambda f: f, jax.jit, in_scan, lambda f: jax.jit(in_scan(f))])
@pytest.mark.parametrize(
    ("impure", "said"),
    [
        (counter, r"two programs: they first differ at test_check.py:\d+ \(counter\).*Python state"),
        (clock, r"they first differ at test_check.py:\d+ \(clock\).*the time"),
        (global_generator, r"they first differ at test_check.py:\d+ \(global_generator\).*NumPy's global generator"),
        (python_generator, r"they first differ at test_check.py:\d+ \(python_generator\).*Python's random"),
        (leaking, r"leaks a traced value.*made at test_check.py:\d+"),
    ],
)
def test_impure_functions_are_found_with_their_line(impure, said, nested):
    wrapped = nested(impure)
    c = rk.check(lambda w, x: jnp.sum(wrapped(jnp.tanh(x @ w))), W, X, policy="full", derivatives="reverse")
    kept.clear()
    assert not c and len(c.impurities) == 1
    assert pytest.raises(rk.CheckError, c.raise_for_failures).match(said)
    assert "failed:" in str(c)


def test_the_holder_of_a_leaked_value_is_named():
    history = []

    def fun(w, x):
        history.append(jnp.tanh(x @ w))
        return jnp.sum(history[-1])

    c = rk.check(fun, W, X, policy="full", derivatives="reverse")
    assert "leaks a traced value into history" in c.impurities[0]


def test_values_that_vary_from_run_to_run_are_found():
    draw = np.random.default_rng(0)

    def fun(w, x):
        noise = jax.pure_callback(lambda: np.float32(draw.random()), S((), jnp.float32))
        return jnp.sum(jnp.tanh(x @ w) * noise)

    c = rk.check(fun, W, X, policy="full", derivatives="reverse")
    assert c.impurities == ("Run twice on the same values, the loss differs: the function is not pure.",)


def test_the_clock_is_right_again():
    before = time.time
    rk.check(lambda w, x: jnp.sum(x @ w), W, X, policy="full", derivatives="reverse")
    assert time.time is before


def test_caches_and_seeded_generators_are_pure():
    cache = {}

    def fun(w, x):
        calls = cache.setdefault("calls", [])
        calls.append(len(calls))
        noise = np.random.default_rng(0).normal(size=(8,)).astype(np.float32)
        return jnp.sum(jnp.tanh(x @ w) * noise)

    assert rk.check(fun, W, X, policy="full", derivatives="reverse").ok


# Flax --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(8)(x))
        self.sow("intermediates", "mean", jnp.mean(h))
        return x + nn.Dropout(0.5, deterministic=False)(jnp.tanh(h))


class Net(nn.Module):
    remat: bool = True

    @nn.compact
    def __call__(self, x):
        block = rk.linen.remat(Block) if self.remat else Block
        for i in range(2):
            x = block(name=f"layers_{i}")(x)
        return x


def linen_loss(net):
    def fun(params, stats, x, key):
        variables = {"params": params, "batch_stats": stats}
        y, new = net.apply(variables, x, rngs={"dropout": key}, mutable=["batch_stats", "intermediates"])
        return jnp.mean(y**2), new

    return fun


@pytest.mark.parametrize(("net", "policy"), [(Net(), None), (Net(remat=False), "full")])
def test_linen_collections_are_compared(net, policy):
    key = jax.random.key(0)
    variables = jax.eval_shape(net.init, {"params": key, "dropout": key}, X)
    args = variables["params"], variables["batch_stats"], X, key
    c = rk.check(linen_loss(net), *args, policy=policy, has_aux=True, derivatives="reverse")
    assert c.ok, c
    labels = {x.label for x in c.compared if x.kind == "aux"}
    assert "aux['batch_stats']['layers_1']['BatchNorm_0']['mean']" in labels
    assert "aux['intermediates']['layers_0']['mean'][0]" in labels
    assert c.regions == 2 and c.bytes_after < c.bytes_before


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


class NnxNet(nnx.Module):
    def __init__(self, rngs, block=NnxBlock):
        self.layers = nnx.List([block(rngs) for _ in range(2)])

    def __call__(self, x):
        for one in self.layers:
            x = one(x)
        return x


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize(("block", "policy"), [(rk.nnx.remat(NnxBlock), None), (NnxBlock, "full")])
def test_nnx_state_is_compared_and_the_module_left_as_it_is(block, policy):
    model = NnxNet(nnx.Rngs(0), block)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param, nnx.BatchStat)[0]))
    counts = [int(one.dropout.rngs.count[...]) for one in model.layers]
    stats = [np.asarray(one.norm.mean[...]) for one in model.layers]
    c = rk.check(nnx_loss, model, jnp.ones((4, 8)), policy=policy, derivatives="reverse")
    assert c.ok, c
    states = {x.label for x in c.compared if x.kind == "state"}
    assert any("mean" in s for s in states) and any("count" in s for s in states)
    assert [int(one.dropout.rngs.count[...]) for one in model.layers] == counts
    for one, mean in zip(model.layers, stats, strict=True):
        np.testing.assert_array_equal(one.norm.mean[...], mean)
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param, nnx.BatchStat)[0]))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_nnx_modules_without_values_get_some():
    model = nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0)))
    c = rk.check(nnx_loss, model, X, policy="full", derivatives="reverse")
    assert c.ok and any("kernel" in label for label in c.made_up)
    assert all(isinstance(x, S) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


# What is not supported -------------------------------------------------------------------------------------------


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (cos * g,))


def test_forward_mode_of_a_custom_vjp_is_unsupported_and_no_failure():
    c = rk.check(lambda w, x: jnp.sum(ruled(x @ w)), W, X, policy="full")
    status = {d.name: d.status for d in c.derivatives}
    assert c.ok
    assert status == {
        "reverse": "same",
        "forward": "unsupported",
        "forward_over_reverse": "same",
        "reverse_over_reverse": "same",
    }
    assert "custom_vjp" in next(d.reason for d in c.derivatives if d.name == "forward")


def test_reverse_mode_of_a_while_loop_is_unsupported_and_forward_mode_compared():
    def fun(w, x):
        return jnp.sum(jax.lax.while_loop(lambda h: jnp.sum(h) < 10, lambda h: jnp.abs(h) + 1, x @ w))

    c = rk.check(rk.remat(fun), W, X)
    status = {d.name: d.status for d in c.derivatives}
    assert c.ok and status["reverse"] == "unsupported" and status["forward"] == "same"
    assert c.bytes_before is None
    assert "reverse" in str(c).lower()


@pytest.mark.skipif(OLD_REMAT3, reason="jax_remat3 of this JAX repeats such a callback")
def test_what_only_remat_breaks_is_a_failure():
    def fun(x):
        seen = io_callback(lambda y: y, S((8,), jnp.float32), jax.lax.stop_gradient(x))
        return jnp.sum(jnp.sin(x) * seen)

    c = rk.check(jax.checkpoint(fun), S((8,), jnp.float32), derivatives="reverse")
    assert [d.status for d in c.derivatives] == ["broken"] and not c
    assert "Reverse mode fails with remat only: Effects not supported" in c.failures[0]


# What remat does -------------------------------------------------------------------------------------------------


def test_a_function_without_remat_is_said_to_have_none():
    c = rk.check(loss, PARAMS, X, derivatives="reverse")
    assert c.ok and c.regions == 0 and "Nothing is rematerialized" in c.findings[0]


@pytest.mark.skipif(OLD_REMAT3, reason="jax_remat3 of this JAX ignores this policy")
def test_remat_that_saves_nothing_is_said_to():
    c = rk.check(jax.checkpoint(loss, policy=jax.checkpoint_policies.everything_saveable), PARAMS, X)
    assert c.ok and c.bytes_before <= c.bytes_after
    assert any("saves nothing" in f or "keeps more" in f for f in c.findings)


def test_gradients_that_vanish_compare_nothing():
    c = rk.check(lambda w, x: jnp.sum(w * 0 * jnp.sin(x)), S((8,), jnp.float32), X, policy="full")
    assert c.ok and any("All gradients are zero" in f for f in c.findings)


# Results and wrong use -------------------------------------------------------------------------------------------


def test_the_result_is_plain_data(monkeypatch):
    c = rk.check(loss, PARAMS, X, policy="full", derivatives="reverse", reference="float64")
    data = json.loads(json.dumps(c.to_dict()))
    assert data["ok"] is True and data["schema"] == 1 and len(data["compared"]) == 3
    broken(monkeypatch, lambda out: [x * jnp.nan for x in out])
    bad = rk.check(loss, PARAMS, X, policy="full", derivatives="reverse")
    data = json.loads(json.dumps(bad.to_dict(), allow_nan=False))
    assert data["ok"] is False and data["compared"][0]["error"] == "inf" and "not finite" in data["failures"][0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "full", "plan": "full"}, "policy= or plan="),
        ({"derivatives": "revers"}, "Did you mean 'reverse'"),
        ({"derivatives": 3}, "derivatives= takes names"),
        ({"reference": "float16"}, "reference= is None, 'float32' or 'float64'"),
        ({"rtol": -1.0}, "rtol= is a number"),
        ({"atol": "1"}, "atol= is a number"),
        ({"seed": -1}, "seed= is a whole number"),
        ({"argnums": 5}, "argnums=5 does not fit"),
        ({"policy": "ful"}, "Did you mean 'full'"),
        ({"policy": {"nowhere": "full"}}, "no block"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(rk.RematError, match=said):
        rk.check(loss, PARAMS, X, **options)


def test_wrong_functions_are_refused():
    with pytest.raises(rk.RematError, match="expected a function"):
        rk.check(3, W)
    with pytest.raises(rk.RematError, match="one scalar"):
        rk.check(layer, W, X)
    with pytest.raises(rk.RematError, match="call it outside jax.jit"):
        jax.jit(lambda w: rk.check(lambda w: jnp.sum(w), w))(jnp.ones(3))
    with pytest.raises(ZeroDivisionError):  # the user's own error
        rk.check(lambda w: 1 / 0, W)


def test_a_function_that_fails_when_it_is_run_is_said_to():
    def fail(x):
        raise ValueError("no such file")

    def fun(x):
        return jnp.sum(x * jax.pure_callback(fail, S((), jnp.float32), jnp.float32(0)))

    with pytest.raises(rk.RematError, match="failed when it was run"):
        rk.check(fun, jnp.ones(3), policy="full", derivatives="reverse")
