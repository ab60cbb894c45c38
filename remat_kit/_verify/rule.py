"""A rule of `lint`: a stable code, what it stands for, why that matters, and the function that looks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from remat_kit._verify.finding import Finding, Hit
from remat_kit._verify.subject import Subject

Look = Callable[[Subject], Iterable[Hit]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
      code: its stable code, ``"RK001"``; never used again for anything else.
      title: what it finds, in a few words.
      why: why that matters, in one or two sentences.
      look: finds it in a program.
    """

    code: str
    title: str
    why: str
    look: Look

    def findings(self, subject: Subject) -> list[Finding]:
        """What it finds, once for each source line and sentence: figures of layers that are alike are summed.

        Raises:
          Unavailable: where the program cannot be looked at as the rule does.
        """
        alike: dict[tuple[object, ...], list[Hit]] = {}
        for hit in self.look(subject):
            where = hit.where
            alike.setdefault((where.file, where.line, "" if where.file else str(where), hit.what), []).append(hit)
        return [
            Finding(self.code, self.title, hits[0].where, hits[0].what, self.why, _summed(hits), hits[0].change)
            for hits in alike.values()
        ]


def _summed(hits: Sequence[Hit]) -> Mapping[str, float]:
    if len(hits) == 1:
        return hits[0].figures
    return {"places": len(hits), **{key: sum(h.figures[key] for h in hits) for key in hits[0].figures}}


def rule(code: str, title: str, why: str) -> Callable[[Look], Rule]:
    """Makes a rule of a function."""
    return lambda look: Rule(code, title, why, look)
