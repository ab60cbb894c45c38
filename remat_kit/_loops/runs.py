"""Runs of steps with one policy each, from a policy for each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from remat_kit._errors import RematError
from remat_kit._policy import policy


class Run(NamedTuple):
    """Steps from `first` to before `last`, by where their inputs lie, and their policy."""

    first: int
    last: int
    policy: Any


def runs(policies: Sequence[Any] | Mapping[range, Any], length: int) -> list[Run]:
    """Reads policies for steps.

    Args:
      policies: one for each of `length` steps, or by ranges that together cover each step once.

    Raises:
      RematError: for steps without a policy or with two, and for steps that there are not.
    """
    if isinstance(policies, Mapping):
        of_step = _by_range(policies, length)
    else:
        of_step = [policy("full" if p is None else p) for p in policies]
        if len(of_step) != length:
            raise RematError(f"policy= has {len(of_step)} entries for {length} steps: give one for each.")
    groups = [(p, list(steps)) for p, steps in itertools.groupby(range(length), lambda i: of_step[i])]
    return [Run(steps[0], steps[-1] + 1, p) for p, steps in groups]


def _by_range(policies: Mapping[range, Any], length: int) -> list[Any]:
    of_step: list[Any] = [None] * length
    for steps, spec in policies.items():
        if not isinstance(steps, range):
            raise RematError(f"policies for some steps go by ranges, such as {{range(0, 4): 'full'}}, got {steps!r}.")
        chosen = policy("full" if spec is None else spec)
        for i in steps:
            if not 0 <= i < length:
                raise RematError(f"policy= speaks of step {i}, and the scan has steps 0 to {length - 1}.")
            if of_step[i] is not None:
                raise RematError(f"policy= has two entries for step {i}.")
            of_step[i] = chosen
    missing = [i for i, p in enumerate(of_step) if p is None]
    if missing:
        raise RematError(
            f"policy= says nothing of step{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}"
            f"{' ...' * (len(missing) > 8)} of {length}: give each a policy ('none' for no remat)."
        )
    return of_step


def in_parts(loop: Callable[..., Any], init: Any, xs: Any, spans: Sequence[Run], reverse: bool) -> tuple[Any, Any]:
    """Runs a scan in several parts.

    Args:
      loop: carry, inputs of a part and the part -> carry, outputs of the part.

    Returns:
      The last carry and the outputs of all steps, in the order of the inputs.
    """
    carry, outputs = init, []
    for run in reversed(spans) if reverse else spans:
        part = jax.tree.map(lambda x, run=run: lax.slice_in_dim(x, run.first, run.last), xs)
        carry, ys = loop(carry, part, run)
        outputs.append(ys)
    ordered = outputs[::-1] if reverse else outputs
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered)
