"""scan and while_loop: the values and gradients of JAX's own loops, and no more steps and states than promised."""

import collections
import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import held
from hypothesis import strategies as st

import remat_kit as rk
from remat_kit._loops import revolve

EARLY_REMAT3 = jax.config.jax_remat3 and jax.__version_info__ < (0, 11)
W = 0.5 * jax.random.normal(jax.random.key(0), (3, 3))
XS = jax.random.normal(jax.random.key(1), (40, 3))


def layer(w):
    """A step with an integer in its carry, a leaf that is None, and outputs of two kinds."""

    def step(carry, x):
        h, count, nothing = carry
        inner = rk.checkpoint_name(h @ w.astype(h.dtype) + x["x"].astype(h.dtype), "inner")
        h = jnp.tanh(inner)
        return (h, count + x["k"], nothing), {"sum": jnp.sum(h), "count": count, "none": None}

    return step


def loss(scan, dtype, reverse=False, **options):
    """A loss of a scan in everything that goes into it."""

    def fn(w, h, xs):
        xs = {"x": xs, "k": jnp.arange(len(xs))}
        carry, ys = scan(layer(w), (h.astype(dtype), 0, None), xs, reverse=reverse, **options)
        weights = 1.0 + jnp.arange(len(ys["sum"]))
        total = jnp.sum(carry[0] ** 2) + jnp.sum(weights * ys["sum"]) / len(weights)
        return total.astype(jnp.float32), (carry, ys)

    return fn


MODES = {
    "policy": st.fixed_dictionaries({"policy": st.sampled_from([None, "full", "none", "dots", "save name=inner"])}),
    "segments": st.fixed_dictionaries(
        {"segments": st.one_of(st.integers(1, 41), st.just("sqrt")), "policy": st.sampled_from([None, "none", "dots"])}
    ),
    "binomial": st.fixed_dictionaries(
        {
            "segments": st.just("binomial"),
            "checkpoints": st.one_of(st.none(), st.integers(1, 41)),
            "policy": st.sampled_from([None, "dots"]),
        }
    ),
    "each": st.just({"policy": list}),
}


# A policy for each step compiles each step: dear.
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k == "each" else ()) for k in MODES])
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(
    length=st.integers(1, 40),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    reverse=st.booleans(),
    unroll=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_scan_is_the_scan_of_jax(kind, length, dtype, reverse, unroll, data):
    mode = data.draw(MODES[kind])
    if kind == "segments" and EARLY_REMAT3:  # JAX fails at integers that a rematerialized step in a region stacks
        mode = {**mode, "policy": "none"}
    if mode["policy"] is list:
        each = st.sampled_from(["full", "none", "dots"])
        mode = {"policy": data.draw(st.lists(each, min_size=length, max_size=length))}
    args = (W, jnp.ones(3), XS[:length])
    wanted, theirs = (
        jax.value_and_grad(loss(scan, dtype, reverse, unroll=unroll, **options), (0, 1, 2), has_aux=True)(*args)
        for scan, options in ((jax.lax.scan, {}), (rk.scan, mode))
    )
    tol = 1e-5 if dtype == jnp.float32 else 0.05
    assert jax.tree.structure(wanted) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=tol, atol=tol)


# How much is kept -----------------------------------------------------------------------------------------------------


def chain(length, **options):
    """A scan of a step that keeps several values of its own, over one array of 16 floats."""

    def fn(h):
        return jnp.sum(rk.scan(lambda h, _: (jnp.sin(jnp.tanh(jnp.sin(h))), None), h, None, length, **options)[0])

    return fn


@pytest.mark.parametrize(
    ("options", "carries"),
    [
        ({}, 36),
        ({"segments": "sqrt"}, 6),
        ({"segments": 4}, 4),
        ({"segments": "binomial", "checkpoints": 3}, 4),
        ({"segments": "binomial", "checkpoints": 1}, 2),
    ],
)
def test_the_backward_pass_holds_so_many_carries(options, carries):
    h = jax.ShapeDtypeStruct((16,), jnp.float32)
    got = held(chain(36, **options), h) / 64
    assert carries <= got <= carries + 1.2  # the argument, counters and places


def steps_run(fn, *args):
    """How often a step runs in a function."""
    ran = collections.Counter()

    def count():
        ran["steps"] += 1

    def step(h, _):
        jax.debug.callback(count)
        return jnp.sin(h), None

    jax.block_until_ready(fn(step, *args))
    jax.effects_barrier()
    return ran["steps"]


