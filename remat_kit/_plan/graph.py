"""The dependency graph of one block: what autodiff computes forward and backward, with every nameable value named.

Nested programs are opened: the values inside `jit` and `scan` stand in one graph. Its recomputation is what
`jax.checkpoint` makes of the block: the forward equations that the residuals need, down to what is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from remat_kit._plan.rates import Rates
from remat_kit._policy import ValueFacts


@dataclasses.dataclass(eq=False)
class Value:
    """One value of a block.

    Attributes:
      bytes: of one run of the program that it stands in.
      trips: how many of it there are in one run of the block, where it is kept: the lengths of inner scans.
      maker: the index of the operation that makes it; -1 for an input of the block.
      root: the index of the value whose memory it shares (itself, where it shares none).
    """

    bytes: int
    trips: int
    maker: int
    root: int

    @property
    def kept_bytes(self) -> int:
        return self.bytes * self.trips


@dataclasses.dataclass(eq=False)
class Op:
    """One equation of a block.

    Attributes:
      op: its primitive.
      reads, writes: indices of values.
      flops: of one run of the block, inner trips included.
      moved, trips: bytes read and written without fusion; how often it runs in one run of the block.
      dtype: of its first operand.
      seconds: by the roofline, given what is fused; see `opening.time_ops`.
      label: of the value that it names; empty for all others.
      primal: whether the function itself needs it. What only its derivative needs (of the forward pass) runs once
        with remat and without: remat moves it to the backward pass.
      form: "alias" (no work), "elementwise", "product", "reduce" or "other".
    """

    op: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: int
    moved: int
    trips: int
    dtype: str
    label: str
    form: str
    seconds: float = 0.0
    primal: bool = True

    @property
    def again_flops(self) -> int:
        """FLOPs more in a step where it is recomputed."""
        return self.flops if self.primal else 0

    @property
    def again_seconds(self) -> float:
        """Seconds more in a step where it is recomputed."""
        return self.seconds if self.primal else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A value that can be saved or offloaded by its name.

    Attributes:
      label: what plans call it.
      seconds: what keeping it takes by the roofline: writing it where it would not be in memory otherwise, and in the
        body of a scan copying it into the array of all iterations.
      facts: what a policy may select it by.
      ops: the operations that name it (one, but for complex numbers and the results of a custom rule).
      bytes: what keeping it takes in one run of the block.
    """

    label: str
    facts: ValueFacts
    ops: tuple[int, ...]
    bytes: int
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """One block, opened.

    Attributes:
      values, ops: in program order; the operations up to `forward` are those of the forward pass.
      forward: the number of forward operations.
      residuals: values that the backward pass reads, inputs of the block included.
      arguments: values that are there anyway (parameters, data, and views of them): free to read again.
      choices: what can be saved or offloaded, in program order.
      decisions: operations whose results are choices (top-k, argmax, sort), where they are read by their names alone.
        Made again they could turn out otherwise, as compilers round intermediates differently in each place.
      constant: values that depend on no input.
      loop: whether the block is the body of a scan, whose residuals cross from one loop to another.
      varying: for each value whether it differs from one iteration of the scan to the next whose body the block is.
      cotangents: what the backward pass is given.
      carried: what it hands on to the block before: cotangents of inputs other than arguments.
      stacked: values in inner scans of which all iterations are in memory at once.
      rates: of the target.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    forward: int
    residuals: tuple[int, ...]
    arguments: frozenset[int]
    choices: tuple[Choice, ...]
    decisions: frozenset[int]
    constant: frozenset[int]
    loop: bool
    varying: tuple[bool, ...]
    cotangents: tuple[int, ...]
    carried: tuple[int, ...]
    stacked: frozenset[int]
    rates: Rates

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward pass by the roofline."""
        return sum(o.seconds for o in self.ops[: self.forward])

    @property
    def backward_seconds(self) -> float:
        """Seconds of the backward pass by the roofline, without recomputation."""
        return sum(o.seconds for o in self.ops[self.forward :])

    def copy_seconds(self, size: int) -> float:
        """What it takes to keep some bytes that are in memory already: in a scan they are read and written once."""
        return 2 * size / self.rates.bandwidth if self.loop else 0.0

    @property
    def kept_without_remat(self) -> tuple[int, ...]:
        """What is kept without remat: one value for each memory that the backward pass reads, arguments left out.

        So are masks and the like, which depend on nothing: compilers compute them where they are read. Outside loops
        they do so with all that they can fuse into its readers, and keep what it is made of.
        """
        fused = set() if self.loop else fused_values(self.ops, self.rates)
        kept: dict[int, None] = {}
        todo = list(reversed(self.residuals))
        seen = set(todo)
        while todo:
            v = todo.pop()
            root = self.values[v].root
            maker = self.values[root].maker
            if root in self.arguments or root in self.constant:
                continue
            if root in fused and maker >= 0 and len(self.ops[maker].reads) <= MOST_FUSED:
                for r in self.ops[maker].reads:
                    if r not in seen:
                        seen.add(r)
                        todo.append(r)
            else:
                kept[root] = None
        return tuple(kept)


def makers(
    values: Sequence[Value], ops: Sequence[Op], wanted: Iterable[int], stops: Callable[[int], bool] = lambda v: False
) -> set[int]:
    """The operations that values are made by, and those that these read from, down to values where it stops."""
    found: set[int] = set()
    todo = list(wanted)
    while todo:
        v = todo.pop()
        maker = values[v].maker
        if maker >= 0 and maker not in found and not stops(v):
            found.add(maker)
            todo += ops[maker].reads
    return found


MOST_FUSED = 8  # a fusion that reads more values is cut somewhere


def fused_values(ops: Sequence[Op], rates: Rates) -> set[int]:
    """The values that are fused into all that reads them and never stand in memory, in a sequence of operations."""
    readers: dict[int, list[Op]] = {}
    for op in ops:
        for v in op.reads:
            readers.setdefault(v, []).append(op)
    fused: set[int] = set()
    for op in reversed(ops):
        for v in op.writes:
            reading = readers.get(v, ())
            if op.form not in ("elementwise", "alias") or not reading:
                continue
            if len(reading) > 1 and not rates.fuses_copies and op.form == "elementwise":
                continue
            if all(
                r.form in ("elementwise", "reduce")
                or (r.form == "product" and rates.fuses_into_products)
                or (r.form == "alias" and fused.issuperset(r.writes))
                for r in reading
            ):
                fused.add(v)
    return fused
