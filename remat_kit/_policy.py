"""Policies: ordered rules of what to save, offload or recompute, and an action for the rest.

Plain data, equal by value. Which of JAX's own policies means the same is in _policy_jax.py, the text form in
_policy_text.py, the named ones in _presets.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

from remat_kit import _globs, _json, _policy_json, _policy_text
from remat_kit._errors import RematError
from remat_kit._policy_jax import as_jax, from_jax
from remat_kit._rules import FIELDS, MOST_RULES, Action, Rule, Selector, ValueFacts, unknown_key, useless

__all__ = ["Action", "Policy", "Rule", "Selector", "ValueFacts", "offload", "policy", "recompute", "save"]

_Globs = str | Iterable[str]


class Criteria(TypedDict, total=False):
    """The criteria of a `Selector`, as `save`, `offload` and `recompute` take them."""

    name: _Globs
    op: _Globs
    path: _Globs
    source: _Globs
    dtype: Any
    larger_than: int | str
    smaller_than: int | str
    batch_dims: bool
    value: _Globs


@dataclass(frozen=True, repr=False)
class Policy:
    """What becomes of each value of a block that the backward pass needs.

    The first rule that matches a value decides; values that no rule matches get the action `rest`. ``a | b`` has the
    rules of both, those of ``a`` first.

    Attributes:
        rules: rules in order.
        rest: the action for all other values.
        remat: False for the policy ``none``: the block is left without rematerialization.
        native: a policy callable of JAX's that remat_kit does not know; it is handed to JAX as it is, and there are no
            rules then.
        name: the preset's name, or empty. Not part of the value: a preset equals the same rules written out.
        doc: what a preset keeps and costs, or empty. Not part of the value.

    Raises:
        RematError: for wrong types, for a rule that can never apply because an earlier one has all its values, or for
            rules beside `native` or ``remat=False``.
    """

    rules: tuple[Rule, ...] = ()
    rest: Action = Action.RECOMPUTE
    remat: bool = True
    native: Callable[..., Any] | None = None
    name: str = field(default="", compare=False)
    doc: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.rules, Rule) or not isinstance(self.rules, (tuple, list)):
            raise RematError(f"a policy's rules are a tuple of Rule, got {self.rules!r}.")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise RematError(f"a policy's rules are a tuple of Rule, and one is {rule!r}.")
        if len(self.rules) > MOST_RULES:
            raise RematError(
                f"a policy has at most {MOST_RULES} rules, got {len(self.rules)}; use globs such as name=a|b."
            )
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "rest", Action(self.rest))
        if not isinstance(self.remat, bool):
            raise RematError(f"a policy's remat is True or False, got {self.remat!r}.")
        if not self.remat and (self.rules or self.native or self.rest != Action.RECOMPUTE):
            raise RematError("a policy with remat=False leaves the block as it is: it takes no rules, rest or native.")
        if self.native is not None:
            if self.rules or self.rest != Action.RECOMPUTE:
                raise RematError("a policy holds either rules or one of JAX's callables (native), not both.")
            if not callable(self.native):
                raise RematError(f"a policy's native is a callable as jax.checkpoint takes, got {self.native!r}.")
        for number, earlier in useless(self.rules):
            raise RematError(
                f"the rule '{_policy_text.format_rule(self.rules[number])[:500]}' never applies: "
                f"'{_policy_text.format_rule(earlier)[:500]}' comes before it and the first match wins."
            )

    def action(self, value: ValueFacts) -> Action:
        """Returns what becomes of a value: the action of the first rule that matches it, else `rest`.

        Under ``none`` all that autodiff keeps is saved.

        Raises:
            RematError: when the policy is a callable of JAX's, which only JAX can ask.
        """
        if self.native is not None:
            raise RematError(f"{self} is a callable that only jax.checkpoint can ask; it has no rules to read.")
        if not self.remat:
            return Action.SAVE
        return next((rule.action for rule in self.rules if rule.selector.matches(value)), self.rest)

    def as_jax(self) -> Callable[..., Any] | None:
        """Returns JAX's own policy that means exactly this, or None when it has to go through names.

        Equal policies give the same object, so that building a policy twice does not cause a retrace.

        Raises:
            RematError: for ``none``, which means no `jax.checkpoint` at all.
        """
        if not self.remat:
            raise RematError("the policy 'none' means no jax.checkpoint at all, so there is no policy to hand to it.")
        return self.native if self.native is not None else as_jax(self.rules, self.rest)

    @property
    def is_full(self) -> bool:
        """Whether everything is recomputed."""
        return self.remat and self.native is None and all(a == Action.RECOMPUTE for a in self.actions)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions that the rules and the rest take, without repeats; empty for ``none`` and for callables."""
        if not self.remat or self.native is not None:
            return ()
        return tuple(dict.fromkeys([*(rule.action for rule in self.rules), self.rest]))

    @property
    def name_globs(self) -> tuple[str, ...]:
        """All globs on checkpoint names that the rules mention, without repeats."""
        return tuple(dict.fromkeys(glob for rule in self.rules for glob in rule.selector.name))

    def exact_names(self) -> dict[str, Action]:
        """Returns the names that the rules decide by name alone and without wildcards, with their actions."""
        decided: dict[str, Action] = {}
        for rule in self.rules:
            if set(rule.selector.criteria()) == {"name"}:
                for glob in rule.selector.name:
                    if (name := _globs.exact(glob)) is not None:
                        decided.setdefault(name, rule.action)
        return decided

    def __or__(self, other: Policy | str) -> Policy:
        if isinstance(other, str):
            other = policy(other)
        if not isinstance(other, Policy):
            return NotImplemented
        for side in (self, other):
            if not side.remat or side.native is not None:
                raise RematError(
                    f"{side} cannot be combined with another policy: "
                    + ("it means no remat at all." if not side.remat else "it is a callable and has no rules.")
                )
        rests = {side.rest for side in (self, other)} - {Action.RECOMPUTE}
        if len(rests) > 1:
            raise RematError(f"'{self.rest} rest' and '{other.rest} rest' contradict each other: take one of them out.")
        added = tuple(r for r in other.rules if not any(mine.selector.covers(r.selector) for mine in self.rules))
        return Policy(self.rules + added, rests.pop() if rests else Action.RECOMPUTE)

    def __ror__(self, other: str) -> Policy:
        return policy(other) | self if isinstance(other, str) else NotImplemented

    def __str__(self) -> str:
        if self.native is not None:
            named = getattr(self.native, "__qualname__", type(self.native).__qualname__)
            return f"<JAX policy {getattr(self.native, '__module__', None) or type(self.native).__module__}.{named}>"
        if not self.remat:
            return "none"
        return "; ".join([*map(_policy_text.format_rule, self.rules), f"{self.rest} rest"])

    def __repr__(self) -> str:
        return f"policy({self.name or str(self)!r})" if self.native is None else str(self)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Reads the text form, which `str` gives: ``"offload name=attn_*; save op=dot_general; recompute rest"``.

        Without a ``rest`` rule all other values are recomputed. Preset names are read by `policy`.

        Raises:
            RematError: with a mark below the spot that is wrong.
        """
        if not isinstance(text, str):
            raise RematError(f"a policy's text form is a str, got {text!r} of type {type(text).__name__}.")
        if text.strip() == "none":
            return cls(remat=False)
        if text.lstrip().startswith("<JAX policy"):
            raise RematError(
                f"{text[:80]!r} stands for a callable of JAX's: it has no text form that can be read back."
            )
        rules, rest = _policy_text.parse(text)
        return cls(rules, Action.RECOMPUTE if rest is None else rest)

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy as plain JSON data with a schema version.

        Raises:
            RematError: when the policy is a callable of JAX's.
        """
        if self.native is not None:
            raise RematError(
                f"{self} is a callable and cannot be written as JSON: describe it by rules, as in 'save name=a|b'."
            )
        return _policy_json.to_dict(self.rules, self.rest, self.remat)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """Reads what `to_dict` gave, checking all of it; raises RematError."""
        rules, rest, remat = _policy_json.from_dict(data)
        return cls(rules, rest, remat)

    def to_json(self) -> str:
        """Returns `to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes) -> Policy:
        """Reads what `to_json` gave, checking all of it; raises RematError."""
        return cls.from_dict(_json.loads(text, "policy"))


def policy(spec: Policy | str | Callable[..., Any] | None) -> Policy:
    """Returns the policy that is meant.

    Args:
        spec: the name of a preset (see `presets`), the text form (see `Policy.parse`), a Policy, or a policy callable
            as `jax.checkpoint` takes. JAX's own callables become equal data; others are kept as they are.

    Raises:
        UnknownPolicyError: for a word that no preset is named.
        RematError: for malformed text, None and other types.
    """
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, str):
        from remat_kit import _presets  # the presets are made of policies

        word = spec.strip()
        found = _presets.find(word)
        return found if found is not None else Policy.parse(spec)
    if spec is None:
        raise RematError(
            "None is no policy, since it means two things in JAX: jax.checkpoint(policy=None) recomputes everything, "
            "while no jax.checkpoint at all saves everything. Write 'full' for the first and 'none' for the second."
        )
    if callable(spec) and not isinstance(spec, type):
        known = from_jax(spec)
        if known is not None:
            return Policy(*known)
        try:
            hash(spec)
        except TypeError:
            raise RematError(f"the policy callable {spec!r} is not hashable, which jax.checkpoint needs.") from None
        return Policy(native=spec)
    hint = " A policy for each block goes to apply(fn, {block: policy})." if isinstance(spec, Mapping) else ""
    if type(spec).__name__ == "Every":
        hint = " every(...) goes to apply and the analyses, for all blocks or in a mapping of blocks to policies."
    if hasattr(spec, "policy_for"):
        hint = " A plan goes to apply, measure, compare or residuals as it is; of one block, plan.policy_for(block)."
    raise RematError(
        f"a policy is a preset's name, text such as 'save name=a', a Policy or a policy callable, "
        f"got {spec!r} of type {type(spec).__name__}.{hint}"
    )


def save(**criteria: Unpack[Criteria]) -> Policy:
    """Returns the policy that saves the values that meet all criteria, and recomputes the rest.

    Args:
        **criteria: `name`, `op`, `path`, `source`, `dtype`, `value` (globs: text, ``a|b`` for either, or several),
            `larger_than`, `smaller_than` (bytes, or text such as ``"1MiB"``) and `batch_dims`, as in `Selector`.
            Without any, all values are saved.

    Raises:
        RematError: for unknown or malformed criteria.
    """
    return _single(Action.SAVE, criteria)


def offload(**criteria: Unpack[Criteria]) -> Policy:
    """Returns the policy that moves the values that meet all criteria to host memory; see `save`."""
    return _single(Action.OFFLOAD, criteria)


def recompute(**criteria: Unpack[Criteria]) -> Policy:
    """Returns the policy that recomputes the values that meet all criteria; useful before a wider rule; see `save`."""
    return _single(Action.RECOMPUTE, criteria)


def _single(action: Action, criteria: Mapping[str, Any]) -> Policy:
    if not criteria:
        return Policy(rest=action)
    for key, value in criteria.items():
        if key not in FIELDS:
            raise RematError(unknown_key(key))
        if isinstance(value, tuple) and not value:
            raise RematError(f"{key} was given no glob: leave it out, or write '*' for any.")
    return Policy((Rule(action, Selector(**criteria)),))


def named(value: Policy, name: str, doc: str) -> Policy:
    """Returns the same policy under a preset's name."""
    return replace(value, name=name, doc=doc)
