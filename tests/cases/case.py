"""A case: a public report of a fault, a small program that shows it, and the outcome that is right with the toolkit.

Outcomes are sentences computed from what really happened; `right` is what they must match, by implementation of remat.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import remat_kit as rk

REMAT3 = bool(jax.config.jax_remat3)  # pyright: ignore[reportAttributeAccessIssue]
EARLY = REMAT3 and jax.__version_info__ < (0, 11)
SAME = "same value and gradients"
_ROUNDINGS = 32  # of the largest entry: what the compiler's other order of operations may make of a few layers


@dataclasses.dataclass(frozen=True)
class Case:
    """One report.

    Attributes:
      title: what is wrong, or doubted, in the report.
      links: the reports, ``"jax-ml/jax#5886"``.
      run: the program; returns the outcome.
      right: the pattern of the right outcome.
      under: the implementation of remat to which the pattern belongs, if it is not for all.
    """

    title: str
    links: tuple[str, ...]
    run: Callable[[], str]
    right: str
    under: str = ""


CASES: list[Case] = []


def case(
    title: str, *links: str, right: str, remat3: str | None = None, early: str | None = None
) -> Callable[..., Any]:
    """Registers a program; `remat3` and `early` are what is right under jax_remat3, and under that of JAX 0.10.2."""

    def decorate(run: Callable[[], str]) -> Callable[[], str]:
        if EARLY and early is not None:
            CASES.append(Case(title, links, run, early, f"jax_remat3 of JAX {jax.__version__}"))
        elif REMAT3 and remat3 is not None:
            CASES.append(Case(title, links, run, remat3, "jax_remat3"))
        else:
            CASES.append(Case(title, links, run, right))
        return run

    return decorate


def told(ask: Callable[[], Any]) -> str:
    """How the toolkit answers: with an error of its own, a warning, or nothing."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            ask()
        except rk.RematError as error:
            return f"refused: {short(error)}"
    ours = [w.message for w in said if issubclass(w.category, rk.RematWarning)]
    return f"warned: {short(ours[0])}" if ours else "taken"


def found(fun: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What `rk.lint` finds."""
    findings = rk.lint(fun, *args, **options)
    return "; ".join(f"{f.code}: {short(f.what)}" for f in findings) or "no finding"


def short(message: object) -> str:
    """The first words of a message."""
    return " ".join(str(message).split())[:200]


def same(plain: Callable[..., Any], wrapped: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Compares with the plain function as `jax.value_and_grad` sees both."""
    a, b = (jax.jit(jax.value_and_grad(f, **options))(*args) for f in (plain, wrapped))
    return equal(SAME, a, b)


def equal(what: str, a: Any, b: Any) -> str:
    """`what` where two trees have one structure and equal numbers up to rounding, else how they differ."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return f"other structure: {jax.tree.structure(b)}"
    off = max(map(_roundings, jax.tree.leaves(a), jax.tree.leaves(b)), default=0.0)
    return what if off <= _ROUNDINGS else f"differs by {off:.3g} roundings"


def _roundings(a: Any, b: Any) -> float:
    """The largest difference in roundings of the largest entry."""
    if (jnp.shape(a), jnp.result_type(a)) != (jnp.shape(b), jnp.result_type(b)):
        return float("inf")
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    eps = float(jnp.finfo(jnp.result_type(a)).eps) if jnp.issubdtype(jnp.result_type(a), jnp.inexact) else 1.0
    return float(np.max(np.abs(x - y), initial=0.0) / (eps * max(np.max(np.abs(x), initial=0.0), 1e-30)))


def equations(fun: Callable[..., Any], primitive: str, *args: Any, **options: Any) -> int:
    """How many equations of a primitive the gradient has, written out."""
    return len(re.findall(rf"\b{primitive}\[", str(jax.make_jaxpr(jax.grad(fun, **options))(*args))))


def kept(report: rk.Residuals) -> list[rk.Residual]:
    """The values that a report says are kept."""
    return [e for e in report.entries if e.action == "saved" and not e.alias_of]


def seen(entry: rk.Residual, fun: Callable[..., Any], text: str) -> str:
    """The names of a value that is kept, its trips, and whether its line is that of a text in a function."""
    lines, first = inspect.getsourcelines(fun)
    file = (inspect.getsourcefile(fun) or "").rsplit("/", 1)[-1]
    mine = {f"{file}:{first + i}" for i, line in enumerate(lines) if text in line}
    where = "at its line" if entry.source.split()[0] in mine else f"at {entry.source}"
    trips = f" x{entry.trips}" if entry.trips > 1 else ""
    return f"{'+'.join(sorted(entry.names))}{trips} {where}"
