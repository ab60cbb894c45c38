"""Policies held against the program that they are for: names and rules that it does not have are said."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from remat_kit._errors import RematError, RematWarning, near_matches
from remat_kit._globs import matches
from remat_kit._naming import Place, asks_labels, is_reserved, labels, values
from remat_kit._policy import Policy
from remat_kit._policy_text import format_rule
from remat_kit._presets import presets, unmatched_names
from remat_kit._trace import jaxprs, survey


@dataclasses.dataclass(frozen=True)
class Missing:
    """A name or glob in a policy that no checkpoint name of a program matches.

    Attributes:
      policy: the policy.
      name: the name or glob.
      present: the checkpoint names that the program has.
      hidden: whether the name is given in the forward rule of a custom_vjp function, where `jax_remat3` ignores names.
    """

    policy: Policy
    name: str
    present: frozenset[str]
    hidden: bool

    @property
    def near(self) -> str:
        """A question that names what may have been meant, or the empty string."""
        return near_matches(self.name, self.present)


def missing_names(jaxpr: Any, policies: Iterable[Policy], *given: str) -> Iterator[Missing]:
    """The names in policies that a program lacks. A preset lists those of several codebases, and needs only one.

    Args:
      *given: names that the program is going to be given.
    """
    asked = [p for p in policies if p.name_globs]
    if not asked:
        return
    have = inside = frozenset(n for n in survey.names_in(jaxpr, forward_rules=True) if not is_reserved(n))
    if jaxprs.remat3():
        have = frozenset(n for n in survey.names_in(jaxpr) if not is_reserved(n))
    for p in asked:
        for name in unmatched_names(p, have):
            if name not in given:
                yield Missing(p, name, have, any(matches(name, n) for n in inside - have))


def check_names(jaxpr: Any, policies: Iterable[Policy], *given: str) -> None:
    """Refuses names that the program does not have; see `missing_names`.

    Raises:
      RematError: for a name or glob that matches no checkpoint name of the program.
    """
    for missing in missing_names(jaxpr, policies, *given):
        title = missing.policy.name or str(missing.policy)[:200]
        if missing.hidden:
            raise RematError(
                f"policy {title!r}: the name {missing.name!r} is given inside the forward rule of a "
                "custom_vjp function, where jax_remat3 ignores names. Name a value outside the rule, or use the "
                "classic implementation (jax.config.update('jax_remat3', False))."
            )
        listed = ", ".join(repr(n) for n in sorted(missing.present)) or "none (name values with rk.checkpoint_name)"
        raise RematError(
            f"policy {title!r}: no value of the program is named {missing.name!r}. "
            f"Its checkpoint names: {listed[:600]}.{missing.near}"
        )


def warn_unmatched(asked: Sequence[tuple[Policy, Any, Place]]) -> None:
    """Warns of rules that match no value of the programs they are for; a preset may list more than a program has.

    Args:
      asked: policies, each with the closed program that it is for and the place of that.

    Warns:
      RematWarning: for each such rule, with near matches.
    """
    lenient = set(presets.values())
    for policy in dict.fromkeys(p for p, _, _ in asked if p.rules and p not in lenient):
        known = labels if asks_labels(policy) else lambda program: {}
        found = [f for p, program, place in asked if p == policy for f in values(program, place, known(program))]
        for rule in policy.rules:
            if any(rule.selector.matches(f) for f in found):
                continue
            pairs = (
                (rule.selector.op, {f.op for f in found}),
                (rule.selector.path, {f.path for f in found}),
                (rule.selector.value, {f.value for f in found}),
            )
            near = "".join(near_matches(glob, known) for globs, known in pairs for glob in globs)
            warnings.warn(
                f"the rule '{format_rule(rule)[:200]}' matches no value that it could save or offload.{near}",
                RematWarning,
                stacklevel=6,
            )
