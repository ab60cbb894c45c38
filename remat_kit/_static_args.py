"""Arguments declared static (`static_argnums`, `static_argnames`), by position, by keyword or at their defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from remat_kit._errors import RematError, near_matches
from remat_kit._trace.inputs import Static


class ArgumentError(RematError, ValueError):
    """An argument, or the declaration of a static one, that cannot be used as asked."""


def read_names(argument: str, given: Any) -> tuple[str, ...]:
    """One name or several as a tuple; raises an ArgumentError for anything else."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(n, str) for n in names):
        raise ArgumentError(f"{argument}= takes a name or several (strings), got {given!r}.")
    return names


def read_positions(argument: str, given: Any) -> tuple[int, ...]:
    """One position or several as a tuple; raises an ArgumentError for anything else."""
    numbers = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(type(i) is int for i in numbers):
        raise ArgumentError(f"{argument}= takes a position or several (whole numbers), got {given!r}.")
    return numbers


@dataclasses.dataclass(frozen=True)
class StaticArguments:
    """Which arguments of a function are static. A parameter that has both a position and a name is in both.

    Attributes:
      argnums: positions; negative ones count from the end of a call's positional arguments.
      argnames: keywords.
    """

    argnums: tuple[int, ...] = ()
    argnames: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, fun: Callable[..., Any], argnums: int | Sequence[int] = (), argnames: str | Iterable[str] = ()
    ) -> StaticArguments:
        """Reads `static_argnums` and `static_argnames` against the signature of `fun`.

        Raises:
          ArgumentError: for a name that the function does not take, and for positions or names of the wrong type.
        """
        argnums, names = read_positions("static_argnums", argnums), read_names("static_argnames", argnames)
        if not argnums and not names:
            return cls()
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            return cls(argnums, frozenset(names))
        keyword = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            for n in names:
                if n not in keyword:
                    raise ArgumentError(
                        f"static_argnames={n!r}: {name_of(fun)} takes no argument of this name; it takes "
                        f"{', '.join(keyword) or 'none by keyword'}.{near_matches(n, keyword)}"
                    )
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters):  # else negative ones depend on the call
            argnums = tuple(i + len(positional) if -len(positional) <= i < 0 else i for i in argnums)
        from_names = [i for i, p in enumerate(positional) if p.name in names and p.kind is not p.POSITIONAL_ONLY]
        from_nums = {
            positional[i].name
            for i in argnums
            if 0 <= i < len(positional) and positional[i].kind is not inspect.Parameter.POSITIONAL_ONLY
        }
        return cls(tuple(dict.fromkeys([*argnums, *from_names])), frozenset(names) | from_nums)

    def positions(self, fun: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> frozenset[int]:
        """The static positions among the positional arguments of one call.

        Raises:
          ArgumentError: for a position that the call does not have and that has no name either.
        """
        n = len(args)
        if not all(-n <= i < n for i in self.argnums) and not self.argnames and not kwargs:
            raise ArgumentError(
                f"static_argnums={self.argnums} of {name_of(fun)}: positions must be at least -{n} and less than {n} "
                f"in this call with {n} positional arguments. Declare the argument by name in static_argnames."
            )
        return frozenset(i % n for i in self.argnums if -n <= i < n)

    def seal(self, fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Puts the static arguments of one call in a `Static` each."""
        static = self.positions(fun, args, kwargs)
        return (
            tuple(Static(x) if i in static else x for i, x in enumerate(args)),
            {k: Static(x) if k in self.argnames else x for k, x in kwargs.items()},
        )


def name_of(fun: Any) -> str:
    """What messages call a function."""
    return getattr(fun, "__qualname__", None) or getattr(fun, "__name__", None) or repr(fun)
