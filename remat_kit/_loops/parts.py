"""A scan in parts: runs of steps with one policy each, and segments that are regions of their own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from remat_kit._errors import RematError
from remat_kit._override import Wanted
from remat_kit._policy import offload, policy
from remat_kit._trace import jaxprs
from remat_kit._trace.jaxprs import JaxprEqn
from remat_kit._wrap import remat


class Run(NamedTuple):
    """Steps from `first` to before `last`, by where their inputs lie, and their policy.

    Attributes:
      segment: of how many steps each segment is that is a region of its own; None if there are none.
    """

    first: int
    last: int
    policy: Any
    segment: int | None = None


CARRY = "scan_carry"  # the checkpoint name of a carry that is offloaded
_OFFLOADED = offload(name=CARRY)


@dataclasses.dataclass(frozen=True)
class Body:
    """How the step of a scan is rematerialized.

    Attributes:
      prevent_cse, block: as in `remat`.
      offloads: whether the carry that it is given goes to the host.
    """

    prevent_cse: bool | None
    block: str | None
    offloads: bool

    def of(self, f: Callable[..., Any], policy: Any, unrolled: bool) -> Callable[..., Any]:
        """The step under a policy.

        Args:
          unrolled: whether no loop is left around it, where XLA could merge recomputation and forward pass.
        """
        chosen = Wanted.of(policy).policy
        cse = True if unrolled and self.prevent_cse is None else self.prevent_cse
        if not self.offloads:
            return (
                f
                if not chosen.remat and self.block is None
                else remat(f, policy=policy, prevent_cse=cse, block=self.block)
            )
        return remat(lambda c, x: f(named(c), x), policy=_OFFLOADED | chosen, prevent_cse=cse, block=self.block)


def named(carry: Any) -> Any:
    """Names the arrays of a carry that have a derivative. Scalars stay where they are."""
    return jax.tree.map(
        lambda x: checkpoint_name(x, CARRY) if jnp.ndim(x) and jaxprs.is_inexact(jax.typeof(x)) else x, carry
    )


def is_unrolled(length: int | None, unroll: Any) -> bool:
    """Whether XLA is given no loop: one iteration, or all of them in one."""
    return length is not None and (unroll is True or max(1, int(unroll)) >= length)


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


def in_parts(
    f: Callable[..., Any], init: Any, xs: Any, parts: Sequence[Run], eqn: JaxprEqn, body: Body, offloads: bool
) -> tuple[Any, Any]:
    """Runs a scan in several parts.

    Args:
      f: the step.
      eqn: the scan as it was traced, for its direction and how far it is unrolled.
      offloads: whether the carries between segments go to the host.

    Returns:
      The last carry and the outputs of all steps, in the order of the inputs.
    """
    reverse, unroll = eqn.params["reverse"], eqn.params["unroll"]

    def scan(step: Callable[..., Any], carry: Any, xs: Any, length: int) -> tuple[Any, Any]:
        return lax.scan(step, carry, xs, length=length, reverse=reverse, unroll=unroll)

    def part(carry: Any, xs: Any, run: Run) -> tuple[Any, Any]:
        length, size = run.last - run.first, run.segment
        if size is None:
            return scan(body.of(f, run.policy, is_unrolled(length, unroll)), carry, xs, length)
        step, count = body.of(f, run.policy, is_unrolled(size, unroll)), length // size
        segment = remat(
            lambda carry, xs: scan(step, named(carry) if offloads else carry, xs, size),
            policy=_OFFLOADED if offloads else None,
            prevent_cse=True if count == 1 else None,
        )
        folded = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[1:]), xs)
        carry, ys = lax.scan(segment, carry, folded, length=count, reverse=reverse)
        return carry, jax.tree.map(lambda y: y.reshape(length, *y.shape[2:]), ys)

    carry, outputs = init, []
    for run in reversed(parts) if reverse else parts:
        carry, ys = part(carry, jax.tree.map(lambda x, run=run: lax.slice_in_dim(x, run.first, run.last), xs), run)
        outputs.append(ys)
    ordered = outputs[::-1] if reverse else outputs
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered)
