"""Public reports on residuals that a report shows without their names, lines, sizes or places in loops and branches."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk

W = jnp.sin(jnp.arange(64.0)).reshape(8, 8) * 0.3
X = jnp.cos(jnp.arange(32.0)).reshape(4, 8)


def line_of(fun, text: str) -> str:
    """``file.py:12`` of the first line of a function's source that holds a text."""
    lines, first = inspect.getsourcelines(fun)
    (offset, *_) = [i for i, line in enumerate(lines) if text in line]
    return f"{__file__.rsplit('/', 1)[-1]}:{first + offset}"


def saved(report: rk.Residuals) -> list[rk.Residual]:
    return [e for e in report.entries if e.action == "saved" and not e.alias_of]


def both_ways(fun, policy, *args):
    """The report of a policy applied, and that of the same policy written into the function."""
    yield rk.residuals(fun, *args, policy=policy)
    yield rk.residuals(rk.remat(fun, policy=policy), *args)


# Names inside jit: https://github.com/jax-ml/jax/pull/38931, https://github.com/jax-ml/jax/pull/20285 ----------


@jax.jit
def named_output(w, x):
    return rk.checkpoint_name(jnp.tanh(x @ w), "inner_act")


@jax.jit
def named_inside(w, x):
    h = rk.checkpoint_name(jnp.tanh(x @ w), "inner_act")
    return jnp.sin(h) * h


@pytest.mark.parametrize("helper", [named_output, named_inside])
def test_a_name_inside_jit_is_kept_and_shown_with_its_line(helper):
    def loss(w, x):
        return jnp.sum(jnp.sin(helper(w, x)))

    for report in both_ways(loss, "save name=inner_act", W, X):
        (entry,) = saved(report)
        assert (entry.names, entry.op, entry.label, entry.bytes) == (("inner_act",), "tanh", "inner_act", X.nbytes)
        assert line_of(helper.__wrapped__, "checkpoint_name") in entry.source
        assert "inner_act" in str(report)
    wrapped = rk.remat(loss, policy="save name=inner_act")
    np.testing.assert_allclose(jax.grad(wrapped)(W, X), jax.grad(loss)(W, X), rtol=1e-6)


# Several names, loops, branches, dictionaries: https://github.com/jax-ml/jax/pull/20285,
# https://github.com/jax-ml/jax/pull/13734, https://github.com/jax-ml/jax/pull/37888 ---------------------------


def two_names(w, x):
    h = rk.checkpoint_name(x @ w, "first")
    h = rk.checkpoint_name(h, "second")
    return jnp.sum(jnp.sin(h))


@pytest.mark.parametrize("policy", ["save name=first", "save name=second", "dots", "matmuls"])
def test_every_name_of_a_value_is_shown_whichever_kept_it(policy):
    for report in both_ways(two_names, policy, W, X):
        (entry,) = saved(report)
        assert sorted(entry.names) == ["first", "second"]
        assert entry.op == "dot_general"
        assert entry.needed_by == ("recompute(sin)",)


def body(h, w):
    h = rk.checkpoint_name(jnp.tanh(h @ w), "loop_act")
    return jnp.sin(h)


def looped(w, x):
    return jnp.sum(jax.lax.scan(lambda h, _: (body(h, w), None), x, None, length=5)[0])


def test_a_named_value_in_a_loop_has_its_trips_and_the_line_in_the_body():
    # Around the loop the name is kept five times; applied, the loop's body is the block and its input is kept too.
    (around,) = saved(rk.residuals(rk.remat(looped, policy="save name=loop_act"), W, X))
    applied = rk.residuals(looped, W, X, policy="save name=loop_act")
    (inside,) = [e for e in saved(applied) if e.names]
    for entry in (around, inside):
        assert (entry.names, entry.op, entry.trips) == (("loop_act",), "tanh", 5)
        assert (entry.shape, entry.bytes) == ((5, *X.shape), 5 * X.nbytes)
        assert line_of(body, "checkpoint_name") in entry.source
    assert applied.blocks == ("scan",)
    (carried,) = [e for e in saved(applied) if not e.names]
    assert (carried.op, carried.trips, carried.bytes) == ("carry", 5, 5 * X.nbytes)
    assert line_of(body, "return") in carried.source


