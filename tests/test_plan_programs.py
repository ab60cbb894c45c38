"""Plans of programs of all kinds."""

from __future__ import annotations

import functools
import json
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk
from remat_kit import _naming
from tests.plans import (
    MODELS,
    OLD_REMAT3,
    TRANSFORMER,
    assert_same,
    gradients,
    model,
    plan,
)


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
