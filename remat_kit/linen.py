"""Rematerialization of Flax Linen modules: `remat` for a class, method or function, `remat_layers` for the layers of a
model, `remat_scan` for a stack of layers.

Turning either on or off changes no parameter, initial value, dropout mask or sown path. Import it as
``from remat_kit import linen`` or use ``rk.linen``; Flax is loaded only then.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax import linen as nn

from remat_kit._errors import RematError
from remat_kit._flax_static import resolve_static
from remat_kit._layers import Layers
from remat_kit._linen_class import check_methods, cover_class, cover_method, original_of
from remat_kit._linen_lift import RematOptions, ScanOptions, check_filters, level_policies, lift_remat, lift_remat_scan
from remat_kit._linen_switch import switch_class
from remat_kit._options import check_flags
from remat_kit._override import Wanted
from remat_kit._policy import Policy
from remat_kit._policy import policy as as_policy
from remat_kit._wrap import check_options

__all__ = ["remat", "remat_layers", "remat_scan"]


def remat(
    target_or_policy: Any = None,
    /,
    *,
    policy: Any = None,
    prevent_cse: bool | None = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    methods: str | Iterable[str] = ("__call__",),
    variables: Any = True,
    rngs: Any = True,
    block: str | None = None,
) -> Any:
    """Makes a Linen module recompute its intermediates in the backward pass instead of keeping them.

    The decorated class stands in for the original everywhere: it has its name and is a subclass of it, so parameter
    trees, initial values, RNG streams, mutable collections and sown paths are the same with and without remat.

        @rk.linen.remat("dots", static_argnames="train", methods=("__call__", "encode"))
        class Block(nn.Module): ...

        Block = rk.linen.remat(Block, policy="dots") if config.remat else Block

    Arguments that are no arrays (flags, strings, Python numbers, None) are static without being declared, by position,
    by keyword and at their defaults. Arrays are differentiated either way.

    Args:
        target_or_policy: a module class (or ``functools.partial`` of one), a method, or a function whose first argument
            is a module; or the policy, and the result is a decorator.
        policy: what is kept, as in `rk.remat`; None means ``"full"``, ``"none"`` leaves the module without remat.
        prevent_cse: as in `rk.remat`; None chooses by context.
        static_argnums: positions to check for being static, as the caller counts them: 0 is the first argument after
            ``self`` (`flax.linen.remat` counts ``self``); negative ones count from the end.
        static_argnames: the same by name. A declared argument that holds an array is refused.
        methods: the covered methods of a class. A covered method that another one calls belongs to its region. Other
            public methods run without remat, and the first direct call of one warns. A subclass that overrides a
            covered method has to be decorated itself.
        variables: collections that are lifted into the region, as in `flax.linen.remat`.
        rngs: RNG streams that are lifted into the region, as in `flax.linen.remat`.
        block: a name for reports and `rk.override`.

    Returns:
        What was given, rematerialized; or a decorator. Decorating again replaces the earlier remat. An instance can be
        pickled if its class can be found under its name, as it can with the decorator form.

    Raises:
        RematError: at decoration for an unknown method, argument name, position or policy, or a target of another kind;
            at the call for an array in a static argument or a module in the return value.
    """
    check_options(prevent_cse, block)
    if target_or_policy is None or _is_policy(target_or_policy):
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
            variables=variables,
            rngs=rngs,
            block=block,
        )
    target = target_or_policy
    chosen = Wanted.of(policy).policy
    check_filters(variables=variables, rngs=rngs)
    options = RematOptions(chosen, prevent_cse, block, variables, rngs)
    lift = functools.partial(lift_remat, options=options)

    cls = _class_of(target)
    if cls is not None:
        names = check_methods(cls, methods)
        functions = {f"{cls.__name__}.{name}": original_of(getattr(cls, name)) for name in names}
        static = resolve_static(functions, static_argnums, static_argnames)
        lifts = dict.fromkeys(names, lift)
        return _like(target, cover_class(cls, lifts, static, name=cls.__name__, what="rk.linen.remat"))
    _check_function("remat", target)
    if methods not in ("__call__", ("__call__",)):
        raise RematError(f"methods= is for module classes, but {_name(target)} is a function.")
    owner = _name(target)
    return cover_method(target, lift, resolve_static({owner: target}, static_argnums, static_argnames)[owner])


def remat_scan(
    target: Any,
    /,
    length: int | None = None,
    *,
    lengths: Sequence[int] | None = None,
    policy: Any = None,
    prevent_cse: bool | None = None,
    in_axes: Any = nn.broadcast,
    out_axes: Any = None,
    variable_axes: Mapping[Any, Any] | None = None,
    variable_broadcast: Any = False,
    variable_carry: Any = False,
    split_rngs: Mapping[Any, bool] | None = None,
    metadata_params: Mapping[Any, Any] | Sequence[Mapping[Any, Any]] | None = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    methods: str | Iterable[str] = ("__call__",),
    reverse: bool = False,
    unroll: int = 1,
    block: str | None = None,
) -> Any:
    """Stacks a Linen module ``length`` times in one scan whose body is rematerialized.

    The result is called like the layer: ``remat_scan(Block, 24)(width, name="layers")(x, mask, train=True)``. The first
    argument is the carry, and the layer returns it for the next one. Parameters have the layer's own tree with a
    leading axis of 24, as from `flax.linen.scan`, whose results this equals with and without remat.

    With ``lengths=(4, 6)`` six layers run inside each of four outer steps, and both levels are rematerialized: the
    backward pass holds 4 + 6 carries instead of 24 and runs the forward pass once more (the recursive checkpointing of
    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). Parameters then have two leading axes.

    Args:
        target: a module class, or ``functools.partial`` of one.
        length: number of layers; ``length=n`` is ``lengths=(n,)``.
        lengths: layers at each level, the outermost loop first.
        policy: what a layer keeps while it is differentiated; the outer levels keep their carries only. A tuple gives
            one policy for each level (`jax_remat3` before JAX 0.11 keeps nothing of the inner levels for an outer one).
            ``"none"`` leaves all levels without remat.
        prevent_cse: as in `rk.remat`; None chooses by context, which means off in these loop bodies.
        in_axes: for positional arguments after the carry: `nn.broadcast` (every layer gets the same) or the axis to
            scan over, one for all or a tuple. Keyword arguments and non-arrays are the same for every layer. With two
            levels a scanned argument has two such axes, as the parameters do.
        out_axes: None if the layer returns the carry alone; otherwise it returns ``(carry, out)`` and the outs are
            stacked along this axis.
        variable_axes: collections with one entry for each layer. Default: ``{True: 0}``, all of them on axis 0.
        variable_broadcast: collections that the layers share.
        variable_carry: collections that are handed from layer to layer.
        split_rngs: RNG streams that differ between layers. Default: ``{True: True}``, all of them.
        metadata_params: for partitioned parameters, the name of the layer axis: ``{nn.PARTITION_NAME: "layers"}``. One
            mapping for the outermost axis (inner ones stay unsharded), or a tuple with one for each level. Default: the
            layer axes are unsharded.
        static_argnums: as in `remat`; 0 is the carry.
        static_argnames: as in `remat`.
        methods: the methods that are scanned and rematerialized. Others raise when flax finds stacked parameters.
        reverse: scan from the last layer to the first.
        unroll: layers in one step of the innermost loop's compiled program.
        block: a name for reports and `rk.override`.

    Returns:
        A module class (or partial), named like `flax.linen.scan` names it: ``Scan`` and the layer's name.

    Raises:
        RematError: for lengths, policies or metadata that do not fit together, and when the layer does not return what
            the next one takes.
    """
    check_options(prevent_cse, block)
    check_flags(reverse=reverse)
    cls = _class_of(target)
    if cls is None:
        raise RematError(
            f"remat_scan stacks a Linen module class, but got {_describe(target)}. For a loop over a function use"
            f" jax.lax.scan with rk.remat on its body."
        )
    levels = _levels(length, lengths)
    scan = ScanOptions(
        lengths=levels,
        policies=_policies(policy, len(levels)),
        metadata=_metadata(metadata_params, len(levels)),
        in_axes=in_axes,
        out_axes=out_axes,
        variable_axes={True: 0} if variable_axes is None else variable_axes,
        variable_broadcast=variable_broadcast,
        variable_carry=variable_carry,
        split_rngs={True: True} if split_rngs is None else split_rngs,
        reverse=reverse,
        unroll=unroll,
    )
    options = RematOptions(scan.policies[-1], prevent_cse, block)
    names = check_methods(cls, methods)
    functions = {f"{cls.__name__}.{name}": original_of(getattr(cls, name)) for name in names}
    static = resolve_static(functions, static_argnums, static_argnames)
    lifts = {
        name: functools.partial(lift_remat_scan, options=options, scan=scan, owner=f"{cls.__name__}.{name}")
        for name in names
    }
    name, what = f"Scan{cls.__name__}", "rk.linen.remat_scan"
    return _like(target, cover_class(cls, lifts, static, name=name, what=what, in_init=True))


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

        Model = rk.linen.remat_layers(Model, "Block", policy="dots")
        model = rk.linen.remat_layers(model, ("Encoder*", Decoder), every=2)

    Every module of the named class inside the model runs as under `remat`, wherever it was created: in compact methods,
    in ``setup``, as an attribute, in the bodies of `nn.scan` and `nn.vmap`. Parameters, initial values, RNG streams,
    mutable collections, sown and captured values, and names are those of the model without it.

    A layer inside another one belongs to its region. Layers decorated with `remat` or stacked with `remat_scan` get
    the policy given here instead of their own; those of `flax.linen.remat` keep their region around the new one.

    Args:
        model: a module class, ``functools.partial`` of one, or an instance.
        layers: a class name, a glob on class names, or a module class, which stands for its subclasses too; or a tuple
            of these. The model itself is not one of its layers.
        every: rematerializes the first of so many layers and leaves the others without remat. Layers count in the order
            in which they are first called; a scanned stack is one layer. Equal layers under `nn.jit` share one trace,
            and so what the first of them got.
        policy, prevent_cse, static_argnames, methods, block: as in `remat`, the same for all layers.

    Returns:
        The same kind as was given: a subclass under the same name, or a new instance. It is on in calls of the model's
        public methods, by itself or as part of another model. Doing it again replaces it, and ``policy="none"`` is off.
        What is pickled keeps it.

    Raises:
        RematError: at once for an option that cannot be used; when ``__call__`` first ends, for a layer that was not
            met, with the classes that were. Where an array is passed for a static argument.

    Warns:
        RematWarning: when another method of a model without ``__call__`` ends, for a layer that was not met so far.
    """
    check_options(prevent_cse, block)
    chosen = Layers.of(layers, methods, every, static_argnames, nn.Module)
    options = RematOptions(Wanted.of(policy).policy, prevent_cse, block)
    if isinstance(model, nn.Module):
        if model.scope is not None:
            raise RematError(
                f"remat_layers got an instance of {type(model).__name__} that is bound already. Switch the class, and"
                f" create the module from that."
            )
        fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}
        return switch_class(type(model), chosen, options)(**fields)
    cls = _class_of(model)
    if cls is None:
        raise RematError(
            f"remat_layers takes a Linen module class or an instance, then the names of its layers; got"
            f" {_describe(model)}."
        )
    return _like(model, switch_class(cls, chosen, options))


