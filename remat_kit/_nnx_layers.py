"""Switching the layers of an NNX model: their type becomes a covered subclass, and nothing else of them changes."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

from flax import nnx

from remat_kit._flax_static import resolve_static
from remat_kit._layers import Layers, methods_of
from remat_kit._nnx_class import Options, cover_class, original_method, stand_in
from remat_kit._pickling import by_recipe
from remat_kit._policy import Policy

_MARK = "__rk_switched__"  # on a class made here: the class that it stands in for
_PLAIN = Options(Policy(remat=False))


def switch_layers(model: nnx.Module, layers: Layers, options: Options) -> None:
    """Rematerializes layers of a model in place; what an earlier switch did to it is undone."""
    inside = [(path, module) for path, module in nnx.iter_modules(model) if path]
    inside.sort(key=lambda item: tuple(map(_in_order, item[0])))  # a module comes before those in it
    classes = [vars(type(module)).get(_MARK, type(module)) for _, module in inside]
    found = [layers.selectors_of(cls, (cls.__name__,)) if methods_of(cls, layers.methods) else [] for cls in classes]
    kinds = {cls for cls, selectors in zip(classes, found, strict=True) if selectors}
    met = {selector for each in found for selector in each}
    layers.check_found(met, {cls.__name__: layers.public_methods(cls) for cls in classes}, type(model).__name__)
    layers.check_kinds(kinds)

    taken: list[tuple] = []  # paths of the layers
    for (path, module), cls, selectors in zip(inside, classes, found, strict=True):
        if selectors:
            nested = any(path[: len(above)] == above for above in taken)
            on = not nested and len(taken) % layers.every == 0
            if not nested:
                taken.append(path)
            cls = _layer_class(cls, replace(layers, selectors=(), every=1), options if on else _PLAIN)
        if type(module) is not cls:
            object.__setattr__(module, "__class__", cls)


def switch_class(cls: type[nnx.Module], layers: Layers, options: Options) -> type[nnx.Module]:
    """Makes a subclass whose instances have the switch; one that was made here before is replaced."""
    original = vars(cls).get(_MARK, cls)

    @functools.wraps(original.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        switch_layers(self, layers, options)

    recipe = by_recipe(switch_class, original, layers, options)
    return stand_in(original, {"__init__": __init__, _MARK: original, **recipe})


@functools.cache
def _layer_class(cls: type, layers: Layers, options: Options) -> type:
    """The type of the layers of a class. Equal options give the same one, so that equal layers stay of one type.

    Of ``layers`` only what is said of methods counts.
    """
    methods = methods_of(cls, layers.methods)
    functions = {method: original_method(cls, method) for method in methods}
    off = not (options.policy.remat or options.block)
    if off and all(fn is getattr(cls, method) for method, fn in functions.items()):
        return cls
    static = {}
    for method, fn in functions.items():
        owner = f"{cls.__name__}.{method}"
        static |= resolve_static({owner: fn}, (), layers.static_names(fn))
    made = cover_class(cls, methods, options, static)
    for name, value in {_MARK: cls, **by_recipe(_layer_class, cls, layers, options)}.items():
        setattr(made, name, value)
    return made


def _in_order(part: Any) -> tuple:
    """The order of attribute names and list positions, with the numbers in them as numbers."""
    return tuple((text.isdecimal(), int(text) if text.isdecimal() else text) for text in re.split(r"(\d+)", str(part)))
