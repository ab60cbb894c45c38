"""What a residual report holds: one entry for each value that reverse mode keeps.

Data only. Reading a program is in `residuals.py`, drawing a table in `remat_kit._show`.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping
from typing import Any

from remat_kit._errors import RematError
from remat_kit._frames import data_frame
from remat_kit._html_view import HtmlView

SCHEMA = 1


class Kind(enum.StrEnum):
    """Where a residual lives, and why it is there."""

    ARGUMENT = "argument"  # an input of the function; kept anyway by its caller
    CONSTANT = "constant"  # an array that the function closes over
    SAVED = "saved"  # an intermediate value kept in device memory
    OFFLOADED = "offloaded"  # an intermediate value moved to host memory


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that the backward pass reads and the forward pass made, or was given.

    Attributes:
      action: where it lives: `argument`, `constant`, `saved` or `offloaded`.
      names: the checkpoint names given to this value, in program order.
      op: the JAX primitive that produced it; ``"input"`` for arguments and constants.
      shape: the shape of what is kept; inside a scan this includes the stacked trip counts.
      dtype: its dtype.
      bytes: bytes on one device, trip counts included. *Predicted* from the jaxpr.
      global_bytes: bytes over all devices. Equal to `bytes` for unsharded values.
      trips: how many loop iterations it is kept for (1 outside loops).
      block: path of the block it lies in, or ``""``.
      path: module path, or the `jax.named_scope` stack.
      source: the user's source line, ``"model.py:41 (attention)"``.
      needed_by: the operations whose derivative rule reads it, ``("dot_general", "tanh")``.
      alias_of: label of the residual of which it is a reshape, transpose or cast-free view, or ``""``.
      recompute_flops: FLOPs of one step to compute it again from what else is kept, trip counts
        included; None where it cannot be recomputed (arguments and constants).
    """

    action: Kind
    names: tuple[str, ...]
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    global_bytes: int
    trips: int = 1
    block: str = ""
    path: str = ""
    source: str = ""
    needed_by: tuple[str, ...] = ()
    alias_of: str = ""
    recompute_flops: int | None = None

    @property
    def label(self) -> str:
        """The checkpoint name if it has one, else ``path/op``."""
        if self.names:
            return self.names[0]
        return f"{self.path}/{self.op}" if self.path else self.op

    @property
    def bytes_per_flop(self) -> float | None:
        """Bytes that recomputing would free for each FLOP it costs; None for inputs, inf for free."""
        if self.recompute_flops is None:
            return None
        return self.bytes / self.recompute_flops if self.recompute_flops else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        out = dataclasses.asdict(self)
        out["action"] = str(self.action)
        out["names"], out["shape"] = list(self.names), list(self.shape)
        out["needed_by"] = list(self.needed_by)
        return out


@dataclasses.dataclass(frozen=True)
class Group:
    """Entries that differ only in the number of the layer they lie in.

    Attributes:
      entry: the first of them.
      entries: all of them, in program order.
      path: the common path with the layers' range in it, ``"layers_{0-11}/mlp"``.
    """

    entry: Residual
    entries: tuple[Residual, ...]
    path: str

    @property
    def count(self) -> int:
        return len(self.entries)

    @property
    def bytes(self) -> int:
        return sum(e.bytes for e in self.entries)

    @property
    def recompute_flops(self) -> int | None:
        flops = [e.recompute_flops for e in self.entries]
        return None if None in flops else sum(f for f in flops if f is not None)


KEYS: Mapping[str, Callable[[Residual], str]] = {
    "block": lambda e: e.block or "(no block)",
    "name": lambda e: ", ".join(e.names) or "(no name)",
    "op": lambda e: e.op,
    "path": lambda e: e.path or "(no path)",
    "source": lambda e: e.source or "(unknown)",
    "dtype": lambda e: e.dtype,
    "action": lambda e: str(e.action),
}


