"""What `check` found: each compared value, what of each derivative, what remat does, and whether all is well."""

from __future__ import annotations

import dataclasses
from typing import Any

from remat_kit._errors import RematError
from remat_kit._html_view import HtmlView
from remat_kit._units import format_shape
from remat_kit._verify.tolerance import Distance

SCHEMA = 1


class CheckError(RematError, AssertionError):
    """A function is not the same with and without remat."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """One array that the function with remat computes, compared with that of the function without.

    Attributes:
      derivative: what was run: "reverse" (loss, auxiliary output, new state and gradient), "forward",
        "forward_over_reverse" or "reverse_over_reverse".
      kind: "loss", "aux", "state", "gradient", "tangent" or "product" (of the Hessian with a random vector).
      label: its path: ``"params['w']"``.
      dtype, shape: its type.
      error: the largest difference of two entries; inf where only one is a finite number.
      size: the largest finite magnitude without remat.
      ulps: the largest difference in units of the last place of its dtype.
      differing: how many entries are not bitwise equal.
      tolerance: the largest error that passes as rounding.
      plain_error, remat_error: the largest differences from the reference, without and with remat; None without one.
      ok: whether it is the same.
    """

    derivative: str
    kind: str
    label: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    size: float
    ulps: float
    differing: int
    tolerance: float
    plain_error: float | None = None
    remat_error: float | None = None
    ok: bool = True

    @property
    def relative_error(self) -> float:
        """The error relative to the largest magnitude."""
        return Distance(self.error, self.size, 0.0, 0).relative

    @property
    def title(self) -> str:
        """What it is, in words."""
        if self.kind == "loss":
            return "the loss"
        of = {
            "gradient": "the gradient of",
            "aux": "the auxiliary output",
            "state": "the new state",
            "tangent": "the tangent of",
            "product": f"the Hessian-vector product ({self.derivative.replace('_', ' ')}) for",
        }
        return f"{of[self.kind]} {self.label}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data; infinite figures as text."""
        out = {**dataclasses.asdict(self), "shape": list(self.shape), "relative_error": self.relative_error}
        return {k: str(v) if isinstance(v, float) and v in (float("inf"),) or v != v else v for k, v in out.items()}


@dataclasses.dataclass(frozen=True)
class Derivative:
    """What became of one derivative.

    Attributes:
      name: "reverse", "forward", "forward_over_reverse" or "reverse_over_reverse".
      status: "same", "different", "unsupported" (the function without remat has none either) or "broken" (only the
        function with remat has none).
      reason: JAX's, for the last two.
    """

    name: str
    status: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether remat changed nothing."""
        return self.status in ("same", "unsupported")


@dataclasses.dataclass(frozen=True)
class Check(HtmlView):
    """Whether a function is the same with and without remat, and what remat does. True where it is the same.

    Attributes:
      policy: the policy in force, or ``"as written"``.
      blocks: paths of the blocks that the policy was applied to.
      compared: every array that was compared.
      derivatives: what became of each derivative that was asked for.
      impurities: what the function depends on, or changes, besides its arguments; a sentence each.
      findings: what is no failure and worth knowing, such as a remat without effect; a sentence each.
      regions: how many `jax.checkpoint` regions the program has.
      bytes_before, bytes_after: residuals kept on the device without and with remat, *predicted*; None where the
        function has no reverse mode.
      host_bytes: residuals that remat offloads, *predicted*.
      made_up: labels of the arguments that were given random values.
      skipped: labels of arguments that were to be differentiated and are no floating or complex numbers.
      seed: of the random values.
      reference: the type of the reference, or None.
    """

    policy: str
    blocks: tuple[str, ...]
    compared: tuple[Compared, ...]
    derivatives: tuple[Derivative, ...]
    impurities: tuple[str, ...]
    findings: tuple[str, ...]
    regions: int
    bytes_before: int | None
    bytes_after: int | None
    host_bytes: int
    made_up: tuple[str, ...]
    skipped: tuple[str, ...]
    seed: int
    reference: str | None

    @property
    def ok(self) -> bool:
        """Whether nothing failed: all that was compared is the same, no derivative is broken, the function is pure."""
        return not self.failures

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first_difference(self) -> Compared | None:
        """The first array that differs: the loss before the other outputs, these before the gradients."""
        return next((c for c in self.compared if not c.ok), None)

    @property
    def failures(self) -> tuple[str, ...]:
        """What failed, a sentence each; the first difference of each derivative stands for the others."""
        found = list(self.impurities)
        for d in self.derivatives:
            if d.status == "broken":
                found.append(
                    f"{_words(d.name)} fails with remat only: {d.reason}. The function without remat supports it."
                )
            wrong = [c for c in self.compared if c.derivative == d.name and not c.ok]
            if wrong:
                found.append(_difference(wrong))
        return tuple(found)

    def raise_for_failures(self) -> None:
        """Raises where anything failed.

        Raises:
          CheckError: a `RematError` that is an AssertionError too, with what failed.
        """
        if self.failures:
            raise CheckError(self.message())

    def message(self) -> str:
        """What failed, in a few lines; the empty string where nothing did."""
        if self.ok:
            return ""
        values = f" Values were made up (seed {self.seed})." if self.made_up else ""
        return f"the function is not the same with remat ({self.policy}).{values}\n" + "\n".join(
            f"- {f}" for f in self.failures
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "failures": list(self.failures),
            **{k: list(v) if isinstance(v, tuple) else v for k, v in data.items()},
            "compared": [c.to_dict() for c in self.compared],
            "derivatives": [dataclasses.asdict(d) for d in self.derivatives],
        }

    def print(self, console: Any = None, *, top: int = 10) -> None:
        """Prints it to a rich console (standard output by default), with the `top` largest differences."""
        from remat_kit._show import check

        check.print_check(self, console, top=top)

    def __str__(self) -> str:
        from remat_kit._show import check

        return check.check_to_str(self)


def _words(derivative: str) -> str:
    text = derivative.replace("_", " ")
    return text[0].upper() + text[1:] + (" mode" if derivative in ("reverse", "forward") else "")


def _difference(wrong: list[Compared]) -> str:
    c = wrong[0]
    more = f" {len(wrong) - 1} more differ ({', '.join(x.label for x in wrong[1:4])})." if len(wrong) > 1 else ""
    apart = f"{c.error:.3g} apart"
    if c.error == float("inf"):
        apart = "not finite in one of the two"
    elif c.size:
        apart += f", {c.relative_error:.2g} of its largest entry"
    reference = ""
    if c.plain_error is not None and c.remat_error is not None:
        reference = f" From the reference it is {c.remat_error:.3g} off, without remat {c.plain_error:.3g}."
    return (
        f"{c.title[0].upper()}{c.title[1:]} ({format_shape(c.dtype, c.shape)}) differs: {apart}, where rounding "
        f"explains {c.tolerance:.2g}.{reference}{more}"
    )
