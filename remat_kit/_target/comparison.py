"""What comparing policies returns: one row for each, with the best one pointed out. Data only."""

from __future__ import annotations

import dataclasses
from typing import Any

from remat_kit._frames import data_frame
from remat_kit._html_view import HtmlView
from remat_kit._target.measurement import SCHEMA, Measurement


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One policy on the target.

    Attributes:
      name: the policy, as it was given.
      measurement: what it compiles to.
      overhead: FLOPs of the step beyond those without remat (of a whole step: beyond the fewest), as a share of them.
        *Counted* from the jaxpr.
      within: whether the peak is within the budget.
      dominated_by: the name of a policy with no larger peak, time and FLOPs, and one of them smaller; or empty.
    """

    name: str
    measurement: Measurement
    overhead: float
    within: bool
    dominated_by: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns one flat row of plain data."""
        m = self.measurement
        return {
            "policy": self.name,
            "predicted_bytes": m.predicted_bytes,
            "peak_bytes": m.peak_bytes,
            "temp_bytes": m.temp_bytes,
            "host_bytes": m.host_bytes,
            "flops": m.flops,
            "overhead": self.overhead,
            "seconds": m.seconds,
            "seconds_are": "timed" if m.timing is not None else "roofline",
            "fits": m.fits,
            "within_budget": self.within,
            "dominated_by": self.dominated_by,
            "compile_seconds": m.compile_seconds,
            "cached": m.cached,
            "findings": list(m.effect.findings) if m.effect is not None else [],
            "notes": list(m.notes),
        }


@dataclasses.dataclass(frozen=True)
class Comparison(HtmlView):
    """Policies side by side on one target.

    Attributes:
      target: what they were compiled for.
      rows: one for each policy, in the order given.
      budget_bytes: the peak to keep within; None if neither it nor the memory is known.
      best: the name of the policy within the budget that takes least time (timed, else the roofline's), then fewest
        FLOPs, then the smallest peak; empty if none is within it.
      refused: policies that could not be measured, with the reason.
    """

    target: str
    rows: tuple[ComparisonRow, ...]
    budget_bytes: int | None
    best: str
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def __getitem__(self, name: str) -> Measurement:
        """The measurement of a policy, by its name in `rows`."""
        for row in self.rows:
            if row.name == name:
                return row.measurement
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version."""
        return {
            "schema": SCHEMA,
            "figures": {
                "predicted": "predicted_bytes; seconds where they are the roofline's",
                "compiled": "peak_bytes, temp_bytes, host_bytes, fits",
                "counted from the jaxpr": "flops, overhead",
                "timed": "seconds where they are timed",
            },
            "target": self.target,
            "budget_bytes": self.budget_bytes,
            "best": self.best,
            "rows": [row.to_dict() for row in self.rows],
            "refused": dict(self.refused),
        }

    def to_pandas(self) -> Any:
        """Returns a DataFrame, one row for each policy. Needs pandas.

        Raises:
          RematError: when pandas is not installed.
        """
        return data_frame(row.to_dict() for row in self.rows)

    def plot(self, ax: Any = None, *, cost: str = "flops") -> Any:
        """Draws the policies as points: peak memory against what they cost. Needs matplotlib.

        Args:
          ax: a matplotlib Axes to draw into; new ones by default.
          cost: ``"flops"``: those beyond a step without remat; ``"time"``: of a step, timed or by the roofline.

        Returns:
          The Axes.

        Raises:
          RematError: for another `cost`, where no policy has a time, or when matplotlib is not installed.
        """
        from remat_kit._show.plots import comparison

        return comparison.draw(self, ax, cost)

    def print(self, console: Any = None) -> None:
        """Prints the table to a rich console (standard output by default)."""
        from remat_kit._show import comparison

        comparison.print_comparison(self, console)

    def __str__(self) -> str:
        from remat_kit._show import comparison

        return comparison.comparison_to_str(self)
