"""max_batch: the largest batch whose compiled step stays within a target's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit._apply import Policies
from remat_kit._errors import RematError
from remat_kit._target.budget import budget_bytes
from remat_kit._target.compile import TIMEOUT
from remat_kit._target.measure import Setting, measure
from remat_kit._target.measurement import SCHEMA, Measurement
from remat_kit._target.target import Target
from remat_kit._units import format_bytes

_LARGEST = 2**24


@dataclasses.dataclass(frozen=True)
class MaxBatch:
    """The largest batch that fits, proven by compiling it and the next larger one.

    Attributes:
      batch: the largest size that fits; 0 if the smallest does not.
      measurement: what it compiles to; None if none fits.
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

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {k: data[k] and data[k].to_dict() for k in ("measurement", "next_measurement")}
        return {"schema": SCHEMA, **data, "compiled": list(self.compiled)}

    def __str__(self) -> str:
        limit = f"{format_bytes(self.budget_bytes)} of {self.target}"
        beyond = ""
        if self.next_measurement is not None:
            beyond = f"; a batch of {self.next_batch} takes {format_bytes(self.next_measurement.peak_bytes)}"
        if self.measurement is None:
            return f"No batch fits into {limit} under {self.policy}{beyond}."
        return (
            f"The largest batch within {limit} under {self.policy} is {self.batch}: peak "
            f"{format_bytes(self.measurement.peak_bytes)}{beyond} (compiled)."
        )


def max_batch(
    make: Callable[[int], tuple[Any, ...]],
    *,
    target: str | Target = "local",
    policy: Policies = None,
    budget: int | float | str | None = None,
    multiple: int = 1,
    limit: int = 65536,
    grad: bool = True,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    progress: bool | None = None,
) -> MaxBatch:
    """Finds the largest batch that fits: predicts it from two small compiles, then confirms it by compiling.

    The peak is taken to grow by the same number of bytes for each example, as it nearly does; each compile corrects the
    prediction, until one size fits and the next does not.

    Args:
      make: from a batch size to ``(fun, args)`` or ``(fun, args, kwargs)``, best with abstract arguments.
      target, policy, grad, argnums, has_aux, compiler_options, timeout: as in `measure`.
      budget: the peak to keep within: bytes, ``"14GiB"`` or a share of the memory; all of it by default.
      multiple: batch sizes are multiples of this (the number of devices that the batch is split over, say).
      limit: the largest size to consider.
      progress: whether to say on standard error what is compiled; on a terminal by default.

    Raises:
      RematError: as `measure` does; where neither the target's memory nor a budget is known.
    """
    from remat_kit._show.progress import say

    for name, value in (("multiple", multiple), ("limit", limit)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise RematError(f"{name} is a positive number of examples, got {value!r}.")
    if not callable(make):
        raise RematError(f"max_batch takes a function from a batch size to (fun, args), got {type(make).__name__}.")
    setting = Setting.of(target, False, False, compiler_options, timeout)
    allowed = budget_bytes(budget, setting.target)
    if allowed is None:
        raise RematError(f"the memory of {setting.target} is not known: pass budget=, such as '14GiB'.")
    top = limit // multiple
    if top == 0:
        raise RematError(f"no multiple of {multiple} is within limit={limit}.")
    found: dict[int, Measurement] = {}

    def fits(units: int) -> bool:
        if units not in found:
            say(f"compiling a batch of {units * multiple} for {setting.target}", progress)
            fun, args, kwargs = _made(make, units * multiple)
            found[units] = measure(
                fun,
                *args,
                policy=policy,
                target=setting.target,
                grad=grad,
                argnums=argnums,
                has_aux=has_aux,
                compiler_options=compiler_options,
                timeout=timeout,
                **kwargs,
            )
        m = found[units]
        return m.fits is not False and m.peak_bytes <= allowed

    low, high, predicted = 0, top + 1, 0  # `low` fits (or is nothing), `high` does not (or is beyond the limit)
    guess = 1
    while high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        guess = _next(found, low, high, allowed)
        if len(found) == 2 and high > top:
            predicted = guess
    last, beyond = found.get(low), found.get(high)
    text = next(iter(found.values())).policy
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
    )


def _made(make: Callable[[int], Any], n: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    made = make(n)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[1], tuple):
        raise RematError(f"make({n}) must return (fun, args) or (fun, args, kwargs), args a tuple; got {made!r:.120}")
    return made[0], made[1], dict(made[2]) if len(made) == 3 else {}


def _next(found: Mapping[int, Measurement], low: int, high: int, allowed: int) -> int:
    """The size to compile next, above `low` and below `high`.

    Where the line through the nearest two peaks meets the budget; the middle once several compiles have not met it.
    """
    if low + 1 >= high:
        return low
    sizes = sorted(found, key=lambda u: abs(found[u].peak_bytes - allowed))[:2]
    if len(sizes) < 2:
        return min(low + 1, high - 1)
    (a, b) = sorted(sizes)
    slope = (found[b].peak_bytes - found[a].peak_bytes) / (b - a)
    if slope <= 0 or len(found) > 8:
        guess = min(2 * low, (low + high) // 2) if low else high // 2
    else:
        guess = a + int((allowed - found[a].peak_bytes) // slope)
    if high in found and guess >= high:
        guess = high - 1
    return max(low + 1, min(guess, high - 1))
