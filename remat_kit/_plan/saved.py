"""Plans as JSON, with a schema version; what is read may come from strangers and is checked throughout."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import stat
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from remat_kit._errors import RematError
from remat_kit._json import check_header, loads, shown
from remat_kit._plan.plan import SCHEMA, VERSION, Plan
from remat_kit._policy import Action, Policy
from remat_kit._trace.blocks import KINDS

_MOST = 64 * 2**20


def to_dict(plan: Plan) -> dict[str, Any]:
    """Returns plain JSON data."""
    data = _plain(plan)
    del data["strict"]
    return {"schema": SCHEMA, "version": VERSION, **data}


def from_dict(data: Any, *, strict: bool = True) -> Plan:
    """Reads what `to_dict` wrote.

    Raises:
      RematError: when a key is missing or unknown, or a value has the wrong type.
    """
    check_header(data, "plan", SCHEMA, VERSION, "Plan again")
    if not isinstance(strict, bool):
        raise RematError(f"strict is True or False, got {strict!r}.")
    rest = {k: v for k, v in data.items() if k not in ("schema", "version")}
    plan = _record(Plan, {**rest, "strict": strict}, "the plan")
    words = {"minimize": ((plan.minimize,), ("time", "flops")), "actions": (plan.actions, tuple(Action))}
    words["kind"] = (tuple(b.kind for b in plan.blocks), KINDS)
    words["action"] = (tuple(v.action for b in plan.blocks for v in b.values), tuple(Action))
    for key, (given, known) in words.items():
        for word in given:
            if word not in known:
                raise RematError(f"the plan: {key} is one of {', '.join(known)}, got {shown(word)}.")
    return plan


def write(plan: Plan, path: Any) -> None:
    """Writes a plan to a file."""
    _check_path(path)
    text = json.dumps(to_dict(plan), indent=1)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except (OSError, TypeError, ValueError) as error:
        raise RematError(f"cannot write the plan to {path!r:.200}: {error}") from None


def _check_path(path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):  # a number would be a file that is open already
        raise RematError(f"a plan is kept in a file, named by a path; got {path!r:.200}")


def read(path: Any, *, strict: bool = True) -> Plan:
    """Reads a plan from a file."""
    _check_path(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe could keep us waiting, a device never ends
            raise RematError(f"cannot read a plan from {path!r:.200}: it is no regular file.")
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST + 1)
    except (OSError, ValueError) as error:
        raise RematError(f"cannot read a plan from {path!r:.200}: {error}") from None
    if len(text) > _MOST:
        raise RematError(f"{path!r:.200} is larger than a plan can be ({_MOST >> 20} Mi characters).")
    return from_dict(loads(text, "plan"), strict=strict)


def _plain(x: Any) -> Any:
    if isinstance(x, Policy):
        return x.to_dict()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: _plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, (tuple, list)):
        return [_plain(v) for v in x]
    return x


_hints = functools.cache(typing.get_type_hints)


def _record(kind: type, data: Any, what: str) -> Any:
    """Reads a dataclass by the types of its fields."""
    if not isinstance(data, Mapping):
        raise RematError(f"{what} is an object, got {shown(data)}.")
    hints = _hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    missing, unknown = [n for n in names if n not in data], [str(k)[:80] for k in data if k not in names]
    if missing or unknown:
        said = [f"lacks {missing[:10]}"] * bool(missing) + [f"has unknown keys {unknown[:10]}"] * bool(unknown)
        raise RematError(f"{what} {' and '.join(said)}.")
    return kind(**{n: _value(hints[n], data[n], f"{what}: {n}") for n in names})


def _value(kind: Any, data: Any, what: str) -> Any:
    args = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):  # only "... | None" occurs
        return None if data is None else _value(next(a for a in args if a is not type(None)), data, what)
    if typing.get_origin(kind) is tuple:
        if not isinstance(data, (list, tuple)):
            raise RematError(f"{what} is a list, got {shown(data)}.")
        return tuple(_value(args[0], v, f"{what}[{i}]") for i, v in enumerate(data))
    if kind is Policy:
        try:
            return Policy.from_dict(data)
        except RematError as error:
            raise RematError(f"{what}: {error}") from None
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, data, what)
    number = isinstance(data, (int, float)) and not isinstance(data, bool)
    if kind is float and number and 0 <= data <= sys.float_info.max:
        return float(data)
    if kind is int and number and isinstance(data, int) and 0 <= data < 2**63:
        return data
    if kind in (str, bool) and isinstance(data, kind):
        return data
    expected = {float: "a number from 0 on", int: "a whole number from 0 on", str: "text", bool: "true or false"}[kind]
    raise RematError(f"{what} is {expected}, got {shown(data)}.")
