"""What measuring returns: XLA's own figures for one program on one target, beside what was predicted. Data only."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from remat_kit._html_view import HtmlView
from remat_kit._trace.report import Residuals

if TYPE_CHECKING:
    from remat_kit._target.timeline import Schedule, Timeline

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per step of a program that was run. *Timed*.

    Attributes:
      median: of all timed steps.
      low, high: the quartiles.
      steps: how many were timed, after warming up.
      peak_bytes: the most memory that the device's allocator had handed out; None where it does not say.
    """

    median: float
    low: float
    high: float
    steps: int
    peak_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Held:
    """A buffer of the compiled program that is live at the peak of device memory.

    Attributes:
      bytes: its size in memory, padding of tiled layouts included.
      shape: its type, as XLA writes it.
      kind: ``argument``, ``output``, ``temp`` or ``constant``.
      phase: ``forward``, ``backward`` or ``recomputed``; empty where the program does not say.
      name: its checkpoint name or that of the argument, where known.
      path: the module path of the operation that made it.
      op: the operation that made it.
      source: the user's source line.
      count: how many like it (one for each layer, say); `bytes` is their sum.
    """

    bytes: int
    shape: str
    kind: str
    phase: str = ""
    name: str = ""
    path: str = ""
    op: str = ""
    source: str = ""
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a policy did to the compiled program, against another policy.

    Attributes:
      against: the other policy, as text.
      predicted_bytes: how many fewer bytes of residuals are kept (over all devices, where types do not tell how they
        are split). *Predicted*. None for whole steps.
      peak_bytes: by how much the peak fell. *Compiled*. None if one of the two does not fit the compiler.
      counted_flops: by how many FLOPs of matrix products the step grew on one device. *Counted* from the jaxpr.
      flops: by how many it grew in the compiled program, trip counts included. *Compiled*. None as for the peak.
      findings: sentences: what the compiler made of it.
    """

    against: str
    predicted_bytes: int | None
    peak_bytes: int | None
    counted_flops: int
    flops: int | None
    findings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Measurement(HtmlView):
    """What one program takes on one target. Bytes are those of one device.

    *Compiled* (XLA's figures): all bytes, `xla_flops` and `xla_bytes_accessed`; None if the program does not fit and
    the compiler gave up on it. *Compiled*, with trip counts: `matmul_flops`, `bytes_accessed`. *Counted* from the
    jaxpr: `flops`, `counted_matmul_flops`. *Predicted*: `residuals`, `roofline_seconds`. *Timed*: `timing`.

    Attributes:
      target: what it was compiled for.
      platform: that of the target: ``"tpu"``, ``"cuda"``, ``"cpu"``.
      policy: the policy in force, as text.
      fits: whether the peak is within `memory_bytes`; None where the memory is not known.
      memory_bytes: what a program can have of one device's memory.
      peak_bytes: the most memory in use at one time; for the CPU `temp + arguments + outputs - aliased`, and where
        temporaries lie in host memory no more than that. For a program that does not fit, what the compiler says that
        it would need.
      temp_bytes: XLA's temporary buffers.
      argument_bytes, output_bytes: those of the step.
      alias_bytes: outputs that lie in donated arguments.
      host_bytes: temporary buffers in host memory (offloaded values).
      host_argument_bytes: arguments and outputs that lie there; not in `peak_bytes`.
      code_bytes: the generated code.
      flops: counted from the jaxpr, over all devices.
      flops_exact: whether that count is exact (no data-dependent loops and no unknown primitives).
      counted_matmul_flops: those of them in matrix products.
      matmul_flops: those of the compiled program's matrix products, on one device.
      xla_flops, xla_bytes_accessed: XLA's own counts, on one device, loop bodies counted once; None where it has none.
      bytes_accessed: main memory traffic of the compiled program's instructions, on one device.
      roofline_seconds: a step's time if each instruction took the slower of its matrix products at the chip's peak rate
        and its memory traffic at full bandwidth, transfers to the host beside them; no chip is as fast. None for
        hardware without known figures.
      compile_seconds: what compiling took (when it was compiled, if `cached`).
      cached: whether an earlier compile of the same program answered; source lines and module paths in `held` are then
        those of that program, which may have been written elsewhere.
      devices: how many devices the program is split over.
      residuals: the residual report; None for a step as written.
      held: the largest buffers at the peak, largest first.
      held_residual_bytes: what the forward pass leaves in device memory for the backward pass, compiled: temporary
        buffers made by the forward pass that are live when the backward pass begins. None where it cannot be told.
      differences: sentences: why `held_residual_bytes` is not what `residuals` predicts.
      effect: what the policy did, where asked.
      timing: measured seconds, where asked.
      notes: sentences that a reader of the figures must know.
      schedule: what `timeline` is read from.
    """

    target: str
    platform: str
    policy: str
    fits: bool | None
    memory_bytes: int | None
    peak_bytes: int
    flops: int
    flops_exact: bool
    counted_matmul_flops: int
    compile_seconds: float
    cached: bool
    temp_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    host_bytes: int | None = None
    host_argument_bytes: int | None = None
    code_bytes: int | None = None
    matmul_flops: int | None = None
    xla_flops: float | None = None
    xla_bytes_accessed: float | None = None
    bytes_accessed: int | None = None
    roofline_seconds: float | None = None
    devices: int = 1
    residuals: Residuals | None = None
    held: tuple[Held, ...] = ()
    held_residual_bytes: int | None = None
    differences: tuple[str, ...] = ()
    effect: Effect | None = None
    timing: Timing | None = None
    notes: tuple[str, ...] = ()
    schedule: Schedule | None = dataclasses.field(default=None, repr=False, compare=False)

    @functools.cached_property
    def timeline(self) -> Timeline | None:
        """Live bytes over the schedule of the compiled program, read when first asked for. *Compiled*.

        None where there is no schedule: the compiler found no room for the program, or gave no order of execution.
        """
        from remat_kit._target import lives

        return None if self.schedule is None else lives.timeline(self, self.schedule)

    @property
    def headroom_bytes(self) -> int | None:
        """What is left of the memory at the peak; negative if it does not fit."""
        return None if self.memory_bytes is None else self.memory_bytes - self.peak_bytes

    @property
    def predicted_bytes(self) -> int | None:
        """Intermediates kept, predicted from the jaxpr; None for a step as written.

        Of one device where types tell how values are split, else of all.
        """
        return None if self.residuals is None else self.residuals.total_bytes

    @property
    def seconds(self) -> float | None:
        """A step's time: timed if it was, else the roofline's."""
        return self.timing.median if self.timing is not None else self.roofline_seconds

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version; without `timeline`, which has a `to_dict` of its own."""
        apart = ("residuals", "schedule")
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in apart}
        for name in ("effect", "timing"):
            data[name] = data[name] and dataclasses.asdict(data[name])
        data["held"] = [dataclasses.asdict(b) for b in self.held]
        data["residuals"] = self.residuals and self.residuals.to_dict()
        return {
            "schema": SCHEMA,
            "figures": {
                "compiled": "bytes, xla_flops, xla_bytes_accessed, matmul_flops, bytes_accessed, compile_seconds",
                "counted from the jaxpr": "flops, counted_matmul_flops",
                "predicted": "residuals, predicted_bytes, roofline_seconds",
                "timed": "timing",
            },
            **data,
            "headroom_bytes": self.headroom_bytes,
            "predicted_bytes": self.predicted_bytes,
            "differences": list(self.differences),
            "notes": list(self.notes),
        }

    def plot(self, ax: Any = None, *, by: str = "class", against: Measurement | None = None) -> Any:
        """Draws memory over the schedule, the peak with its largest buffers marked. Needs matplotlib.

        Args:
          ax: a matplotlib Axes to draw into; new ones by default.
          by: ``"class"`` or ``"module"``, as in `Timeline.by`.
          against: another measurement, drawn over it as a line; each pass then gets one width.

        Returns:
          The Axes.

        Raises:
          RematError: where there is no `timeline`, or when matplotlib is not installed.
        """
        from remat_kit._show.plots import timeline

        return timeline.draw(self, ax, by, against)

    def print(self, console: Any = None) -> None:
        """Prints the figures to a rich console (standard output by default)."""
        from remat_kit._show import measurement

        measurement.print_measurement(self, console)

    def __str__(self) -> str:
        from remat_kit._show import measurement

        return measurement.measurement_to_str(self)
