"""Outcomes of public reports on what `jax.checkpoint` keeps: policies, kernels, what reports show, placement."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from case import SAME, case, equations, found, kept, same, seen, short, told
from helpers import residual_bytes

import remat_kit as rk

POLICIES = jax.checkpoint_policies
W = jnp.sin(jnp.arange(64.0)).reshape(8, 8) * 0.3
X = jnp.cos(jnp.arange(32.0)).reshape(4, 8)  # 128 bytes, as has every value made of it below


# Policies ------------------------------------------------------------------------------------------------------------


def layers(w, x):
    h = rk.checkpoint_name(jnp.tanh(x @ w), "mlp_up")
    return jnp.sum(jnp.sin(h @ w))


@case(
    "policy=None is read as keep all, and keeps nothing",
    "AI-Hypercomputer/maxtext#3924",
    right=r"refused: .*two things in JAX.*'full'.*'none'.*; full keeps 0 bytes, none (\d{3,}), jax\.vjp \1",
)
def none_has_two_meanings() -> str:
    full, none = (rk.residuals(layers, W, X, policy=p).total_bytes for p in ("full", "none"))
    said = told(lambda: rk.policy(None))
    return f"{said}; full keeps {full} bytes, none {none}, jax.vjp {residual_bytes(layers, W, X)}"


@case(
    "a misspelt name keeps nothing, without a word",
    "AI-Hypercomputer/maxtext#489",
    "NVIDIA/JAX-Toolbox#982",
    "NVIDIA/TransformerEngine#2003",
    right=r"RK001: .*'mlp-up'.*Did you mean 'mlp_up'.*; refused: .*'mlp-up'.*Did you mean 'mlp_up'.*; kept mlp_up",
)
def misspelt() -> str:
    region = jax.checkpoint(layers, policy=POLICIES.save_only_these_names("mlp-up"))
    said = told(lambda: jax.grad(rk.remat("save name=mlp-up")(layers))(W, X))
    names = [n for e in kept(rk.residuals(rk.remat("save name=mlp_up")(layers), W, X)) for n in e.names]
    return f"{found(region, W, X, select=['RK001'])}; {said}; kept {'+'.join(names)}"


@case(
    "save_anything_except_these_names keeps those names",
    "jax-ml/jax#37888",
    right=r"JAX's: warned: .*names are ignored by JAX.*; ours drops it: 128 bytes to 0; " + SAME,
)
def everything_but_a_name() -> str:
    def square(w, x):
        h = rk.checkpoint_name(x @ w, "big")
        return jnp.sum(h * h)

    said = told(lambda: rk.policy(POLICIES.save_anything_except_these_names("big")))
    ours = rk.remat("recompute name=big; save rest")(square)
    before, after = residual_bytes(square, W, X), residual_bytes(ours, W, X)
    return f"JAX's: {said}; ours drops it: {before} bytes to {after}; {same(square, ours, W, X)}"


OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["mlp_up"],
    offload_src="device",
    offload_dst="pinned_host",
)


@case(
    "a union with an offloading policy fails under grad only",
    "jax-ml/jax#20015",
    "apple/axlearn#696",
    right=r"JAX's union: refused: .*policy\(first\) \| policy\(second\).*; contradiction: refused: .*contradict.*; "
    rf"ours offloads 128 bytes and keeps 128, jax.vjp holds 256; {SAME}",
    early=r"JAX's union: refused: .*; contradiction: refused: .*contradict.*; refused: .*offloads.*jax_remat3.*"
    r"ignores.*",
)
def save_and_offload() -> str:
    union = told(lambda: rk.policy(POLICIES.save_from_both_policies(POLICIES.dots_saveable, OFFLOAD)))
    both = told(lambda: rk.policy("save rest") | rk.policy("offload rest"))
    policy = rk.offload(name="mlp_up") | rk.policy("dots")
    ours = told(lambda: rk.residuals(layers, W, X, policy=policy))
    if ours == "taken":
        report = rk.residuals(layers, W, X, policy=policy)
        remat = rk.remat(policy)(layers)
        ours = f"ours offloads {report.host_bytes} bytes and keeps {report.total_bytes}, "
        ours += f"jax.vjp holds {residual_bytes(remat, W, X)}; {same(layers, remat, W, X)}"
    return f"JAX's union: {union}; contradiction: {both}; {ours}"


@case(
    "dots without batch dimensions keep no product of experts",
    "AI-Hypercomputer/maxtext#2207",
    right=r"RK011: .*batch dimensions.*; products: 4 with dots_no_batch, 3 with matmuls, 3 without; "
    r"vmap: .*batch dimensions.*'matmuls'.*, kept \(4, 6, 16\) with it",
)
def experts() -> str:
    w, x = jnp.sin(jnp.arange(512.0)).reshape(4, 8, 16), jnp.cos(jnp.arange(192.0)).reshape(4, 6, 8)

    def moe(w, x):
        return jnp.sum(jnp.sin(jnp.einsum("etd,edf->etf", x, w)))

    def mapped(w, x):
        return jnp.sum(jax.vmap(lambda w, x: jnp.sum(jnp.sin(x @ w)))(w, x))

    region = jax.checkpoint(moe, policy=POLICIES.dots_with_no_batch_dims_saveable)
    products = [equations(f, "dot_general", w, x, argnums=(0, 1)) for f in (region, rk.remat("matmuls")(moe), moe)]
    note = " ".join(rk.residuals(mapped, w, x, policy="dots_no_batch").notes)
    (product,) = kept(rk.residuals(mapped, w, x, policy="matmuls"))
    return (
        f"{found(region, w, x, select=['RK011'])}; products: {products[0]} with dots_no_batch, {products[1]} with "
        f"matmuls, {products[2]} without; vmap: {note}, kept {product.shape} with it"
    )


# Kernels -------------------------------------------------------------------------------------------------------------

RUNS: list[None] = []


def _on_host(q):
    RUNS.append(None)
    lse = np.log(np.exp(q).sum(-1, keepdims=True))
    return np.exp(q - lse), lse


def _kernel(q):
    types = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((q.shape[0], 1), q.dtype)
    return jax.pure_callback(_on_host, types, q)


@jax.custom_vjp
def attend(q):
    return _kernel(q)[0]


attend.defvjp(lambda q: ((o := _kernel(q))[0], o), lambda kept, g: (g * kept[0] + kept[1],))


def kernel_runs(fun) -> int:
    RUNS.clear()
    jax.block_until_ready(jax.jit(jax.grad(fun))(X))
    return len(RUNS)


@case(
    "an attention kernel runs again though its output is named",
    "AI-Hypercomputer/maxtext#1805",
    "jax-ml/jax#26374",
    "apple/axlearn#925",
    right=r"RK010: 'attn_out' is kept.*f32\[4,1\].*; kernel runs: 1 without remat, 2 with the output kept, "
    r"1 with attention_kernels \(taken\)",
    remat3=r"RK010: 'attn_out' is kept.*; kernel runs: 1 without remat, 2 with the output kept, "
    r"2 with attention_kernels \(warned: .*jax_remat3 ignores names inside forward rules.*\)",
)
def kernel() -> str:
    def loss(q):
        return jnp.sum(jnp.sin(rk.checkpoint_name(attend(jnp.sin(q)), "attn_out")))

    region = jax.checkpoint(loss, policy=POLICIES.save_only_these_names("attn_out"))
    said = told(lambda: jax.eval_shape(jax.grad(rk.remat("attention_kernels")(loss)), X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rk.RematWarning)
        runs = [kernel_runs(f) for f in (loss, region, rk.remat("attention_kernels")(loss))]
    return (
        f"{found(region, X, select=['RK010'])}; kernel runs: {runs[0]} without remat, {runs[1]} with the output kept, "
        f"{runs[2]} with attention_kernels ({said})"
    )


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


tripled.defvjp(lambda x: (tripled(x), jnp.cos(x)), lambda c, g: (3.0 * c * g,))  # not sin's derivative, on purpose


@case(
    "a forward rule that calls its own function recurses",
    "jax-ml/jax#38914",
    right=r"first derivative 3\.00 cos, second -3\.00 sin; applied 3\.00 cos, -3\.00 sin; kept y, 12 bytes",
)
def rule_that_calls_itself() -> str:
    def ratios(f) -> list[float]:
        return [float(jax.grad(f)(1.0) / jnp.cos(1.0)), float(jax.grad(jax.grad(f))(1.0) / jnp.sin(1.0))]

    (first, second), applied = ratios(rk.remat(tripled)), ratios(rk.apply(tripled, "full"))
    named = rk.remat("names")(lambda x: jnp.sum(rk.checkpoint_name(tripled(x), "y") ** 2))
    (value,) = kept(rk.residuals(named, jnp.ones(3)))
    return (
        f"first derivative {first:.2f} cos, second {second:.2f} sin; applied {applied[0]:.2f} cos, {applied[1]:.2f} "
        f"sin; kept {'+'.join(value.names)}, {value.bytes} bytes"
    )


# Reports -------------------------------------------------------------------------------------------------------------


def inner(w, x):
    h = rk.checkpoint_name(jnp.tanh(x @ w), "inner_act")
    return jnp.sin(h) * h


@case(
    "a value named inside jit is reported without its name",
    "jax-ml/jax#38931",
    "jax-ml/jax#20285",
    right=rf"kept inner_act at its line; jax\.vjp holds 128 bytes; {SAME}",
)
def name_inside_jit() -> str:
    def loss(w, x):
        return jnp.sum(jnp.sin(jax.jit(inner)(w, x)))

    remat = rk.remat("save name=inner_act")(loss)
    (value,) = kept(rk.residuals(remat, W, X))
    return (
        f"kept {seen(value, inner, 'checkpoint_name')}; jax.vjp holds {residual_bytes(remat, W, X)} bytes; "
        f"{same(loss, remat, W, X)}"
    )


def two_names(w, x):
    return jnp.sum(jnp.sin(rk.checkpoint_name(rk.checkpoint_name(x @ w, "first"), "second")))


def loop(w, x):
    def body(h, _):
        return jnp.sin(rk.checkpoint_name(jnp.tanh(h @ w), "loop_act")), None

    return jnp.sum(jax.lax.scan(body, x, None, length=5)[0])


def branches(w, x):
    def yes(w, x):
        return jnp.sin(rk.checkpoint_name(jnp.tanh(x @ w), "yes_act"))

    return jnp.sum(jax.lax.cond(x[0, 0] > 0, yes, lambda w, x: x * 2.0, w, x))


@case(
    "a report shows names in some situations only",
    "jax-ml/jax#20285",
    "jax-ml/jax#13734",
    right=r"two names: first\+second at its line; loop: loop_act x5 at its line, 640 bytes; branch: yes_act at its "
    r"line; argument: p\['layer'\]\['kernel'\]",
)
def names_everywhere() -> str:
    def dictionary(p):
        return jnp.sum(jnp.sin(X @ p["layer"]["kernel"]))

    (both,) = kept(rk.residuals(rk.remat("save name=first")(two_names), W, X))
    (looped,) = kept(rk.residuals(rk.remat("save name=loop_act")(loop), W, X))
    (branch,) = kept(rk.residuals(rk.remat("save name=yes_act")(branches), W, X))
    given = [
        e.path
        for e in rk.residuals(dictionary, {"layer": {"kernel": W}}, policy="full").entries
        if e.action == "argument"
    ]
    return (
        f"two names: {seen(both, two_names, 'first')}; loop: {seen(looped, loop, 'loop_act')}, {looped.bytes} bytes; "
        f"branch: {seen(branch, branches, 'yes_act')}; argument: {' '.join(given)}"
    )


# Placement -----------------------------------------------------------------------------------------------------------


def temp(fun, *args: Any) -> int:
    temp_bytes = rk.measure(fun, *args, target="cpu", keep_barriers=True).temp_bytes
    assert temp_bytes is not None
    return temp_bytes


@case(
    "remat around a scan looks small and saves nothing",
    "apple/axlearn#1171",
    "jax-ml/jax#27748",
    "jax-ml/jax#20877",
    right=r"RK005: the region is around a scan of 64 steps.*; kept: 0 bytes around, 8192 in the body of rk.apply, "
    rf"\d{{5,}} without; compiled: (9\d|1\d\d)% around, [1-6]\d% in the body; {SAME}",
)
def around_a_scan() -> str:
    w, x = jnp.sin(jnp.arange(1024.0)).reshape(32, 32) * 0.1, jnp.ones(32)

    def scan(x):
        return jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(jnp.sin(h @ w)), None), x, None, length=64)[0])

    around, inside = jax.checkpoint(scan), rk.apply(scan, "full")
    bytes_kept = [rk.residuals(f, x).total_bytes for f in (around, inside, scan)]
    plain = temp(scan, x)
    return (
        f"{found(around, x, select=['RK005'])}; kept: {bytes_kept[0]} bytes around, {bytes_kept[1]} in the body of "
        f"rk.apply, {bytes_kept[2]} without; compiled: {temp(around, x) / plain:.0%} around, "
        f"{temp(inside, x) / plain:.0%} in the body; {same(scan, inside, x)}"
    )


@case(
    "checkpoint of the whole loss saves nothing, nor does prevent_cse=False",
    "jax-ml/jax#12792",
    "jax-ml/jax#13999",
    "google/flax#1499",
    right=r"whole: RK004: one region holds all.*; prevent_cse: RK012: prevent_cse=False outside.*; compiled: whole "
    rf"(9\d|1\d\d)%, rk\.apply in several blocks [1-7]\d%, and measure finds: .*the peak fell by .*; {SAME}",
    # whose recomputation does not wait for the backward pass, that of jax.checkpoint neither
    early=r"whole: RK004: one region holds all.*; prevent_cse: no finding; compiled: whole (9\d|1\d\d)%, rk\.apply in "
    rf"several blocks (9\d|1\d\d)%, and measure finds: No effect on the peak: .*; {SAME}",
)
def whole_loss() -> str:
    weights, x = [jnp.eye(32) * 0.9] * 9, jnp.ones((128, 32))

    def network(weights, x, wrap=lambda f: f):
        for w in weights:
            x = wrap(lambda w, x: jnp.tanh(jnp.sin(x @ w)))(w, x)
        return jnp.sum(x)

    merged = functools.partial(network, wrap=functools.partial(jax.checkpoint, prevent_cse=False))
    whole, applied = jax.checkpoint(network), rk.apply(network, "full")
    blocks = "several blocks" if len(rk.residuals(network, weights, x, policy="full").blocks) > 2 else "one block"
    measured = rk.measure(network, weights, x, policy="full", against="none", target="cpu", keep_barriers=True)
    assert measured.effect is not None and measured.temp_bytes is not None
    effect = f"finds: {short(measured.effect.findings[0])}" if measured.effect.findings else "finds nothing"
    plain = temp(network, weights, x)
    return (
        f"whole: {found(whole, weights, x, select=['RK004'])}; prevent_cse: "
        f"{found(merged, weights, x, select=['RK012'])}; compiled: whole {temp(whole, weights, x) / plain:.0%}, "
        f"rk.apply in {blocks} {measured.temp_bytes / plain:.0%}, and measure {effect}; "
        f"{same(network, applied, weights, x)}"
    )
