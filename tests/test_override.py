"""`rk.override` and marked blocks: which policy is in force, and that JAX's caches see it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk


@rk.remat("full", block="mlp")
def mlp(x):
    return jnp.sin(jnp.sin(x))


@rk.remat(block="decoder/attention")
def attention(x):
    return jnp.cos(jnp.cos(x))


def regions(fun, *args):
    """The number of `jax.checkpoint` regions in a traced function."""
    return str(jax.make_jaxpr(fun)(*args)).count("policy")


def test_it_exchanges_the_policy_of_a_block():
    assert regions(mlp, 1.0) == 1
    with rk.override({"mlp": "none"}):
        assert regions(mlp, 1.0) == 0
        assert regions(attention, 1.0) == 1
        assert np.isclose(jax.grad(mlp)(1.0), jnp.cos(jnp.sin(1.0)) * jnp.cos(1.0))
    assert regions(mlp, 1.0) == 1


def test_a_compiled_function_is_traced_again():
    step = jax.jit(lambda x: jax.grad(mlp)(x))
    barriers = step.lower(1.0).as_text().count("optimization_barrier")
    assert barriers > 0
    step(1.0)
    with rk.override({"mlp": "none"}):
        assert step.lower(1.0).as_text().count("optimization_barrier") == 0
        step(1.0)
    assert step.lower(1.0).as_text().count("optimization_barrier") == barriers


def test_a_warm_cache_does_not_warn():
    step = jax.jit(jax.grad(mlp))
    for _ in range(2):
        with rk.override({"mlp": "dots"}):
            step(1.0)


def test_globs_and_their_order():
    with rk.override({"decoder/*": "none", "**": "dots"}):
        assert regions(attention, 1.0) == 0
        assert regions(mlp, 1.0) == 1
    with rk.override({"*": "none"}):  # stops at /
        assert (regions(attention, 1.0), regions(mlp, 1.0)) == (1, 0)


def test_nested_overrides():
    with rk.override({"mlp": "dots", "decoder/*": "none"}):
        with rk.override({"mlp": "none"}):
            assert regions(mlp, 1.0) == 0
            assert regions(attention, 1.0) == 0  # the outer one is in force where the inner one says nothing
        assert regions(mlp, 1.0) == 1


def test_a_glob_that_matches_nothing_warns():
    with pytest.warns(rk.RematWarning, match="'mlpp'.*Did you mean 'mlp'"):
        with rk.override({"mlpp": "none", "mlp": "none"}):
            mlp(1.0)
    with pytest.warns(rk.RematWarning, match="'attention'"):  # the block's whole name is decoder/attention
        with rk.override({"attention": "none"}):
            attention(1.0)


def test_control_characters_in_names_are_escaped():
    rk.remat(jnp.sin, block="a\x1b[31mb")(1.0)
    with pytest.warns(rk.RematWarning) as said, rk.override({"nobody": "none"}):
        pass
    assert "\x1b" not in str(said[0].message) and r"a\x1b[31mb" in str(said[0].message)
    with pytest.raises(rk.RematError) as error:
        rk.apply(rk.remat(jnp.sin, block="a\x1b[31mb"), {"nobody": "full"})(1.0)
    assert "\x1b" not in str(error.value) and r"a\x1b[31mb" in str(error.value)


def test_an_error_inside_is_the_one_that_is_seen():
    with pytest.raises(ZeroDivisionError):
        with rk.override({"unknown": "none"}):
            raise ZeroDivisionError


@pytest.mark.parametrize("policies", [{}, None, "dots", {"": "dots"}, {3: "dots"}, {"mlp": None}, {"mlp": "dotz"}])
def test_wrong_use(policies):
    with pytest.raises(rk.RematError):
        with rk.override(policies):
            pass


def test_functions_without_a_block_are_left_alone():
    f = rk.remat(lambda x: jnp.sin(x))
    with rk.override({"**": "none"}):
        assert regions(f, 1.0) == 1
        mlp(1.0)


def test_overrides_of_one_thread_do_not_reach_another():
    seen = {}

    def work():
        seen["other"] = regions(mlp, 1.0)

    with rk.override({"mlp": "none"}):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        seen["this"] = regions(mlp, 1.0)
    assert seen == {"other": 1, "this": 0}


def test_many_threads_may_wrap_and_run_at_once():
    def work(i):
        f = rk.remat(lambda x: jnp.sin(x * i), policy="dots", block=f"b{i}")
        with rk.override({f"b{i}": "full"}):
            results[i] = float(jax.grad(f)(1.0))

    results = {}
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: pytest.approx(i * np.cos(i), rel=1e-5) for i in range(8)}


def test_blocks_are_named_in_reports():
    def loss(x):
        return mlp(jnp.sum(attention(x)))

    assert [b.path for b in rk.trace(loss, jnp.ones(3)).blocks] == ["decoder/attention", "mlp"]
