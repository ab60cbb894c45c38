"""Rematerialization of Flax NNX modules: `remat` for a class, a method or a function of modules, `remat_layers` for the
layers of a model.

State updates (BatchNorm statistics, RNG counters, sown values, new attributes) reach the caller's objects once, as they
do without remat. Import it as ``from remat_kit import nnx`` or use ``rk.nnx``; Flax is loaded only then.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

from flax import nnx

from remat_kit import _adapters
from remat_kit._errors import RematError
from remat_kit._flax_static import resolve_static
from remat_kit._layers import Layers
from remat_kit._nnx_class import Options, cover_class, cover_function, original_method
from remat_kit._nnx_layers import switch_class, switch_layers
from remat_kit._override import Wanted
from remat_kit._policy import Policy
from remat_kit._static_args import read_names
from remat_kit._wrap import check_options

__all__ = ["remat", "remat_layers"]


def remat(
    target_or_policy: Any = None,
    /,
    *,
    policy: Any = None,
    prevent_cse: bool | None = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    methods: str | Iterable[str] = ("__call__",),
    block: str | None = None,
) -> Any:
    """Makes an NNX module, or a function of modules, recompute its intermediates in the backward pass.

        @rk.nnx.remat("dots")
        class Block(nnx.Module): ...

        run = rk.nnx.remat(lambda block, x: block(x))     # modules are arguments, anywhere in them
        y = rk.nnx.remat(self.block)(x)                   # a module or a bound method: the module is passed along

    A decorated class has the original's name and is a subclass of it. Arguments that are no arrays (flags, strings,
    Python numbers, None) are static without being declared, by position, by keyword and at their defaults. Two
    references to one module stay one module, and a module in the result that was passed in is the caller's own object.

    Args:
        target_or_policy: a module class, a function, a bound method or a module; or the policy, and the result is a
            decorator.
        policy: what is kept, as in `rk.remat`; None means ``"full"``, ``"none"`` leaves the target without remat.
        prevent_cse: as in `rk.remat`; None chooses by context.
        static_argnums: positions to check for being static. They count the caller's arguments: those of a method start
            after ``self``, those of a function at its first parameter; negative ones count from the end.
        static_argnames: the same by name. A declared argument that holds an array is refused.
        methods: the covered methods of a class. A covered method that another one calls belongs to its region; other
            methods run without remat, and so do methods that a subclass overrides.
        block: a name for reports and `rk.override`.

    Returns:
        What was given, rematerialized; or a decorator. Decorating again replaces the earlier remat.

    Raises:
        RematError: at decoration for an unknown method, argument name, position or policy; at the call for modules or
            Variables that the function captures instead of taking them as arguments, for Variables with ``ref=True``,
            and for arrays in static arguments.
    """
    check_options(prevent_cse, block)
    if target_or_policy is None or isinstance(target_or_policy, (str, Policy)):
        if target_or_policy is not None and policy is not None:
            raise RematError(f"two policies were given: {target_or_policy!r} and policy={policy!r}. Give one of them.")
        policy = target_or_policy if policy is None else policy
        chosen = Wanted.of(policy).policy  # here, so that a typo is seen where it stands
        return functools.partial(
            remat,
            policy=chosen,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            methods=methods,
            block=block,
        )
    target = target_or_policy
    options = Options(Wanted.of(policy).policy, prevent_cse, block)
    if inspect.isclass(target):
        return _cover_class(target, options, static_argnums, static_argnames, methods)
    _check_function(target)
    if isinstance(target, nnx.Module):
        target = target.__call__  # type: ignore[operator]
    owner = getattr(target, "__qualname__", None) or type(target).__name__
    static = resolve_static({owner: target}, static_argnums, static_argnames, skip=0)[owner]
    return cover_function(target, options, static)


def remat_layers(
    model: Any,
    layers: Any,
    /,
    *,
    policy: Any = None,
    every: int = 1,
    prevent_cse: bool | None = None,
    static_argnames: str | Iterable[str] = (),
    methods: str | Iterable[str] = ("__call__",),
    block: str | None = None,
) -> Any:
    """Rematerializes the layers of a model that is left as it is written.

        model = rk.nnx.remat_layers(Model(rngs=nnx.Rngs(0)), "Block", policy="dots")
        rk.nnx.remat_layers(model, ("Encoder*", Decoder), every=2)

    Every module of the named class inside the model runs as under `remat`: in attributes, in lists, stacked for
    `nnx.scan` and made by `nnx.vmap`. The layers get a subclass under their name as their type; parameters and other
    state stay as they are. `nnx.split` and `nnx.merge` keep it, since the graph definition holds the types.

    A layer inside another one belongs to its region. Layers decorated with `remat` get the policy given here instead of
    their own.

    Args:
        model: a module, which is changed in place, or a class or ``functools.partial`` of one.
        layers: a class name, a glob on class names, or a module class, which stands for its subclasses too; or a tuple
            of these. The model itself is not one of its layers.
        every: rematerializes the first of so many layers and leaves the others without remat. Layers count in the order
            of their paths, with numbers in them in numeric order; a stacked layer is one.
        policy, prevent_cse, static_argnames, methods, block: as in `remat`, the same for all layers.

    Returns:
        The model; or a subclass of the class under its name (or a partial of that), whose instances have it from the
        end of ``__init__`` on. Doing it again replaces it, and ``policy="none"`` is off. What is pickled keeps it.

    Raises:
        RematError: for an option that cannot be used, and for a layer that the model does not have, with the classes
            that it has; the model is unchanged then.
    """
    check_options(prevent_cse, block)
    chosen = Layers.of(layers, methods, every, static_argnames, nnx.Module)
    options = Options(Wanted.of(policy).policy, prevent_cse, block)
    cls = model.func if isinstance(model, functools.partial) else model
    if inspect.isclass(cls) and issubclass(cls, nnx.Module):
        switched = switch_class(cls, chosen, options)
        return switched if cls is model else functools.partial(switched, *model.args, **model.keywords)
    if not isinstance(model, nnx.Module):
        raise RematError(f"remat_layers takes an NNX module or class, then the names of its layers; got {model!r:.80}.")
    switch_layers(model, chosen, options)
    return model


def _cover_class(cls: type, options: Options, argnums: Any, argnames: Any, methods: Any) -> type:
    if not issubclass(cls, nnx.Module):
        hint = " Use rk.linen.remat for Linen modules." if "linen" in str(cls.__mro__) else ""
        raise RematError(f"rk.nnx.remat takes an nnx.Module class or a function of modules; got {cls!r}.{hint}")
    names = read_names("methods", methods)
    if not names:
        raise RematError(f"methods is empty, so nothing of {cls.__name__} would be rematerialized.")
    functions = {f"{cls.__name__}.{name}": original_method(cls, name) for name in names}
    return cover_class(cls, names, options, resolve_static(functions, argnums, argnames))


def _check_function(target: Any) -> None:
    if not callable(target):
        raise RematError(f"rk.nnx.remat takes an nnx.Module class or a function of modules; got {target!r}.")
    _adapters.refuse_without_variables(target)
    module = getattr(target, "__module__", None) or type(target).__module__
    if module.partition(".")[0] == "jax":
        raise RematError(f"rk.nnx.remat got {target!r} as its function. If it is meant as the policy, write policy=...")
