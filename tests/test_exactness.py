"""Residual reports are exact: on every reference model, under every preset, to the byte what `jax.vjp` holds."""

from __future__ import annotations

import functools
import warnings

import jax
import pytest
from flax import nnx
from truth import Held, held

import remat_kit as rk

TRANSFORMER = {"layers": 2, "batch": 2, "width": 16, "heads": 2, "mlp_ratio": 2}
TINY = {
    "gpt": {**TRANSFORMER, "length": 6, "vocab": 50},
    "gpt_nnx": {**TRANSFORMER, "length": 6, "vocab": 50},
    "llama": {"layers": 2, "batch": 2, "length": 6, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24, "vocab": 50},
    "vit": {**TRANSFORMER, "image": 8, "patch": 4, "classes": 10},
    "resnet": {"stages": (1, 1), "batch": 2, "image": 8, "width": 4, "classes": 10},
    "moe": {**TRANSFORMER, "length": 6, "vocab": 50, "experts": 4},
    "rnn": {"layers": 2, "batch": 2, "length": 6, "width": 16, "vocab": 50},
}
VARIANTS = {  # settings that change what is kept: masks and keys, auxiliary outputs, other dtypes
    "gpt": {"dropout": 0.1, "dtype": "bfloat16"},
    "gpt_nnx": {"tied": False, "dtype": "bfloat16"},
    "llama": {"dtype": "float32", "param_dtype": "bfloat16", "mesh": jax.sharding.AbstractMesh((2,), ("fsdp",))},
    "vit": {"dropout": 0.1, "dtype": "float32"},
    "resnet": {"stats": True, "dtype": "float32"},
    "moe": {"top_k": 1, "dtype": "float32"},
    "rnn": {"dtype": "bfloat16"},
}
MODELS = tuple(TINY)
OFFLOADING = tuple(name for name, p in rk.presets.items() if rk.Action.OFFLOAD in p.actions)
# What each model is asked in a quick run; the others are marked slow. Among them every way to JAX: no remat, JAX's
# own policies, names that the model has, names put in by rules, and offloading.
QUICK = {
    "gpt": ("none", "full", "dots_no_batch", "minimal_with_context", "minimal_offloaded"),
    "gpt_nnx": ("matmuls",),
    "llama": ("save_qkv_proj",),
    "vit": ("save_mlp",),
    "resnet": ("offload_matmuls",),
    "moe": ("minimal_with_experts",),
    "rnn": ("dots",),
}


@functools.cache
def tiny(model, variant=False):
    settings = {**TINY[model], **(VARIANTS[model] if variant else {})}
    return rk.zoo.build(model, **settings, abstract=True)


def has_aux(model, variant):
    return bool(variant and VARIANTS[model].get("stats"))


def truth(fn, args, aux=False) -> Held:
    """What `jax.vjp` holds; an NNX module is taken apart by hand, its `nnx.Param`s being what is differentiated."""
    module, *data = args
    if not isinstance(module, nnx.Module):
        return held(fn, *args, has_aux=aux)
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return held(lambda p, r, *d: fn(nnx.merge(graph, p, r), *d), params, rest, *data, has_aux=aux)


def reported(report) -> Held:
    """The report's figures, summed from its entries: aliases and host memory included."""
    made = sum(e.bytes for e in report.entries if e.action in ("saved", "offloaded"))
    assert made == report.total_bytes + report.alias_bytes + report.host_bytes
    return Held(made, report.argument_bytes, report.constant_bytes)


def refused(preset) -> str:
    """Part of the message with which a preset must be refused under the JAX in force, or the empty string."""
    if preset in OFFLOADING and jax.config.jax_remat3 and jax.__version_info__ < (0, 11):
        return "ignores"
    return ""


def check(model, preset, variant=False):
    with warnings.catch_warnings():
        if jax.config.jax_remat3:  # which ignores some of JAX's own policies: that is told, and the figures are exact
            warnings.simplefilter("ignore", rk.RematWarning)
        compare(model, preset, variant)


def compare(model, preset, variant):
    fn, args = tiny(model, variant)
    aux = has_aux(model, variant)
    asked = functools.partial(rk.residuals, fn, *args, has_aux=aux)
    applied = rk.apply(fn, preset)
    names = set(rk.trace(fn, *args).names)
    wanted = [g for g in rk.presets[preset].name_globs if g != "*"]
    message = "named" if wanted and not names.intersection(wanted) else refused(preset)
    if preset == "names" and not names:
        message = "named"
    if message:
        for ask in (lambda: asked(policy=preset), lambda: truth(applied, args, aux)):
            with pytest.raises(rk.RematError, match=message):
                ask()
        return
    report = asked(policy=preset)
    assert reported(report) == truth(applied, args, aux)
    assert report.notes or report.entries  # something was read


PRODUCT = [
    pytest.param(model, preset, marks=() if preset in QUICK[model] else pytest.mark.slow, id=f"{model}-{preset}")
    for model in MODELS
    for preset in rk.presets
]


@pytest.mark.parametrize(("model", "preset"), PRODUCT)
def test_policy(model, preset):
    check(model, preset)


@pytest.mark.parametrize("variant", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_as_written(model, variant):
    fn, args = tiny(model, variant)
    aux = has_aux(model, variant)
    assert reported(rk.residuals(fn, *args, has_aux=aux)) == truth(fn, args, aux)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["full", "dots", "matmuls", "minimal", "offload_matmuls"])
@pytest.mark.parametrize("model", MODELS)
def test_policy_on_variant(model, preset):
    check(model, preset, variant=True)
