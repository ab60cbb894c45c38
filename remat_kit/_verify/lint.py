"""lint: where remat does nothing, does harm, or is not what it seems, each place with a stable code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from remat_kit import _adapters
from remat_kit._apply import Policies
from remat_kit._target.measure import measure
from remat_kit._target.measurement import Measurement
from remat_kit._target.target import Target
from remat_kit._target.target import target as as_target
from remat_kit._verify.finding import Finding, Findings
from remat_kit._verify.rules import RULES
from remat_kit._verify.settings import Settings, commented
from remat_kit._verify.subject import Subject, Unavailable


def lint(
    fun: Callable[..., Any],
    *args: Any,
    policy: Policies = None,
    target: str | Target | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    **kwargs: Any,
) -> Findings:
    """Looks for remat that does nothing, does harm, or is not what it seems.

    The function is traced and differentiated, not run. The comment ``# remat-kit: ignore[RK003]`` on a finding's
    line, or alone on the line above, takes it out; so does a setting in the nearest ``pyproject.toml``::

        [tool.remat-kit.lint]
        ignore = ["RK012"]

    Args:
      fun, *args, **kwargs: a loss and its arguments, real or abstract, as `residuals` takes them.
      policy: a policy, mapping or plan as `apply` takes it; None looks at the function as written.
      target: as `measure` takes it. Rules on what the compiler makes of remat need one, and compile twice for it.
      argnums, has_aux: as in `jax.grad`.
      select, ignore: codes, or beginnings of codes; None takes the settings, else all codes.

    Returns:
      A `Findings`: print it, iterate over it, or take its ``codes``.

    Raises:
      RematError: for a function that is no loss, an unknown policy, block or code, a target that cannot be compiled
        for. A name that the program lacks is a finding here, and no error.
    """
    settings = Settings.of(select, ignore, RULES)
    where = None if target is None else as_target(target)

    def measured() -> Measurement:
        assert where is not None
        return measure(
            fun, *args, policy=policy, against={"**": "none"}, target=where, argnums=argnums, has_aux=has_aux, **kwargs
        )

    found: list[Finding] = []
    notes: dict[str, None] = {}
    with _adapters.adapted(fun, args, kwargs) as call:
        subject = Subject(call, policy, argnums, has_aux, where, measured)
        for rule in RULES.values():
            if not settings.wants(rule.code):
                continue
            try:
                found += rule.findings(subject)
            except Unavailable as reason:
                if str(reason):
                    notes[str(reason)] = None
    if subject.refused:
        notes["The policy has names that the program lacks; the other rules looked at the program as written."] = None
    if subject.loss.applied is not None and subject.loss.applied.replaced:
        paths = ", ".join(subject.loss.applied.replaced[:6])
        notes[f"The policy replaces those of jax.checkpoint regions in the program: {paths}."] = None
    shown = tuple(f for f in found if not commented(f))
    return Findings(shown, tuple(f for f in found if commented(f)), subject.loss.policy, tuple(notes))
