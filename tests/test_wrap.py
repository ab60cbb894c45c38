"""`rk.remat` stands in for `jax.checkpoint`: same values, derivatives, residuals, errors and effects."""

import contextlib
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as name
from jax.ad_checkpoint import print_saved_residuals
from jax.experimental import io_callback

import remat_kit as rk

JAX = jax.checkpoint_policies
REMAT3 = bool(jax.config.jax_remat3)
EARLY = jax.__version_info__ < (0, 11)
classic_only = pytest.mark.skipif(REMAT3, reason="jax_remat3 asks no policy about these values")
no_vmap_of_names = pytest.mark.skipif(REMAT3 and EARLY, reason="jax_remat3 of this JAX cannot vmap over names")


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)
    assert jax.tree.structure(a) == jax.tree.structure(b)


def types(tree):
    return jax.tree.map(lambda x: (jax.typeof(x).str_short(), jax.typeof(x).weak_type), tree)


def residuals(fun, *args):
    """What JAX itself says is saved: types and, for arguments, where from."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_saved_residuals(fun, *args)
    lines = out.getvalue().splitlines()
    return sorted(line if "argument" in line else line.split()[0] for line in lines)


def count(op, fun, *args):
    return str(jax.make_jaxpr(fun)(*args)).count(f" {op} ")


# Functions of every kind, each a function of the wrapper under test -------------------------------------


def elementwise(wrap):
    return wrap(lambda x: lax.sin(lax.sin(x))), (2.0,)


def free_variable(wrap):
    def f(x):
        y = 2 * jnp.sin(x)
        return wrap(lambda x: jnp.cos(x) * jnp.sin(y))(x)

    return f, (2.0,)


def in_scan(wrap):
    body = wrap(lambda c, x: (jnp.sin(c * x), None))
    return lambda x: lax.scan(body, x, np.arange(1.0, 4.0))[0], (0.5,)


def around_scan(wrap):
    return wrap(lambda x: lax.scan(lambda c, x: (jnp.sin(c * x), None), x, np.arange(1.0, 4.0))[0]), (0.5,)


def binomial(wrap):
    def build(funs):
        if len(funs) == 1:
            return funs[0]
        half = len(funs) // 2
        first, second = build(funs[:half]), build(funs[half:])
        return wrap(lambda x: second(first(x)))

    return build([jnp.sin] * 4), (2.0,)


def custom_jvp(wrap):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda p, t: (f(p[0]), 3 * jnp.cos(p[0]) * t[0]))
    return wrap(lambda x: f(f(x))), (2.0,)


def of_jitted(wrap):
    return wrap(jax.jit(lambda x: jnp.sin(jnp.sin(x)))), (2.0,)


def in_jitted(wrap):
    return jax.jit(wrap(lambda x: jnp.sin(jnp.sin(x)))), (2.0,)


def branches(wrap):
    return wrap(lambda x: lax.cond(x > 0, lambda x: jnp.sin(jnp.sin(x)), jnp.cos, x)), (2.0,)


def named(wrap):
    return wrap(lambda x: jnp.sin(name(jnp.sin(x), "s")), policy=JAX.save_only_these_names("s")), (2.0,)


def named_free_variable(wrap):
    def f(x):
        y = jnp.sin(x)
        return wrap(lambda z: name(jnp.sin(y * z), "s") * y, policy=JAX.save_only_these_names("s"))(x)

    return f, (2.0,)


PROGRAMS = [
    elementwise,
    free_variable,
    in_scan,
    around_scan,
    binomial,
    custom_jvp,
    of_jitted,
    in_jitted,
    branches,
    named,
    named_free_variable,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_and_derivatives(program):
    ours, args = program(rk.remat)
    theirs, _ = program(jax.checkpoint)
    over = (jnp.stack([jnp.float32(a), jnp.float32(a) / 2]) for a in args)
    close(ours(*args), theirs(*args))
    close(jax.grad(ours)(*args), jax.grad(theirs)(*args))
    close(jax.jit(jax.grad(ours))(*args), jax.jit(jax.grad(theirs))(*args))
    close(jax.jvp(ours, args, args), jax.jvp(theirs, args, args))
    if not (REMAT3 and EARLY and program in (named, named_free_variable)):
        batch = tuple(over)
        close(jax.vmap(jax.grad(ours))(*batch), jax.vmap(jax.grad(theirs))(*batch))


@pytest.mark.parametrize("program", [elementwise, free_variable, custom_jvp, in_scan, named])
def test_second_derivatives(program):
    ours, args = program(rk.remat)
    theirs, _ = program(jax.checkpoint)
    close(jax.grad(jax.grad(ours))(*args), jax.grad(jax.grad(theirs))(*args))
    close(jax.jvp(jax.grad(ours), args, args), jax.jvp(jax.grad(theirs), args, args))


@pytest.mark.parametrize("program", PROGRAMS)
def test_residuals(program):
    ours, args = program(rk.remat)
    theirs, _ = program(jax.checkpoint)
    if not (REMAT3 and EARLY):  # whose functions have no signature, so no names of arguments
        assert residuals(ours, *args) == residuals(theirs, *args)
    linear = [jax.linearize(f, *args)[1] for f in (ours, theirs)]
    assert count("cos", linear[0], *args) == count("cos", linear[1], *args)


POLICIES = {
    "sin": lambda prim, *_, **__: prim.name == "sin",
    "cos": lambda prim, *_, **__: prim.name == "cos",
    "all": lambda *_, **__: True,
    "dots or name": JAX.save_from_both_policies(JAX.dots_saveable, JAX.save_only_these_names("s")),
    "dots": JAX.dots_saveable,
    "everything": JAX.everything_saveable,
    "nothing": JAX.nothing_saveable,
    "names": JAX.save_only_these_names("s", "t"),
    "but": JAX.save_any_names_but_these("s"),
}


@classic_only
@pytest.mark.parametrize("policy", POLICIES)
def test_residuals_under_callables(policy):
    def f(w, x):
        return jnp.sum(name(jnp.sin(name(jnp.sin(x @ w), "s") @ w), "t"))

    w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
    ours, theirs = (wrap(f, policy=POLICIES[policy]) for wrap in (rk.remat, jax.checkpoint))
    assert residuals(ours, w, x) == residuals(theirs, w, x)

    def scanned(g):
        return lambda w, x: lax.scan(lambda x, w: (x * g(w, x), None), x, jnp.stack([w, w]))[0]

    assert residuals(scanned(ours), w, x) == residuals(scanned(theirs), w, x)


def test_weak_types_and_python_scalars():
    f = rk.remat(lambda x: (x * 2, 3, True))
    g = jax.checkpoint(lambda x: (x * 2, 3, True))
    for x in (1, 1.0, True, 2j, np.float16(1), jnp.bfloat16(1), np.ones(2, np.int8)):
        assert types(f(x)) == types(g(x))


def test_integers_keys_and_float0():
    def f(table, index, key, mask):
        return jnp.sum(jnp.sin(table[index] + jax.random.normal(key, (2, 3))) * mask[:, None])

    args = (jnp.ones((4, 3)), jnp.array([0, 2]), jax.random.key(0), np.array([True, False]))
    close(jax.grad(rk.remat(f))(*args), jax.grad(f)(*args))
    ours, theirs = (jax.vjp(wrap(f), *args)[1](1.0) for wrap in (rk.remat, jax.checkpoint))
    assert [str(c.dtype) for c in ours] == [str(c.dtype) for c in theirs]
    assert ours[1].dtype == jax.dtypes.float0


def test_keywords_and_pytrees():
    def f(d, *rest, k, scale=2.0):
        return {"b": d["a"] * rest[0], "a": [k * scale, None, d["b"]]}

    args, kwargs = ({"b": 1.0, "a": 2}, 3.0), {"k": jnp.int32(4)}
    assert types(rk.remat(f)(*args, **kwargs)) == types(jax.checkpoint(f)(*args, **kwargs))
    close(rk.remat(f)(*args, **kwargs, scale=3.0), f(*args, **kwargs, scale=3.0))
    grad = jax.grad(lambda s: rk.remat(f)(*args, k=1.0, scale=s)["a"][0])(2.0)
    assert grad == 1.0


def test_vmap_axes_and_axis_names():
    f = rk.remat(lambda x, y: lax.psum(jnp.sin(x), "i") * y)
    plain = lambda x, y: lax.psum(jnp.sin(x), "i") * y  # noqa: E731
    x = jnp.arange(6.0).reshape(2, 3)
    for axis in (0, 1):
        mapped = [jax.vmap(g, in_axes=(axis, None), out_axes=axis, axis_name="i") for g in (f, plain)]
        close(mapped[0](x, 2.0), mapped[1](x, 2.0))
        close(*(jax.grad(lambda x, m=m: m(x, 2.0).sum())(x) for m in mapped))


def test_linear_transpose_and_shapes():
    f = rk.remat(lambda x: 3 * x)
    if not REMAT3:  # which has no transposition
        assert jax.linear_transpose(f, 1.0)(2.0)[0] == 6.0
    assert jax.eval_shape(f, jax.ShapeDtypeStruct((2,), jnp.float32)).shape == (2,)


def test_without_jit():
    with jax.disable_jit():
        assert np.isclose(jax.grad(named(rk.remat)[0])(2.0), jax.grad(named(jax.checkpoint)[0])(2.0))


@pytest.mark.skipif(REMAT3, reason="jax_remat3 leaks by itself")
def test_no_tracer_leaks():
    with jax.checking_leaks():
        f = named_free_variable(rk.remat)[0]
        assert np.isclose(jax.jit(jax.grad(f))(2.0), jax.grad(f)(2.0))


def test_debug_callbacks_run_as_in_jax():
    def runs(wrap):
        seen = []

        def f(x):
            jax.debug.callback(lambda v: seen.append(v), x)
            return jnp.sin(jnp.sin(x))

        for g in (wrap(f), jax.grad(wrap(f)), jax.jit(jax.grad(wrap(f)))):
            g(1.0)
            jax.effects_barrier()
            yield len(seen)

    assert list(runs(rk.remat)) == list(runs(jax.checkpoint))


def test_side_effects_that_cannot_be_repeated_are_refused_where_jax_refuses_them():
    def f(x):
        return x * io_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), jnp.float32))

    try:
        expected = jax.grad(jax.checkpoint(f))(1.0)
    except NotImplementedError:
        with pytest.raises(rk.RematError, match="Effects not supported"):
            jax.grad(rk.remat(f))(1.0)
    else:
        assert jax.grad(rk.remat(f))(1.0) == expected


@pytest.mark.parametrize("policy", ["full", "names", "save op=sin"])
def test_concrete_values_are_asked_for_in_the_users_terms(policy):
    def branching(x):
        y = name(jnp.sin(x), "s")
        return y if x > 0 else -y

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"branching at .*argument x") as error:
        rk.remat(branching, policy=policy)(3.0)
    assert REMAT3 or "static_argnums" in str(error.value)


def test_a_leaked_tracer_is_reported_as_in_jax():
    leaked = []
    rk.remat(lambda x: leaked.append(jnp.sin(x)) or x)(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        leaked[0] + 1


# prevent_cse -----------------------------------------------------------------------------------------


def barriers(fun, *args):
    return jax.jit(jax.grad(fun)).lower(*args).as_text().count("optimization_barrier")


@pytest.mark.skipif(REMAT3 and EARLY, reason="jax_remat3 of this JAX ignores prevent_cse")
def test_prevent_cse_is_chosen_by_context():
    inner = lambda x: jnp.sin(jnp.sin(x))  # noqa: E731
    f = rk.remat(inner)

    def in_scan(f):
        return lambda x: lax.scan(lambda x, _: (f(x), None), x, length=3)[0]

    def grad_in_scan(f):
        return lambda x: lax.scan(lambda x, _: (x + jax.grad(f)(x), None), x, length=3)[0]

    def in_jit_in_scan(f):
        return in_scan(jax.jit(f))

    assert barriers(f, 1.0) > 0
    assert barriers(in_scan(f), 1.0) == 0
    # XLA could merge recomputation and forward pass here: both are in one body.
    assert "optimization_barrier" in jax.jit(grad_in_scan(f)).lower(1.0).as_text()
    assert barriers(in_jit_in_scan(f), 1.0) > 0
    assert barriers(in_scan(rk.remat(inner, prevent_cse=True)), 1.0) > 0
    assert barriers(rk.remat(inner, prevent_cse=False), 1.0) == 0
    assert barriers(in_scan(rk.remat(inner, policy="save op=sin")), 1.0) == 0


@pytest.mark.skipif(REMAT3 and EARLY, reason="jax_remat3 of this JAX ignores prevent_cse")
def test_prevent_cse_takes_a_prefix_of_the_arguments():
    def f(flag, x, y, *, z):
        return jnp.sin(jnp.sin(x[0] * y * x[1] * z))

    args = ((2.0, 3.0), 4.0)
    flags = (((True, False), False), False)  # of (args, kwargs), without the static argument, as in JAX
    with_flag = rk.remat(f, prevent_cse=flags, static_argnums=0)
    without = jax.checkpoint(functools.partial(f, True), prevent_cse=flags)
    ours = jax.grad(lambda x, y: with_flag(True, x, y, z=5.0))
    theirs = jax.grad(lambda x, y: without(x, y, z=5.0))
    assert jax.jit(ours).lower(*args).as_text() == jax.jit(theirs).lower(*args).as_text()
    both = rk.remat(f, prevent_cse=flags, static_argnums=0, policy="save op=sin")
    assert barriers(lambda x: both(True, x, 4.0, z=5.0), args[0]) > 0
    one = rk.remat(lambda flag, x, y: jnp.sin(jnp.sin(x * y)), prevent_cse=(True, False), static_argnums=0)
    assert barriers(lambda x: one(True, x, x), 2.0) == barriers(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x * x))), 2.0)


def test_names_in_forward_rules_are_found_in_any_order():
    @jax.custom_vjp
    def inner(x):
        return jnp.sin(x)

    inner.defvjp(lambda x: (rk.checkpoint_name(jnp.sin(x), "named"), x), lambda x, c: (c * jnp.cos(x),))
    shared = jax.jit(inner)

    @jax.custom_vjp
    def outer(x):
        return jnp.cos(x)

    outer.defvjp(lambda x: (shared(x), x), lambda x, c: (c,))
    for fn in (lambda x: outer(shared(x)), lambda x: shared(outer(x))):
        if jax.config.jax_remat3:
            with pytest.raises(rk.RematError, match="forward rule"):
                rk.remat(fn, policy="save name=named")(1.0)
        else:
            assert rk.remat(fn, policy="save name=named")(1.0) == fn(1.0)


@pytest.mark.skipif(REMAT3 and EARLY, reason="jax_remat3 of this JAX refuses such rules, in jax.checkpoint too")
def test_a_forward_rule_that_closes_over_an_array():
    k = jnp.arange(3.0)

    @jax.custom_vjp
    def fn(x):
        return jnp.sin(x) * k

    fn.defvjp(lambda x: (jnp.tanh(x) * k, x * k), lambda x, c: (c * k,))
    x = jnp.ones(3)
    wrapped = rk.remat(lambda x: jnp.sum(fn(jnp.exp(x))), policy="save op=exp")
    np.testing.assert_allclose(jax.grad(wrapped)(x), jax.grad(lambda x: jnp.sum(fn(jnp.exp(x))))(x), rtol=1e-6)
    assert rk.residuals(lambda x: jnp.sum(fn(jnp.exp(x))), x, policy="save op=exp").total_bytes >= 12


@pytest.mark.parametrize("policy", ["full", "dots", "names", "save op=tanh; recompute rest"])
def test_a_python_number_may_have_a_name(policy):
    def fn(x):
        return jnp.sum(jnp.tanh(x * rk.checkpoint_name(2.0, "two")))

    x = jnp.ones(3)
    for new in (rk.remat(fn, policy=policy), rk.apply(fn, policy)):
        np.testing.assert_allclose(jax.grad(new)(x), jax.grad(fn)(x), rtol=1e-6)
    assert rk.residuals(fn, x, policy=policy).entries
