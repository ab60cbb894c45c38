"""Random programs under random policies: the same values, the same gradients, and reports exact to the byte.

``REMAT_KIT_EXAMPLES=2000`` searches longer than a usual run does.
"""

from __future__ import annotations

import functools
import os
import warnings

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from programs import OLD_REMAT3, POLICIES, Program, policies, programs
from sameness import OLD_FAULTS, WAYS, applied, check_same, gradient, made_for, possibly_refused, same
from truth import Held, held

import remat_kit as rk

KEYS = ("block", "name", "op", "path", "source", "dtype", "action")


def search(few: int, **strategies):
    """A property test on `few` examples: always the same ones, unless a longer search is asked for."""
    asked = int(os.environ.get("REMAT_KIT_EXAMPLES", "0"))
    chosen = settings(
        max_examples=asked or few,
        derandomize=not asked,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: chosen(given(**strategies)(_quiet(test)))


def _quiet(test):
    @functools.wraps(test)
    def run(**drawn):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rk.RematWarning)  # random rules are often ones that cannot help
            try:
                test(**drawn)
            except Exception as e:
                if not (OLD_REMAT3 and any(fault in str(e) for fault in OLD_FAULTS)):
                    raise
                reject()
        _forget()

    return run


_runs = 0


def _forget():
    """Empties JAX's caches now and then: every example compiles programs that no other one needs."""
    global _runs
    _runs += 1
    if _runs % 100 == 0:
        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Compiles without optimizations: quicker, and rounding then differs little between two forms of one program."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# Bytes --------------------------------------------------------------------------------------------


def figures(report: rk.Residuals) -> Held:
    return Held(
        made=sum(e.bytes for e in report.entries if e.action in ("saved", "offloaded")),
        arguments=report.argument_bytes,
        constants=report.constant_bytes,
    )


def check_report(report: rk.Residuals, program: Program, fn, args) -> None:
    """The report agrees with `jax.vjp` of `fn` and with itself, and can be shown."""
    assert figures(report) == held(fn, *args, has_aux=program.aux)
    made = report.total_bytes + report.alias_bytes + report.host_bytes
    assert figures(report).made == made
    for key in KEYS:
        sums = report.by(key)
        inputs = report.argument_bytes + report.constant_bytes if key == "action" else 0
        assert sum(sums.values()) == made - report.alias_bytes + inputs
        assert list(sums.values()) == sorted(sums.values(), reverse=True)
    assert sum(g.bytes for g in report.groups()) == made + report.argument_bytes + report.constant_bytes
    for e in report.entries:
        assert e.bytes == e.global_bytes >= 0 and e.trips >= 0 and (e.recompute_flops or 0) >= 0
        assert (e.recompute_flops is None) == (e.action in ("argument", "constant"))
    assert report.diff(report).bytes == 0 and not report.diff(report).gone
    assert str(report) and report._repr_html_() and report.to_dict()["total_bytes"] == report.total_bytes


def abstract(args):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


@search(25, program=programs())
def test_report_as_written(program):
    fn, args = program.fn, program.args()
    report = rk.residuals(fn, *args, has_aux=program.aux)
    check_report(report, program, fn, args)
    assert rk.residuals(fn, *abstract(args), has_aux=program.aux) == report


@search(15, program=programs())
def test_report_for_two_arguments(program):
    fn, (params, x, *rest) = program.fn, program.args()
    report = rk.residuals(fn, params, x, *rest, argnums=(0, 1), has_aux=program.aux)
    check_report(report, program, lambda both, *rest: fn(*both, *rest), ((params, x), *rest))


@search(40, program=programs(), policy=policies(offload=not OLD_REMAT3))
def test_report_of_policy(program, policy):
    fn, args = program.fn, program.args()
    new = applied(program, policy)
    if new is not None:
        check_report(rk.residuals(fn, *args, policy=policy, has_aux=program.aux), program, new, args)


def blocks_of(program: Program, text: str, choices: tuple[int, ...]) -> dict[str, str]:
    """Policies for some blocks of a program, by their paths or by a glob."""
    found = rk.trace(program.fn, *program.args()).blocks
    paths = [b.path for b in found if b.kind not in ("segment", "whole")] or [b.path for b in found]
    chosen = dict.fromkeys(paths[n % len(paths)] for n in choices)
    outermost = [p for p in chosen if not any(p.startswith(f"{around}/") for around in chosen)]  # blocks do not nest
    globs = {path: text if i % 2 == 0 else "none" for i, path in enumerate(outermost)}
    return {"**": text} if not globs or choices[0] == 0 else globs


