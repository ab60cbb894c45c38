"""Between policies as data and JAX's own policy callables (`jax.checkpoint_policies`), both ways.

JAX's are frozen dataclasses in some versions (0.10.2) and closures in others (0.12): neither equal nor picklable. They
are recognized by identity, type or code object, and read through their fields; what is not recognized stays as it is.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import jax

from remat_kit import _globs
from remat_kit._errors import RematError, RematWarning
from remat_kit._rules import Action, Rule, Selector

OFFLOAD = {"offload_src": "device", "offload_dst": "pinned_host"}
DOT_OPS = ("conv_general_dilated", "dot_general", "scaled_matmul_wrapper")

_jax = jax.checkpoint_policies
_SAVE_DOTS = (Rule(Action.SAVE, Selector(op=DOT_OPS)),)
_SAVE_DOTS_NO_BATCH = (Rule(Action.SAVE, Selector(op=("dot_general", "scaled_matmul_wrapper"), batch_dims=False)),)
_OFFLOAD_DOTS_NO_BATCH = (Rule(Action.OFFLOAD, Selector(op=("dot_general",), batch_dims=False)),)
_FIXED = [
    (_jax.nothing_saveable, (), Action.RECOMPUTE),
    (_jax.everything_saveable, (), Action.SAVE),
    (_jax.dots_saveable, _SAVE_DOTS, Action.RECOMPUTE),
    (_jax.dots_with_no_batch_dims_saveable, _SAVE_DOTS_NO_BATCH, Action.RECOMPUTE),
]
FACTORIES = {  # JAX's functions that make a policy, and the text that means the same
    "save_only_these_names": "save name=a|b",
    "save_any_names_but_these": "recompute name=a|b; save name=*",
    "save_anything_except_these_names": "recompute name=a|b; save rest",
    "save_and_offload_only_these_names": "save name=a; offload name=b",
    "save_from_both_policies": "save name=a; save op=dot_general",
    "offload_dot_with_no_batch_dims": "offload op=dot_general batch_dims=no",
}


def as_jax(rules: Iterable[Rule], rest: Action) -> Callable[..., Any] | None:
    """Returns JAX's own policy that means the same, or None when JAX has none.

    The same meaning gives the same object, so that it does not cause a retrace.
    """
    kept = list(rules)
    while kept and kept[-1].action == rest:
        kept.pop()
    if not kept:
        return {Action.RECOMPUTE: _jax.nothing_saveable, Action.SAVE: _jax.everything_saveable}.get(rest)
    if rest != Action.RECOMPUTE:
        return None
    if (dots := _dots(kept)) is not None:
        return dots
    return _names(kept)


def from_jax(policy: Callable[..., Any]) -> tuple[tuple[Rule, ...], Action] | None:
    """Returns the data of one of JAX's own policies, or None for any other callable.

    Raises:
        RematError: for a function that makes policies, where its result was meant, and for a union that offloads.
    """
    for factory, text in FACTORIES.items():
        if policy is getattr(_jax, factory, None):
            raise RematError(
                f"jax.checkpoint_policies.{factory} makes policies and is none: call it, or write policy({text!r})."
            )
    for known, rules, rest in _FIXED:
        if policy is known or (dataclasses.is_dataclass(known) and type(policy) is type(known) and policy == known):
            return rules, rest
    kind, fields = _kind(policy), _fields(policy)
    kinds = _kinds()
    if kind == kinds["save_anything_except_these_names"]:
        warnings.warn(
            "jax.checkpoint_policies.save_anything_except_these_names keeps every value, those with the names too: "
            f"the names are ignored by JAX. Write policy({FACTORIES['save_anything_except_these_names']!r}).",
            RematWarning,
            stacklevel=4,
        )
        return None
    if kind == kinds["save_from_both_policies"]:
        parts = [from_jax(p) for p in fields.values() if callable(p)]
        if any(part and Action.OFFLOAD in (part[1], *(rule.action for rule in part[0])) for part in parts):
            raise RematError(
                "jax.checkpoint_policies.save_from_both_policies cannot combine a policy that offloads: JAX fails when "
                "it differentiates. Combine them here, as policy(first) | policy(second) (the first wins)."
            )
        return None
    try:
        return _made(kind, fields, kinds)
    except (KeyError, TypeError, ValueError, RematError):  # another JAX's fields, or names that no glob can hold
        return None


def _made(kind: Any, fields: dict[str, Any], kinds: dict[str, Any]) -> tuple[tuple[Rule, ...], Action] | None:
    """The data of a policy that one of JAX's functions made."""
    offload = {key: fields[key] for key in OFFLOAD} if "offload_dst" in fields else OFFLOAD
    if offload != OFFLOAD:
        return None
    if kind == kinds["save_only_these_names"]:
        (names,) = fields.values()
        return _by_name((Action.SAVE, names)), Action.RECOMPUTE
    if kind == kinds["save_any_names_but_these"]:
        (names,) = fields.values()
        any_name = Rule(Action.SAVE, Selector(name=("*",)))
        return (*_by_name((Action.RECOMPUTE, names)), any_name), Action.RECOMPUTE
    if kind == kinds["save_and_offload_only_these_names"]:
        saved, offloaded = fields["names_which_can_be_saved"], fields["names_which_can_be_offloaded"]
        return _by_name((Action.SAVE, saved), (Action.OFFLOAD, offloaded)), Action.RECOMPUTE
    if kind == kinds["offload_dot_with_no_batch_dims"]:
        return _OFFLOAD_DOTS_NO_BATCH, Action.RECOMPUTE
    return None


