"""Which compilers are installed, and what to install for those that are not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path


def missing(platform: str) -> str:
    """What to install before a platform can be compiled for; empty if nothing."""
    if platform == "tpu":
        return "" if _found("libtpu") else "libtpu is not installed. Run: pip install 'remat-kit[tpu]'"
    plugin = next((d for d in ("jax-cuda12-plugin", "jax-cuda13-plugin") if _found(d.replace("-", "_"))), None)
    if plugin is None:
        return "JAX's CUDA plugin is not installed. Run: pip install 'remat-kit[cuda]'"
    ours, theirs = version(plugin), version("jaxlib")
    if ours and theirs and ours.split(".")[:3] != theirs.split(".")[:3]:
        return f"{plugin} {ours} is not for jaxlib {theirs}. Run: pip install '{plugin}=={theirs}'"
    if not _assembler():
        return "NVIDIA's assembler ptxas is not installed. Run: pip install 'remat-kit[cuda]'"
    return ""


def version(distribution: str) -> str:
    """The version of an installed distribution; empty if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _assembler() -> bool:
    """Whether `ptxas` is among NVIDIA's packages, or where CUDA keeps it."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    folders = [f for root in roots for f in (root / "cuda_nvcc", root / "cu13")]
    folders += [Path(p) for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    on_path = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep)]
    return any((d / "ptxas").is_file() for d in (*(f / "bin" for f in folders), *on_path))
