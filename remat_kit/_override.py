"""override: other policies for marked blocks (``@rk.remat(block="mlp")``), for what is traced inside a `with`."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from remat_kit._errors import RematError, RematWarning, near_matches
from remat_kit._globs import matches
from remat_kit._policy import Policy
from remat_kit._policy import policy as as_policy
from remat_kit._units import printable


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A policy as a user gave it.

    Attributes:
      policy: the policy.
      strict: whether a name that the function does not have is an error. For a callable of JAX's it is a warning, since
        JAX passes over it.
    """

    policy: Policy
    strict: bool = True

    @classmethod
    def of(cls, spec: Any) -> Wanted:
        """Reads a policy; None means ``"full"``, as in `jax.checkpoint`."""
        if spec is None:
            return cls(Policy())
        return cls(as_policy(spec), strict=isinstance(spec, (str, Policy)))


# The overrides in force, the innermost first. JAX's caches look at it.
_Layer = tuple[tuple[str, Wanted], ...]
_layers: Any = jax.make_user_context(default_value=None)
_marked: set[str] = set()  # all blocks met so far, for messages
_matched: set[tuple[tuple[_Layer, ...], str]] = set()  # kept for good: a warm cache does not ask again


def _given(p: Any) -> Any:
    return as_policy(p) if p is None else p  # None is refused here: it means two things in JAX


@contextlib.contextmanager
def override(policies: Mapping[str, Any]) -> Iterator[None]:
    """Exchanges the policies of marked blocks (``@rk.remat(block="mlp")``) for what is traced inside.

    JAX's caches see it: a function compiled before is traced again. Overrides nest, the inner one wins.

    Args:
      policies: policies by globs on block names; the first match wins, ``"none"`` removes remat.

    Raises:
      RematError: for anything but a mapping of strings to policies.

    Warns:
      RematWarning: on leaving, for a glob that no marked block matched.
    """
    if not isinstance(policies, Mapping) or not policies:
        raise RematError(f"override takes a mapping of block globs to policies, got {policies!r}.")
    for glob in policies:
        if not isinstance(glob, str) or not glob:
            raise RematError(f"override: blocks are named by strings, got {glob!r}.")
        matches(glob, "", "/")  # a malformed glob is refused here
    layer = tuple((glob, Wanted.of(_given(p))) for glob, p in policies.items())
    layers = (layer, *(_layers.value or ()))
    with _layers(layers):
        yield
    for glob, _ in layer:
        if (layers, glob) not in _matched:
            known = sorted(_marked)
            warnings.warn(
                f"override: no marked block matched {glob!r}. Marked blocks so far: "
                f"{printable(', '.join(known)) or 'none'}.{near_matches(glob, known)}",
                RematWarning,
                stacklevel=3,
            )


def in_force(block: str | None, written: Wanted) -> Wanted:
    """The policy for a marked block: that of the innermost override that matches its name, else its own."""
    if block is None:
        return written
    _marked.add(block)
    layers: tuple[_Layer, ...] = _layers.value or ()
    found = []
    for i, layer in enumerate(layers):
        glob, wanted = next(((g, w) for g, w in layer if matches(g, block, "/")), ("", None))
        if wanted is not None:
            _matched.add((layers[i:], glob))
            found.append(wanted)
    return found[0] if found else written