LENGTHS = [(1, 1), (7, 1), (2, 3), (10, 3), (20, 3), (21, 3), (33, 4), (40, 9)]


@pytest.mark.parametrize(("length", "checkpoints"), LENGTHS)
def test_binomial_advances_as_often_as_the_closed_form_says(length, checkpoints):
    """Griewank and Walther 2000: r * n - comb(c + r, c + 1), the first pass but for its last step included."""

    def fn(step, h):
        return jax.grad(lambda h: rk.scan(step, h, None, length, segments="binomial", checkpoints=checkpoints)[0])(h)

    r = next(r for r in itertools.count() if math.comb(checkpoints + r, checkpoints) >= length)
    optimum = r * length - math.comb(checkpoints + r, checkpoints + 1) if length > 1 else 0
    last_step_and_derivatives = 1 + length
    assert steps_run(fn, 1.0) == optimum + last_step_and_derivatives


def test_the_closed_form_is_the_optimum():
    fewest = {}
    for c, n in itertools.product(range(1, 6), range(1, 40)):
        tries = [m + fewest[n - m, c - 1] + fewest[m, c] for m in range(1, n)] if c > 1 else [n * (n - 1) // 2]
        fewest[n, c] = min(tries, default=0)
        assert revolve.advances(n, c) == fewest[n, c]
        kept = [*revolve.kept(n, c), n]
        gaps = [b - a for a, b in itertools.pairwise(kept)]
        first = sum(fewest.get((g - (k == len(gaps) - 1), c - k), 0) for k, g in enumerate(gaps))
        assert n - 1 + first == fewest[n, c]


@pytest.mark.parametrize("checkpoints", [1, 2, 4, 9, 16])
def test_online_places_are_near_the_optimum(checkpoints):
    table = revolve.online_slots(revolve.Places(600), checkpoints)
    ratios = []
    for n in range(checkpoints + 2, 600, 7):
        held = {int(place): step for step, place in enumerate(table[:n]) if place < checkpoints}
        kept = [*sorted(held.values()), n]
        gaps = [b - a for a, b in itertools.pairwise(kept)]
        after = sum(revolve.advances(g - (k == len(gaps) - 1), checkpoints - k) for k, g in enumerate(gaps))
        ratios.append((n - 1 + after) / revolve.advances(n, checkpoints))
    assert min(ratios) >= 1 and np.mean(ratios) < 1.03 and max(ratios) < (1.06 if checkpoints >= 16 else 1.3)


# while_loop -----------------------------------------------------------------------------------------------------------


def decay(limit):
    def cond(state):
        return jnp.sum(state["h"] ** 2) > limit

    def body(w):
        def step(state):
            return {"h": 0.97 * jnp.tanh(state["h"] @ w), "count": state["count"] + 1, "none": None}

        return step

    return cond, body


@pytest.mark.parametrize("checkpoints", [1, 2, 5, 30, None])
@pytest.mark.parametrize("limit", [10.0, 1.5, 0.3])
def test_while_loop_is_differentiated_in_reverse(checkpoints, limit):
    cond, body = decay(limit)
    w, h = jnp.eye(3) + 0.01 * W, jnp.ones(3)

    def by_hand(w, h, steps):
        state = {"h": h, "count": 0, "none": None}
        for _ in range(steps):
            state = body(w)(state)
        return jnp.sum(state["h"] ** 2) * state["count"]

    def fn(w, h):
        state = {"h": h, "count": 0, "none": None}
        out = rk.while_loop(cond, body(w), state, max_steps=90, checkpoints=checkpoints)
        return jnp.sum(out["h"] ** 2) * out["count"], out["count"]

    (value, steps), got = jax.jit(jax.value_and_grad(fn, (0, 1), has_aux=True))(w, h)
    plain = jax.lax.while_loop(cond, body(w), {"h": h, "count": 0, "none": None})
    assert steps == plain["count"]
    wanted_value, wanted = jax.value_and_grad(by_hand, (0, 1))(w, h, int(steps))
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    for a, b in zip(wanted, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_while_loop_in_other_transformations():
    cond, body = decay(0.3)

    def fn(h):
        return jnp.sum(rk.while_loop(cond, body(W + jnp.eye(3)), {"h": h, "count": 0, "none": None}, max_steps=50)["h"])

    def by_scan(h):
        def step(state, _):
            new = body(W + jnp.eye(3))(state)
            return jax.tree.map(lambda a, b: jnp.where(cond(state), a, b), new, state), None

        return jnp.sum(jax.lax.scan(step, {"h": h, "count": 0, "none": None}, None, 50)[0]["h"])

    hs = jnp.stack([jnp.ones(3), 0.1 * jnp.ones(3), jnp.arange(3.0)])
    np.testing.assert_allclose(jax.vmap(jax.grad(fn))(hs), jax.vmap(jax.grad(by_scan))(hs), rtol=1e-5, atol=1e-6)
    twice = jax.jvp(jax.grad(fn), (hs[0],), (hs[2],))[1]
    np.testing.assert_allclose(twice, jax.jvp(jax.grad(by_scan), (hs[0],), (hs[2],))[1], rtol=1e-4, atol=1e-5)
    inside = jax.grad(lambda h: jax.lax.scan(lambda c, _: (c + fn(h * c), None), 1.0, None, 3)[0])
    wanted = jax.grad(lambda h: jax.lax.scan(lambda c, _: (c + by_scan(h * c), None), 1.0, None, 3)[0])
    np.testing.assert_allclose(inside(hs[0]), wanted(hs[0]), rtol=1e-4, atol=1e-5)


def test_while_loop_ends_after_max_steps_and_holds_its_checkpoints_only():
    def fn(h, most, checkpoints):
        return jnp.sum(rk.while_loop(lambda h: True, jnp.sin, h, max_steps=most, checkpoints=checkpoints))

    h = jnp.linspace(0, 1, 16)
    np.testing.assert_allclose(fn(h, 3, 2), jnp.sum(jnp.sin(jnp.sin(jnp.sin(h)))), rtol=1e-6)
    np.testing.assert_array_equal(fn(h, 0, 2), jnp.sum(h))
    few, many = (held(lambda h, n=n: fn(h, n, 6), h) for n in (100, 100_000))
    assert few == many < 9 * 64


def test_tables_stay_small_however_long_a_loop_may_be():
    assert revolve.table(127, 2**31 - 1, 10).shape == (128, 13)
    places = revolve.Places(10**6)
    steps = [step for step, _ in places.steps()]
    assert len(steps) == places.entries < 40_000 and steps[:8192] == list(range(8192))
    entry, is_one = places.entry(jnp.asarray(steps, jnp.int32))
    assert is_one.all() and (entry == jnp.arange(len(steps))).all()


def test_the_number_of_steps_may_be_far_above_what_is_taken():
    fn = lambda h: rk.while_loop(lambda s: s[1] < 30, lambda s: (jnp.sin(s[0]), s[1] + 1), (h, 0), max_steps=10**9)[0]  # noqa: E731
    plain = lambda h: jax.lax.fori_loop(0, 30, lambda _, h: jnp.sin(h), h)  # noqa: E731
    np.testing.assert_allclose(jax.grad(fn)(1.0), jax.jvp(plain, (1.0,), (1.0,))[1], rtol=1e-5)


# Remat that stays -----------------------------------------------------------------------------------------------------


def temporaries(fn, *args):
    """Bytes of temporary memory of the gradient, compiled with all optimizations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        compiled = jax.jit(jax.grad(fn)).lower(*args).compile()
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="its CPU compiler merges recomputation outside loops")
def test_remat_stays_where_the_compiler_unrolls_the_loop():
    h, ws = jnp.ones((512, 16)), jnp.ones((8, 16, 16))

    def fn(scan, **options):
        step = lambda h, w: (jnp.tanh(jnp.sin(1.1 * jnp.sin(h @ w))), None)  # noqa: E731
        return lambda h: jnp.sum(scan(step, h, ws, **options)[0])

    carries = {k: temporaries(f, h) / h.nbytes for k, f in {
        "none": fn(jax.lax.scan, unroll=True),
        "unrolled": fn(rk.scan, unroll=True),
        "each": fn(rk.scan, policy=["full", "none"] * 4),
        "one segment": fn(rk.scan, segments=1, unroll=8),
        "blocks": rk.apply(fn(jax.lax.scan, unroll=8), {"scan": "full"}),
        "parts": rk.apply(fn(jax.lax.scan), {f"scan@{i}:{i + 1}": "full" for i in range(8)}),
    }.items()}  # fmt: skip
    assert carries["none"] > 15
    assert carries["each"] < 0.85 * carries["none"]
    for how in ("unrolled", "one segment", "blocks", "parts"):
        assert carries[how] < 0.7 * carries["none"], how
