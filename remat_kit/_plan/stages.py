"""A program as the planner sees it: its blocks in the order in which they run, and the memory that no block holds.

Between the blocks of the default choice lie the rest of the program (embedding, head, loss): blocks of their own here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from remat_kit import _rewrite
from remat_kit._errors import RematError
from remat_kit._loss import Loss
from remat_kit._plan import flow
from remat_kit._plan.graph import Graph
from remat_kit._plan.opening import NotDifferentiated, build
from remat_kit._plan.rates import Rates
from remat_kit._trace import blocks, default, jaxprs, marks, survey
from remat_kit._trace.blocks import Candidate
from remat_kit._trace.linearized import Linearized, linearize


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One block of a program.

    Attributes:
      block: where it stands.
      graph: what it computes; the same object for equal blocks; None where it carries no derivative or cannot be
        rematerialized.
      trips: how often it runs for each run of its program: the length of a scan.
      around: how often that program runs.
      slice_bytes: of what a scan takes a slice of in each iteration (stacked parameters, mostly); 0 for all others.
      note: why it cannot be rematerialized, if so; empty too where there is nothing to keep.
    """

    block: Candidate
    graph: Graph | None
    trips: int
    around: int
    slice_bytes: int = 0
    note: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """A program in stages.

    Attributes:
      stages: in the order in which they run.
      argument_bytes, output_bytes: of the step that computes the value and the gradient.
      other_bytes: residuals outside all stages.
    """

    stages: tuple[Stage, ...]
    argument_bytes: int
    output_bytes: int
    other_bytes: int


def stages(loss: Loss, local: Sequence[int], rates: Rates, *, by_name: bool = False) -> Stages:
    """Divides a loss into stages and opens them.

    Args:
      local: bytes on one device of each input.
      by_name: as in `opening.build`.

    Raises:
      RematError: where reverse mode cannot differentiate the loss.
    """
    jaxpr = loss.traced.jaxpr
    candidates = blocks.find(jaxpr)
    lin = linearize(jaxpr, loss.differentiated, loss.outputs, without_remat=True, backward=False)
    chosen = blocks.choose(jaxpr, candidates, default.kept(lin))
    chosen = sorted([*chosen, *blocks.rest(chosen, candidates)], key=_order)
    opener = _Opener(jaxpr, loss.differentiated, rates, by_name)
    found = tuple(opener.stage(c) for c in chosen)
    gradients = sum(n for n, d in zip(local, loss.differentiated, strict=True) if d)
    results = sum(jaxprs.nbytes(v.aval) for v in jaxprs.opened(jaxpr).outvars)
    opened = [s.block for s in found if s.graph is not None]
    return Stages(found, sum(local), gradients + results, _other_bytes(lin, opened))


def _order(c: Candidate) -> tuple[int, ...]:
    return (*(i for i, _ in c.site), min(c.eqns, default=0))


def _other_bytes(lin: Linearized, chosen: Sequence[Candidate]) -> int:
    """Bytes of residuals that no block makes. What autodiff moves out of a loop is still its block's."""
    inside: set[int] = set()
    for c in chosen:
        for i in c.eqns:
            eqn = c.owner.eqns[i]
            inside.add(id(eqn))
            for call in jaxprs.calls(eqn):
                inside.update(id(e) for program in survey.programs(call.jaxpr) for e in program.eqns)
    return sum(n for chain, n in default.kept(lin) if not chain or id(chain[-1]) not in inside)


class _Opener:
    """Opens blocks, equal ones once."""

    def __init__(self, jaxpr: Any, differentiated: Sequence[bool], rates: Rates, by_name: bool) -> None:
        self.active = flow.active(jaxpr, differentiated)
        self.given = flow.given(jaxpr)
        self.rates, self.by_name = rates, by_name
        self.opened: dict[Any, tuple[Graph | None, str]] = {}
        self.kept: dict[int, Any] = {}

    def stage(self, c: Candidate) -> Stage:
        loop: int | None = None
        sliced = 0
        if c.kind in ("scan", "checkpoint"):
            (call,) = jaxprs.calls(c.owner.eqns[c.eqns[0]])
            program = call.jaxpr
            invars = jaxprs.opened(program).invars
            if c.kind == "scan":
                loop = call.num_consts
                sliced = c.trips * sum(jaxprs.nbytes(v.aval) for v in invars[loop + call.num_carry :])
        else:
            program, invars, _, _ = _rewrite.outline(c.owner, c.eqns, c.marks)
        if any(e.primitive.name == "shard_map" for e in c.outer):
            return Stage(c, None, c.trips, c.runs // max(c.trips, 1), sliced, "it lies inside a shard_map.")
        active = tuple(self.active.get(v, False) for v in invars)
        arguments = tuple(self.arguments(c, invars))
        key = (survey.fingerprint(program, self.kept, marks.unnumbered), active, arguments, loop)
        if key not in self.opened:
            self.opened[key] = self.open(program, active, arguments, loop)
        found, note = self.opened[key]
        return Stage(c, found, c.trips, c.runs // max(c.trips, 1), sliced, note)

    def arguments(self, c: Candidate, invars: Sequence[Any]) -> list[bool]:
        """For each input of a block whether it is there anyway.

        Asked where the block is called: a program that is called twice may be given an argument only once.
        """
        if c.kind not in ("scan", "checkpoint"):
            return [self.given.get(v, False) for v in invars]
        eqn = c.owner.eqns[c.eqns[0]]
        (call,) = jaxprs.calls(eqn)
        outer = [eqn.invars[o] for o in call.operands]
        here = [isinstance(v, jaxprs.Literal) or self.given.get(v, False) for v in outer]
        carried = range(call.num_consts, call.num_consts + call.num_carry)
        return [
            self.given.get(v, False) if i in carried else h for i, (v, h) in enumerate(zip(invars, here, strict=True))
        ]

    def open(
        self, program: Any, active: Sequence[bool], arguments: Sequence[bool], loop: int | None
    ) -> tuple[Graph | None, str]:
        try:
            _rewrite.check_effects(program)
        except RematError as error:
            return None, str(error)
        if any(jaxprs.is_ref(v.aval) for p in survey.programs(program) for e in p.eqns for v in e.outvars):
            return None, "it makes a mutable reference."
        if not jaxprs.replays(program):
            return None, "recomputing it would repeat effects that JAX does not repeat (io_callback)."
        try:
            return build(program, active, arguments, self.rates, loop=loop, by_name=self.by_name), ""
        except NotDifferentiated:
            return None, ""
