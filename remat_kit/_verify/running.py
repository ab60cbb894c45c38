"""Running a derivative of two programs on the same values, and comparing what comes out leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._errors import RematError
from remat_kit._trace import jaxprs
from remat_kit._verify import random_values, tolerance
from remat_kit._verify.derivatives import Subject
from remat_kit._verify.reference import Reference, types
from remat_kit._verify.result import Compared, Derivative


class Unsupported(Exception):
    """JAX has no such derivative of a program; the message is the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A loss with and without remat, and the values to run them on.

    Attributes:
      subject: what both compute.
      plain, remat: the programs.
      leaves: their arguments, real.
      seed: of the random vectors and the nudges.
      reference: the loss in a wider type; None if not asked for.
      rtol, atol: the user's tolerances; None for those that are derived.
    """

    subject: Subject
    plain: Any
    remat: Any
    leaves: list[Any]
    seed: int
    reference: Reference | None
    rtol: float | None
    atol: float | None

    def compare(self, derivative: str) -> tuple[Derivative, list[Compared], list[str]]:
        """Runs one derivative with and without remat.

        Returns:
          What became of it, what was compared, and what differs between two runs of one program (a sentence each).

        Raises:
          RematError: if the function without remat fails when it is run.
        """
        try:
            plain = compiled(self.subject.function(derivative, self.plain), self.leaves, self.vectors)
        except Unsupported as reason:
            return Derivative(derivative, "unsupported", str(reason)), [], []
        a, again = (self.run(plain) for _ in range(2))
        try:
            remat = compiled(self.subject.function(derivative, self.remat), self.leaves, self.vectors)
            b = self.run(remat)
        except (Unsupported, RematError) as reason:
            return Derivative(derivative, "broken", str(reason)), [], []
        wide = self._wide(derivative)
        avals = [v.aval for v in jaxprs.opened(self.plain).outvars]
        described = self.subject.described(derivative, avals)
        labels = [*described.labels, *(label for label, _ in self.references)]
        kinds = [*described.kinds, *("state" for _ in self.references)]
        eps = tolerance.computing_eps(self.plain)
        noise = self._noise(plain, a, eps)
        compared, unsteady = [], []
        for i, (label, kind) in enumerate(zip(labels, kinds, strict=True)):
            found = self._compared(derivative, kind, label, a[i], b[i], wide[i] if wide else None, eps, noise[i])
            compared.append(found)
            twice = tolerance.distance(a[i], again[i])
            if twice.error > tolerance.allowed(twice, a[i].dtype, eps, 0.0):
                unsteady.append(f"Run twice on the same values, {found.title} differs: the function is not pure.")
        status = "same" if all(c.ok for c in compared) else "different"
        return Derivative(derivative, status), compared, unsteady[:1]

    @property
    def vectors(self) -> list[Any]:
        return self.subject.vectors(self.leaves, self.seed)

    @property
    def references(self) -> list[tuple[str, Any]]:
        """The mutable references that the loss may write to."""
        return references(self.subject, self.plain, self.leaves)

    def run(self, executable: Any, leaves: Sequence[Any] | None = None) -> list[Any]:
        """Runs a compiled derivative on the leaves, or on others; see `run`."""
        return run(executable, self.leaves if leaves is None else leaves, self.vectors, self.references)

    def _compared(
        self, derivative: str, kind: str, label: str, a: Any, b: Any, wide: Any, eps: float, noise: float
    ) -> Compared:
        between = tolerance.distance(a, b)
        if self.rtol is None and self.atol is None:
            most = tolerance.allowed(between, a.dtype, eps, noise)
        else:
            most = (self.atol or 0.0) + (self.rtol or 0.0) * between.size
        ok = between.error <= most
        off: tuple[float | None, float | None] = (None, None)
        if wide is not None and jnp.issubdtype(a.dtype, jnp.inexact):
            plain_error, remat_error = (tolerance.distance(wide, x, a.dtype).error for x in (a, b))
            off = plain_error, remat_error
            ok = ok or remat_error <= max(2 * plain_error, most)
        return Compared(
            derivative=derivative,
            kind=kind,
            label=label,
            dtype=str(a.dtype),
            shape=tuple(a.shape),
            error=between.error,
            size=between.size,
            ulps=between.ulps,
            differing=between.differing,
            tolerance=most,
            plain_error=off[0],
            remat_error=off[1],
            ok=ok,
        )

    def _noise(self, plain: Any, a: Sequence[Any], eps: float) -> list[float]:
        """For each output, what a change of the arguments' last bits does to it."""
        if self.rtol is not None or self.atol is not None or not eps:
            return [0.0] * len(a)
        moved = self.run(plain, random_values.nudged(self.leaves, eps / 2, self.seed))  # as far as rounding goes
        errors = (tolerance.distance(x, y).error for x, y in zip(a, moved, strict=True))
        return [e if np.isfinite(e) else 0.0 for e in errors]

    def _wide(self, derivative: str) -> list[Any] | None:
        if self.reference is None:
            return None
        with types(self.reference.wide):
            fun = self.subject.function(derivative, self.reference.jaxpr)
            leaves = self.reference.leaves
            vectors = self.subject.vectors(leaves, self.seed)
            try:
                executable = compiled(fun, leaves, vectors)
            except Unsupported:  # at other types only: there is nothing to hold the two against
                return None
            return run(executable, leaves, vectors, self.references)


def references(subject: Subject, plain: Any, leaves: Sequence[Any]) -> list[tuple[str, Any]]:
    """The mutable references that a loss is given or closes over, with their labels."""
    closed_over = [(f"captured reference {i}", x) for i, x in enumerate(jaxprs.constants(plain))]
    everything = [*zip(subject.labels, leaves, strict=True), *closed_over]
    return [(label, x) for label, x in everything if jaxprs.is_ref(jaxprs.aval_of(x))]


def compiled(fun: Callable[..., Any], leaves: Sequence[Any], vectors: Sequence[Any]) -> Any:
    """Compiles a derivative.

    Raises:
      Unsupported: where JAX has no rule for it, which it says while it traces or while it lowers.
      RematError: where XLA fails.
    """
    try:
        lowered = jax.jit(fun).trace(leaves, vectors).lower()
    except Exception as error:  # JAX raises all kinds: what has no rule fails where the rule would be used
        raise Unsupported(_reason(error)) from error
    try:
        return lowered.compile()
    except Exception as error:
        raise RematError(f"the function could not be compiled: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    said = (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
    plain = isinstance(error, (ValueError, TypeError, NotImplementedError, RuntimeError, RematError)) and said
    return said if plain else f"{type(error).__name__}{': ' if said else ''}{said}"


def run(executable: Any, leaves: Sequence[Any], vectors: Sequence[Any], refs: Sequence[tuple[str, Any]]) -> list[Any]:
    """Runs a compiled derivative; what it writes to references comes as further results, and is undone.

    Raises:
      RematError: for what fails when it is run.
    """
    before = [jnp.copy(r[...]) for _, r in refs]
    try:
        out = jax.block_until_ready(list(executable(leaves, vectors)))
        return [*out, *(jnp.copy(r[...]) for _, r in refs)]
    except Exception as error:  # a callback of the user's, or too little memory
        raise RematError(f"the function failed when it was run: {_reason(error)}.") from error
    finally:
        for (_, r), x in zip(refs, before, strict=True):
            r[...] = x
