"""Facts about this installation: versions, devices, the remat implementation in force, what is missing.

The limits of JAX's remat are not looked up by version: each is tried, on a program of a few operations.
"""

from __future__ import annotations

import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Sequence
from typing import Any

SCHEMA = 1

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "scipy", "rich", "jinja2", "optax", "pandas", "matplotlib")
# extra -> (distributions it needs, what it is for, how to install it)
_EXTRAS: dict[str, tuple[Sequence[str], str, str]] = {
    "plot": (("matplotlib",), "plots", 'pip install "remat-kit[plot]"'),
    "pandas": (("pandas",), "Residuals.to_pandas()", "pip install pandas"),
    "tpu": (("libtpu",), "compiling for TPUs, attached or not", 'pip install "remat-kit[tpu]"'),
    "cuda": (
        ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"),
        "compiling for NVIDIA GPUs, attached or not",
        'pip install "remat-kit[cuda]"',
    ),
}


def examine() -> dict[str, Any]:
    """Returns the facts as plain JSON data; `problems` lists what keeps remat_kit from working."""
    import remat_kit

    problems: list[str] = []
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "remat_kit": remat_kit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        **_devices(problems),
        "remat": _implementation(),
        "limits": {},
        "missing": _missing(),
        "problems": problems,
    }
    if not problems:
        facts["limits"] = _limits_of_both(problems)
    return facts


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(problems: list[str]) -> dict[str, Any]:
    import jax

    try:
        devices = jax.devices()
    except Exception as e:  # whatever a plugin raises
        problems.append(f"JAX finds no devices: {str(e).splitlines()[0] if str(e) else type(e).__name__}")
        return {"backend": None, "devices": []}
    kinds: dict[tuple[str, str], int] = {}
    for d in devices:
        kinds[d.platform, d.device_kind] = kinds.get((d.platform, d.device_kind), 0) + 1
    found = [{"platform": p, "kind": k, "count": n} for (p, k), n in kinds.items()]
    return {"backend": jax.default_backend(), "devices": found}


def _implementation() -> str:
    import jax

    return "jax_remat3" if getattr(jax.config, "jax_remat3", False) else "classic"


def _missing() -> list[dict[str, Any]]:
    out = []
    for extra, (needs, use, install) in _EXTRAS.items():
        absent = [name for name in needs if _version(name) is None]
        if absent:
            out.append({"extra": extra, "packages": absent, "for": use, "install": install})
    return out


def _limits_of_both(problems: list[str]) -> dict[str, list[str]]:
    """By implementation: what it does not do."""
    import jax

    if not hasattr(jax.config, "jax_remat3"):  # a JAX with a single implementation
        return {_implementation(): _limits(problems)}
    before = getattr(jax.config, "jax_remat3")  # noqa: B009 (not in the stubs)
    try:
        out = {}
        for name, switch in (("classic", False), ("jax_remat3", True)):
            jax.config.update("jax_remat3", switch)
            out[name] = _limits(problems)
        return out
    finally:
        jax.config.update("jax_remat3", before)


def _limits(problems: list[str]) -> list[str]:
    """What the remat implementation in force does not do; each is tried."""
    out = []
    for works, sentence in (
        (_offloads, "offload actions are ignored: values are neither saved nor offloaded"),
        (_leaves_out_barriers, "prevent_cse=False is ignored"),
        (_maps_names, "jax.vmap does not work over checkpoint names"),
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                good = works()
        except Exception as e:
            problems.append(f"a trial of jax.checkpoint failed: {type(e).__name__}: {e}")
            continue
        if not good:
            out.append(sentence)
    return out


def _trial() -> tuple[Callable[..., Any], Any]:
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    def fn(x):
        return jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x), "a")))

    return fn, jax.ShapeDtypeStruct((2, 2), jnp.float32)


def _offloads() -> bool:
    import jax

    fn, x = _trial()
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["a"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return "host" in str(jax.make_jaxpr(jax.grad(jax.checkpoint(fn, policy=policy)))(x))


def _leaves_out_barriers() -> bool:
    import jax

    fn, x = _trial()
    return "optimization_barrier" not in jax.jit(jax.grad(jax.checkpoint(fn, prevent_cse=False))).lower(x).as_text()


def _maps_names() -> bool:
    import jax
    import jax.numpy as jnp

    fn, x = _trial()
    block = jax.vmap(jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names("a")))
    try:
        jax.make_jaxpr(jax.grad(lambda x: jnp.sum(block(x))))(x)
    except NotImplementedError:
        return False
    return True
