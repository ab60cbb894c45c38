"""Public reports on policies that do not mean what they seem to: None, misspelt names, exclusions, offloading."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk
from remat_kit import RematError

REMAT3 = jax.config.jax_remat3
OLD = jax.__version_info__ < (0, 11)
# The newer remat of JAX 0.10.2 ignores offloading (refused by the toolkit) and policies on other values than named ones
# and products (it warns).
EARLY_REMAT3 = REMAT3 and OLD

W = jnp.sin(jnp.arange(64.0)).reshape(8, 8) * 0.3
X = jnp.cos(jnp.arange(32.0)).reshape(4, 8)
VALUE = X.nbytes  # every intermediate below has the shape of X


def held(fun, *args) -> list[tuple[tuple[int, ...], str]]:
    """What the pullback of `jax.vjp` holds besides the arguments, by JAX's own account."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(fun, *a)[1]))(*args).jaxpr
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    found = {v for v in jaxpr.outvars if isinstance(v, jax.extend.core.Var)} - inputs
    return sorted((v.aval.shape, str(v.aval.memory_space)) for v in found)


# What None means: https://github.com/AI-Hypercomputer/maxtext/pull/3924 -----------------------------------------


def plain(w, x):
    return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))


def test_a_raw_none_is_refused_with_both_meanings():
    with pytest.raises(RematError, match="two things in JAX.*'full'.*'none'"):
        rk.policy(None)


def test_full_keeps_nothing_and_none_and_everything_keep_what_autodiff_does():
    assert rk.residuals(plain, W, X, policy="full").total_bytes == 0
    assert rk.residuals(plain, W, X, policy="none").total_bytes == VALUE * len(held(plain, W, X))
    assert rk.residuals(plain, W, X, policy="none").total_bytes > 0
    assert rk.residuals(rk.remat("none")(plain), W, X).total_bytes == VALUE * len(held(plain, W, X))
    assert held(rk.remat("full")(plain), W, X) == held(rk.remat(plain), W, X) == []


@pytest.mark.skipif(EARLY_REMAT3, reason="jax_remat3 of this JAX ignores the policy")
def test_everything_keeps_as_much_as_no_remat():
    none, everything = (rk.residuals(plain, W, X, policy=p).total_bytes for p in ("none", "everything"))
    assert everything == none == rk.residuals(rk.remat("everything")(plain), W, X).total_bytes


@pytest.mark.skipif(not EARLY_REMAT3, reason="the policy is honoured here")
def test_everything_warns_where_it_is_ignored():
    with pytest.warns(rk.RematWarning, match="'everything'.*jax_remat3.*recomputes"):
        assert rk.residuals(plain, W, X, policy="everything").total_bytes == 0


@pytest.mark.parametrize("name", ["none", "full", "dots"])
def test_the_report_says_which_policy_was_in_force(name):
    report = rk.residuals(plain, W, X, policy=name)
    assert report.policy == name
    assert f"policy   {name}\n" in str(report)
    assert rk.residuals(plain, W, X).policy == "as written"


# Misspelt names: https://github.com/AI-Hypercomputer/maxtext/pull/489, https://github.com/NVIDIA/JAX-Toolbox/pull/982,
# https://github.com/NVIDIA/TransformerEngine/pull/2003 ---------------------------------------------------------


def named(w, x):
    h = rk.checkpoint_name(jnp.tanh(x @ w), "mlp_up")
    return jnp.sum(jnp.sin(h @ w))


ASK = {
    "remat, called": lambda p: rk.remat(named, policy=p)(W, X),
    "remat, differentiated": lambda p: jax.grad(rk.remat(named, policy=p))(W, X),
    "remat, jitted": lambda p: jax.jit(rk.remat(named, policy=p))(W, X),
    "apply": lambda p: jax.grad(rk.apply(named, p))(W, X),
    "apply to a block": lambda p: rk.apply(named, {"*": p})(W, X),
    "residuals": lambda p: rk.residuals(named, W, X, policy=p),
    "residuals of remat": lambda p: rk.residuals(rk.remat(named, policy=p), W, X),
}


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("policy", ["save name=mlp-up", "save name=mlpup*", "recompute name=MLP_up; save rest"])
def test_a_name_that_the_function_does_not_have_is_refused_with_the_nearest(ask, policy):
    with pytest.raises(RematError, match="no value of the program is named .*Did you mean 'mlp_up'"):
        ASK[ask](policy)


@pytest.mark.parametrize("ask", ASK)
def test_the_right_name_is_accepted(ask):
    ASK[ask]("save name=mlp_up")


def test_a_name_unlike_all_others_is_refused_with_the_names_there_are():
    with pytest.raises(RematError, match="'zzz'.*Its checkpoint names: 'mlp_up'") as e:
        rk.residuals(named, W, X, policy="save name=zzz")
    assert "Did you mean" not in str(e.value)
    with pytest.raises(RematError, match="'mlp_up'.*rk.checkpoint_name"):
        rk.residuals(plain, W, X, policy="save name=mlp_up")


# Everything but some names: https://github.com/jax-ml/jax/pull/37888 -------------------------------------------

EXCEPT = "recompute name=big; save rest"


def square(w, x):
    h = rk.checkpoint_name(x @ w, "big")
    return jnp.sum(h * h)


