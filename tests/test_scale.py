"""Deep programs: work grows with the number of equations and no faster, and nesting is no obstacle."""

from __future__ import annotations

import cProfile
import pstats
import sys

import deep
import jax
import pytest

import remat_kit as rk

VERBS = {
    "trace": rk.trace,
    "residuals": rk.residuals,
    "apply": lambda fn, *args: jax.make_jaxpr(rk.apply(fn, "full"))(*args),
    "plan": lambda fn, *args: rk.plan(fn, *args, budget="1MiB", target=None),
}
EVERY_VERB = pytest.mark.parametrize("verb", VERBS)


def calls(verb, fn, args):
    """How many Python and C functions a verb calls: the same in every run, unlike the time."""
    jax.clear_caches()
    profile = cProfile.Profile()
    profile.runcall(VERBS[verb], fn, *args)
    return pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@EVERY_VERB
@pytest.mark.parametrize("program", ["layers", "blocks", "chain"])
def test_work_grows_with_the_equations(verb, program):
    def made(n):
        if program == "chain":
            return deep.chain(20 * n)
        loss, (params, x) = deep.layers(n, width=8)
        if program == "layers":
            return loss, (params, x)

        def marked(params, x):
            block = rk.remat("none", block="layer")(lambda p, x: x + jax.nn.gelu(x @ p["up"]) @ p["down"])
            for p in params:
                x = block(p, x)
            return (x**2).mean()

        return marked, (params, x)

    VERBS[verb](*_flat(made(3)))  # what is imported and set up once
    few, many = (calls(verb, *made(n)) / n for n in (16, 64))
    assert many < 1.1 * few  # for each equation no more


def _flat(program):
    fn, args = program
    return fn, *args


@pytest.mark.slow
def test_ten_thousand_equations():
    loss, args = deep.layers(280)
    program = rk.trace(loss, *args)
    assert len(program.values) > 10_000
    assert program.flops == rk.trace(*_flat(deep.layers(1))).flops * 280 - 279 * _head_flops()
    loss, args = deep.chain(5_000)
    report = rk.residuals(loss, *args)
    assert report.total_bytes == 5_000 * 8 * 4  # a cosine for each sine
    # and for its argument again the product, the sines and factors so far, of eight numbers each
    assert sorted(e.recompute_flops for e in report.entries if e.action == "saved") == [
        8 * (2 + 2 * i) for i in range(5_000)
    ]


def _head_flops():
    """FLOPs that do not repeat with the layers."""
    one, two = (rk.trace(*_flat(deep.layers(n))).flops for n in (1, 2))
    return 2 * one - two


LEVELS = {"jit": (deep.in_jit, 40), "scan": (deep.in_scan, 10), "cond": (deep.in_cond, 15)}
# Under jax_remat3 JAX's name stacks grow by a factor of 3.5 with each level.
LEVELS["checkpoint"] = (deep.in_checkpoint, 8 if jax.config.jax_remat3 else 25)


@EVERY_VERB
@pytest.mark.parametrize("level", LEVELS)
def test_nesting(verb, level):
    VERBS[verb](*_flat(deep.nested(*LEVELS[level])))


@EVERY_VERB
def test_nested_arguments(verb):
    VERBS[verb](*_flat(deep.tree(200)))


def test_nested_too_deeply_is_said():
    fn, args = deep.nested(deep.in_jit, 400)
    for verb in VERBS.values():
        with pytest.raises(rk.RematError, match=f"recursion limit of {sys.getrecursionlimit()} frames.*nest it less"):
            verb(fn, *args)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 limits calls through C, in JAX itself too")
def test_two_hundred_levels_where_python_lets_jax():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(5_000)
    try:
        fn, args = deep.nested(deep.in_jit, 200)
        jax.make_jaxpr(jax.grad(fn))(*args)
        assert len(rk.residuals(fn, *args).entries) >= 200
        jax.make_jaxpr(jax.grad(rk.apply(fn, "full")))(*args)
    finally:
        sys.setrecursionlimit(before)
