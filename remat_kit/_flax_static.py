"""Arguments and results of a Flax method or function: which leaves are arrays, and which are declared static.

Only arrays enter and leave a rematerialized region as traced values. Every other leaf (flags, strings, Python numbers,
functions) stays what it is, as it does without remat, and needs no declaration; a declared static argument is checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from remat_kit._errors import near_matches
from remat_kit._static_args import ArgumentError, read_names, read_positions
from remat_kit._trace import jaxprs
from remat_kit._trace.inputs import Static
from remat_kit._trace.inputs import unseal as unseal

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced: arrays and mutable references are, NumPy and Python scalars are not."""
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and jaxprs.is_ref(jaxprs.aval_of(leaf))


def split_arrays(tree: Any) -> tuple[dict[int, Any], Callable[[Mapping[int, Any]], Any]]:
    """Splits a pytree into its array leaves and a function that puts leaves of those kinds back in their places."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if is_array(leaf)}

    def rebuild(values: Mapping[int, Any]) -> Any:
        return treedef.unflatten([values.get(i, leaf) for i, leaf in enumerate(leaves)])

    return arrays, rebuild


def seal(tree: Any) -> Any:
    """Keeps the leaves of a region's result that are no arrays from being traced; `unseal` undoes it outside."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else Static(leaf), tree)


@dataclass(frozen=True)
class DeclaredStatic:
    """The declared static arguments of one function, found in its signature.

    Attributes:
        owner: how messages call the function.
        signature: its signature less the skipped parameters, or None where nothing is declared.
        names: parameters declared static.
        extra: positions declared static that fall into ``*args``.
    """

    owner: str
    signature: inspect.Signature | None = None
    names: frozenset[str] = field(default_factory=frozenset)
    extra: frozenset[int] = field(default_factory=frozenset)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises ArgumentError if an argument declared static holds an array."""
        if self.signature is None:
            return
        try:
            bound = self.signature.bind(*args, **kwargs).arguments
        except TypeError:
            return  # the call itself reports the wrong arguments, in the words of the user's function
        found = {name: bound[name] for name in self.names if name in bound}
        for parameter in self.signature.parameters.values():  # static names that the function takes in **kwargs
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                inside = bound.get(parameter.name, {})
                found |= {name: inside[name] for name in self.names if name in inside}
        found |= {f"argument {i}": args[i] for i in self.extra if i < len(args)}
        for name, value in found.items():
            for leaf in jax.tree.leaves(value):
                if is_array(leaf):
                    raise ArgumentError(
                        f"{self.owner}: {name!r} is declared static, but this call passes an array for it"
                        f" ({leaf.dtype}{list(leaf.shape)}). Static arguments are Python values such as True or 'mean';"
                        f" leave arrays out of static_argnames and of static_argnums, which counts from the caller's"
                        f" first argument."
                    )


def resolve_static(
    functions: Mapping[str, Callable],
    argnums: int | Iterable[int],
    argnames: str | Iterable[str],
    *,
    skip: int = 1,
) -> dict[str, DeclaredStatic]:
    """Finds declared static arguments in the signatures of functions.

    Args:
        functions: what messages call each function -> the function.
        argnums: positions as the caller counts them, after the skipped parameters; -1 is the last one.
        argnames: parameter names.
        skip: leading parameters that are not the caller's: 1 for ``self``.

    Returns:
        For each function its static arguments. A position or name need only exist in one of them.

    Raises:
        ArgumentError: a name or position that no function has.
    """
    numbers, names = read_positions("static_argnums", argnums), read_names("static_argnames", argnames)
    if not numbers and not names:
        return {owner: DeclaredStatic(owner) for owner in functions}
    signatures = {owner: _signature(function, skip) for owner, function in functions.items()}
    found = {owner: (set[str](), set[int]()) for owner in functions}
    for name in names:
        _assign_name(name, signatures, found)
    for number in numbers:
        _assign_number(number, signatures, found)
    return {
        owner: DeclaredStatic(owner, signatures[owner], frozenset(named), frozenset(extra))
        for owner, (named, extra) in found.items()
    }


def _signature(function: Callable, skip: int) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind in _POSITIONAL:
        parameters = parameters[skip:]
    return signature.replace(parameters=parameters)


def _assign_name(name: str, signatures: Mapping[str, inspect.Signature], found: dict) -> None:
    known: set[str] = set()
    for owner, signature in signatures.items():
        parameters = signature.parameters
        known |= set(parameters)
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if name in parameters or takes_any:
            found[owner][0].add(name)
    if not any(name in named for named, _ in found.values()):
        raise ArgumentError(
            f"static_argnames has {name!r}, which is no argument of {', '.join(signatures)}"
            f" (arguments: {', '.join(sorted(known)) or 'none'}).{near_matches(name, known)}"
        )


def _assign_number(number: int, signatures: Mapping[str, inspect.Signature], found: dict) -> None:
    listing = []
    hit = False
    for owner, signature in signatures.items():
        positional = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]
        takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values())
        listing.append(f"{owner}({', '.join(positional + (['*args'] if takes_any else []))})")
        if -len(positional) <= number < len(positional) and not (takes_any and number < 0):
            found[owner][0].add(positional[number])
            hit = True
        elif takes_any and number >= 0:
            found[owner][1].add(number)
            hit = True
    if not hit:
        raise ArgumentError(
            f"static_argnums has {number}, which is no position in {', '.join(listing)}. Positions count the caller's"
            f" arguments (not self) from 0, and -1 is the last. static_argnames says the same by name."
        )
