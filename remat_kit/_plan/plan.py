"""What planning returns: for each block what is kept, offloaded and recomputed, with its proof. Data only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from remat_kit._apply import BlockForm, Planned
from remat_kit._errors import RematError, UnknownBlockError, near_matches
from remat_kit._globs import literal
from remat_kit._html_view import HtmlView
from remat_kit._names import MAXTEXT_NAMES
from remat_kit._policy import Policy
from remat_kit._units import printable

SCHEMA = "remat_kit.plan"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class PlannedValue:
    """One value of a block that matters to the plan, and what becomes of it.

    Attributes:
      label: what the plan's policy calls it, ``attn/dot_general#2``.
      action: ``save``, ``offload`` or ``recompute``.
      op, dtype, source: of the value; `names` are its checkpoint names.
      bytes: of all runs of the block together.
      flops, seconds: what making it again takes, from what else is kept, all runs together.
      why: the reason, in words.
    """

    label: str
    action: str
    op: str
    dtype: str
    names: tuple[str, ...]
    source: str
    bytes: int
    flops: int
    seconds: float
    why: str


@dataclasses.dataclass(frozen=True)
class PlannedBlock:
    """One block under the plan. Its figures are *predicted*, of all its runs together.

    Attributes:
      path, kind: of the block, as in `remat_kit.Block`; ``rest_0``, ... are the parts between the layers.
      runs: how often it runs in one step.
      policy: what is applied to it; ``none`` leaves it without remat.
      kept_bytes: kept on the device from the forward to the backward pass.
      host_bytes: kept in host memory.
      working_bytes: the most that one run's backward pass holds besides that.
      flops, seconds: of what is recomputed; `seconds` with the time that keeping the rest takes.
      values: those whose treatment is worth telling, largest first.
      form: what of the block's program the plan depends on.
    """

    path: str
    kind: str
    runs: int
    policy: Policy
    kept_bytes: int
    host_bytes: int
    working_bytes: int
    flops: int
    seconds: float
    values: tuple[PlannedValue, ...]
    form: BlockForm


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What a plan is predicted to take, in bytes on one device, FLOPs and seconds by the roofline.

    Attributes:
      peak_bytes: as the model has it: arguments, outputs, what is kept and the largest backward working set.
      corrected_bytes: the same, corrected by what was compiled on the way; equal to it without compiles.
      argument_bytes, output_bytes: of the step.
      other_bytes: residuals outside all blocks.
      kept_bytes, working_bytes: at the block where the peak is, which is `binding`.
      host_bytes: in host memory.
      flops, seconds: of the whole step, recomputation included.
      recompute_flops: of recomputation alone.
      remat_seconds: of recomputation, and of writing what is kept where it is kept.
      binding: the block in whose backward pass the peak is.
    """

    peak_bytes: int
    corrected_bytes: int
    argument_bytes: int
    output_bytes: int
    other_bytes: int
    kept_bytes: int
    working_bytes: int
    host_bytes: int
    flops: int
    seconds: float
    recompute_flops: int
    remat_seconds: float
    binding: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the plan compiles to: *compiled*, but for `flops` (counted from the jaxpr) and `seconds` (the roofline's).

    Attributes:
      peak_bytes, temp_bytes, argument_bytes, output_bytes, host_bytes, flops, seconds: as in `Measurement`.
    """

    peak_bytes: int
    temp_bytes: int | None
    argument_bytes: int | None
    output_bytes: int | None
    host_bytes: int
    flops: int
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One program that was compiled on the way to the plan.

    Attributes:
      predicted_bytes, peak_bytes: the model's peak and the compiled one.
      cost: of recomputation, in what is minimized.
      within: whether the compiled peak is within the budget.
    """

    predicted_bytes: int
    peak_bytes: int
    cost: float
    within: bool


@dataclasses.dataclass(frozen=True)
class Rival:
    """A preset, as the plan's model sees it.

    Attributes:
      name: of the preset.
      peak_bytes: predicted, corrected as the plan's.
      flops, seconds: of its recomputation, predicted; `seconds` as in `Predicted.remat_seconds`.
      within: whether that peak is within the budget.
    """

    name: str
    peak_bytes: int
    flops: int
    seconds: float
    within: bool


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Planned, HtmlView):
    """For each block of a program what is saved, offloaded and recomputed, to keep within a budget of memory.

    `remat_kit.apply`, `measure`, `compare` and `residuals` take it as a policy.

    Attributes:
      blocks: in program order.
      budget_bytes: the peak to keep within.
      target: what it was planned for; empty for none.
      minimize: ``"time"`` (seconds by the roofline) or ``"flops"``.
      actions: what was allowed.
      names_only: whether only checkpoint names of the program's own were chosen among; all blocks have one policy then.
      predicted: what the plan is predicted to take.
      measured: what it compiles to; None without compiles.
      bound: nothing within the plan's predicted peak costs less than this (recomputation, in what is minimized),
        as far as the solver proved it for the model.
      attempts: what was compiled on the way, in order.
      rivals: presets in the same model.
      rates: where seconds come from, in words.
      within: whether the peak (compiled, else predicted) is within the budget. If not, this is the plan with the
        smallest peak that was found.
      strict: whether `apply` refuses a program that is not the same as the one planned for.
      notes: what else there is to know.
    """

    blocks: tuple[PlannedBlock, ...]
    budget_bytes: int
    target: str
    minimize: str
    actions: tuple[str, ...]
    names_only: bool
    predicted: Predicted
    measured: Measured | None
    bound: float
    attempts: tuple[Attempt, ...]
    rivals: tuple[Rival, ...]
    rates: str
    within: bool
    strict: bool = True
    notes: tuple[str, ...] = ()

    def policy_for(self, block: str) -> Policy:
        """The policy of a block, by its path.

        Raises:
          UnknownBlockError: a RematError and KeyError, for a block that the plan does not have.
        """
        for b in self.blocks:
            if b.path == block:
                return b.policy
        paths = [b.path for b in self.blocks]
        raise UnknownBlockError(
            f"the plan has no block {block!r:.100}. Its blocks: {printable(', '.join(paths)[:600]) or 'none'}."
            + (near_matches(block, paths) if isinstance(block, str) else "")
        )

    @property
    def cost(self) -> float:
        """What the plan's recomputation costs, in what is minimized. *Predicted*."""
        return self.predicted.remat_seconds if self.minimize == "time" else float(self.predicted.recompute_flops)

    @property
    def gap(self) -> float:
        """By what share of the whole step the plan can be above the cheapest one in its model, at the most."""
        whole = self.predicted.seconds if self.minimize == "time" else self.predicted.flops
        return max(0.0, self.cost - self.bound) / whole if whole else 0.0

    @property
    def peak_bytes(self) -> int:
        """The peak: compiled, where it was compiled, else predicted."""
        return self.measured.peak_bytes if self.measured is not None else self.predicted.corrected_bytes

    @property
    def saved_names(self) -> tuple[str, ...]:
        """With ``names_only``: the names to save."""
        return self._names("save")

    @property
    def offloaded_names(self) -> tuple[str, ...]:
        """With ``names_only``: the names to offload."""
        return self._names("offload")

    def _names(self, action: str) -> tuple[str, ...]:
        if not self.names_only or not self.blocks:
            return ()
        return tuple(n for n, a in self.blocks[0].policy.exact_names().items() if a == action)

    def as_jax(self) -> str:
        """With ``names_only``: the plan as an expression of `jax.checkpoint_policies`.

        Raises:
          RematError: for a plan that does not go by names.
        """
        self._need_names("as_jax")
        saved, offloaded = self.saved_names, self.offloaded_names
        if not offloaded:
            return f"jax.checkpoint_policies.save_only_these_names({', '.join(map(repr, saved))})"
        return (
            "jax.checkpoint_policies.save_and_offload_only_these_names(names_which_can_be_saved="
            f"{list(saved)!r}, names_which_can_be_offloaded={list(offloaded)!r}, offload_src='device', "
            "offload_dst='pinned_host')"
        )

    def as_maxtext(self) -> str:
        """With ``names_only``: the plan as settings of MaxText (``remat_policy: custom``, a place for each name).

        Names that MaxText does not know are left out, which a comment says.

        Raises:
          RematError: for a plan that does not go by names.
        """
        self._need_names("as_maxtext")
        places = dict.fromkeys(self.saved_names, "device") | dict.fromkeys(self.offloaded_names, "offload")
        known = {MAXTEXT_NAMES[name]: place for name, place in places.items() if name in MAXTEXT_NAMES}
        other = [name for name in places if name not in MAXTEXT_NAMES]
        lines = ["remat_policy: custom", *(f"{name}: {place}" for name, place in known.items())]
        return "\n".join(lines + [f"# not MaxText's: {', '.join(other)}"] * bool(other))

    def _need_names(self, what: str) -> None:
        if not self.names_only:
            raise RematError(f"{what} is for plans made with names_only=True; this one chooses single values.")

    # As a policy ------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """What reports call the plan."""
        from remat_kit._show.plan import title

        return title(self)

    def items(self) -> tuple[tuple[str | None, Policy], ...]:
        """Policies by block, as `apply` takes them."""
        if self.names_only:
            return ((None, self.blocks[0].policy),) if self.blocks else ()
        return tuple((literal(b.path), b.policy) for b in self.blocks)

    def forms(self) -> Mapping[str, BlockForm]:
        """What of each block's program the plan depends on."""
        return {b.path: b.form for b in self.blocks}

    # Views ------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Per block and value what becomes of it and why, what binds the peak, and the best preset beside it."""
        from remat_kit._show.plan import explain

        return explain(self)

    def plot(self, ax: Any = None) -> Any:
        """Draws for each block how many bytes are saved, offloaded and recomputed. Needs matplotlib.

        Args:
          ax: a matplotlib Axes to draw into; new ones by default.

        Returns:
          The Axes.

        Raises:
          RematError: when matplotlib is not installed.
        """
        from remat_kit._show.plots import plan

        return plan.draw(self, ax)

    def print(self, console: Any = None) -> None:
        """Prints the plan to a rich console (standard output by default)."""
        from remat_kit._show.plan import print_plan

        print_plan(self, console)

    def __repr__(self) -> str:
        return f"<{self.title}: {len(self.blocks)} blocks>"

    def __str__(self) -> str:
        from remat_kit._show.plan import plan_to_str

        return plan_to_str(self)

    # As a file --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version."""
        from remat_kit._plan import saved

        return saved.to_dict(self)

    @classmethod
    def from_dict(cls, data: Any, *, strict: bool = True) -> Plan:
        """Reads what `to_dict` gave, checking all of it; see `load`."""
        from remat_kit._plan import saved

        return saved.from_dict(data, strict=strict)

    def save(self, path: Any) -> None:
        """Writes the plan as JSON.

        Raises:
          RematError: where the file cannot be written.
        """
        from remat_kit._plan import saved

        saved.write(self, path)

    @classmethod
    def load(cls, path: Any, *, strict: bool = True) -> Plan:
        """Reads a plan that `save` wrote.

        Args:
          strict: whether `apply` refuses a program that differs from the one planned for, naming what differs.
            Otherwise it only refuses one whose blocks are others.

        Raises:
          RematError: where the file cannot be read or is no plan.
        """
        from remat_kit._plan import saved

        return saved.read(path, strict=strict)
