"""max_batch: the largest batch whose compiled step stays within a budget, under a policy or the best plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit._apply import Policies
from remat_kit._errors import RematError
from remat_kit._plan.plan import Plan
from remat_kit._plan.planner import Session, count_of
from remat_kit._progress import say
from remat_kit._target.budget import budget_bytes
from remat_kit._target.compile import TIMEOUT
from remat_kit._target.figures import measured
from remat_kit._target.measurement import SCHEMA, Measurement
from remat_kit._target.setting import Setting
from remat_kit._target.target import Target
from remat_kit._units import format_bytes

_LARGEST = 2**24
_UNSET: Any = object()  # for None is a policy: the function as written
_BEST = "the best plan"


@dataclasses.dataclass(frozen=True)
class MaxBatch:
    """The largest batch that fits, confirmed by compiling it and the next larger one, which does not.

    Attributes:
      batch: the largest size that fits; 0 if the smallest does not.
      measurement: what it compiles to; None if none fits.
      plan: the plan that it needs, where each size was planned for.
      next_batch: the next larger size.
      next_measurement: what that compiles to, which does not fit; None if `limit` was reached first.
      budget_bytes: the peak that it had to keep within.
      target: what it was compiled for.
      policy: the policy in force, as text.
      predicted: the size that the first two compiles predicted; 0 if there was nothing to predict.
      compiled: the sizes that were compiled, in order.
    """

    batch: int
    measurement: Measurement | None
    next_batch: int
    next_measurement: Measurement | None
    budget_bytes: int
    target: str
    policy: str
    predicted: int
    compiled: tuple[int, ...]
    plan: Plan | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {k: data[k] and data[k].to_dict() for k in ("measurement", "next_measurement", "plan")}
        return {"schema": SCHEMA, **data, "compiled": list(self.compiled)}

    def __str__(self) -> str:
        limit = f"{format_bytes(self.budget_bytes)} of {self.target}"
        beyond = ""
        if self.next_measurement is not None:
            beyond = f"; a batch of {self.next_batch} takes {format_bytes(self.next_measurement.peak_bytes)}"
        under = "" if self.policy == "as written" else f" under {self.policy}"
        under = " with a plan for each size" if self.policy == _BEST else under
        if self.measurement is None:
            return f"No batch fits into {limit}{under}{beyond}."
        return (
            f"The largest batch within {limit}{under} is {self.batch}: peak "
            f"{format_bytes(self.measurement.peak_bytes)}{beyond} (compiled)."
        )


def max_batch(
    make: Callable[[int], tuple[Any, ...]],
    *,
    target: str | Target = "local",
    policy: Policies = _UNSET,
    budget: int | float | str | None = None,
    multiple: int = 1,
    limit: int = 65536,
    grad: bool = True,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    minimize: str = "time",
    actions: Sequence[str] = ("save", "recompute", "offload"),
    compiles: int = 3,
    progress: bool | None = None,
) -> MaxBatch:
    """Finds the largest batch that fits: predicts it from two small compiles, then confirms it by compiling.

    The peak is taken to grow by the same number of bytes for each example, as it nearly does; each compile corrects the
    prediction, until one size fits and the next does not. (A compiler may still find room for a larger one by chance.)

    Args:
      make: from a batch size to ``(fun, args)`` or ``(fun, args, kwargs)``, best with abstract arguments.
      target, grad, argnums, has_aux, compiler_options, timeout: as in `measure`.
      policy: as in `measure`. Without it, and with a budget, each size gets the best plan for the budget.
      budget: the peak to keep within: bytes, ``"14GiB"`` or a share of the memory; all of it by default.
      minimize, actions, compiles: of the plans, as in `plan`.
      multiple: batch sizes are multiples of this (the number of devices that the batch is split over, say).
      limit: the largest size to consider.
      progress: whether to say on standard error what is compiled; on a terminal by default.

    Raises:
      RematError: as `measure` does; where neither the target's memory nor a budget is known.
    """
    for name, value in (("multiple", multiple), ("limit", limit)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise RematError(f"{name} is a positive number of examples, got {value!r}.")
    if not callable(make):
        raise RematError(f"max_batch takes a function from a batch size to (fun, args), got {type(make).__name__}.")
    setting = Setting.of(
        target, timeout=timeout, grad=grad, argnums=argnums, has_aux=has_aux, compiler_options=compiler_options
    )
    allowed = budget_bytes(budget, setting.target)
    if allowed is None:
        raise RematError(f"the memory of {setting.target} is not known: pass budget=, such as '14GiB'.")
    top = limit // multiple
    if top == 0:
        raise RematError(f"no multiple of {multiple} is within limit={limit}.")
    planning = policy is _UNSET and budget is not None and grad
    found: dict[int, Measurement] = {}
    plans: dict[int, Plan] = {}

    def planned(n: int) -> tuple[Measurement, Plan]:
        fun, args, kwargs = _made(make, n)
        session = Session.open(
            fun, args, kwargs, target=setting.target, actions=actions, minimize=minimize,
            argnums=argnums, has_aux=has_aux, keep_barriers=False, compiler_options=compiler_options, timeout=timeout,
            progress=progress,
        )  # fmt: skip
        made = session.plan(allowed, max(count_of(compiles), 1))
        assert session.chosen is not None
        return session.chosen.found, made

    def fits(units: int) -> bool:
        n = units * multiple
        if units not in found and planning:
            say(f"planning for a batch of {n}", progress)
            found[units], plans[units] = planned(n)
        elif units not in found:
            say(f"compiling a batch of {n} for {setting.target}", progress)
            fun, args, kwargs = _made(make, n)
            found[units] = measured(setting.step(fun, args, kwargs, None if policy is _UNSET else policy), setting)
        m = found[units]
        return m.fits is not False and m.peak_bytes <= allowed

    low, high, predicted = _search(fits, lambda u: found[u].peak_bytes, top, allowed)
    last, beyond = found.get(low), found.get(high)
    text = _BEST if planning else next(iter(found.values())).policy
    return MaxBatch(
        low * multiple,
        last,
        high * multiple,
        beyond,
        allowed,
        setting.target.spec,
        text,
        predicted * multiple,
        tuple(u * multiple for u in found),
        plans.get(low),
    )


def _made(make: Callable[[int], Any], n: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    made = make(n)
    fits = isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[1], tuple)
    if not fits or (len(made) == 3 and not (isinstance(made[2], Mapping) and all(isinstance(k, str) for k in made[2]))):
        raise RematError(f"make({n}) must return (fun, args) or (fun, args, kwargs), args a tuple; got {made!r:.120}")
    return made[0], made[1], dict(made[2]) if len(made) == 3 else {}


def _search(fits: Callable[[int], bool], peak: Callable[[int], int], top: int, allowed: int) -> tuple[int, int, int]:
    """A size that fits while the next does not, and what the first two trials predicted.

    Each trial goes where the line through two peaks meets the budget: those around the answer once there is one that
    does not fit, before that the two largest. Then every second trial halves the interval instead, so that a bent line
    costs few more.
    """
    if not fits(1):
        return 0, 1, 0
    low, high, predicted = 1, top + 1, 0
    tried = [1]
    guess = 2
    while high - low > 1:
        guess = max(low + 1, min(guess, high - 1))
        if fits(guess):
            low = guess
        else:
            high = guess
        tried.append(guess)
        below = max((n for n in tried if n < low), default=None)
        a, b = (low, high) if high in tried else (below, low)
        slope = (peak(b) - peak(a)) / (b - a) if a is not None else 0.0
        guess = low + int((allowed - peak(low)) // slope) if slope > 0 else 2 * low
        if len(tried) == 2:
            predicted = guess
        if len(tried) > 4 and high in tried and len(tried) % 2:
            guess = (low + high) // 2
    return low, high, predicted
