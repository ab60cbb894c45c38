"""The JSON form of policies, with a schema version; what is read may come from strangers and is checked throughout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from remat_kit._errors import RematError
from remat_kit._rules import FIELDS, Action, Rule, Selector, as_action, unknown_key

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
    if not isinstance(data, Mapping):
        raise RematError(f"a policy in JSON is an object, got {_kind(data)}.")
    if data.get("schema") != SCHEMA:
        raise RematError(f'not a policy: its "schema" is {_show(data.get("schema"))}, expected {SCHEMA!r}.')
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise RematError(
            f"the policy has schema version {_show(version)}; this remat_kit reads version {VERSION}. "
            "Write it again with this version, or update remat_kit."
        )
    _same_keys(data, {"schema", "version", "remat", "rules", "rest"}, "the policy")
    if not isinstance(data["remat"], bool):
        raise RematError(f'the policy\'s "remat" is true or false, got {_kind(data["remat"])}.')
    if not isinstance(data["rules"], list):
        raise RematError(f'the policy\'s "rules" is a list, got {_kind(data["rules"])}.')
    rules = tuple(_rule(rule, f"rule {i}") for i, rule in enumerate(data["rules"], 1))
    return rules, _action(data["rest"], '"rest"'), data["remat"]


def loads(text: str | bytes) -> Any:
    """Reads JSON, without repeated keys and with every failure as a RematError."""
    if not isinstance(text, (str, bytes, bytearray)):
        raise RematError(f"a policy's JSON is text, got {type(text).__name__}; for a dict use from_dict.")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise RematError("the policy's JSON has a key twice in one object.")
        return found

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise RematError(f"the policy is not JSON: {str(error)[:200]}") from None


def _rule(data: Any, where: str) -> Rule:
    if not isinstance(data, Mapping):
        raise RematError(f"{where} is an object, got {_kind(data)}.")
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
            raise RematError(f"{where}: {key} is {expected}, got {_show(value)}.")
    try:
        return Rule(_action(data["action"], "its action"), Selector(**criteria))
    except RematError as error:
        raise RematError(f"{where}: {error}") from None


def _action(value: Any, what: str) -> Action:
    if not isinstance(value, str):
        raise RematError(f"{what} is one of {', '.join(Action)}, got {_kind(value)}.")
    return as_action(value)


def _same_keys(data: Mapping[str, Any], expected: set[str], what: str) -> None:
    missing, unknown = expected - set(data), {str(k)[:80] for k in data} - expected
    if missing or unknown:
        parts = [f"lacks {sorted(missing)}"] * bool(missing) + [f"has unknown keys {sorted(unknown)[:10]}"] * bool(
            unknown
        )
        raise RematError(f"{what} {' and '.join(parts)}.")


def _kind(value: Any) -> str:
    return f"{_show(value)} of type {type(value).__name__}"


def _show(value: Any) -> str:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, or endless nesting
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= 80 else shown[:77] + "..."
