"""One way to treat a block: what is saved, offloaded and recomputed, and what that takes. Exact for a given choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from remat_kit._plan.graph import Graph, makers
from remat_kit._plan.memory import working_bytes


@dataclasses.dataclass(frozen=True)
class Point:
    """A choice for one block, with what it takes in one run of it.

    Attributes:
      remat: whether the block is rematerialized at all; without, all that autodiff keeps is saved.
      saved, offloaded: labels of values, in program order.
      recomputed: indices of the forward operations that run again.
      kept_bytes: kept on the device from the forward to the backward pass, inputs included.
      fixed_bytes: those of `kept_bytes` that all iterations share, where the block is the body of a scan.
      host_bytes: kept in host memory.
      working_bytes: the most that its backward pass holds besides what is kept.
      flops, seconds: of what runs again.
      keeping_seconds: what it takes to write what is kept where it is kept.
      bound: no choice that keeps as few bytes costs less than this (in what is minimized); for solved points.
    """

    remat: bool
    saved: tuple[str, ...]
    offloaded: tuple[str, ...]
    recomputed: tuple[int, ...]
    kept_bytes: int
    fixed_bytes: int
    host_bytes: int
    working_bytes: int
    flops: int
    seconds: float
    keeping_seconds: float
    bound: float = 0.0

    def cost(self, minimize: str) -> float:
        """What is minimized: ``"time"`` or ``"flops"``."""
        return self.seconds + self.keeping_seconds if minimize == "time" else float(self.flops)


def without_remat(graph: Graph) -> Point:
    """Everything that autodiff keeps is kept; see `Graph.kept_without_remat`."""
    kept = graph.kept_without_remat
    fixed = sum(graph.values[v].kept_bytes for v in kept if not graph.varying[v])
    total = sum(graph.values[v].kept_bytes for v in kept)
    again = () if graph.loop else _between(graph, kept)
    held = frozenset(kept) if again else frozenset(graph.values[v].root for v in graph.residuals)
    return Point(
        False, (), (), (), total, fixed, 0, working_bytes(graph, again, held), 0, 0.0, graph.copy_seconds(total)
    )


def _between(graph: Graph, kept: Sequence[int]) -> tuple[int, ...]:
    """The forward operations between what is kept and what the backward pass reads."""
    roots = set(kept)
    again = makers(graph.values, graph.ops, graph.residuals, lambda v: graph.values[v].root in roots)
    return tuple(sorted(again))


def choose(graph: Graph, saved: Iterable[str], offloaded: Iterable[str] = ()) -> Point:
    """The point of a choice of labels; those that the backward pass does not need are left out of it."""
    wanted = _actions(graph, saved, offloaded)
    again, used, given = _traced(graph, wanted)
    kept = [c for c in graph.choices if c.label in used and wanted[c.label] == "save"]
    hosted = [c for c in graph.choices if c.label in used and wanted[c.label] == "offload"]
    roots = dict.fromkeys(graph.values[v].root for v in given)
    roots = {r: None for r in roots if r not in graph.arguments}
    total = sum(c.bytes for c in kept) + sum(graph.values[r].kept_bytes for r in roots)
    fixed = sum(graph.values[r].kept_bytes for r in roots if not graph.varying[r])
    held = {graph.values[v].root for c in kept for o in c.ops for v in graph.ops[o].writes} | set(roots)
    order = tuple(sorted(again))
    return Point(
        True,
        tuple(c.label for c in kept),
        tuple(c.label for c in hosted),
        order,
        total,
        fixed,
        sum(c.bytes for c in hosted),
        working_bytes(graph, order, frozenset(held)),
        sum(graph.ops[o].again_flops for o in order),
        sum(graph.ops[o].again_seconds for o in order),
        sum(c.seconds for c in (*kept, *hosted)) + graph.copy_seconds(sum(graph.values[r].kept_bytes for r in roots)),
    )


def trimmed(graph: Graph, saved: Sequence[str], offloaded: Sequence[str], minimize: str) -> Point:
    """The point of a choice without those labels that make nothing cheaper, as a solver's tolerance lets through."""
    wanted = _actions(graph, saved, offloaded)
    sizes = {c.label: c.bytes for c in graph.choices}
    seconds = {c.label: c.seconds for c in graph.choices}

    def cost(wanted: dict[str, str]) -> tuple[float, int]:
        again, used, given = _traced(graph, wanted)
        roots = {graph.values[v].root for v in given} - graph.arguments
        inputs = sum(graph.values[r].kept_bytes for r in roots)
        kept = inputs + sum(sizes[k] for k in used if wanted[k] == "save")
        if minimize == "flops":
            return float(sum(graph.ops[o].again_flops for o in again)), kept
        keeping = sum(seconds[k] for k in used) + graph.copy_seconds(inputs)
        return sum(graph.ops[o].again_seconds for o in again) + keeping, kept

    best = cost(wanted)
    for label in sorted(wanted, key=lambda k: (sizes[k], k)):
        less = {k: a for k, a in wanted.items() if k != label}
        found = cost(less)
        if found[0] <= best[0] * (1 + _NOTHING) and found[1] <= best[1]:
            wanted, best = less, min(found, best)
    return choose(
        graph,
        [k for k, a in wanted.items() if a == "save"],
        [k for k, a in wanted.items() if a == "offload"],
    )


_NOTHING = 1e-9


def _actions(graph: Graph, saved: Iterable[str], offloaded: Iterable[str]) -> dict[str, str]:
    keep, host = set(saved), set(offloaded)
    wanted = {c.label: "save" for c in graph.choices if c.label in keep}
    return wanted | {c.label: "offload" for c in graph.choices if c.label in host}


def _traced(graph: Graph, wanted: dict[str, str]) -> tuple[set[int], set[str], set[int]]:
    """What runs again to have the residuals, which labels of those kept that reads, and which inputs."""
    named = {o: c.label for c in graph.choices if c.label in wanted for o in c.ops}
    again: set[int] = set()
    used: set[str] = set()
    given: set[int] = set()
    todo = list(graph.residuals)
    seen = set(todo)
    while todo:
        v = todo.pop()
        maker = graph.values[v].maker
        if maker < 0:
            if v not in graph.arguments:
                given.add(v)
        elif maker in named:
            used.add(named[maker])
        elif maker not in again:
            again.add(maker)
            for r in graph.ops[maker].reads:
                if r not in seen:
                    seen.add(r)
                    todo.append(r)
    return again, used, given