def _levels(length: int | None, lengths: Sequence[int] | None) -> tuple[int, ...]:
    if (length is None) == (lengths is None):
        raise RematError("remat_scan needs the number of layers: give either length=24 or lengths=(4, 6).")
    levels = (length,) if lengths is None else tuple(lengths) if isinstance(lengths, Iterable) else (None,)
    if not levels or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in levels):
        given = length if lengths is None else lengths
        raise RematError(f"the lengths of remat_scan are positive whole numbers; got {given!r:.80}.")
    return levels  # type: ignore[return-value]


def _policies(policy: Any, levels: int) -> tuple[Policy, ...]:
    if isinstance(policy, (tuple, list)):
        if len(policy) != levels:
            raise RematError(f"policy has {len(policy)} entries for {levels} levels of remat_scan: give one for each.")
        return tuple(as_policy("full" if p is None else p) for p in policy)
    return level_policies(Wanted.of(policy).policy, levels)


def _metadata(metadata: Any, levels: int) -> tuple[Mapping[Any, Any], ...]:
    unsharded = {nn.PARTITION_NAME: None}
    if metadata is None:
        return (unsharded,) * levels
    if isinstance(metadata, Mapping):
        return ({**unsharded, **metadata},) + ({**metadata, **unsharded},) * (levels - 1)
    given = tuple(metadata) if isinstance(metadata, (tuple, list)) else ()
    if not all(isinstance(m, Mapping) for m in given) or (not given and metadata != ()):
        raise RematError(f"metadata_params is a mapping, or a tuple with one for each level; got {metadata!r:.80}.")
    if len(given) != levels:
        raise RematError(
            f"metadata_params has {len(given)} entries for {levels} levels of remat_scan: give one mapping, or one for"
            f" each level."
        )
    return tuple({**unsharded, **m} for m in given)


