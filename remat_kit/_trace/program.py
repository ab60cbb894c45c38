"""A traced program as data: its blocks and its values, with bytes, FLOPs and trip counts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from remat_kit._html_view import HtmlView
from remat_kit._trace import blocks, cost, default, jaxprs, marks
from remat_kit._trace.blocks import Candidate
from remat_kit._trace.holders import Holders
from remat_kit._trace.jaxprs import CallKind, Literal, Var
from remat_kit._trace.provenance import identical
from remat_kit._trace.tracing import Traced

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Value:
    """One value that a program computes.

    Attributes:
      names: its checkpoint names, in program order.
      op: the primitive that produces it.
      shape, dtype: of one run; inside a loop, of one iteration.
      bytes: of all runs together (trip counts included).
      trips: how often it is computed: the product of the lengths of the scans around it.
      flops: FLOPs of the equation that produces it, trip counts included (for an equation with several
        results, on the first of them).
      path: module path, or the `jax.named_scope` stack.
      source: the user's source line, ``"model.py:41 (attention)"``.
      block: path of the innermost block that holds it, or ``""``.
    """

    names: tuple[str, ...]
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trips: int
    flops: int
    path: str
    source: str
    block: str


@dataclasses.dataclass(frozen=True)
class Block:
    """A region that can be rematerialized as one unit.

    Attributes:
      path: its name, as `apply` takes it.
      kind: "module" (a module call or marked function), "scan" (its body), "checkpoint" (an existing region),
        "segment" or "whole".
      trips: iterations, where it is the body of a scan; else 1.
      runs: how often it runs in one run of the program.
      flops: FLOPs of all its runs.
      bytes: bytes of the values computed in it, all runs together.
      input_bytes: bytes of what it reads from outside in one run: the least that remat keeps for it.
      parent: path of the block around it, or ``""``.
      default: whether it is one of the blocks taken where the user names none.
    """

    path: str
    kind: str
    trips: int
    runs: int
    flops: int
    bytes: int
    input_bytes: int
    parent: str
    default: bool


@dataclasses.dataclass(frozen=True)
class Program(HtmlView):
    """What a function computes, before differentiation. Every figure is *predicted* from the jaxpr.

    Attributes:
      blocks: all blocks, outer ones before those inside them.
      values: all values, in program order; those of nested programs included.
      flops: FLOPs of one run, trip counts included; `exact` says whether every trip count was known.
      bytes: operands and results of all equations: the memory traffic without fusion.
    """

    blocks: tuple[Block, ...]
    values: tuple[Value, ...]
    flops: int
    bytes: int
    exact: bool

    @property
    def default_blocks(self) -> tuple[Block, ...]:
        """The blocks that a policy is applied to where the user names none."""
        return tuple(b for b in self.blocks if b.default)

    @property
    def names(self) -> tuple[str, ...]:
        """All checkpoint names in the program, in program order."""
        return tuple(dict.fromkeys(n for v in self.values for n in v.names))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version."""
        return {
            "schema": SCHEMA,
            "figures": "predicted",
            "flops": self.flops,
            "bytes": self.bytes,
            "exact": self.exact,
            "blocks": [dataclasses.asdict(b) for b in self.blocks],
            "values": [{**dataclasses.asdict(v), "names": list(v.names), "shape": list(v.shape)} for v in self.values],
        }

    def __str__(self) -> str:
        from remat_kit._show.program import program_to_str

        return program_to_str(self)


def read(traced: Traced) -> Program:
    """Reads a traced function."""
    candidates = blocks.find(traced.jaxpr)
    chosen = default.default_blocks(traced, candidates)
    known = list(dict.fromkeys((*candidates, *chosen)))
    values = tuple(_values(traced.jaxpr, known))
    total = cost.program_cost(traced.jaxpr)
    held, defaults = _held_bytes(values, known), set(chosen)
    return Program(
        blocks=tuple(_block(c, held[c], c in defaults) for c in known),
        values=values,
        flops=total.flops,
        bytes=total.bytes,
        exact=total.exact,
    )


def _held_bytes(values: Sequence[Value], known: Sequence[Candidate]) -> dict[Candidate, int]:
    """Bytes of the values in each block, those of the blocks inside it included."""
    sums: dict[str, int] = {}
    for v in values:
        sums[v.block] = sums.get(v.block, 0) + v.bytes
    around: dict[str, set[Candidate]] = {}  # a region that fills the body of a scan shares its path
    for c in known:
        around.setdefault(c.path, set()).update((c, *c.ancestors()))
    held = dict.fromkeys(known, 0)
    for path, blocks_around in around.items():
        for c in blocks_around:
            held[c] += sums.get(path, 0)
    return held


def _block(c: Candidate, held_bytes: int, is_default: bool) -> Block:
    eqns = [c.owner.eqns[i] for i in c.eqns]
    made = {v for e in eqns for v in e.outvars}
    reads = {v for e in eqns for v in e.invars if isinstance(v, Var)} - made
    around = c.runs // max(c.trips, 1)  # the equations' own cost counts their trips already
    input_bytes = sum(jaxprs.nbytes(v.aval) for v in reads)
    if c.kind == "scan":
        (call,) = jaxprs.calls(eqns[0])
        input_bytes = sum(jaxprs.nbytes(v.aval) for v in jaxprs.opened(call.jaxpr).invars)
    return Block(
        path=c.path,
        kind=c.kind,
        trips=c.trips,
        runs=c.runs,
        flops=sum(cost.eqn_flops(e) for e in eqns) * around,
        bytes=held_bytes,
        input_bytes=input_bytes,
        parent="" if c.parent is None else c.parent.path,
        default=is_default,
    )


def _values(jaxpr: Any, known: Sequence[Candidate]) -> list[Value]:
    found: list[Value] = []
    holders = Holders(known)

    def visit(program: Any, chain: tuple[Any, ...], prefix: tuple[str, ...], trips: int) -> None:
        owner = jaxprs.opened(program)
        alike = identical(owner)
        names: dict[Any, list[str]] = {}
        for e in owner.eqns:
            if (n := jaxprs.name_of(e)) is not None and not isinstance(e.invars[0], Literal):
                for v in alike[e.invars[0]]:
                    names.setdefault(v, []).append(n)
        for e in owner.eqns:
            here = (*chain, e)
            called, rest = marks.split(jaxprs.scopes(e))
            path = (*prefix, *map(marks.name, called))
            nested = [c for c in jaxprs.calls(e) if c.rewritable or c.kind is CallKind.CUSTOM]
            for call in nested:
                visit(call.jaxpr, here, (*path, *rest), trips * call.trips)
            if nested:
                continue
            inside = holders.of(here)
            block = max(inside, key=lambda c: c.depth).path if inside else ""
            file, line, function = jaxprs.source_line(e)
            for i, v in enumerate(e.outvars):
                found.append(
                    Value(
                        names=tuple(dict.fromkeys(names.get(v, ()))),
                        op=jaxprs.op_of(e),
                        shape=tuple(getattr(v.aval, "shape", ())),
                        dtype=str(getattr(v.aval, "dtype", v.aval)),
                        bytes=jaxprs.nbytes(v.aval) * trips,
                        trips=trips,
                        flops=0 if i else cost.eqn_flops(e) * trips,
                        path="/".join((*path, *rest)),
                        source=f"{os.path.basename(file)}:{line} ({function})" if file else "",
                        block=block,
                    )
                )

    visit(jaxpr, (), (), 1)
    return found
