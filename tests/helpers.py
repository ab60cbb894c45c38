"""What several tests share: JAX's own count of residual bytes and of regions, gradients compared, commands run."""

from __future__ import annotations

import re

import jax
import numpy as np

from remat_kit import _cli


def residual_bytes(fun, *args):
    """Bytes of intermediates that jax.vjp holds with respect to the first argument, counted by JAX itself."""
    traced, shape = jax.make_jaxpr(lambda *a: jax.vjp(lambda x: fun(x, *a[1:]), a[0]), return_shape=True)(*args)
    held = traced.jaxpr.outvars[len(traced.jaxpr.outvars) - len(jax.tree.leaves(shape[1])) :]
    inputs = {*traced.jaxpr.invars, *traced.jaxpr.constvars}
    kept = {v for v in held if isinstance(v, jax.extend.core.Var) and v not in inputs}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


def assert_same_gradients(a, b, *args, rtol=2e-5, atol=1e-6):
    va, ga = jax.jit(jax.value_and_grad(a))(*args)
    vb, gb = jax.jit(jax.value_and_grad(b))(*args)
    np.testing.assert_allclose(va, vb, rtol=rtol)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), ga, gb)


def assert_same(a, b, rtol=2e-4, atol=1e-5):
    """Two pytrees of one structure have equal numbers, up to rounding."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def state_of(model):
    """The state of an NNX module as a tree of numbers."""
    from flax import nnx

    def plain(leaf):
        is_key = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(plain, nnx.to_pure_dict(nnx.state(model)))


def held(fn, *args):
    """Bytes that the backward pass of a function holds, its arguments included. Nothing is computed."""
    pull = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


def regions(fn, *args):
    """Number of remat equations in a traced function, nested ones included, under either implementation."""
    text = str(jax.make_jaxpr(fn)(*args))
    return len(re.findall(r"\b(?:checkpoint|remat2?|RematTraced)\[", text))


def run(capsys, *argv):
    """Returns exit status, standard output and standard error of one command."""
    try:
        status = _cli.main(list(argv))
    except SystemExit as e:  # argparse
        status = e.code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err
