"""Where programs without layers are cut, held against every way to cut them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk
from remat_kit._trace import jaxprs, narrow


def program(seed: int):
    """A random chain with branches: values of several sizes, some of them read much later."""
    rng = np.random.default_rng(seed)

    def fn(x):
        values = [x]
        for _ in range(9):
            a = values[-1]
            b = values[rng.integers(len(values))] if rng.random() < 0.4 else a
            n = int(rng.integers(1, 6)) * 8
            values.append(jnp.sin(a)[:n] if n < a.shape[0] else jnp.sin(a) * b[0])
        return jnp.sum(values[-1])

    return jaxprs.opened(jax.make_jaxpr(fn)(jnp.ones(64)))


def total(owner, cuts):
    """What all segments hand on, each value once, and the most that one of them computes."""
    bounds = [0, *cuts, len(owner.eqns)]
    made = {v: i for i, e in enumerate(owner.eqns) for v in e.outvars}
    handed_on = {
        v for c in cuts for e in owner.eqns[c:] for v in e.invars if isinstance(v, jaxprs.Var) and made.get(v, c) < c
    }
    held = [sum(narrow._computed_bytes(e) for e in owner.eqns[a:b]) for a, b in itertools.pairwise(bounds)]
    return sum(jaxprs.nbytes(v.aval) for v in handed_on) + max(held)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.slow if n > 2 else ()) for n in range(12)])
def test_no_other_cuts_are_better(seed):
    owner = program(seed)
    places = narrow._places(owner, narrow._spans(owner), np.arange(len(owner.eqns) + 1))
    every = [c for k in range(len(places) + 1) for c in itertools.combinations(places, k)]
    least = min(total(owner, c) for c in every)
    assert least <= total(owner, narrow.cuts(owner)) <= least / narrow._FINER


def test_a_chain_of_equal_layers_is_cut_into_the_square_root_of_its_length():
    def chain(x):
        for _ in range(64):
            x = jnp.sin(x)
        return x

    owner = jaxprs.opened(jax.make_jaxpr(chain)(jnp.ones(8)))
    assert len(narrow.cuts(owner)) + 1 == 8


def test_a_deep_program_is_cut_all_along():
    def chain(x):
        for _ in range(3000):
            x = jnp.sin(x) * x
        return jnp.sum(x)

    owner = jaxprs.opened(jax.make_jaxpr(chain)(jnp.ones(8)))
    assert 20 < len(narrow.cuts(owner)) < 200


def test_planning_reaches_what_a_checkpoint_for_each_layer_keeps():
    def layer(w, x):
        return x + jnp.tanh(x @ w)

    def loss(ws, x, layer=layer):
        for w in ws:
            x = layer(w, x)
        return jnp.mean(x**2)

    args = ([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((16384, 64), jnp.float32))
    by_layer = rk.measure(lambda ws, x: loss(ws, x, jax.checkpoint(layer)), *args, target="cpu")
    plan = rk.plan(loss, *args, budget=by_layer.peak_bytes, target="cpu")
    assert plan.within and {b.kind for b in plan.blocks} == {"segment"}
