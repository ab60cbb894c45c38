"""Finding a model by its name, as the command line does (``zoo:gpt --set layers=12``).

Knows where each model lives and nothing about any of them: the settings are the parameters of its function.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from remat_kit._errors import RematError, near_matches

# Files are private because a submodule `gpt` would shadow the function `gpt` as soon as it is imported.
_MODELS = ("gpt", "gpt_nnx", "llama", "vit", "resnet", "moe", "rnn")


def names() -> tuple[str, ...]:
    """Returns the names of the models, without importing any."""
    return _MODELS


def load(name: str) -> Callable[..., Any]:
    """Returns the function that builds the model `name`; raises `RematError` where there is none."""
    if name not in _MODELS:
        raise RematError(
            f"The zoo has no model {name!r}.{near_matches(str(name), _MODELS)} It has: {', '.join(_MODELS)}."
        )
    return getattr(importlib.import_module(f"remat_kit.zoo._{name}"), name)


def build(name: str, **settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Builds the model `name` with `settings`, the keyword arguments of its function.

    Args:
        name: one of `names()`.
        **settings: sizes and options, as values (not as text); what is left out has its default.

    Returns:
        ``(fn, args)``: what the model's own function returns.

    Raises:
        RematError: for an unknown model or setting (with the nearest names), or a value that the model refuses.
    """
    model = load(name)
    known = inspect.signature(model).parameters
    for setting in settings:
        if setting not in known:
            raise RematError(
                f"zoo.{name} has no setting {setting!r}.{near_matches(setting, known)} It has: {', '.join(known)}."
            )
    return model(**settings)
