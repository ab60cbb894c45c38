"""Public reports on mutable references in rematerialized functions: what a replay writes, it writes twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk
from remat_kit import RematError

# https://github.com/jax-ml/jax/pull/39438, https://github.com/jax-ml/jax/pull/29127

REMAT3 = jax.config.jax_remat3
OLD = jax.__version_info__ < (0, 11)
# Plain jax.checkpoint fails on these too.
NO_REFS = pytest.mark.skipif(REMAT3 and OLD, reason="jax_remat3 of this JAX cannot differentiate functions of refs")
NO_REFS_OF_ITS_OWN = pytest.mark.skipif(
    not REMAT3, reason="classic remat cannot differentiate functions that make refs"
)

X = jnp.arange(3.0)
WRAP = pytest.mark.parametrize(
    "wrap",
    [
        rk.remat,
        rk.remat("dots"),
        rk.remat("save op=sin"),
        lambda f: rk.apply(f, "full"),
        lambda f: rk.apply(f, {"*": "dots"}),
    ],
    ids=["remat", "remat native", "remat named", "apply", "apply to blocks"],
)
RUN = pytest.mark.parametrize(
    "run", [lambda f: f, jax.grad, lambda f: jax.jit(jax.grad(f))], ids=["value", "grad", "jit of grad"]
)


def count(x, ref):
    ref[...] += 1.0
    return jnp.sum(jnp.sin(jnp.sin(x)))


def count_in_loop(x, ref):
    def body(h, _):
        ref[...] += 1.0
        return jnp.sin(h), None

    return jnp.sum(jax.lax.scan(body, x, None, length=2)[0])


def scaled(x, ref):
    return jnp.sum(jnp.sin(x * ref[...]))


def counter():
    return jax.new_ref(jnp.zeros((), jnp.float32))


@WRAP
@RUN
@pytest.mark.parametrize("fun", [count, count_in_loop])
def test_writing_to_an_argument_is_refused_and_nothing_is_written(wrap, run, fun):
    ref = counter()
    with pytest.raises(
        RematError, match=r"writes to a mutable reference \(Ref\{float32\[\]\}\).*Return the value instead"
    ):
        run(wrap(fun))(X, ref)
    assert ref[...] == 0


@WRAP
@RUN
@pytest.mark.parametrize("fun", [count, count_in_loop])
def test_writing_to_a_reference_closed_over_is_refused_and_nothing_is_written(wrap, run, fun):
    ref = counter()
    with pytest.raises(RematError, match=r"writes to a mutable reference \(Ref\{float32\[\]\}\)"):
        run(wrap(lambda x: fun(x, ref)))(X)
    assert ref[...] == 0


def test_the_error_names_the_reference_written_to_and_not_those_read():
    def fun(x, read, written):
        written[...] += jnp.sum(read[...])
        return jnp.sum(jnp.sin(x))

    read, written = jax.new_ref(jnp.zeros(3)), counter()
    for wrapped in (rk.remat(fun), rk.apply(fun, "full"), lambda x, a, b: rk.remat(lambda x: fun(x, a, b))(x)):
        with pytest.raises(RematError, match=r"\(Ref\{float32\[\]\}\)"):
            wrapped(X, read, written)


def test_the_way_out_that_the_error_names_works():
    def fun(x):
        return jnp.sum(jnp.sin(jnp.sin(x))), jnp.ones(())

    ref = counter()
    grads, stat = jax.grad(rk.remat(fun), has_aux=True)(X)
    ref[...] += stat
    assert ref[...] == 1
    np.testing.assert_allclose(grads, jax.grad(lambda x: fun(x)[0])(X), rtol=1e-6)


@WRAP
@RUN
@NO_REFS
def test_reading_works(wrap, run):
    ref = jax.new_ref(jnp.asarray(2.0, jnp.float32))
    want = run(lambda x: jnp.sum(jnp.sin(x * 2.0)))(X)
    np.testing.assert_allclose(run(wrap(scaled))(X, ref), want, rtol=1e-6)
    np.testing.assert_allclose(run(wrap(lambda x: scaled(x, ref)))(X), want, rtol=1e-6)
    assert ref[...] == 2


def own(x):
    total = jax.new_ref(jnp.zeros_like(x))
    total[...] += jnp.sin(x)
    return jnp.sum(jnp.sin(total[...]))


@WRAP
def test_a_reference_that_the_function_makes_is_its_own_affair(wrap):
    np.testing.assert_allclose(wrap(own)(X), own(X), rtol=1e-6)


@WRAP
@NO_REFS_OF_ITS_OWN
def test_a_reference_that_the_function_makes_is_made_anew_in_the_replay(wrap):
    np.testing.assert_allclose(jax.grad(wrap(own))(X), jax.grad(own)(X), rtol=1e-6)


@NO_REFS
def test_residuals_of_functions_of_references():
    ref = jax.new_ref(jnp.asarray(2.0, jnp.float32))
    for policy in (None, "full", "none"):
        assert rk.residuals(scaled, X, ref, policy=policy).total_bytes <= 2 * X.nbytes + 4
    assert rk.residuals(count, X, ref).total_bytes > 0  # as written it is no remat: fine
    with pytest.raises(RematError, match="writes to a mutable reference"):
        rk.residuals(count, X, ref, policy="full")


# A reference written by a backward rule only is written once, with remat too.


@jax.custom_vjp
def stash(ref, x):
    return x


def _backward(ref, g):
    ref[...] = g
    return None, g


stash.defvjp(lambda ref, x: (x, ref), _backward)


@NO_REFS
@pytest.mark.parametrize("wrap", [rk.remat, lambda f: rk.apply(f, "full")])
def test_a_backward_rule_may_write(wrap):
    def fun(x, ref):
        return jnp.sum(jnp.sin(stash(ref, jnp.sin(x))))

    ref, reference = jax.new_ref(jnp.zeros(3)), jax.new_ref(jnp.zeros(3))
    want = jax.jit(jax.grad(fun))(X, reference)
    np.testing.assert_allclose(jax.jit(jax.grad(wrap(fun)))(X, ref), want, rtol=1e-6)
    np.testing.assert_allclose(ref[...], reference[...], rtol=1e-6)
