"""The memory of one block's backward pass: what is alive at once while it runs again and is differentiated.

Operations run in program order. What a compiler fuses into its readers never stands in memory: reading it is reading
what it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat_kit._plan.graph import MOST_FUSED, Graph, fused_values


def working_bytes(graph: Graph, again: Sequence[int], kept: frozenset[int]) -> int:
    """The most bytes alive in the backward pass of a block, besides what was kept for it.

    Args:
      again: the forward operations that run again, in order.
      kept: values (roots of memory) that are kept.
    """
    values = graph.values
    order = [*again, *range(graph.forward, len(graph.ops))]
    fused = fused_values([graph.ops[n] for n in order], graph.rates)
    behind: dict[int, tuple[int, ...]] = {}  # for a value that is not in memory, what it is computed from
    made: dict[int, int] = {values[v].root: 0 for v in graph.cotangents}
    last: dict[int, int] = dict.fromkeys(made, 0)

    def sources(v: int) -> tuple[int, ...]:
        root = values[v].root
        return behind.get(root, (root,))

    for at, number in enumerate(order):
        op = graph.ops[number]
        reads = tuple(dict.fromkeys(s for r in op.reads for s in sources(r)))
        for s in reads:
            last[s] = at
        for v in op.writes:
            root = values[v].root
            if root != v or root in kept or root in graph.arguments:
                continue
            if v in fused and len(reads) <= MOST_FUSED:
                behind[v] = reads
            else:
                made[v] = at
                last.setdefault(v, at)
    for v in graph.carried:  # they leave the block
        for s in sources(v):
            last[s] = len(order)
    change = [0] * (len(order) + 2)
    for v, at in made.items():
        change[at] += values[v].kept_bytes if v in graph.stacked else values[v].bytes
        change[last[v] + 1] -= values[v].kept_bytes if v in graph.stacked else values[v].bytes
    most = now = 0
    for c in change:
        now += c
        most = max(most, now)
    return most