def _is_policy(value: Any) -> bool:
    return isinstance(value, (str, Policy))


def _class_of(target: Any) -> type[nn.Module] | None:
    """The module class of a class or of a partial of one, else None."""
    if isinstance(target, functools.partial):
        target = target.func
    return target if inspect.isclass(target) and issubclass(target, nn.Module) else None


def _like(target: Any, cls: type[nn.Module]) -> Any:
    if isinstance(target, functools.partial):
        return functools.partial(cls, *target.args, **target.keywords)
    return cls


def _check_function(verb: str, target: Any) -> None:
    if isinstance(target, nn.Module):
        raise RematError(
            f"rk.linen.{verb} got an instance of {type(target).__name__}. Decorate its class and make the instance from"
            f" that: rk.linen.{verb}({type(target).__name__})(...)."
        )
    module = getattr(target, "__module__", None) or type(target).__module__
    if callable(target) and module.partition(".")[0] == "jax":
        raise RematError(f"rk.linen.{verb} got {_describe(target)}. If it is meant as the policy, write policy=...")
    if inspect.isclass(target) or not callable(target):
        hint = " Use rk.nnx.remat for NNX modules." if "nnx" in str(getattr(target, "__mro__", "")) else ""
        raise RematError(
            f"rk.linen.{verb} takes a Linen module class, a method, or a function of a module; got"
            f" {_describe(target)}.{hint}"
        )
    if inspect.ismethod(target) and isinstance(target.__self__, nn.Module):
        raise RematError(
            f"rk.linen.{verb} got the bound method {_name(target)}. Use the function, and pass the module:"
            f" rk.linen.{verb}({type(target.__self__).__name__}.{target.__name__})(module, ...)."
        )


def _name(target: Callable) -> str:
    return getattr(target, "__qualname__", None) or type(target).__name__


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else f"{_name(value)} ({type(value).__name__})"