CHOICES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@search(40, program=programs(), policy=policies(offload=not OLD_REMAT3), choices=CHOICES)
def test_report_of_policies_by_block(program, policy, choices):
    fn, args = program.fn, program.args()
    by_block = blocks_of(program, policy, choices)
    new = applied(program, by_block)
    if new is not None:
        check_report(rk.residuals(fn, *args, policy=by_block, has_aux=program.aux), program, new, args)


@search(25, program=programs(), policy=policies(offload=not OLD_REMAT3))
def test_report_of_remat(program, policy):
    with possibly_refused():
        fn, args = rk.remat(program.fn, policy=policy), program.args()
        check_report(rk.residuals(fn, *args, has_aux=program.aux), program, fn, args)


@search(15, program=programs(), number=st.integers(1, len(POLICIES) - 1))
def test_jax_policies_go_to_jax(program, number):
    """A policy of JAX's own compiles to what `jax.checkpoint` does with it."""
    mine = rk.remat(program.fn, policy=POLICIES[number], prevent_cse=True)
    theirs = jax.checkpoint(program.fn, policy=POLICIES[number])

    def lowered(fn):
        return jax.jit(lambda *xs: gradient(program, fn)(*xs)).lower(*program.args()).as_text()

    with possibly_refused():
        assert lowered(mine) == lowered(theirs)


# Values and gradients -------------------------------------------------------------------------------


@search(25, program=programs(), policy=policies(offload=False), way=st.sampled_from(WAYS))
def test_apply_changes_nothing(program, policy, way):
    program = made_for(program, way)
    new = applied(program, policy)
    if new is not None:
        check_same(program, new, way)


@search(15, program=programs(), policy=policies(offload=False), choices=CHOICES, way=st.sampled_from(WAYS))
def test_apply_by_block_changes_nothing(program, policy, choices, way):
    program = made_for(program, way)
    new = applied(program, blocks_of(program, policy, choices))
    if new is not None:
        check_same(program, new, way)


@search(15, program=programs(), policy=policies(offload=False), way=st.sampled_from(WAYS))
def test_remat_changes_nothing(program, policy, way):
    program = made_for(program, way)
    with possibly_refused():
        check_same(program, rk.remat(program.fn, policy=policy), way)


# Found by search, kept as examples ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["save op=fft", "save op=fft|exp", "recompute op=sin; save rest"])
@pytest.mark.parametrize("wrap", [rk.apply, lambda fn, policy: rk.remat(fn, policy=policy)])
def test_complex_values_can_be_kept(wrap, policy):
    """JAX cannot keep a complex value by its name; its two parts are kept instead."""

    def fn(x):
        z = jnp.fft.fft(jnp.sin(x))
        return jnp.sum(jnp.real(jnp.exp(0.1 * z) * z))

    x = jnp.arange(3.0)
    same(jax.grad(fn)(x), jax.grad(wrap(fn, policy))(x))
    report = rk.residuals(wrap(fn, policy), x)
    assert report.total_bytes == held(wrap(fn, policy), x).made
    assert report.total_bytes == (2 if policy == "save op=fft" else 4) * x.nbytes


def test_loops_that_never_run():
    """A scan over no elements is a block like any other."""

    def fn(w, xs):
        c, ys = jax.lax.scan(lambda c, x: (jnp.tanh(c * w + x), jnp.sin(c)), w, xs)
        return jnp.sum(c) + jnp.sum(ys)

    args = jnp.ones(3), jnp.ones((0, 3))
    (block,) = [b for b in rk.trace(fn, *args).blocks if b.kind == "scan"]
    assert (block.trips, block.flops) == (0, 0)
    for policy in ("full", "save op=tanh", {"scan": "dots"}):
        assert rk.residuals(fn, *args, policy=policy).total_bytes == held(rk.apply(fn, policy), *args).made == 0
        same(jax.grad(fn)(*args), jax.grad(rk.apply(fn, policy))(*args))


def test_empty_sums_cost_nothing():
    def fn(x, empty):
        return jnp.sum(jnp.sin(x) * jnp.sum(empty))

    report = rk.residuals(fn, jnp.ones(3), jnp.ones((0, 3)))
    assert all((e.recompute_flops or 0) >= 0 for e in report.entries)
