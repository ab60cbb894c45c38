"""What `rk.remat` refuses or warns of instead of passing it over: names, mutable references, modules, jax_remat3."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name as name
from jax.experimental import io_callback

import remat_kit as rk

JAX = jax.checkpoint_policies
REMAT3 = bool(jax.config.jax_remat3)
EARLY = REMAT3 and jax.__version_info__ < (0, 11)
remat3 = pytest.mark.skipif(not REMAT3, reason="about jax_remat3")
early_remat3 = pytest.mark.skipif(not EARLY, reason="about jax_remat3 of JAX 0.10")
OFFLOAD = {"offload_src": "device", "offload_dst": "pinned_host"}


def f(x):
    return jnp.sin(name(jnp.sin(x), "first"))


# Names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["save name=frist", rk.save(name="frist"), "save name=first|other", "save name=b*"])
def test_a_name_that_the_function_does_not_have_is_an_error(policy):
    with pytest.raises(rk.RematError, match="Its checkpoint names: 'first'"):
        rk.remat(f, policy=policy)(1.0)


def test_near_names_are_suggested():
    with pytest.raises(rk.RematError, match="'frist'.*Did you mean 'first'"):
        jax.grad(rk.remat(f, policy="save name=frist"))(1.0)


@pytest.mark.parametrize("decorated", [False, True])
def test_in_a_policy_of_jax_it_is_a_warning(decorated):
    policy = JAX.save_only_these_names("frist")
    g = rk.remat(policy=policy)(f) if decorated else rk.remat(f, policy=policy)
    with pytest.warns(rk.RematWarning, match="'frist'.*Did you mean 'first'"):
        assert np.isclose(jax.grad(g)(1.0), jax.grad(f)(1.0))
    marked = rk.remat(f, block="limits")
    with pytest.warns(rk.RematWarning, match="'frist'"), rk.override({"limits": policy}):
        marked(1.0)


def test_names_that_are_there_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(rk.remat(f, policy=JAX.save_only_these_names("first")))(1.0)


# Mutable references ------------------------------------------------------------------------------------


def test_writes_to_an_argument_are_refused():
    def counts(x, ref):
        ref[...] += 1
        return jnp.sin(jnp.sin(x))

    ref = jax.new_ref(jnp.float32(0))
    for policy in ("full", "dots", "save op=sin"):
        for call in (rk.remat(counts, policy=policy), jax.grad(rk.remat(counts, policy=policy))):
            with pytest.raises(rk.RematError, match="writes to a mutable reference"):
                call(1.0, ref)
    assert ref[...] == 0
    jax.grad(rk.remat(counts, policy="none"))(1.0, ref)
    assert ref[...] == 1


def test_writes_to_a_captured_reference_are_refused():
    ref = jax.new_ref(jnp.float32(0))

    def counts(x):
        ref[...] += 1
        return jnp.sin(jnp.sin(x))

    for call in (rk.remat(counts), jax.grad(rk.remat(counts)), jax.jit(rk.remat(counts))):
        with pytest.raises(rk.RematError, match="writes to a mutable reference"):
            call(1.0)
    assert ref[...] == 0


def test_references_may_be_read_and_made():
    ref = jax.new_ref(jnp.float32(2))
    if not EARLY:  # which cannot differentiate such a function
        assert np.isclose(jax.grad(rk.remat(lambda x, r: jnp.sin(x * r[...])))(1.0, ref), 2 * jnp.cos(2.0))
        assert np.isclose(jax.grad(rk.remat(lambda x: jnp.sin(x * ref[...])))(1.0), 2 * jnp.cos(2.0))

    def local(x):
        r = jax.new_ref(x)
        r[...] = jnp.sin(r[...])
        return r[...]

    assert rk.remat(local)(1.0) == jnp.sin(1.0)


@pytest.mark.skipif(REMAT3, reason="jax_remat3 does not take references of backward rules")
def test_backward_rules_may_write():
    @jax.custom_vjp
    def stash(ref, x):
        return x

    def backward(ref, g):
        ref[...] = g
        return None, g

    stash.defvjp(lambda ref, x: (x, ref), backward)
    ref = jax.new_ref(jnp.float32(0))
    grad = jax.jit(jax.grad(rk.remat(lambda x, ref: jnp.sin(stash(ref, jnp.sin(x))))))(1.0, ref)
    assert np.isclose(ref[...], jnp.cos(jnp.sin(1.0))) and np.isclose(grad, ref[...] * jnp.cos(1.0))


# Callbacks -------------------------------------------------------------------------------------------

seen = []


def logs(x, ordered=False):
    io_callback(seen.append, None, jax.lax.stop_gradient(x), ordered=ordered)
    return jnp.sin(jnp.sin(x))


def times_called(f):
    seen.clear()
    jax.block_until_ready(f(1.0))
    jax.effects_barrier()
    return len(seen)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("policy", ["full", "dots", "save op=sin larger_than=0"])
def test_io_callback_is_refused_where_a_region_is_differentiated(policy, ordered):
    fun = functools.partial(logs, ordered=ordered)
    region = rk.remat(fun, policy=policy)

    def layers(x):
        return jax.lax.scan(lambda x, _: (region(x), None), x, length=2)[0]

    def captures(x):
        return rk.remat(lambda: fun(x), policy=policy)()

    for f, times in ((region, 1), (jax.jit(region), 1), (rk.apply(fun, policy), 1), (captures, 1), (layers, 2)):
        assert times_called(f) == times
        for grad in (jax.grad(f), jax.jit(jax.grad(f))):
            if EARLY:  # which allows it
                assert times_called(grad) >= times
                continue
            with pytest.raises(NotImplementedError, match="Effects not supported") as error:
                grad(1.0)
            if f not in (layers,) and not hasattr(f, "lower"):  # JAX differentiates loops and jitted functions later
                assert isinstance(error.value, rk.RematError) and "jax.debug.callback" in str(error.value)
                assert "jax._src" not in str(error.value)
    assert times_called(jax.grad(rk.remat(fun, policy="none"))) == 1


def test_forward_mode_of_a_region_with_io_callback():
    values, expected = (jax.jvp(f(logs), (1.0,), (1.0,)) for f in (rk.remat, jax.checkpoint))
    np.testing.assert_allclose(values, expected)
    np.testing.assert_allclose(jax.jvp(rk.apply(logs, "full"), (1.0,), (1.0,)), expected)


@pytest.mark.skipif(EARLY, reason="jax_remat3 of this JAX replays io_callback")
def test_jax_still_refuses_io_callback():
    with pytest.raises(NotImplementedError):
        jax.grad(jax.checkpoint(logs))(1.0)


@pytest.mark.parametrize("policy", ["full", "save op=sin larger_than=0"])
def test_other_callbacks_may_be_replayed(policy):
    def prints(x):
        jax.debug.callback(seen.append, x)
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(x))
        return jnp.sin(jnp.sin(x)) + y

    grad = jax.grad(rk.remat(prints, policy=policy))
    assert times_called(grad) >= 1 and np.isclose(grad(1.0), jnp.cos(jnp.sin(1.0)) * jnp.cos(1.0))


# Modules ---------------------------------------------------------------------------------------------


def test_nnx_modules_belong_to_rk_nnx():
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for call in (
        lambda: rk.remat(lambda m, x: m(x))(module, jnp.ones(2)),
        lambda: rk.remat(lambda x, *, m: m["a"][0](x))(jnp.ones(2), m={"a": [module]}),
        lambda: rk.remat(module),
        lambda: rk.remat(module.__call__),
        lambda: rk.remat(lambda r: r.dropout())(nnx.Rngs(0)),
    ):
        with pytest.raises(rk.RematError, match="rk.nnx.remat"):
            call()

    class Block(nnx.Module):
        @rk.remat("dots")
        def __call__(self, x):
            return x

    with pytest.raises(rk.RematError, match="rk.nnx.remat"):
        Block()(1.0)
    graph, state = nnx.split(module)  # pure data: fine
    grad = jax.grad(rk.remat(lambda s, x: jnp.sum(nnx.merge(graph, s)(x))))(state, jnp.ones(2))
    assert jax.tree.structure(grad) == jax.tree.structure(state)


@pytest.mark.parametrize("policy", ["full", "dots", "save op=mul"])
def test_captured_nnx_modules_may_be_read_but_not_changed(policy):
    layer, norm = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    x = jnp.ones((3, 2))
    np.testing.assert_allclose(rk.remat(lambda x: layer(x) * 1, policy=policy)(x), layer(x))
    before = norm.mean[...]
    for call in (
        rk.remat(lambda x: norm(x) * 1, policy=policy),
        jax.jit(rk.remat(lambda x: norm(x) * 1, policy=policy)),
    ):
        with pytest.raises(rk.RematError, match="lambda.* changes a module or Variable .*rk.nnx.remat"):
            call(x)
    np.testing.assert_array_equal(norm.mean[...], before)


def test_bound_linen_modules_belong_to_rk_linen():
    class Inner(linen.Module):
        @rk.remat
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(x)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return rk.remat(lambda layer, x: layer(x))(linen.Dense(2), x)

    for module in (Inner(), Outer()):
        with pytest.raises(rk.RematError, match="rk.linen.remat"):
            module.init(jax.random.key(0), jnp.ones(2))

    dense = linen.Dense(2)  # unbound, a module is only its settings
    params = dense.init(jax.random.key(0), jnp.ones(2))
    loss = rk.remat(lambda layer, params, x: jnp.sum(layer.apply(params, x)))
    expected = jax.grad(lambda p: jnp.sum(dense.apply(p, jnp.ones(2))))(params)
    found = jax.grad(loss, argnums=1)(dense, params, jnp.ones(2))
    jax.tree.map(np.testing.assert_allclose, found, expected)
    assert rk.remat(dense.apply)(params, jnp.ones(2)).shape == (2,)


# jax_remat3 --------------------------------------------------------------------------------------------


@remat3
def test_a_callable_that_jax_remat3_does_not_ask_is_reported():
    g = rk.remat(f, policy=lambda prim, *_, **__: prim.name == "sin")
    with pytest.warns(rk.RematWarning, match="keeps the results of sin, but jax_remat3"):
        assert np.isclose(jax.grad(g)(1.0), jax.grad(f)(1.0))
    with pytest.warns(rk.RematWarning, match="keeps the results of .*sin"):
        rk.remat(f, policy=lambda *_, **__: True)(1.0)


@remat3
def test_what_jax_remat3_honours_does_not_warn():
    def dense(x):
        return jnp.sin(name(x @ x, "first"))

    for policy in ("full", "dots", "dots_no_batch", "save name=first", "names", "save op=sin", lambda *_, **__: False):
        jax.grad(lambda x, p=policy: jnp.sum(rk.remat(dense, policy=p)(x)))(jnp.ones((2, 2)))
    if not EARLY:
        both = JAX.save_from_both_policies(JAX.dots_saveable, JAX.save_only_these_names("first"))
        for policy in ("everything", both):
            rk.remat(dense, policy=policy)(jnp.ones((2, 2)))


@early_remat3
def test_policies_that_the_early_jax_remat3_ignores():
    x = jnp.ones((2, 2))
    for policy in ("offload name=first", "offload_dots", JAX.offload_dot_with_no_batch_dims(**OFFLOAD)):
        with pytest.raises(rk.RematError, match="offloads, which jax_remat3"):
            rk.remat(lambda x: f(x @ x), policy=policy)(x)
    both = JAX.save_from_both_policies(JAX.dots_saveable, JAX.save_only_these_names("first"))
    for policy, lost in (("everything", "sin"), (both, "dot_general, name"), ("dots", "conv_general_dilated")):
        with pytest.warns(rk.RematWarning, match=f"keeps the results of .*{lost}"):
            rk.remat(lambda x: f(jax.numpy.convolve(x[0] @ x, x[0])), policy=policy)(x)
    with pytest.warns(rk.RematWarning, match="prevent_cse is ignored"):
        rk.remat(f, prevent_cse=False)(1.0)


@pytest.mark.skipif(EARLY, reason="jax_remat3 of this JAX has no prevent_cse")
def test_regions_with_a_flag_for_each_argument_can_be_rewritten():
    region = jax.checkpoint(lambda x, y: jnp.sin(jnp.sin(x * y)), prevent_cse=(True, False))

    def loss(x):
        return region(x, jnp.cos(x))

    for policy in ("full", "save op=sin"):
        assert np.isclose(jax.grad(rk.apply(loss, policy))(1.0), jax.grad(loss)(1.0))
    assert rk.residuals(loss, 1.0).total_bytes >= 0
    assert np.isclose(jax.grad(rk.remat(loss))(1.0), jax.grad(loss)(1.0))


@early_remat3
@pytest.mark.parametrize("policy", ["dots", "save name=inne*"])
def test_a_policy_that_does_not_reach_into_a_region_is_said(policy):
    inner = jax.checkpoint(lambda x: jnp.sin(name(x @ x, "inner")))
    with pytest.warns(rk.RematWarning, match="inside a jax.checkpoint region") as said:
        rk.remat(lambda x: jnp.sum(inner(jnp.sin(x))), policy=policy)(jnp.ones((2, 2)))
    assert len(said) == 1 and said[0].filename == __file__
