"""Programs named on the command line: `zoo:NAME` or `package.module:factory`.

Whatever a user's factory does wrong becomes a `RematError` that names the factory.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from remat_kit._errors import RematError, near_matches
from remat_kit._units import printable

FORMS = "zoo:NAME (a built-in model) or package.module:factory"


class Loaded(NamedTuple):
    """A function to analyse and what to call it with."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load(spec: str, settings: Mapping[str, Any]) -> Loaded:
    """Makes the program that `spec` names.

    Args:
      spec: `zoo:NAME`, built with abstract arguments unless the settings say otherwise, or
        `package.module:factory`; the current folder is importable.
      settings: keyword arguments for the zoo model or the factory.

    Raises:
      RematError: unknown program or setting, or a factory that fails or returns something else.
    """
    source, colon, name = spec.partition(":")
    if not (source and colon and name):
        raise RematError(f"program {spec!r}: expected {FORMS}.{_zoo_hint(spec)}")
    if source == "zoo":
        return _from_zoo(name, settings)
    return _returned(spec, _call(spec, _factory(spec, source, name), settings))


def parse_settings(items: Sequence[str]) -> dict[str, Any]:
    """Reads `KEY=VALUE` items; a value that is not JSON is taken as a string."""
    out: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise RematError(f"--set {item!r}: expected KEY=VALUE, such as layers=12 or dtype=bfloat16.")
        if key in out:
            raise RematError(f"--set {key}=...: given twice.")
        try:
            out[key] = json.loads(value)
        except ValueError:
            out[key] = {"True": True, "False": False, "None": None}.get(value, value)
    return out


def _from_zoo(name: str, settings: Mapping[str, Any]) -> Loaded:
    from remat_kit import zoo

    if name not in zoo.names():
        raise RematError(
            f"zoo:{name}: no such model.{near_matches(name, zoo.names())} There are {', '.join(zoo.names())}."
        )
    fn, args = _run(f"zoo:{name}", lambda: zoo.build(name, **{"abstract": True, **settings}))
    return Loaded(fn, tuple(args), {})


def _zoo_hint(spec: str) -> str:
    from remat_kit import zoo

    return f" Did you mean 'zoo:{spec}'?" if spec in zoo.names() else ""


def _factory(spec: str, source: str, name: str) -> Callable[..., Any]:
    if not all(part.isidentifier() for part in source.split(".")):
        raise RematError(f"program {spec!r}: {source!r} is no module's name; expected {FORMS}.")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(source)
    except ModuleNotFoundError as e:
        # the module asked for (or a package above it), not something that it imports itself
        if e.name and (source == e.name or source.startswith(e.name + ".")):
            raise RematError(
                f"program {spec!r}: no module named {e.name!r}. It must be installed, or lie in {here}."
            ) from None
        raise _failed(f"importing {source}", e) from e
    except (Exception, SystemExit) as e:
        raise _failed(f"importing {source}", e) from e
    seen: list[str] = []
    for part in name.split("."):
        if not hasattr(found, part):
            where = ".".join([source, *seen])
            raise RematError(f"program {spec!r}: {where} has no {part!r}.{near_matches(part, _public(found))}")
        found = getattr(found, part)
        seen.append(part)
    if not callable(found):
        raise RematError(f"program {spec!r}: {name} is a {type(found).__name__}; expected a factory, to be called.")
    return found


def _public(module: object) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


def _call(spec: str, factory: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some built-in callables have none
        return _run(spec, lambda: factory(**settings))
    try:
        signature.bind(**settings)
    except TypeError as e:
        known = [n for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
        unknown = [k for k in settings if k not in known]
        hint = near_matches(unknown[0], known) if unknown else ""
        raise RematError(f"program {spec!r}: the factory is {factory.__name__}{signature}; {e}.{hint}") from None
    return _run(spec, lambda: factory(**settings))


def _returned(spec: str, value: Any) -> Loaded:
    wanted = f"program {spec!r}: the factory must return (fn, args) or (fn, args, kwargs)"
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        size = f" of {len(value)}" if isinstance(value, tuple) else ""
        raise RematError(f"{wanted}, and returned a {type(value).__name__}{size}.")
    fn, args, kwargs = value if len(value) == 3 else (*value, {})
    if not callable(fn):
        raise RematError(f"{wanted}; what it returned as fn is a {type(fn).__name__}, which cannot be called.")
    if not isinstance(args, (tuple, list)):
        raise RematError(f"{wanted}; args is a {type(args).__name__}: write (fn, (arg,)) for a single argument.")
    if not isinstance(kwargs, Mapping) or not all(isinstance(k, str) for k in kwargs):
        raise RematError(f"{wanted}; kwargs is a {type(kwargs).__name__}, expected a dict with keywords as keys.")
    return Loaded(fn, tuple(args), dict(kwargs))


def _run(spec: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except RematError:
        raise
    except (Exception, SystemExit) as e:
        raise _failed(f"making {spec}", e) from e


def _failed(what: str, error: BaseException) -> RematError:
    return RematError(f"{what} failed: {describe(error)}")


def describe(error: BaseException) -> str:
    """The error in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    message = printable(str(error).strip().split("\n", 1)[0])
    return f"{type(error).__name__}: {message}{place}" if message else f"{type(error).__name__}{place}"
