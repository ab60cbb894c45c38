"""The JSON form of policies, with a schema version; what is read may come from strangers and is checked throughout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from remat_kit._errors import RematError
from remat_kit._json import check_header, kind, shown
from remat_kit._rules import FIELDS, MOST_RULES, Action, Rule, Selector, unknown_key

SCHEMA = "remat_kit.policy"
VERSION = 1


def to_dict(rules: Iterable[Rule], rest: Action, remat: bool) -> dict[str, Any]:
    """Returns plain JSON data."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "remat": remat,
        "rules": [
            {"action": rule.action.value}
            | {k: list(v) if isinstance(v, tuple) else v for k, v in rule.selector.criteria().items()}
            for rule in rules
        ],
        "rest": rest.value,
    }


def from_dict(data: Any) -> tuple[tuple[Rule, ...], Action, bool]:
    """Reads what `to_dict` wrote; returns rules, rest and remat.

    Raises:
        RematError: when a key is missing or unknown, or a value has the wrong type.
    """
    check_header(data, "policy", SCHEMA, VERSION, "Write it again")
    _same_keys(data, {"schema", "version", "remat", "rules", "rest"}, "the policy")
    if not isinstance(data["remat"], bool):
        raise RematError(f'the policy\'s "remat" is true or false, got {kind(data["remat"])}.')
    if not isinstance(data["rules"], list):
        raise RematError(f'the policy\'s "rules" is a list, got {kind(data["rules"])}.')
    if len(data["rules"]) > MOST_RULES:
        raise RematError(f"the policy has {len(data['rules'])} rules, and may have {MOST_RULES}.")
    rules = tuple(_rule(rule, f"rule {i}") for i, rule in enumerate(data["rules"], 1))
    return rules, _action(data["rest"], '"rest"'), data["remat"]


def _rule(data: Any, where: str) -> Rule:
    if not isinstance(data, Mapping):
        raise RematError(f"{where} is an object, got {kind(data)}.")
    if "action" not in data:
        raise RematError(f'{where} has no "action".')
    criteria = {key: value for key, value in data.items() if key != "action"}
    for key, value in criteria.items():
        if key not in FIELDS:
            raise RematError(f"{where}: {unknown_key(str(key)[:80])}")
        if key in ("larger_than", "smaller_than"):
            ok = isinstance(value, int) and not isinstance(value, bool)
            expected = "a whole number of bytes"
        elif key == "batch_dims":
            ok, expected = isinstance(value, bool), "true or false"
        else:
            ok = isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
            expected = "a list of globs"
        if not ok:
            raise RematError(f"{where}: {key} is {expected}, got {shown(value)}.")
    try:
        return Rule(_action(data["action"], "its action"), Selector(**criteria))
    except RematError as error:
        raise RematError(f"{where}: {error}") from None


def _action(value: Any, what: str) -> Action:
    if not isinstance(value, str):
        raise RematError(f"{what} is one of {', '.join(Action)}, got {kind(value)}.")
    return Action(value)


def _same_keys(data: Mapping[str, Any], expected: set[str], what: str) -> None:
    missing, unknown = expected - set(data), {str(k)[:80] for k in data} - expected
    if missing or unknown:
        parts = [f"lacks {sorted(missing)}"] * bool(missing) + [f"has unknown keys {sorted(unknown)[:10]}"] * bool(
            unknown
        )
        raise RematError(f"{what} {' and '.join(parts)}.")
