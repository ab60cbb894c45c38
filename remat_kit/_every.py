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
    """A policy for one block of several.

    Attributes:
      step: of how many blocks one gets the policy; the others keep everything.
      policy: the policy.
    """

    step: int
    policy: Policy

    @classmethod
    def of(cls, spec: Any) -> Every:
        """Reads what goes to blocks: what `every` made, or a policy, which goes to each of them."""
        return spec if isinstance(spec, Every) else cls(1, as_policy(spec))

    def __str__(self) -> str:
        title = self.policy.name or str(self.policy)
        return title if self.step == 1 else f"every {self.step}: {title}"


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


def thinned(taken: Sequence[tuple[Candidate, Every]]) -> list[tuple[Candidate, Policy]]:
    """Blocks each with its own policy. Those that share an `Every` are counted together."""
    found: list[tuple[Candidate, Policy]] = []
    seen: dict[int, int] = {}
    for block, every in taken:
        if block.kind == "scan" and block.trips > 1 and every.step > 1:
            first, last = block.span or (0, block.trips)
            middle = first - (first - last) // every.step  # rounded up
            for part, its in (((first, middle), every.policy), ((middle, last), _NONE)):
                piece = blocks.part_of(block, part)
                assert piece is not None
                found.append((piece, its))
        else:
            n = seen[id(every)] = seen.get(id(every), -1) + 1
            found.append((block, _NONE if n % every.step else every.policy))
    return found
