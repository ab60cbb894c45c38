"""Which layers of a model `remat_layers` means: by class name, glob or class, and every how many of them.

Knows no framework; what it did not find it names together with the classes that are there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from remat_kit._errors import RematError, near_matches
from remat_kit._globs import canonical, matches_any, split
from remat_kit._static_args import ArgumentError, read_names

Selector = str | type


@dataclass(frozen=True)
class Layers:
    """The layers that are meant.

    Attributes:
        base: the framework's module class.
        selectors: class names, globs on class names, or classes, which stand for their subclasses too.
        methods: the methods that are rematerialized.
        every: the first of so many layers is; the others are not.
        static_argnames: arguments of these methods that are checked for being static.
    """

    base: type
    selectors: tuple[Selector, ...]
    methods: tuple[str, ...]
    every: int
    static_argnames: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Any, methods: Any, every: Any, static_argnames: Any, base: type) -> Layers:
        """Reads what a user gave; raises RematError for what names no layers.

        Args:
            given: a selector or a tuple of them.
            base: the framework's module class.
        """
        selectors = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if not selectors:
            raise RematError("remat_layers was given no layers: name their class, such as 'Block'.")
        for selector in selectors:
            if isinstance(selector, str):
                for part in split(selector):
                    canonical(part)
            elif not (isinstance(selector, type) and issubclass(selector, base)):
                raise RematError(
                    f"the layers of remat_layers are class names, globs on them, or subclasses of"
                    f" {base.__module__.partition('.module')[0]}.Module; got {selector!r}."
                )
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise RematError(f"every= takes a whole number of layers, such as 2, got {every!r}.")
        names = read_names("methods", methods)
        if not names:
            raise RematError("methods is empty, so nothing would be rematerialized.")
        return cls(base, selectors, names, every, read_names("static_argnames", static_argnames))

    def selectors_of(self, kind: type, names: Iterable[str]) -> list[Selector]:
        """The selectors that mean a class, given all names that it goes by."""
        return [s for s in self.selectors if _means(s, kind, names)]

    def static_names(self, fn: Callable) -> list[str]:
        """Those of the static arguments that a method takes."""
        if not self.static_argnames:
            return []
        parameters = inspect.signature(fn).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return [name for name in self.static_argnames if takes_any or name in parameters]

    def public_methods(self, kind: type) -> tuple[str, ...]:
        """The methods of a class that a user may name: not private, and not those that every module has."""
        names = [n for n in dir(kind) if not n.startswith("_") and not hasattr(self.base, n)]
        return methods_of(kind, ["__call__", *names])

    def check_found(self, met: Collection[Selector], called: Mapping[str, Collection[str]], where: str) -> None:
        """Raises RematError for selectors that no layer was met for.

        Args:
            met: the selectors of the layers met.
            called: the classes inside the model, each with those methods that were called or that it has.
            where: what messages call the model.
        """
        for selector in self.selectors:
            if selector in met:
                continue
            name = selector if isinstance(selector, str) else selector.__name__
            same = [k for k in called if k == name or (isinstance(selector, str) and _means(selector, object, (k,)))]
            if same:
                there = sorted({method for kind in same for method in called[kind]})
                raise RematError(
                    f"remat_layers covers {', '.join(self.methods)} of {', '.join(same)}, but {where} has only"
                    f" {', '.join(there) or 'no method'} of it. Name what it calls in methods=."
                )
            raise RematError(
                f"remat_layers found no layer of class {name!r} inside {where} (classes there:"
                f" {', '.join(sorted(called)) or 'none'}).{near_matches(name, called)}"
            )

    def check_kinds(self, kinds: Collection[type]) -> None:
        """Raises RematError for a method that no layer has, and ArgumentError for a static argument that none takes."""
        for name in self.methods:
            if not any(methods_of(kind, (name,)) for kind in kinds):
                known = {m for kind in kinds for m in self.public_methods(kind)}
                raise RematError(
                    f"methods has {name!r}, but {', '.join(sorted(k.__name__ for k in kinds))} has no such method"
                    f" (methods: {', '.join(sorted(known)) or 'none'}).{near_matches(name, known)}"
                )
        functions = [getattr(kind, method) for kind in kinds for method in methods_of(kind, self.methods)]
        for name in self.static_argnames:
            if not any(name in self.static_names(fn) for fn in functions):
                arguments = {n for fn in functions for n in inspect.signature(fn).parameters} - {"self"}
                raise ArgumentError(
                    f"static_argnames has {name!r}, which is no argument of {', '.join(self.methods)} of"
                    f" {', '.join(sorted(k.__name__ for k in kinds))} (arguments:"
                    f" {', '.join(sorted(arguments)) or 'none'}).{near_matches(name, arguments)}"
                )


def methods_of(kind: type, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names that are methods of a class. Not by getattr, which finds the metaclass's `__call__`."""
    found = {n: f for base in reversed(kind.__mro__) for n, f in vars(base).items()}
    return tuple(n for n in names if is_method(found.get(n)))


def is_method(attribute: Any) -> bool:
    """Whether an attribute of a class is a method: a function, or what a transform such as `nnx.jit` made of one."""
    return callable(attribute) and hasattr(attribute, "__get__") and not inspect.isclass(attribute)


def _means(selector: Selector, kind: type, names: Iterable[str]) -> bool:
    if isinstance(selector, str):
        parts = tuple(map(canonical, split(selector)))
        return any(matches_any(parts, name) for name in names)
    return issubclass(kind, selector)
