"""frontier: the plans that no other plan beats on both memory and the cost of recomputation."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from remat_kit._errors import RematError, RematWarning, first_line
from remat_kit._frames import data_frame
from remat_kit._html_view import HtmlView
from remat_kit._plan.calibrate import Trial
from remat_kit._plan.plan import Plan
from remat_kit._plan.planner import Session, count_of
from remat_kit._progress import track
from remat_kit._target.budget import budget_bytes
from remat_kit._target.comparison import Comparison
from remat_kit._target.compile import TIMEOUT
from remat_kit._target.measurement import Measurement
from remat_kit._target.target import Target

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Frontier(HtmlView):
    """Plans by their peak, smallest first: each takes more memory than the one before it, and costs less.

    Attributes:
      plans: the plans; those with `measured` were compiled, the peaks of the others are predicted and corrected.
      target: what they are for; empty for none.
      minimize: ``"time"`` or ``"flops"``.
      memory_bytes: of the target; None if it is not known.
    """

    plans: tuple[Plan, ...]
    target: str
    minimize: str
    memory_bytes: int | None

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __getitem__(self, index: int) -> Plan:
        return self.plans[index]

    def within(self, budget: int | str) -> Plan | None:
        """The cheapest plan within a budget of bytes; None if there is none."""
        allowed = budget_bytes(budget, None)
        if allowed is None:
            raise RematError("within takes a budget in bytes, such as '14GiB'.")
        fitting = [p for p in self.plans if p.peak_bytes <= allowed]
        return fitting[-1] if fitting else None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version, each plan as `Plan.to_dict` gives it."""
        return {
            "schema": SCHEMA,
            "figures": {"compiled": "peak_bytes of plans with measured", "predicted": "all others"},
            "target": self.target,
            "minimize": self.minimize,
            "memory_bytes": self.memory_bytes,
            "plans": [p.to_dict() for p in self.plans],
        }

    def rows(self) -> list[dict[str, Any]]:
        """One flat row of plain data for each plan."""
        return [
            {
                "peak_bytes": p.peak_bytes,
                "peak_is": "compiled" if p.measured is not None else "predicted",
                "host_bytes": p.predicted.host_bytes,
                "recompute_flops": p.predicted.recompute_flops,
                "remat_seconds": p.predicted.remat_seconds,
                "cost": p.cost,
                "bound": p.bound,
                "gap": p.gap,
            }
            for p in self.plans
        ]

    def to_pandas(self) -> Any:
        """Returns a DataFrame, one row for each plan. Needs pandas.

        Raises:
          RematError: when pandas is not installed.
        """
        return data_frame(self.rows())

    def plot(self, ax: Any = None, *, presets: Comparison | None = None, budget: int | str | None = None) -> Any:
        """Draws the plans as a line, with presets beside them: peak memory against recomputation. Needs matplotlib.

        Args:
          ax: a matplotlib Axes to draw into; new ones by default.
          presets: of `compare`, drawn at their compiled peaks and at the cost that the plans' model has for them. By
            default the peaks are the model's, too.
          budget: in bytes, to draw beside the target's memory.

        Returns:
          The Axes.

        Raises:
          RematError: for policies that the model does not know, or when matplotlib is not installed.
        """
        from remat_kit._show.plots import frontier

        return frontier.draw(self, ax, presets, budget_bytes(budget, None))

    def print(self, console: Any = None) -> None:
        """Prints the table to a rich console (standard output by default)."""
        from remat_kit._show.plan import print_frontier

        print_frontier(self, console)

    def __str__(self) -> str:
        from remat_kit._show.plan import frontier_to_str

        return frontier_to_str(self)


def frontier(
    fun: Callable[..., Any],
    *args: Any,
    target: str | Target | None = "local",
    actions: Sequence[str] = ("save", "recompute", "offload"),
    minimize: str = "time",
    points: int = 12,
    compiles: int = 4,
    names_only: bool = False,
    split: bool | float = False,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    keep_barriers: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    progress: bool | None = None,
    **kwargs: Any,
) -> Frontier:
    """Finds the plans that no other beats, from the smallest peak to the lowest cost.

    Args:
      fun, args, kwargs, target, actions, minimize, names_only, split, argnums, has_aux, keep_barriers,
        compiler_options, timeout: as in `plan`.
      points: how many budgets to plan for, evenly spread between the smallest peak and that of the cheapest plan.
      compiles: how many of the plans to compile, from end to end. They correct the predicted peaks of the others.
      progress: whether to show a progress bar on standard error; on a terminal by default.

    Returns:
      A `Frontier`: plans whose peaks rise and whose costs fall; plans that another one beats are left out.

    Raises:
      RematError: as `plan` does.
    """
    if not isinstance(points, int) or isinstance(points, bool) or not 1 <= points <= _MOST_POINTS:
        raise RematError(f"points is a number of budgets from 1 to {_MOST_POINTS}, got {points!r}.")
    wanted = count_of(compiles)
    session = Session.open(
        fun, args, kwargs, target=target, actions=actions, minimize=minimize, names_only=names_only, split=split,
        argnums=argnums, has_aux=has_aux, keep_barriers=keep_barriers, compiler_options=compiler_options,
        timeout=timeout, progress=progress,
    )  # fmt: skip
    return of_session(session, points, wanted if target is not None else 0, progress)


_MOST_POINTS = 1000


def of_session(session: Session, points: int, compiles: int, progress: bool | None = None) -> Frontier:
    """The frontier of a loss that was opened."""
    problem = session.problem
    least, cheapest = problem.least(), problem.cheapest()
    spread = [least.peak + (cheapest.peak - least.peak) * k / max(points - 1, 1) for k in range(points)]
    between = filter(None, map(problem.solve, spread))
    found = {s.key: s for s in (least, *between, cheapest)}
    selections = sorted(found.values(), key=lambda s: (s.peak, s.cost))
    chosen = _spread(len(selections), compiles)
    done: dict[Any, Trial[Measurement]] = {}
    refused: dict[Any, RematError] = {}
    for k in track(chosen, "compiling plan", progress):
        try:
            trial = session.compiled(selections[k])
        except RematError as error:
            refused[selections[k].key] = error
            if len(refused) == len(chosen):
                raise
        else:
            done[trial.selection.key] = trial
    if refused:
        reason = first_line(next(iter(refused.values())))
        warnings.warn(
            f"{len(refused)} of {len(chosen)} plans that were to be compiled are left out: {reason}",
            RematWarning,
            stacklevel=3,
        )
    plans = []
    for s in selections:
        if s.key in refused:
            continue
        trial = done.get(s.key)
        made = session.made(s, 0, trial.found if trial is not None else None)
        plans.append(dataclasses.replace(made, budget_bytes=made.peak_bytes, within=True))
    kept: list[Plan] = []
    for p in sorted(plans, key=lambda p: (p.peak_bytes, p.cost)):
        if not kept or p.cost < kept[-1].cost:
            kept.append(p)
    setting = session.info.setting
    memory = setting.target.memory_bytes if setting is not None else None
    return Frontier(tuple(kept), setting.target.spec if setting is not None else "", session.info.minimize, memory)


def _spread(n: int, wanted: int) -> list[int]:
    """Some of so many numbers, from end to end."""
    if wanted >= n:
        return list(range(n))
    if wanted < 2:
        return [n - 1][:wanted]
    return sorted({round(k * (n - 1) / (wanted - 1)) for k in range(wanted)})
