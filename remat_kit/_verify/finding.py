"""What `lint` finds: one `Finding` for each fault, and the collection that it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from remat_kit._html_view import HtmlView
from remat_kit._units import format_bytes, format_flops, format_seconds

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Where:
    """A place in a user's program.

    Attributes:
      block: path of the block, as `apply` takes it, or ``""``.
      path: module path, or the `jax.named_scope` stack.
      file, line, function: the user's source line; ``("", 0, "")`` if it is not known.
    """

    block: str = ""
    path: str = ""
    file: str = ""
    line: int = 0
    function: str = ""

    @property
    def source(self) -> str:
        """The source line, ``"model.py:41 (attention)"``."""
        name = self.file.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{self.line} ({self.function})" if self.file else ""

    def __str__(self) -> str:
        return " ".join(x for x in (self.path or self.block, self.source and f"at {self.source}") if x)


@dataclasses.dataclass(frozen=True)
class Hit:
    """What a rule found: everything of a `Finding` that is not the same for all of its code."""

    where: Where
    what: str
    figures: Mapping[str, float]
    change: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place where remat does nothing, does harm, or is not what it seems.

    Attributes:
      code: the stable code, ``"RK001"``.
      title: what the code stands for, in a few words.
      where: the block, module path and source line.
      what: what was found, in one sentence.
      why: why it matters.
      figures: what shows it, summed over ``places`` where there are several; the keys end in the unit: ``_bytes``,
        ``_flops``, ``_seconds``, or are counts. *Predicted* from the program, but for the codes that compile
        (their figures say so).
      change: what to do.
    """

    code: str
    title: str
    where: Where
    what: str
    why: str
    figures: Mapping[str, float]
    change: str

    @property
    def figure(self) -> str:
        """The figures in words: ``"kept 12.0 MiB, values 3"``."""
        return ", ".join(f"{_label(key)} {_amount(key, x)}" for key, x in self.figures.items())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {
            **{k: getattr(self, k) for k in ("code", "title", "what", "why", "change")},
            "where": {**dataclasses.asdict(self.where), "source": self.where.source},
            "figures": dict(self.figures),
        }


_UNITS = {"_bytes": format_bytes, "_flops": format_flops, "_seconds": format_seconds}


def _label(key: str) -> str:
    for unit in _UNITS:
        key = key.removesuffix(unit)
    return key.replace("_", " ")


def _amount(key: str, x: float) -> str:
    spelled = next((f for unit, f in _UNITS.items() if key.endswith(unit)), None)
    return f"{x:g}" if spelled is None else spelled(x)


@dataclasses.dataclass(frozen=True)
class Findings(HtmlView):
    """What `lint` found in one program.

    Attributes:
      findings: in the order of their codes, then of the program.
      suppressed: those that a comment or a setting ignores.
      policy: the policy that was looked at, or ``"as written"``.
      notes: what could not be looked at, and why.
    """

    findings: tuple[Finding, ...]
    suppressed: tuple[Finding, ...] = ()
    policy: str = "as written"
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, i: int) -> Finding:
        return self.findings[i]

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes that were found, each once."""
        return tuple(dict.fromkeys(f.code for f in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data with a schema version."""
        return {
            "schema": SCHEMA,
            "policy": self.policy,
            "findings": [f.to_dict() for f in self.findings],
            "suppressed": [f.to_dict() for f in self.suppressed],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from remat_kit._show import findings

        return findings.findings_to_str(self)
