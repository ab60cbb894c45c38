"""Lifting: a function of Linen scopes becomes one whose body is rematerialized, once or as the body of a scan.

These are the counterparts of `flax.core.lift.checkpoint` and `lift.remat_scan` on this package's own remat. They know
scopes, variables and RNG streams; classes and methods are the concern of `_linen_class.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList, lift
from flax.typing import In, Out

from remat_kit._errors import RematError
from remat_kit._flax_static import seal, split_arrays, unseal
from remat_kit._numbers import whole
from remat_kit._policy import Policy
from remat_kit._wrap import remat


@dataclass(frozen=True)
class RematOptions:
    """How a region is rematerialized: policy, prevent_cse and block as in `rk.remat`, and what is lifted into it."""

    policy: Policy
    prevent_cse: bool | None = None
    block: str | None = None
    variables: Any = True
    rngs: Any = True


@dataclass(frozen=True)
class ScanOptions:
    """How layers are scanned: lengths from the outermost loop inwards, the rest as in `flax.linen.scan`."""

    lengths: tuple[int, ...]
    policies: tuple[Policy, ...]
    metadata: tuple[Mapping[Any, Any], ...]
    in_axes: Any = nn.broadcast
    out_axes: Any = None
    variable_axes: Mapping[Any, Any] = field(default_factory=lambda: {True: 0})
    variable_broadcast: Any = False
    variable_carry: Any = False
    split_rngs: Mapping[Any, bool] = field(default_factory=lambda: {True: True})
    reverse: bool = False
    unroll: int = 1

    def __post_init__(self) -> None:
        for name in ("in_axes", "out_axes"):
            value = getattr(self, name)
            if not all(a is nn.broadcast or whole(a) is not None for a in jax.tree.leaves(value)):
                raise RematError(f"{name}= takes axes, or nn.broadcast for all layers alike; got {value!r:.80}.")
        axes, split = self.variable_axes, self.split_rngs
        known = isinstance(axes, Mapping) and all(
            isinstance(a, (In, Out)) or whole(a) is not None for a in axes.values()
        )
        if not known:
            raise RematError(f"variable_axes= maps collections to axes, as in {{'params': 0}}; got {axes!r:.80}.")
        if not isinstance(split, Mapping) or not all(isinstance(s, bool) for s in split.values()):
            raise RematError(f"split_rngs= maps streams to bools, as in {{'dropout': True}}; got {split!r:.80}.")
        check_filters(variable_broadcast=self.variable_broadcast, variable_carry=self.variable_carry)
        check_filters(variable_axes=list(axes), split_rngs=list(split))
        if not isinstance(self.unroll, bool) and (whole(self.unroll) is None or self.unroll < 1):
            raise RematError(f"unroll= is a number of layers, 1 or more, got {self.unroll!r:.80}.")


def check_filters(**filters: Any) -> None:
    """Refuses what names no collections or streams.

    Raises:
        RematError: naming the option.
    """
    for name, value in filters.items():
        parts = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
        if not all(isinstance(part, (bool, str, DenyList)) for part in parts):
            raise RematError(f"{name}= takes True, False, a name or several, as Flax's filters do; got {value!r:.80}.")


def lift_remat(fn: Callable, options: RematOptions) -> Callable:
    """Makes ``fn(scopes, *args, **kwargs)`` rematerialize what it computes.

    Leaves of the arguments, of the variables and of the results that are no arrays stay Python values. The RNG counters
    of the scopes advance as in one call, however often the region is traced.
    """

    def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args, **kwargs):
        arrays, rebuild = split_arrays((variable_groups, rng_groups, args, kwargs))
        counters: list[dict] = []

        def region(arrays):
            variable_groups, rng_groups, args, kwargs = rebuild(arrays)
            scopes = scope_fn(variable_groups, rng_groups)
            live = [scope.rng_counters for scope in jax.tree.leaves(scopes)]
            if counters:  # a second trace: the first one has counted already
                for now, before in zip(live, counters, strict=True):
                    _restore(now, before)
            else:
                counters.extend(map(_copy, live))
            out = fn(scopes, *args, **kwargs)
            return seal((out, repack_fn(scopes)))

        wrapped = remat(region, policy=options.policy, prevent_cse=options.prevent_cse, block=options.block)
        return unseal(wrapped(arrays))

    return lift.pack(
        inner, (options.variables,), (options.variables,), (options.rngs,), name="remat", enable_kwargs=True
    )


def lift_remat_scan(fn: Callable, options: RematOptions, scan: ScanOptions, owner: str) -> Callable:
    """Makes ``fn(scopes, carry, *args, **kwargs)`` run ``prod(scan.lengths)`` times, each level rematerialized.

    Returns:
        A function of the same arguments: the last carry, and with ``scan.out_axes`` the stacked second results too.
    """

    def body(scopes, carry, *args, **kwargs):
        return _layer_result(owner, carry, fn(scopes, carry, *args, **kwargs), scan.out_axes is not None)

    policies = scan.policies
    if options.policy != policies[-1]:  # `remat_layers` asks for another one
        policies = level_policies(options.policy, len(scan.lengths))
    for length, policy, metadata in reversed(list(zip(scan.lengths, policies, scan.metadata, strict=True))):
        body = _lift_level(body, replace(options, policy=policy), scan, length, metadata)

    def run(scopes, *args, **kwargs):
        if not args:
            raise RematError(f"remat_scan: {owner} is called without its carry, the first positional argument.")
        carry, out = body(scopes, *args, **kwargs)
        return carry if scan.out_axes is None else (carry, out)

    return run


def level_policies(policy: Policy, levels: int) -> tuple[Policy, ...]:
    """The policies of nested loops where the layer has this one: the outer loops keep their carries only."""
    return (Policy() if policy.remat else policy,) * (levels - 1) + (policy,)


def _lift_level(
    body: Callable, options: RematOptions, scan: ScanOptions, length: int, metadata: Mapping[Any, Any]
) -> Callable:
    rematted = lift_remat(body, options)

    def level(scopes, carry, *args, **kwargs):
        # Keyword arguments are the same for every layer: the loop closes over them.
        loop = lift.scan(
            lambda scopes, carry, *xs: rematted(scopes, carry, *xs, **kwargs),
            variable_axes=scan.variable_axes,
            variable_broadcast=scan.variable_broadcast,
            variable_carry=scan.variable_carry,
            split_rngs=scan.split_rngs,
            in_axes=_axes_of(scan.in_axes, args),  # type: ignore[arg-type]
            out_axes=() if scan.out_axes is None else scan.out_axes,  # type: ignore[arg-type]
            length=length,
            reverse=scan.reverse,
            unroll=scan.unroll,
            metadata_params=dict(metadata),
        )
        return loop(scopes, carry, *args)

    return level


def _axes_of(in_axes: Any, args: Sequence[Any]) -> tuple:
    if not isinstance(in_axes, (tuple, list)):
        return (in_axes,) * len(args)
    if len(in_axes) != len(args):
        raise RematError(
            f"in_axes has {len(in_axes)} entries, but the layers are called with {len(args)} positional arguments after"
            f" the carry. Give one entry for each (nn.broadcast for those that every layer shares)."
        )
    return tuple(in_axes)


def _layer_result(owner: str, carry: Any, result: Any, has_out: bool) -> tuple[Any, Any]:
    if has_out:
        if not isinstance(result, tuple) or len(result) != 2:
            raise RematError(
                f"remat_scan was given out_axes, so {owner} has to return (carry, out); it returned"
                f" {_describe(result)}."
            )
        after, out = result
    else:
        after, out = result, ()
    if jax.tree.structure(carry) != jax.tree.structure(after):
        advice = "" if has_out else " A layer that returns (carry, out) needs out_axes=0, which stacks the outs."
        raise RematError(
            f"remat_scan feeds what {owner} returns to the next layer, so it has to look like its first argument"
            f" ({_describe(carry)}); it returned {_describe(after)}.{advice}"
        )
    for before, now in zip(jax.tree.leaves(carry), jax.tree.leaves(after), strict=True):
        weak = getattr(getattr(before, "aval", None), "weak_type", False)  # jax.lax.scan promotes these itself
        if not weak and _type_of(before) != _type_of(now):
            raise RematError(
                f"remat_scan feeds what {owner} returns to the next layer, so shapes and dtypes have to stay:"
                f" {_type_of(before)} became {_type_of(now)}. Cast or project the result, or what goes into the stack."
            )
    return after, out


def _describe(tree: Any) -> str:
    return str(jax.tree.map(_type_of, tree)).replace("'", "")


def _type_of(leaf: Any) -> str:
    try:
        return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
    except TypeError:
        return type(leaf).__name__


def _copy(counters: dict) -> dict:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in counters.items()}


def _restore(now: dict, before: dict) -> None:
    """Sets counters back in place: scopes outside the region share these dictionaries."""
    for key in [key for key in now if key not in before]:
        del now[key]
    for key, value in before.items():
        if isinstance(value, dict):
            _restore(now[key], value)
        else:
            now[key] = value
