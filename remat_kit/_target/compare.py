"""compare: one compiled program per policy, side by side."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from remat_kit._apply import Policies, Rules
from remat_kit._errors import RematError
from remat_kit._progress import track
from remat_kit._target.budget import budget_bytes
from remat_kit._target.comparison import Comparison, ComparisonRow
from remat_kit._target.compile import TIMEOUT
from remat_kit._target.effect import effect
from remat_kit._target.figures import measured
from remat_kit._target.measurement import Measurement
from remat_kit._target.setting import Setting
from remat_kit._target.target import Target


def compare(
    fun: Callable[..., Any],
    *args: Any,
    policies: Sequence[Policies] | Mapping[str, Policies] = ("none", "full", "dots", "dots_no_batch"),
    target: str | Target = "local",
    budget: int | float | str | None = None,
    grad: bool = True,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    time: bool = False,
    keep_barriers: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    progress: bool | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compiles the gradient of a loss, or a whole step, under several policies for one target.

    Args:
      fun, args, kwargs, target, grad, argnums, has_aux, time, keep_barriers, compiler_options, timeout: as in
        `measure`.
      policies: what `apply` takes, each; or a mapping of names of your own to them.
      budget: peak bytes to keep within: an int, ``"14GiB"``, or a share of the target's memory such as ``0.9``; all of
        it by default.
      progress: whether to show a progress bar on standard error; on a terminal by default.

    Returns:
      A `Comparison`: print it, or take its ``rows``, ``best``, ``to_dict()``, ``to_pandas()``.

    Raises:
      RematError: for an unknown policy, before anything is compiled; as `measure` does where no policy can be
        measured.
    """
    named = _named(policies)
    setting = Setting.of(
        target,
        timeout=timeout,
        grad=grad,
        argnums=argnums,
        has_aux=has_aux,
        compiler_options=compiler_options,
        time=time,
        keep_barriers=keep_barriers,
    )
    allowed = budget_bytes(budget, setting.target)
    found: dict[str, Measurement] = {}
    refused: dict[str, str] = {}
    last: RematError | None = None
    for name in track(named, f"compiling for {setting.target}", progress):
        try:
            found[name] = measured(setting.step(fun, args, kwargs, named[name]), setting, time)
        except RematError as e:
            refused[name] = str(e)
            last = e
    if last is not None and not found:
        raise last
    base = next((m for name, m in found.items() if _removes_remat(named[name], whole_step=not grad)), None)
    flops = base.flops if base is not None else _flops_without_remat(setting, fun, args, kwargs, found)
    if base is not None:
        found = {
            n: m if m is base else dataclasses.replace(m, effect=effect(base, m, setting.keep_barriers))
            for n, m in found.items()
        }
    rows = tuple(
        ComparisonRow(
            name,
            m,
            m.flops / flops - 1 if flops else 0.0,
            m.fits is not False and (allowed is None or m.peak_bytes <= allowed),
            _dominating(name, found),
        )
        for name, m in found.items()
    )
    within = [r for r in rows if r.within]
    best = min(
        within, key=lambda r: (_seconds(r.measurement), r.measurement.flops, r.measurement.peak_bytes), default=None
    )
    return Comparison(setting.target.spec, rows, allowed, best.name if best else "", refused)


def _named(policies: Sequence[Policies] | Mapping[str, Policies]) -> dict[str, Policies]:
    """Policies by name, each readable."""
    if isinstance(policies, Mapping):
        named = dict(policies)
        for name in named:
            if not isinstance(name, str):
                raise RematError(f"policies: names are strings, got {name!r}.")
    elif isinstance(policies, str) or not isinstance(policies, Iterable):
        raise RematError(
            f"policies are several: a sequence of policies, or a mapping of names to them; got {policies!r:.80}."
        )
    else:
        named = {}
        for p in policies:
            name = p if isinstance(p, str) else "as written" if p is None else str(Rules.of(p))
            if name in named:
                raise RematError(f"policies: {name!r} is given twice.")
            named[name] = p
    if not named:
        raise RematError("policies is empty: name at least one, such as 'dots'.")
    for p in named.values():
        if p is not None:
            Rules.of(p)
    return named


def _removes_remat(policy: Policies, *, whole_step: bool) -> bool:
    """Whether a policy leaves nothing rematerialized: one for all blocks of a loss, those of a step's marked blocks."""
    if policy is None:
        return False
    rules = Rules.of(policy)
    return all(not p.remat for p in rules.policies) and (whole_step or rules.items[0][0] is None)


def _flops_without_remat(setting: Setting, fun: Any, args: Any, kwargs: Any, found: Mapping[str, Measurement]) -> int:
    if setting.grad:
        with contextlib.suppress(RematError):  # its figures stand without it
            return setting.step(fun, args, kwargs, "none").cost.flops
    return min(m.flops for m in found.values())


def _seconds(m: Measurement) -> float:
    return m.seconds if m.seconds is not None else 0.0


def _dominating(name: str, found: Mapping[str, Measurement]) -> str:
    """The first policy that is no worse than another in peak, time and FLOPs, and better in one of them."""
    mine = _objectives(found[name])
    for other, m in found.items():
        theirs = _objectives(m)
        if all(a <= b for a, b in zip(theirs, mine, strict=True)) and theirs != mine and m.fits is not False:
            return other
    return ""


def _objectives(m: Measurement) -> tuple[float, ...]:
    return (m.peak_bytes, _seconds(m) if m.fits is not False else float("inf"), m.flops)
