"""The errors and warnings of remat_kit: each says what was asked, what was found and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class RematError(Exception):
    """Base class of every error that remat_kit raises on purpose."""


class _NotFoundError(RematError, KeyError):
    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class UnknownPolicyError(_NotFoundError):
    """A policy name that is not registered. The message lists the nearest names."""


class UnknownBlockError(_NotFoundError):
    """A block that a plan does not have. The message lists the nearest ones."""


class OptionError(RematError, TypeError):
    """An option of the wrong type."""


class UnsupportedEffectError(RematError, NotImplementedError):
    """A rematerialized function has an effect that JAX does not repeat, and is differentiated."""


class UnsupportedVmapError(RematError, NotImplementedError):
    """A rematerialized function with checkpoint names is mapped by an implementation of remat that cannot do so."""


class RematWarning(UserWarning):
    """Something was asked for that has no effect, or another effect than it seems to have."""


def near_matches(word: str, known: Iterable[str]) -> str:
    """Returns ``" Did you mean 'a' or 'b'?"``, or an empty string when nothing is near."""
    known = sorted(set(known))
    folded = {k.lower().replace("-", "_"): k for k in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=3, cutoff=0.6)
    if not found:
        return ""
    return " Did you mean " + " or ".join(repr(folded[f]) for f in found) + "?"


def first_line(error: BaseException) -> str:
    """The first line of an error of JAX's, which shows objects by the name of their class instead of their address."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return re.sub(r"<(?:\w+\.)*(\w+) object at 0x\w+>", r"\1", line)