def _by_name(*groups: tuple[Action, Iterable[str]]) -> tuple[Rule, ...]:
    rules = []
    for action, names in groups:
        if globs := tuple(_globs.literal(name) for name in names):
            rules.append(Rule(action, Selector(name=globs)))
    return tuple(rules)


def _dots(rules: list[Rule]) -> Callable[..., Any] | None:
    """The native policy for rules on matrix products, however they are divided into rules."""
    asked = [rule.selector.criteria() for rule in rules]
    batch = {criteria.get("batch_dims") for criteria in asked}
    actions = {rule.action for rule in rules}
    if any("op" not in criteria or set(criteria) - {"op", "batch_dims"} for criteria in asked):
        return None
    if len(batch) != 1 or len(actions) != 1:
        return None
    ops = tuple(sorted({glob for criteria in asked for glob in criteria["op"]}))
    whole = (Rule(actions.pop(), Selector(op=ops, batch_dims=batch.pop())),)
    if whole == _OFFLOAD_DOTS_NO_BATCH:
        return _offload_dots()
    return {_SAVE_DOTS: _jax.dots_saveable, _SAVE_DOTS_NO_BATCH: _jax.dots_with_no_batch_dims_saveable}.get(whole)


def _names(rules: list[Rule]) -> Callable[..., Any] | None:
    """The native policy for rules on exact names, or on any name but some."""
    decided: dict[str, Action] = {}
    for rule in rules:
        if set(rule.selector.criteria()) != {"name"}:
            return None
        if "*" in rule.selector.name:  # the rules behind it can match no name that is still undecided
            if rule.action != Action.SAVE or Action.OFFLOAD in decided.values():
                return None
            return _any_but(frozenset(name for name, action in decided.items() if action == Action.RECOMPUTE))
        for glob in rule.selector.name:
            name = _globs.exact(glob)
            if name is None:
                return None
            decided.setdefault(name, rule.action)
    saved = frozenset(name for name, action in decided.items() if action == Action.SAVE)
    offloaded = frozenset(name for name, action in decided.items() if action == Action.OFFLOAD)
    if not saved | offloaded:
        return _jax.nothing_saveable
    return _save_and_offload(saved, offloaded) if offloaded else _save_only(saved)


@cache
def _save_only(names: frozenset[str]) -> Callable[..., Any]:
    return _jax.save_only_these_names(*sorted(names))


@cache
def _any_but(names: frozenset[str]) -> Callable[..., Any]:
    return _jax.save_any_names_but_these(*sorted(names))


@cache
def _save_and_offload(saved: frozenset[str], offloaded: frozenset[str]) -> Callable[..., Any]:
    return _jax.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(saved), names_which_can_be_offloaded=sorted(offloaded), **OFFLOAD
    )


@cache
def _offload_dots() -> Callable[..., Any]:
    return _jax.offload_dot_with_no_batch_dims(**OFFLOAD)


@cache
def _kinds() -> dict[str, Any]:
    """What a policy made by each of JAX's functions looks like."""
    samples = {
        "save_only_these_names": _jax.save_only_these_names("a"),
        "save_any_names_but_these": _jax.save_any_names_but_these("a"),
        "save_anything_except_these_names": _jax.save_anything_except_these_names("a"),
        "save_and_offload_only_these_names": _save_and_offload(frozenset("a"), frozenset("b")),
        "offload_dot_with_no_batch_dims": _offload_dots(),
        "save_from_both_policies": _jax.save_from_both_policies(_jax.dots_saveable, _jax.save_only_these_names("a")),
    }
    return {factory: _kind(sample) for factory, sample in samples.items()}


def _kind(policy: Any) -> Any:
    """The code object of a function (all closures of one function share it), else the type."""
    return getattr(policy, "__code__", None) or type(policy)


def _fields(policy: Any) -> dict[str, Any]:
    """The data that a policy holds, by the names that JAX gave them."""
    if dataclasses.is_dataclass(policy) and not isinstance(policy, type):
        return {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    names = getattr(getattr(policy, "__code__", None), "co_freevars", ())
    cells = getattr(policy, "__closure__", None) or ()
    try:
        return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    except ValueError:  # an empty cell
        return {}