def longer(w, x):
    big = rk.checkpoint_name(jnp.exp(x @ w), "big")
    small = rk.checkpoint_name(jnp.exp(big @ w), "small")
    return jnp.sum(small * big)


@pytest.mark.parametrize("wrap", [lambda f: rk.remat(f, policy=EXCEPT), lambda f: rk.apply(f, EXCEPT)])
def test_an_excluded_value_and_its_unnamed_producer_are_dropped(wrap):
    assert held(square, W, X) == [((4, 8), str(jax.memory.Space.Device))]  # without remat it is kept
    assert held(wrap(square), W, X) == []  # neither under its name nor as the product before it
    np.testing.assert_allclose(jax.grad(wrap(square))(W, X), jax.grad(square)(W, X), rtol=1e-6)


def test_the_rest_is_kept():
    report = rk.residuals(longer, W, X, policy=EXCEPT)
    names = {n for e in report.entries for n in e.names}
    assert "big" not in names
    assert "small" in names
    assert "exp" not in {e.op for e in report.entries if not e.names}
    wrapped = rk.remat(longer, policy=EXCEPT)
    np.testing.assert_allclose(jax.grad(wrapped)(W, X), jax.grad(longer)(W, X), rtol=1e-6)


def test_the_policy_of_jax_that_ignores_its_names_is_flagged():
    with pytest.warns(rk.RematWarning, match="names are ignored by JAX.*recompute name=a|b; save rest"):
        rk.policy(jax.checkpoint_policies.save_anything_except_these_names("big"))


# Saving and offloading together: https://github.com/jax-ml/jax/pull/20015, https://github.com/apple/axlearn/pull/696


def two(w, x):
    a = rk.checkpoint_name(jnp.sin(x @ w), "act")
    k = rk.checkpoint_name(jnp.cos(a @ w), "kept")
    return jnp.sum(jnp.sin(k @ w) * a)


MIXED = rk.save(name="kept") | rk.offload(name="act") | rk.policy("dots")


@pytest.mark.skipif(EARLY_REMAT3, reason="jax_remat3 of this JAX ignores offloading")
class TestCombined:
    @pytest.mark.parametrize("wrap", [rk.remat(policy=MIXED), lambda f: rk.apply(f, MIXED)])
    def test_gradients_are_those_without_remat(self, wrap):
        want = jax.grad(two, argnums=(0, 1))(W, X)
        for got in (jax.grad(wrap(two), argnums=(0, 1))(W, X), jax.jit(jax.grad(wrap(two), argnums=(0, 1)))(W, X)):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)

    def test_each_value_goes_where_its_rule_says(self):
        report = rk.residuals(two, W, X, policy=MIXED)
        kept = [(str(e.action), e.names or e.op) for e in report.entries if e.action in ("saved", "offloaded")]
        assert sorted(kept, key=str) == sorted(
            [("offloaded", ("act",)), ("saved", ("kept",)), *[("saved", "dot_general")] * 3], key=str
        )
        assert (report.host_bytes, report.total_bytes) == (VALUE, 4 * VALUE)
        assert "offloaded to host" in str(report)
        host = [(X.shape, str(jax.memory.Space.Host))]
        assert [h for h in held(rk.remat(two, policy=MIXED), W, X) if h[1] == host[0][1]] == host

    @pytest.mark.parametrize(
        ("policy", "on_host"),
        [
            (rk.save(name="act") | rk.offload(name="act"), 0),
            (rk.offload(name="act") | rk.save(name="act"), VALUE),
            (rk.policy("dots") | rk.offload(name="act"), VALUE),
        ],
    )
    def test_the_left_wins_where_both_speak(self, policy, on_host):
        assert rk.residuals(two, W, X, policy=policy).host_bytes == on_host

    def test_jax_policies_combine_too(self):
        policies = jax.checkpoint_policies
        offload = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["act"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        combined = rk.policy(policies.dots_saveable) | rk.policy(offload)
        report = rk.residuals(two, W, X, policy=combined)
        assert (report.host_bytes, report.total_bytes) == (VALUE, 3 * VALUE)
        np.testing.assert_allclose(jax.grad(rk.remat(two, policy=combined))(W, X), jax.grad(two)(W, X), rtol=1e-5)


def test_contradictions_are_found_when_the_policy_is_built():
    with pytest.raises(RematError, match="contradict"):
        rk.policy("save rest") | rk.policy("offload rest")


def test_a_union_of_jax_that_would_fail_under_grad_is_refused_when_read():
    policies = jax.checkpoint_policies
    offload = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    with pytest.raises(RematError, match=r"policy\(first\) \| policy\(second\)"):
        rk.policy(policies.save_from_both_policies(policies.dots_saveable, offload))


@pytest.mark.skipif(EARLY_REMAT3, reason="jax_remat3 of this JAX ignores the policy")
def test_a_union_of_saves_passes_as_it_is():
    policies = jax.checkpoint_policies
    both = policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("act"))
    assert len(held(rk.remat(two, policy=both), W, X)) == 4


@pytest.mark.skipif(not EARLY_REMAT3, reason="offloading works here")
def test_offloading_is_refused_where_it_would_be_ignored():
    for ask in (lambda: rk.residuals(two, W, X, policy=MIXED), lambda: jax.grad(rk.remat(two, policy=MIXED))(W, X)):
        with pytest.raises(RematError, match="offloads.*jax_remat3.*ignores"):
            ask()
