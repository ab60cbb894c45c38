"""scan and while_loop: their options, what they refuse, and how they get on with the rest of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import regions

import remat_kit as rk


def test_only_what_is_differentiated_gets_a_gradient():
    """Data that a loop reads is neither copied nor given a gradient of its size."""
    xs = jnp.ones((50, 1000))

    def fn(h):
        step = lambda h, x: (jnp.sin(h) + jnp.mean(x), None)  # noqa: E731
        return rk.scan(step, h, xs, segments="binomial", checkpoints=4)[0]

    sizes = [v.aval.size for e in jax.make_jaxpr(jax.grad(fn))(1.0).eqns for v in e.outvars]
    assert max(sizes) < xs.size


def test_key_arrays_and_captured_values():
    keys = jax.random.split(jax.random.key(0), 11)

    def fn(scan, w, **options):
        def step(carry, key):
            h, own = carry
            own, used = jax.random.split(own)
            return (jnp.tanh(w * h) + jax.random.normal(key) + jax.random.normal(used), own), None

        return scan(step, (w, jax.random.key(1)), keys, **options)[0][0]

    wanted = jax.value_and_grad(lambda w: fn(jax.lax.scan, w))(0.3)
    for options in ({}, {"segments": 3}, {"segments": "binomial", "checkpoints": 2}, {"policy": ["full"] * 11}):
        np.testing.assert_allclose(jax.value_and_grad(lambda w, o=options: fn(rk.scan, w, **o))(0.3), wanted, rtol=1e-5)


def test_policies_for_ranges_make_one_loop_for_each_run():
    def fn(h):
        policy = {range(0, 6, 2): "full", range(1, 6, 2): "full", range(6, 10): "none"}
        return rk.scan(lambda h, _: (jnp.sin(jnp.sin(h)), None), h, None, 10, policy=policy)[0]

    text = str(jax.make_jaxpr(fn)(1.0))
    assert text.count(" scan[") == 2 and regions(fn, 1.0) == 1


def test_a_block_name_reaches_the_step():
    def fn(h):
        return rk.scan(lambda h, _: (jnp.sin(jnp.sin(h)), None), h, None, 10, block="cell")[0]

    assert rk.residuals(fn, 1.0).blocks == ("cell",)
    with rk.override({"cell": "none"}):
        assert regions(fn, 1.0) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 0}, "segments= is a number of segments"),
        ({"segments": "log"}, "segments= is a number of segments"),
        ({"segments": True}, "segments= is a number of segments"),
        ({"checkpoints": 3}, 'goes with segments="binomial"'),
        ({"segments": "binomial", "checkpoints": 0}, "1 or more, got 0"),
        ({"segments": "binomial", "offload_carry": True}, "offload_carry= goes with"),
        ({"policy": ["full"] * 3}, "3 entries for 10 steps"),
        ({"policy": {range(0, 4): "full"}}, "says nothing of steps 4, 5, 6, 7, 8, 9 of 10"),
        ({"policy": {range(0, 4): "full", range(3, 10): "dots"}}, "two entries for step 3"),
        ({"policy": {range(0, 11): "full"}}, "speaks of step 10"),
        ({"policy": {0: "full"}}, "by ranges"),
        ({"policy": ["full"] * 10, "segments": 2}, "choose one"),
        ({"policy": "none", "offload_carry": True}, 'policy= is "none"'),
        ({"policy": "dotz"}, "dotz"),
        ({"policy": rk.every(2, "full")}, "goes to apply"),
        ({"offload_carry": True}, "this carry has none"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(rk.RematError, match=message):
        init = jnp.ones(2) if options.get("policy") == "none" else 1.0
        rk.scan(lambda h, _: (jnp.sin(h), None), init, None, 10, **options)


@pytest.mark.parametrize("options", [{}, {"segments": 2}, {"segments": "binomial"}, {"policy": ["full"] * 4}])
def test_errors_of_jax_stay_what_they_are(options):
    with pytest.raises(TypeError, match="carry"):
        rk.scan(lambda h, _: (jnp.stack([h, h]), None), 1.0, None, 4, **options)
    with pytest.raises(ValueError, match="length"):
        rk.scan(lambda h, x: (h + x, None), 1.0, jnp.ones(4), 5, **options)


def test_a_step_that_writes_to_a_reference_is_refused():
    ref = jax.new_ref(jnp.zeros(()))

    def step(h, _):
        ref[...] = h
        return jnp.sin(h), None

    for options in ({}, {"segments": 2}, {"segments": "binomial"}):
        with pytest.raises(rk.RematError, match="mutable reference"):
            rk.scan(step, 1.0, None, 4, **options)
    with pytest.raises(rk.RematError, match="max_steps"):
        rk.while_loop(lambda h: h > 0, jnp.sin, 1.0, max_steps=2.5)


@pytest.mark.parametrize("options", [{}, {"segments": 3}, {"segments": "binomial"}, {"policy": ["full"] * 4}])
def test_dropout_of_a_linen_module_is_that_of_the_plain_scan(options):
    from flax import linen as nn

    class Model(nn.Module):
        options: dict | None

        @nn.compact
        def __call__(self, x):
            dense, dropout = nn.Dense(16), nn.Dropout(0.4, deterministic=False)
            x = dense(x)
            scan = jax.lax.scan if self.options is None else rk.scan
            return scan(lambda h, _: (dropout(dense(h)), None), x, None, 4, **(self.options or {}))[0]

    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    x = jnp.ones((4, 16))
    params = Model(None).init(rngs, x)
    plain, ours = (Model(o).apply(params, x, rngs={"dropout": jax.random.key(2)}) for o in (None, options))
    np.testing.assert_allclose(plain, ours, rtol=1e-6)


def test_effects_that_must_not_be_repeated_are_refused_under_grad():
    from jax.experimental import io_callback

    def step(h, _=None):
        io_callback(lambda: None, None, ordered=True)
        return jnp.sin(h)

    binomial = lambda h: rk.scan(lambda h, _: (step(h), None), h, None, 5, segments="binomial")[0]  # noqa: E731
    loop = lambda h: rk.while_loop(lambda h: h > 0.7, step, h, max_steps=5)  # noqa: E731
    for fn in (binomial, loop):
        assert np.isfinite(fn(1.0))
        with pytest.raises(NotImplementedError, match="must not be repeated"):
            jax.grad(fn)(1.0)


def test_no_traces_are_leaked():
    with jax.checking_leaks():
        for options in ({}, {"segments": 2}, {"segments": "binomial"}):
            jax.grad(lambda w, o=options: rk.scan(lambda c, _: (jnp.sin(c * w), None), 1.0, None, 3, **o)[0])(1.0)
        jax.grad(lambda w: rk.while_loop(lambda c: c > w, lambda c: jnp.sin(c * w), 1.0, max_steps=3))(0.5)


# Offloaded carries ----------------------------------------------------------------------------------------------------

offloads = pytest.mark.skipif(
    jax.config.jax_remat3 and jax.__version_info__ < (0, 11), reason="refused, as this remat would recompute instead"
)


def offloading(h, **options):
    step = lambda h, _: (jnp.sin(jnp.tanh(jnp.sin(h))), None)  # noqa: E731
    return jnp.sum(rk.scan(step, h, None, 12, offload_carry=True, **options)[0])


@offloads
@pytest.mark.filterwarnings("ignore:offload_carry=True has no effect:remat_kit.RematWarning")
@pytest.mark.parametrize(("options", "carries"), [({}, 12), ({"segments": 3}, 3), ({"policy": ["full"] * 12}, 12)])
def test_offloaded_carries_are_on_the_host(options, carries):
    h = jnp.linspace(0, 1, 16)
    report = rk.residuals(lambda h: offloading(h, **options), h)
    assert (report.total_bytes, report.host_bytes) == (0, carries * h.nbytes)
    plain = lambda h: jnp.sum(jax.lax.fori_loop(0, 12, lambda _, h: jnp.sin(jnp.tanh(jnp.sin(h))), h))  # noqa: E731
    np.testing.assert_allclose(jax.grad(lambda h: offloading(h, **options))(h), jax.grad(plain)(h), rtol=1e-5)


@offloads
def test_a_cpu_says_once_that_it_offloads_nothing():
    h = jnp.linspace(0, 1, 16)
    step = jax.jit(jax.grad(offloading))
    with pytest.warns(rk.RematWarning, match="no effect on the CPU") as told:
        step(h)
        step(h)
    assert len(told) == 1 and told[0].filename == __file__
    rk.residuals(offloading, h)  # says what another target would do
    assert "on the CPU" in str(rk.measure(offloading, h, target="cpu"))


# Derivatives that there are not ---------------------------------------------------------------------------------------

FEW = {
    "scan": lambda h: rk.scan(lambda h, _: (jnp.sin(h), None), h, None, 9, segments="binomial", checkpoints=2)[0],
    "while_loop": lambda h: rk.while_loop(
        lambda s: s[1] < 9, lambda s: (jnp.sin(s[0]), s[1] + 1), (h, 0), max_steps=12
    )[0],
}


@pytest.mark.parametrize("loop", FEW)
def test_what_cannot_be_differentiated_so_is_said(loop):
    fn = FEW[loop]
    plain = lambda h: jax.lax.fori_loop(0, 9, lambda _, h: jnp.sin(h), h)  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.hessian(fn))(1.0), jax.hessian(plain)(1.0), rtol=1e-4)
    for twice in (jax.grad(jax.grad(fn)), jax.jit(jax.grad(jax.jit(jax.grad(fn)))), jax.jacrev(jax.grad(fn))):
        with pytest.raises(rk.RematError, match="differentiated in reverse again.*jax.hessian"):
            twice(1.0)
    with pytest.raises(rk.RematError, match="differentiated in forward mode"):
        jax.jvp(fn, (1.0,), (1.0,))
    with pytest.raises(TypeError, match="forward-mode"):  # JAX's own
        jax.jvp(jax.jit(fn), (1.0,), (1.0,))
