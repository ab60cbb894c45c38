"""Reference models to analyse, measure and test with: each call gives ``(fn, args)`` as the analyses take them.

A model's file (and flax with it) is imported when the model is first asked for. None of them rematerializes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat_kit.zoo._registry import build as build
from remat_kit.zoo._registry import load as _load
from remat_kit.zoo._registry import names as names

if TYPE_CHECKING:
    from remat_kit.zoo._gpt import gpt as gpt
    from remat_kit.zoo._gpt_nnx import gpt_nnx as gpt_nnx
    from remat_kit.zoo._llama import llama as llama
    from remat_kit.zoo._moe import moe as moe
    from remat_kit.zoo._resnet import resnet as resnet
    from remat_kit.zoo._rnn import rnn as rnn
    from remat_kit.zoo._vit import vit as vit

__all__ = ["build", "gpt", "gpt_nnx", "llama", "moe", "names", "resnet", "rnn", "vit"]


def __getattr__(name: str) -> Any:
    if name in names():
        return _load(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
