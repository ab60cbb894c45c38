"""Reading JSON that may come from strangers: no repeated keys, a schema and a version, every failure one RematError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from remat_kit._errors import RematError


def loads(text: str | bytes, what: str) -> Any:
    """Reads JSON text.

    Args:
      what: whose text it is, for messages: ``"policy"``.
    """
    if not isinstance(text, (str, bytes, bytearray)):
        raise RematError(f"a {what}'s JSON is text, got {type(text).__name__}; for a dict use from_dict.")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise RematError(f"the {what}'s JSON has a key twice in one object.")
        return found

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise RematError(f"the {what} is not JSON: {str(error)[:200]}") from None


def check_header(data: Any, what: str, schema: str, version: int, again: str) -> None:
    """Checks that data are an object of a schema and version.

    Args:
      again: what to do about another version, besides updating remat_kit.
    """
    if not isinstance(data, Mapping):
        raise RematError(f"a {what} in JSON is an object, got {kind(data)}.")
    if data.get("schema") != schema:
        raise RematError(f'not a {what}: its "schema" is {shown(data.get("schema"))}, expected {schema!r}.')
    found = data.get("version")
    if type(found) is not int or found != version:
        raise RematError(
            f"the {what} has schema version {shown(found)}; this remat_kit reads version {version}. "
            f"{again} with this version, or update remat_kit."
        )


def kind(value: Any) -> str:
    """A value and its type, in a few words."""
    return f"{shown(value)} of type {type(value).__name__}"


def shown(value: Any) -> str:
    """A value in a few words, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, or endless nesting
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
