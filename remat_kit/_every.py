"""every: a policy for every second, third, ... block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from remat_kit._errors import RematError
from remat_kit._numbers import whole
from remat_kit._policy import Policy
from remat_kit._policy import policy as as_policy
from remat_kit._trace import blocks
from remat_kit._trace.blocks import Candidate


@dataclasses.dataclass(frozen=True)
class Every:
    """A policy for one block of several, made by `every`.

    Attributes:
      step: of how many blocks one gets the policy; the others keep everything.
      policy: the policy.
    """

    step: int
    policy: Policy

    def __str__(self) -> str:
        return f"every {self.step}: {self.policy.name or self.policy}"


def every(step: int, policy: Any) -> Every:
    """A policy for the first of each `step` blocks, in the order in which they run; the others go without remat.

        rk.apply(loss, rk.every(2, "full"))
        rk.apply(loss, {"encoder/*": rk.every(3, "full"), "decoder/*": "dots"})

    Of a scan, whose iterations are one program, the first ``1 / step`` of the iterations get it: as many as if they
    alternated, and the scan runs in two parts. That costs slices of what it scans over, about one copy of its weights.

    Raises:
      RematError: for a step that is no whole number from 1 on, or an unknown policy.
    """
    count = whole(step)
    if count is None or count < 1:
        raise RematError(f"every(step, policy) takes a whole number of blocks, such as 2, got {step!r}.")
    return Every(count, as_policy(policy))


_NONE = Policy(remat=False)


def thinned(taken: Sequence[tuple[Candidate, Policy | Every]]) -> list[tuple[Candidate, Policy]]:
    """Blocks each with its own policy, from blocks that may share an `Every`."""
    found: list[tuple[Candidate, Policy]] = []
    seen: dict[int, int] = {}
    for block, p in taken:
        if isinstance(p, Policy):
            found.append((block, p))
        elif block.kind == "scan" and block.trips > 1 and p.step > 1:
            first, last = block.span or (0, block.trips)
            middle = first - (first - last) // p.step  # rounded up
            for part, its in (((first, middle), p.policy), ((middle, last), _NONE)):
                piece = blocks.part_of(block, part)
                assert piece is not None
                found.append((piece, its))
        else:
            n = seen[id(p)] = seen.get(id(p), -1) + 1
            found.append((block, p.policy if n % p.step == 0 else _NONE))
    return found