def yes(w, x):
    return jnp.sin(rk.checkpoint_name(jnp.tanh(x @ w), "yes_act"))


def no(w, x):
    return jnp.cos(rk.checkpoint_name(jnp.sin(x @ w), "no_act"))


def branching(w, x):
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, yes, no, w, x))


@pytest.mark.parametrize(
    ("policy", "names"),
    [("save name=yes_act", ["yes_act"]), ("save name=no_act", ["no_act"]), ("names", ["no_act", "yes_act"])],
)
def test_named_values_in_branches_are_kept_and_shown(policy, names):
    for report in both_ways(branching, policy, W, X):
        kept = saved(report)
        assert sorted(n for e in kept for n in e.names) == names
        assert sum(e.bytes for e in kept) == X.nbytes  # one place serves both branches
        sources = {line_of(yes, "yes_act") in e.source or line_of(no, "no_act") in e.source for e in kept}
        assert sources == {True}
    for x in (X, -X):  # either branch
        wrapped = rk.remat(branching, policy=policy)
        np.testing.assert_allclose(jax.grad(wrapped)(W, x), jax.grad(branching)(W, x), rtol=1e-5, atol=1e-6)


def test_arguments_carry_their_path_in_the_tree():
    def loss(p, x):
        return jnp.sum(jnp.sin(x["tokens"][0] @ p["layer"]["kernel"]) @ p["layer"]["kernel"])

    report = rk.residuals(loss, {"layer": {"kernel": W, "unused": X}}, {"tokens": [X]}, policy="full")
    assert {e.path: e.bytes for e in report.entries} == {"p['layer']['kernel']": W.nbytes, "x['tokens'][0]": X.nbytes}
    assert {e.action for e in report.entries} == {"argument"}
    assert report.argument_bytes == W.nbytes + X.nbytes


def test_each_value_says_which_operation_needs_it():
    def loss(w, x):
        a = rk.checkpoint_name(jnp.sin(x @ w), "a")
        b = rk.checkpoint_name(jnp.cos(a @ w), "b")
        return jnp.sum(jnp.tanh(b @ w))

    report = rk.residuals(loss, W, X, policy="names")
    needed = {e.label: set(e.needed_by) for e in saved(report)}
    assert set(needed) == {"a", "b"}
    assert all(ops and ops <= {"dot_general", "recompute(dot_general)", "recompute(sin)"} for ops in needed.values())


# Keys, masks and token ids: https://github.com/patrick-kidger/equinox/pull/497,
# https://github.com/jax-ml/jax/issues/12706 ------------------------------------------------------------------


def test_keys_integers_and_masks_are_counted_at_their_size():
    def loss(table, tokens, mask, keys):
        noise = jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys)
        return jnp.sum(jnp.sin(table[tokens] * mask[:, None] + noise))

    args = (
        jnp.ones((10, 4)),
        jnp.array([1, 5, 7]),
        jnp.array([True, False, True]),
        jax.random.split(jax.random.key(0), 3),
    )
    report = rk.residuals(loss, *args, policy="full")
    found = {e.path: (e.bytes, e.dtype) for e in report.entries}
    assert found == {
        "table": (160, "float32"),
        "tokens": (12, "int32"),
        "mask": (3, "bool"),
        "keys": (24, "key<fry>"),  # two words of 32 bits each
    }
    assert report.total_bytes == 0


def test_a_named_key_and_a_mask_can_be_kept():
    def noisy(x, key):
        key = rk.checkpoint_name(jax.random.split(key)[1], "subkey")
        return jnp.sum(jnp.sin(x * jax.random.uniform(key, x.shape)))

    (entry,) = saved(rk.residuals(noisy, X, jax.random.key(0), policy="save name=subkey"))
    assert (entry.names, entry.bytes, entry.shape) == (("subkey",), 8, ())
    (mask,) = [
        e
        for e in saved(rk.residuals(lambda x: jnp.sum(jnp.where(x > 0, x * x, 0)), X, policy="none"))
        if e.dtype == "bool"
    ]
    assert mask.bytes == X.size


def test_integers_cannot_be_differentiated_and_the_error_names_the_argument():
    with pytest.raises(rk.RematError, match="tokens of type int32"):
        rk.residuals(lambda table, tokens: jnp.sum(table[tokens]), jnp.ones(4), jnp.array([1, 2]), argnums=1)
