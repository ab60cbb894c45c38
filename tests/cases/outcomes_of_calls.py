"""Outcomes of public reports on functions that fail or change when they are rematerialized: calls, loops, effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from case import SAME, case, equal, found, kept, same, told
from jax.experimental import checkify, io_callback

import remat_kit as rk

X = jnp.cos(jnp.arange(3.0))


# Arguments -----------------------------------------------------------------------------------------------------------


@case(
    "weakly typed inputs of a scan fail under grad",
    "jax-ml/jax#9836",
    right=f"weak input: {SAME}, applied {SAME}; weak carry: {SAME}, still weak",
)
def weak_types() -> str:
    scanned = jnp.arange(15).reshape(5, 3) / 1.0
    assert scanned.weak_type

    def loss(x, wrap=lambda f: f):
        return jnp.sum(jax.lax.scan(wrap(lambda h, e: (jnp.sin(h), jnp.sum(h**2) + 0 * e[0])), x, scanned)[1])

    def carried(s: Any, wrap=lambda f: f) -> Any:
        return jax.lax.scan(wrap(lambda h, _: (jnp.sin(h), None)), s * 1.0, None, length=3)[0]

    weak = "still weak" if carried(2.0, rk.remat).weak_type else "no longer weak"
    return (
        f"weak input: {same(loss, lambda x: loss(x, rk.remat), X)}, applied {same(loss, rk.apply(loss, 'full'), X)}; "
        f"weak carry: {same(carried, lambda s: carried(s, rk.remat), 2.0)}, {weak}"
    )


@case(
    "a static flag works by position, not by keyword or default",
    "jax-ml/jax#18405",
    "eelregit/pmwd#27",
    right=r"by position sin, by keyword sin, by default cos, under jit sin; unknown name: refused: .*'flg'.*"
    r"Did you mean 'flag'.*",
)
def static_flags() -> str:
    def fun(x, flag=False):
        return jnp.sum(jnp.sin(x) if flag else jnp.cos(x))

    def which(slope) -> str:
        sine, cosine = (equal(name, want, slope) for want, name in ((jnp.cos(X), "sin"), (-jnp.sin(X), "cos")))
        return sine if sine == "sin" else cosine

    grad = jax.grad(rk.remat(fun, static_argnames="flag"))
    jitted = jax.jit(grad, static_argnames="flag")
    unknown = told(lambda: rk.remat(fun, static_argnames="flg"))
    return (
        f"by position {which(grad(X, True))}, by keyword {which(grad(X, flag=True))}, by default {which(grad(X))}, "
        f"under jit {which(jitted(X, flag=True))}; unknown name: {unknown}"
    )


@case(
    "integers, masks and keys: what is saved, what gradient appears",
    "patrick-kidger/equinox#497",
    "jax-ml/jax#12706",
    right=r"table 160, tokens 12, mask 3, keys 24 bytes; cotangents: float32, float0, float0, float0; named key kept "
    rf"in 8 bytes; {SAME}",
)
def keys_and_integers() -> str:
    table, tokens, mask = jnp.linspace(0, 1, 40).reshape(10, 4), jnp.array([1, 5, 7]), jnp.array([True, False, True])
    keys = jax.random.split(jax.random.key(0), 3)

    def fun(table, tokens, mask, keys):
        noise = jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys)
        return jnp.sum(jnp.sin(table[tokens] * mask[:, None] + noise))

    def noisy(x, key):
        key = rk.checkpoint_name(jax.random.split(key)[1], "subkey")
        return jnp.sum(jnp.sin(x * jax.random.uniform(key, x.shape)))

    args = table, tokens, mask, keys
    report = rk.residuals(fun, *args, policy="full")
    sizes = {e.path: e.bytes for e in report.entries}
    dtypes = ["float0" if c.dtype == jax.dtypes.float0 else c.dtype.name for c in jax.vjp(rk.remat(fun), *args)[1](1.0)]
    (key,) = kept(rk.residuals(rk.remat("save name=subkey")(noisy), table, keys[0]))
    return (
        f"{', '.join(f'{name} {sizes[name]}' for name in ('table', 'tokens', 'mask', 'keys'))} bytes; cotangents: "
        f"{', '.join(dtypes)}; named key kept in {key.bytes} bytes; {same(fun, rk.remat(fun), *args)}"
    )


# Transformations -----------------------------------------------------------------------------------------------------


@case(
    "checkify cannot see a check in a rematerialized, jitted function",
    "jax-ml/jax#23867",
    right="; ".join(f"{way}: need positive, fine" for way in ("remat", "jit", "grad", "apply")),
)
def checks_inside() -> str:
    def fun(x):
        checkify.check(jnp.all(x > 0), "need positive")
        return jnp.sum(jnp.log(x))

    def says(f, x) -> str:
        return (checkify.checkify(f)(x)[0].get() or "fine").split(" (")[0]

    ways = {
        "remat": rk.remat(fun),
        "jit": rk.remat(jax.jit(fun)),
        "grad": jax.grad(rk.remat(fun)),
        "apply": jax.jit(jax.grad(rk.apply(fun, "full"))),
    }
    return "; ".join(f"{name}: {says(f, -X[1:])}, {says(f, X[:2])}" for name, f in ways.items())


@case(
    "a while loop in a region fails in forward mode; names in branches are lost",
    "jax-ml/jax#27353",
    "jax-ml/jax#37888",
    right=r"linearized: same tangent, applied: same tangent; reverse: ValueError: Reverse-mode differentiation does "
    rf"not work for lax\.while_loop.*; fori_loop: {SAME}; branches keep left_act, right_act in 12 bytes; {SAME}",
)
def while_loops_and_branches() -> str:
    def until(y):
        def body(c):
            i, _, b, d = c
            return i + 1, jnp.sin(b), jnp.cos(d), d * y  # what depends on y grows from step to step

        return jax.lax.while_loop(lambda c: c[0] < 4, body, (0, 0.5, 0.5, 1.5))[1]

    def counted(y):
        return jax.lax.fori_loop(0, 4, lambda _, h: jnp.sin(h) * y, y)

    def branching(x):
        left, right = (
            lambda x, f=f, name=name: jnp.sin(rk.checkpoint_name(f(x), name))
            for f, name in ((jnp.tanh, "left_act"), (jnp.exp, "right_act"))
        )
        return jnp.sum(jax.lax.cond(x[0] > 0, left, right, x))

    def tangent(f) -> str:
        want = jax.jvp(until, (0.9,), (1.0,))[1]
        return equal("same tangent", want, jax.linearize(f, 0.9)[1](1.0))

    try:
        reverse = str(jax.grad(rk.remat(until))(0.9))
    except ValueError as error:
        reverse = f"ValueError: {str(error)[:70]}"
    named = rk.remat("names")(branching)
    values = kept(rk.residuals(named, X))
    return (
        f"linearized: {tangent(rk.remat(until))}, applied: {tangent(rk.apply(until, 'full'))}; reverse: {reverse}; "
        f"fori_loop: {same(counted, rk.remat(counted), 0.9)}; branches keep "
        f"{', '.join(sorted(n for e in values for n in e.names))} in {sum(e.bytes for e in values)} bytes; "
        f"{same(branching, named, X)}"
    )


@case(
    "bfloat16 gradients are not equal to the bit",
    "jax-ml/jax#8702",
    "jax-ml/jax#22244",
    right=r"check passes, (\d+) entries differ; without tolerance it fails; jax\.grad: \1 differ, by [0-3]\.\d "
    r"roundings of bfloat16 at most",
)
def bfloat16() -> str:
    x = jnp.asarray(np.random.default_rng(0).random(512), jnp.bfloat16)

    def loss(x, wrap=lambda f: f):
        return wrap(lambda x: jax.nn.softmax(x.astype(jnp.float32) * 3))(x + 1)[:7].sum()

    def remat(x):
        return loss(x, rk.remat)

    usual = rk.check(remat, x, derivatives="reverse")
    exact = rk.check(remat, x, derivatives="reverse", rtol=0, atol=0)
    entries = sum(c.differing for c in usual.compared)
    a, b = (np.asarray(jax.jit(jax.grad(f))(x), np.float32) for f in (loss, remat))
    roundings = np.max(np.abs(a - b)) / np.max(np.abs(a)) * 2**7
    return (
        f"check {'passes' if usual else 'fails'}, {entries} entries differ; without tolerance it "
        f"{'passes' if exact else 'fails'}; jax.grad: {np.sum(a != b)} differ, "
        f"by {roundings:.1f} roundings of bfloat16 at most"
    )


@case(
    "vmap with unmapped arguments fails",
    "jax-ml/jax#39909",
    right=rf"full: {SAME}; dots: {SAME}; names: {SAME}; batched product kept: \(7, 5\)",
    early=rf"full: {SAME}; dots: {SAME}; names: refused: .*cannot map over names.*; batched product kept: \(7, 5\)",
)
def unmapped_arguments() -> str:
    w, x = jnp.eye(5) * 0.2, jnp.sin(jnp.arange(35.0)).reshape(7, 5)

    def fun(w, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w)))

    def named(w, x):
        return jnp.sum(jnp.sin(rk.checkpoint_name(jnp.tanh(x @ w), "h")))

    def batched(f) -> Callable[..., Any]:
        return lambda w, x: jnp.sum(jax.vmap(f, (None, 0))(w, x) ** 2)

    ways = []
    for policy, f in (("full", fun), ("dots", fun), ("names", named)):
        remat = batched(rk.remat(policy)(f))
        said = told(lambda remat=remat: jax.eval_shape(jax.grad(remat), w, x))
        ways.append(f"{policy}: {same(batched(fun), remat, w, x) if said == 'taken' else said}")
    products = [e.shape for e in kept(rk.residuals(batched(rk.remat("dots")(fun)), w, x)) if e.op == "dot_general"]
    return f"{'; '.join(ways)}; batched product kept: {' '.join(map(str, products))}"


# Effects -------------------------------------------------------------------------------------------------------------

SEEN: list[Any] = []


def calls(fun) -> int | str:
    """How often the callback of a function runs on the host."""
    SEEN.clear()
    try:
        jax.block_until_ready(jax.jit(fun)(X))
    except NotImplementedError:
        return "never"
    jax.effects_barrier()
    return len(SEEN)


@case(
    "callbacks in a region run again, are dropped or raise",
    "jax-ml/jax#5886",
    "jax-ml/jax#8907",
    "jax-ml/jax#28738",
    right=r"debug\.callback: RK018: .*debug\.callback.*runs again.*, runs 2, outside the region 1; io_callback: RK019: "
    r".*io_callback.*, refused: Effects not supported .*\[IOEffect\]\. .*jax\.debug\.callback.*, runs never, outside "
    r"the region 1",
    early=r"debug\.callback: RK018: .*debug\.callback.*runs again.*, runs 2, outside the region 1; io_callback: RK019: "
    r".*io_callback.*, taken, runs 2, outside the region 1",
)
def callbacks() -> str:
    def math(x):
        return jnp.sum(jnp.sin(jnp.sin(x)))

    def debug(x, wrap=lambda f: f):
        jax.debug.callback(SEEN.append, x[1])
        return wrap(math)(x)

    def effect(x, wrap=lambda f: f):
        io_callback(SEEN.append, None, jax.lax.stop_gradient(x[1]))
        return wrap(math)(x)

    prints, writes = (found(jax.checkpoint(f), X, select=["RK018", "RK019"]) for f in (debug, effect))
    outside = [calls(jax.grad(lambda x, f=f: f(x, rk.remat))) for f in (debug, effect)]
    inside = [calls(jax.grad(rk.remat(f))) for f in (debug, effect)]
    said = told(lambda: jax.grad(rk.remat(effect))(X))
    return (
        f"debug.callback: {prints}, runs {inside[0]}, outside the region {outside[0]}; io_callback: {writes}, {said}, "
        f"runs {inside[1]}, outside the region {outside[1]}"
    )


@case(
    "a write to a mutable reference happens twice",
    "jax-ml/jax#39438",
    "jax-ml/jax#29127",
    right=r"RK020: .*Ref\{float32\[\]\}.*; remat refused: .*Return the value instead.*; apply refused: .*Return the "
    r"value instead.*; 0 writes; returned and written outside: 1 write",
)
def mutable_references() -> str:
    def count(x, ref):
        ref[...] += 1.0
        return jnp.sum(jnp.sin(jnp.sin(x)))

    def returned(x):
        return jnp.sum(jnp.sin(jnp.sin(x))), jnp.ones(())

    ref = jax.new_ref(jnp.zeros(()))
    finding = found(lambda x: jax.checkpoint(lambda x: count(x, ref))(x), X, select=["RK020"])
    said = [told(lambda f=f: jax.grad(f)(X, ref)) for f in (rk.remat(count), rk.apply(count, "full"))]
    writes = int(ref[...])
    ref[...] += jax.grad(rk.remat(returned), has_aux=True)(X)[1]
    return (
        f"{finding}; remat {said[0]}; apply {said[1]}; {writes} writes; returned and written outside: "
        f"{int(ref[...])} write"
    )