@dataclasses.dataclass(frozen=True)
class Residuals(HtmlView):
    """What reverse mode keeps between the forward and the backward pass of one function.

    Every figure is *predicted* from the jaxpr: exact for what `jax.vjp` keeps, before XLA.
    Bytes are per device.

    Attributes:
      entries: one `Residual` each, in the order of `jax.vjp`'s closure.
      policy: the policy in force, as text; ``"as written"`` when none was given.
      blocks: paths of the blocks that the policy was applied to.
      notes: sentences that a reader of the figures must know (limits, removed regions).
    """

    entries: tuple[Residual, ...]
    policy: str = "as written"
    blocks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def _sum(self, *, action: Kind, alias: bool = False) -> int:
        return sum(e.bytes for e in self.entries if e.action is action and bool(e.alias_of) is alias)

    @property
    def total_bytes(self) -> int:
        """Intermediates kept in device memory; arguments, constants, host memory and aliases apart."""
        return self._sum(action=Kind.SAVED)

    @property
    def alias_bytes(self) -> int:
        """Reshapes and transposes of values that are kept as well: XLA may or may not share them."""
        return self._sum(action=Kind.SAVED, alias=True)

    @property
    def argument_bytes(self) -> int:
        """Arguments that the backward pass reads."""
        return sum(e.bytes for e in self.entries if e.action is Kind.ARGUMENT)

    @property
    def constant_bytes(self) -> int:
        """Arrays that the function closes over and the backward pass reads."""
        return sum(e.bytes for e in self.entries if e.action is Kind.CONSTANT)

    @property
    def host_bytes(self) -> int:
        """Intermediates moved to host memory."""
        return sum(e.bytes for e in self.entries if e.action is Kind.OFFLOADED)

    @property
    def global_bytes(self) -> int:
        """`total_bytes` over all devices instead of one."""
        return sum(e.global_bytes for e in self.entries if e.action is Kind.SAVED and not e.alias_of)

    @property
    def recompute_flops(self) -> int:
        """FLOPs of recomputing every saved and offloaded value once, each from the others."""
        return sum(e.recompute_flops or 0 for e in self.entries)

    def by(self, key: str) -> dict[str, int]:
        """Sums the bytes of kept intermediates (aliases apart) by a key, largest first.

        Args:
          key: "block", "name", "op", "path", "source", "dtype" or "action"; "action" counts
            arguments and constants too.

        Raises:
          RematError: for any other key.
        """
        if not isinstance(key, str) or key not in KEYS:
            raise RematError(f"by({key!r}): no such key. Use one of {', '.join(KEYS)}.")
        sums: dict[str, int] = {}
        for e in self.entries:
            if e.alias_of or (key != "action" and e.action in (Kind.ARGUMENT, Kind.CONSTANT)):
                continue
            k = KEYS[key](e)
            sums[k] = sums.get(k, 0) + e.bytes
        return dict(sorted(sums.items(), key=lambda kv: -kv[1]))

    def groups(self) -> tuple[Group, ...]:
        """Joins entries of identical layers: those that differ only in one number of their path."""
        found: dict[tuple[Any, ...], list[Residual]] = {}
        for e in self.entries:
            free = e.recompute_flops is None
            alike = dataclasses.replace(e, block="", path="", alias_of="", needed_by=(), recompute_flops=None)
            key = (alike, free, bool(e.alias_of), re.sub(r"\d+", "{}", e.path))
            found.setdefault(key, []).append(e)
        split = [g for entries in found.values() for g in _by_one_number(entries)]
        order = {id(e): i for i, e in enumerate(self.entries)}
        split.sort(key=lambda g: order[id(g[0])])
        return tuple(Group(g[0], tuple(g), _joint_path([e.path for e in g])) for g in split)

    def diff(self, other: Residuals) -> ResidualsDiff:
        """Compares with another report of the same function: `self` is before, `other` after."""
        if not isinstance(other, Residuals):
            raise RematError(f"diff compares two reports of rk.residuals; got {type(other).__name__}.")
        before, after = _multiset(self), _multiset(other)
        gone = [e for k, es in before.items() for e in es[len(after.get(k, ())) :]]
        new = [e for k, es in after.items() for e in es[len(before.get(k, ())) :]]
        return ResidualsDiff(self.policy, other.policy, tuple(gone), tuple(new), other.total_bytes - self.total_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version."""
        return {
            "schema": SCHEMA,
            "figures": "predicted",
            "policy": self.policy,
            "blocks": list(self.blocks),
            "notes": list(self.notes),
            "total_bytes": self.total_bytes,
            "alias_bytes": self.alias_bytes,
            "argument_bytes": self.argument_bytes,
            "constant_bytes": self.constant_bytes,
            "host_bytes": self.host_bytes,
            "global_bytes": self.global_bytes,
            "entries": [e.to_dict() for e in self.entries],
        }

    def to_pandas(self) -> Any:
        """Returns a DataFrame, one row for each entry. Needs pandas.

        Raises:
          RematError: when pandas is not installed.
        """
        return data_frame({"label": e.label, **e.to_dict(), "bytes_per_flop": e.bytes_per_flop} for e in self.entries)

    def plot(self, ax: Any = None, *, by: str = "path") -> Any:
        """Draws what is kept. Needs matplotlib.

        Args:
          ax: a matplotlib Axes to draw into; new ones by default.
          by: ``"path"``: nested boxes of modules, as high as their bytes, identical layers together; any other key of
            the method `by`: a bar for each part, blocks that differ in their number together.

        Returns:
          The Axes.

        Raises:
          RematError: for another key, or when matplotlib is not installed.
        """
        from remat_kit._show.plots import residuals

        return residuals.draw(self, ax, by)

    def print(self, console: Any = None, *, top: int | None = None) -> None:
        """Prints the table to a rich console (standard output by default), sized to the terminal."""
        from remat_kit._show import text

        text.print_residuals(self, console, top=top)

    def __str__(self) -> str:
        from remat_kit._show import text

        return text.residuals_to_str(self)


@dataclasses.dataclass(frozen=True)
class ResidualsDiff(HtmlView):
    """What one policy keeps and another does not.

    Attributes:
      before, after: the two policies, as text.
      gone: entries only in the first report.
      new: entries only in the second.
      bytes: `total_bytes` of the second less that of the first (negative: the second keeps less).
    """

    before: str
    after: str
    gone: tuple[Residual, ...]
    new: tuple[Residual, ...]
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version."""
        return {
            "schema": SCHEMA,
            "figures": "predicted",
            "before": self.before,
            "after": self.after,
            "bytes": self.bytes,
            "gone": [e.to_dict() for e in self.gone],
            "new": [e.to_dict() for e in self.new],
        }

    def __str__(self) -> str:
        from remat_kit._show import text

        return text.diff_to_str(self)


def _multiset(report: Residuals) -> dict[tuple[Any, ...], list[Residual]]:
    out: dict[tuple[Any, ...], list[Residual]] = {}
    for e in report.entries:
        out.setdefault((e.action, e.names, e.op, e.shape, e.dtype, e.path, e.source), []).append(e)
    return out


def _by_one_number(entries: list[Residual]) -> list[list[Residual]]:
    """Splits entries whose paths differ in numbers so that within each part only one of these varies."""
    numbers = [re.findall(r"\d+", e.path) for e in entries]
    varying = [i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    parts: dict[tuple[str, ...], list[Residual]] = {}
    for e, n in zip(entries, numbers, strict=True):
        parts.setdefault(tuple(n[i] for i in varying[1:]), []).append(e)
    return list(parts.values())


def _joint_path(paths: list[str]) -> str:
    """`layers_0/mlp`, `layers_1/mlp`, ... -> `layers_{0-11}/mlp`."""
    if len(set(paths)) == 1:
        return paths[0]
    pieces = [re.split(r"(\d+)", p) for p in paths]
    out = []
    for column in zip(*pieces, strict=True):
        values = list(dict.fromkeys(column))
        if len(values) == 1:
            out.append(values[0])
            continue
        numbers = sorted(int(v) for v in values)
        dense = numbers == list(range(numbers[0], numbers[-1] + 1))
        out.append("{" + (f"{numbers[0]}-{numbers[-1]}" if dense else ",".join(map(str, numbers))) + "}")
    return "".join(out)
