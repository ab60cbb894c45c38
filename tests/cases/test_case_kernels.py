"""Public reports on matrix products and kernels that are recomputed although a policy seems to keep them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk
from remat_kit import RematError, RematWarning

REMAT3 = jax.config.jax_remat3
OLD = jax.__version_info__ < (0, 11)
NO_VMAP_OF_NAMES = pytest.mark.skipif(REMAT3 and OLD, reason="jax_remat3 of this JAX cannot vmap over names")


def kept_products(report: rk.Residuals) -> int:
    return sum(e.op == "dot_general" and e.action == "saved" for e in report.entries)


# Experts' products have batch dimensions: https://github.com/AI-Hypercomputer/maxtext/issues/2207 ---------------

EXPERTS = jnp.sin(jnp.arange(4.0 * 8 * 16)).reshape(4, 8, 16) * 0.1
TOKENS = jnp.cos(jnp.arange(4.0 * 6 * 8)).reshape(4, 6, 8)


def dense(w, x):
    return jnp.sum(jnp.sin(jnp.tanh(jnp.einsum("etd,df->etf", x, w))))


def moe(w, x):
    return jnp.sum(jnp.sin(jnp.tanh(jnp.einsum("etd,edf->etf", x, w))))


def one(w, x):
    return jnp.sum(jnp.sin(jnp.tanh(x @ w)))


def over_experts(fun):
    return lambda w, x: jnp.sum(jax.vmap(fun)(w, x))


@pytest.mark.parametrize(
    "report",
    [
        lambda: rk.residuals(moe, EXPERTS, TOKENS, policy="dots_no_batch"),
        lambda: rk.residuals(over_experts(one), EXPERTS, TOKENS, policy="dots_no_batch"),
        lambda: rk.residuals(rk.remat("dots_no_batch")(moe), EXPERTS, TOKENS),
        lambda: rk.residuals(rk.apply(moe, "dots_no_batch"), EXPERTS, TOKENS),
        lambda: rk.residuals(over_experts(rk.remat("dots_no_batch")(one)), EXPERTS, TOKENS),
    ],
    ids=["policy", "policy of a vmap", "remat", "apply", "vmap of remat"],
)
def test_the_report_says_which_products_were_not_kept_and_why(report):
    found = report()
    assert kept_products(found) == 0
    (note,) = found.notes
    assert "batch dimensions" in note and "test_case_kernels.py:" in note and "MoE experts" in note
    assert "'matmuls'" in note
    assert "batch dimensions" in str(found)


def test_there_is_no_note_where_every_product_was_kept():
    report = rk.residuals(dense, EXPERTS[0], TOKENS, policy="dots_no_batch")
    assert (kept_products(report), report.notes) == (1, ())


@pytest.mark.parametrize(
    "report",
    [
        lambda: rk.residuals(moe, EXPERTS, TOKENS, policy="matmuls"),
        lambda: rk.residuals(over_experts(one), EXPERTS, TOKENS, policy="matmuls"),
        lambda: rk.residuals(rk.apply(over_experts(one), "matmuls"), EXPERTS, TOKENS),
        pytest.param(
            lambda: rk.residuals(over_experts(rk.apply(one, "matmuls")), EXPERTS, TOKENS), marks=NO_VMAP_OF_NAMES
        ),
        pytest.param(
            lambda: rk.residuals(over_experts(rk.remat("matmuls")(one)), EXPERTS, TOKENS), marks=NO_VMAP_OF_NAMES
        ),
    ],
    ids=["einsum", "policy of a vmap", "apply to a vmap", "vmap of apply", "vmap of remat"],
)
def test_matmuls_keeps_experts_products_with_and_without_vmap(report):
    found = report()
    assert [e.shape for e in found.entries if e.op == "dot_general"] == [(4, 6, 16)]
    assert found.notes == ()


def test_gradients_of_experts_are_those_without_remat():
    want = jax.grad(moe, argnums=(0, 1))(EXPERTS, TOKENS)
    for fun in (rk.remat("matmuls")(moe), rk.apply(over_experts(one), "matmuls")):
        got = jax.grad(fun, argnums=(0, 1))(EXPERTS, TOKENS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


# A kernel whose second output nobody named: https://github.com/AI-Hypercomputer/maxtext/pull/1805,
# https://github.com/jax-ml/jax/pull/26374, https://github.com/apple/axlearn/pull/925 ---------------------------

Q = jnp.sin(jnp.arange(32.0)).reshape(4, 8)
K = jnp.cos(jnp.arange(48.0)).reshape(6, 8)


def _on_host(q, k):
    scores = np.asarray(q) @ np.asarray(k).T
    lse = np.log(np.exp(scores).sum(-1, keepdims=True))
    return (np.exp(scores - lse) @ np.asarray(k)).astype(np.float32), lse.astype(np.float32)


def _kernel(q, k):
    """Opaque, as fused kernels are: one equation with two outputs."""
    types = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((q.shape[0], 1), q.dtype)
    return jax.pure_callback(_on_host, types, q, k)


def attention(named_inside: bool):
    @jax.custom_vjp
    def attend(q, k):
        return _kernel(q, k)[0]

    def forward(q, k):
        out, lse = _kernel(q, k)
        if named_inside:
            out, lse = rk.checkpoint_name(out, "attn_out"), rk.checkpoint_name(lse, "attn_lse")
        return out, (k, out, lse)

    def backward(residuals, g):
        k, out, lse = residuals
        return g * lse, jnp.ones_like(k) * jnp.sum(g * out)

    attend.defvjp(forward, backward)

    def loss(q, k):
        out = attend(jnp.sin(q), jnp.cos(k))
        return jnp.sum(jnp.sin(out if named_inside else rk.checkpoint_name(out, "attn_out")))

    return loss


def kernel_runs(fun) -> int:
    return str(jax.make_jaxpr(jax.grad(fun, argnums=(0, 1)))(Q, K)).count("pure_callback[")


def assert_same_gradients(fun, reference):
    for a, b in zip(jax.grad(fun, (0, 1))(Q, K), jax.grad(reference, (0, 1))(Q, K), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["full", "save name=attn_out", "dots"])
@pytest.mark.parametrize("how", ["policy", "remat", "apply"])
def test_the_report_says_that_the_kernel_runs_again_and_for_which_residual(policy, how):
    loss = attention(named_inside=False)
    if how == "policy":
        report = rk.residuals(loss, Q, K, policy=policy, argnums=(0, 1))
    else:
        wrapped = rk.remat(loss, policy=policy) if how == "remat" else rk.apply(loss, policy)
        report = rk.residuals(wrapped, Q, K, argnums=(0, 1))
        assert kernel_runs(wrapped) == 2
    (note,) = [n for n in report.notes if "custom_vjp" in n]
    assert "runs again in the backward pass" in note and "test_case_kernels.py:" in note
    assert "f32[4,1]" in note  # the log-sum-exp
    assert ("classic implementation" in note) == bool(REMAT3)


def test_without_remat_the_kernel_runs_once_and_nothing_is_said():
    loss = attention(named_inside=False)
    assert kernel_runs(loss) == 1
    assert rk.residuals(loss, Q, K, argnums=(0, 1)).notes == ()


@pytest.mark.skipif(bool(REMAT3), reason="jax_remat3 ignores names in forward rules")
class TestCovered:
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("wrap", [rk.remat, rk.apply], ids=["remat", "apply"])
    def test_saving_the_call_covers_all_its_residuals(self, wrap, inside):
        loss = attention(inside)
        kept = wrap(loss, policy="save op=custom_vjp_call")
        assert kernel_runs(kept) == 1
        assert_same_gradients(kept, loss)
        report = rk.residuals(loss, Q, K, policy="save op=custom_vjp_call", argnums=(0, 1))
        assert report.notes == ()
        assert {e.shape for e in report.entries if e.op == "pure_callback"} == {(4, 8), (4, 1)}

    @pytest.mark.parametrize("policy", ["save name=attn_out|attn_lse", "save name=attn_*", "names"])
    @pytest.mark.parametrize("wrap", [rk.remat, rk.apply], ids=["remat", "apply"])
    def test_names_in_the_forward_rule_are_found_and_kept(self, wrap, policy):
        loss = attention(named_inside=True)
        kept = wrap(loss, policy=policy)
        assert kernel_runs(kept) == 1
        assert_same_gradients(kept, loss)
        report = rk.residuals(loss, Q, K, policy=policy, argnums=(0, 1))
        assert {("attn_out",), ("attn_lse",)} <= {e.names for e in report.entries}
        assert report.notes == ()

    def test_one_name_of_two_is_not_enough(self):
        loss = attention(named_inside=True)
        assert kernel_runs(rk.remat(loss, policy="save name=attn_out")) == 2
        (note,) = rk.residuals(loss, Q, K, policy="save name=attn_out", argnums=(0, 1)).notes
        assert "runs again" in note

    def test_a_rule_on_the_kernel_itself_reaches_into_the_forward_rule(self):
        loss = attention(named_inside=False)
        kept = rk.remat(loss, policy="save op=pure_callback larger_than=0")
        assert kernel_runs(kept) == 1
        assert_same_gradients(kept, loss)

    def test_a_misspelt_name_is_still_refused(self):
        with pytest.raises(RematError, match="Did you mean 'attn_lse'"):
            rk.residuals(attention(named_inside=True), Q, K, policy="save name=attn_ise")


@pytest.mark.skipif(not REMAT3, reason="the classic implementation honours names in forward rules")
class TestUnderRemat3:
    def test_saving_the_call_warns_that_it_has_no_effect(self):
        loss = attention(named_inside=False)
        for ask in (
            lambda: rk.residuals(loss, Q, K, policy="save op=custom_vjp_call"),
            lambda: jax.grad(rk.remat(loss, policy="save op=custom_vjp_call"))(Q, K),
        ):
            with pytest.warns(RematWarning, match="jax_remat3 ignores names inside forward rules"):
                ask()

    def test_names_in_the_forward_rule_are_refused(self):
        loss = attention(named_inside=True)
        for ask in (
            lambda: rk.residuals(loss, Q, K, policy="save name=attn_out|attn_lse"),
            lambda: rk.remat(loss, policy="save name=attn_*")(Q, K),
        ):
            with pytest.raises(RematError, match="forward rule.*jax_remat3 ignores names"):
                ask()


# A rule that calls its own function: https://github.com/jax-ml/jax/pull/38914 -----------------------------------


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (sine(x), jnp.cos(x)), lambda c, g: (3.0 * c * g,))  # not the true derivative, on purpose


@pytest.mark.parametrize("wrap", [rk.remat, rk.remat("save op=custom*"), lambda f: rk.apply(f, "full")])
@pytest.mark.filterwarnings("ignore:the policy saves the custom_vjp call")  # said under jax_remat3
def test_a_rule_that_calls_its_function_is_used_once_and_twice_differentiated(implementation, wrap):
    f = wrap(lambda x: sine(x))
    np.testing.assert_allclose(jax.grad(f)(1.0), 3 * np.cos(1.0), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.grad(f))(1.0), -3 * np.sin(1.0), rtol=1e-6)
