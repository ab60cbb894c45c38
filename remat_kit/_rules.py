"""Rules: an action for the values that a selector speaks of, as plain data.

All criteria of a selector must hold; within one criterion any of its globs may. Knows nothing of JAX's own policies.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from remat_kit import _globs
from remat_kit._bytes import format_bytes, parse_bytes
from remat_kit._errors import RematError, near_matches

SEPARATORS = {"name": "", "op": "", "path": "/", "source": "/", "dtype": "", "value": "/"}
_DTYPES = {
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"{s}{n}": f"{'u' * (s == 'u')}int{n}" for s in ("i", "u", "s") for n in (8, 16, 32, 64)},
    "bf16": "bfloat16",
    "c64": "complex64",
    "c128": "complex128",
}


class Action(enum.StrEnum):
    """What becomes of a value: kept on the device, kept in host memory, or computed again in the backward pass."""

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"

    @classmethod
    def _missing_(cls, value: object) -> Action:
        hint = near_matches(value, [a.value for a in cls]) if isinstance(value, str) else ""
        raise RematError(f"there is no action {value!r:.80}.{hint} The actions are {', '.join(cls)}.")


@dataclass(frozen=True)
class ValueFacts:
    """What a selector may ask about one value of a program.

    Attributes:
        names: the names given to it by `jax.ad_checkpoint.checkpoint_name`; empty when it has none.
        op: the primitive that computed it (``dot_general``), seen through names.
        path: path of the module that made it (``decoder/layers/mlp``), empty at the top.
        source: path of the user's source file.
        dtype: as ``str(dtype)`` gives it (``bfloat16``).
        bytes: its size in bytes, as kept (times the trip count where it is kept for each trip).
        batch_dims: for matrix products, whether they have batch dimensions (``scaled_matmul_wrapper``: whether its
            batch is not 1, which is what JAX asks); None for everything else.
        value: its label, unique in its block (``attn/dot_general#2``); empty where no rule asks for it.
    """

    names: tuple[str, ...] = ()
    op: str = ""
    path: str = ""
    source: str = ""
    dtype: str = ""
    bytes: int = 0
    batch_dims: bool | None = None
    value: str = ""


@dataclass(frozen=True)
class Selector:
    """Which values a rule speaks of; a criterion that is empty or None is not asked.

    Strings are split at ``|``, sizes such as ``"1MiB"`` become bytes and dtypes their names, so selectors that mean the
    same are equal.

    Attributes:
        name: globs on checkpoint names.
        op: globs on primitive names.
        path: globs on module paths; ``*`` stops at ``/``, ``**`` does not. Paths start at the program in `apply` and
            `residuals`, at the decorated module or function in decorators and `override`.
        source: globs on the source file, matched with its whole path or its end after a ``/``.
        dtype: globs on dtype names.
        larger_than: bytes, strictly more than.
        smaller_than: bytes, strictly less than.
        batch_dims: whether a matrix product has batch dimensions; True and False both leave out other operations.
        value: globs on the labels of single values: the module path inside the block, the primitive and, from the
            second one on, its number there (``attn/dot_general#2``). What plans are made of.

    Raises:
        RematError: for malformed globs or sizes, wrong types, or when nothing is asked.
    """

    name: tuple[str, ...] = ()
    op: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    larger_than: int | None = None
    smaller_than: int | None = None
    batch_dims: bool | None = None
    value: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in FIELDS:
            object.__setattr__(self, key, normalize(key, getattr(self, key)))
        if not self.criteria():
            raise RematError(f"a rule must say which values it speaks of: give one or more of {', '.join(FIELDS)}.")
        low, high = self.larger_than, self.smaller_than
        if high == 0 or (low is not None and high is not None and high - low < 2):
            raise RematError(
                f"no value is larger than {format_bytes(low or 0)} and smaller than {format_bytes(high or 0)}."
            )

    def criteria(self) -> dict[str, Any]:
        """Returns what is asked, by field name, in the order of the fields."""
        return {key: value for key in FIELDS if (value := getattr(self, key)) not in ((), None)}

    def matches(self, value: ValueFacts) -> bool:
        """Tells whether all criteria hold for the value."""
        return (
            (self.larger_than is None or value.bytes > self.larger_than)
            and (self.smaller_than is None or value.bytes < self.smaller_than)
            and (self.batch_dims is None or value.batch_dims == self.batch_dims)
            and (not self.op or _globs.matches_any(self.op, value.op))
            and (not self.value or _globs.matches_any(self.value, value.value, "/"))
            and (not self.name or any(_globs.matches_any(self.name, name) for name in value.names))
            and (not self.dtype or _globs.matches_any(self.dtype, value.dtype))
            and (not self.path or _globs.matches_any(self.path, value.path, "/"))
            and (not self.source or _globs.matches_any(_tails(self.source), value.source.replace("\\", "/"), "/"))
        )

    def covers(self, other: Selector) -> bool:
        """Tells whether every value that ``other`` selects is surely selected here too."""
        asked = other.criteria()
        for key, mine in self.criteria().items():
            theirs = asked.get(key)
            if theirs is None:
                return False
            if key == "larger_than":
                ok = theirs >= mine
            elif key == "smaller_than":
                ok = theirs <= mine
            elif key == "batch_dims":
                ok = theirs == mine
            else:
                ok = all(_covers_glob(mine, glob, SEPARATORS[key]) for glob in theirs)
            if not ok:
                return False
        return True


FIELDS = tuple(field.name for field in fields(Selector))


@dataclass(frozen=True)
class Rule:
    """An action for every value that the selector matches."""

    action: Action
    selector: Selector

    def __post_init__(self) -> None:
        object.__setattr__(self, "action", Action(self.action))
        if not isinstance(self.selector, Selector):
            raise RematError(f"a rule needs a Selector, got {self.selector!r} of type {type(self.selector).__name__}.")


MOST_RULES = 1000  # of a policy: what a person or a planner writes is far below; a stranger's file may not be
_MOST_COMPARED = 2000


def useless(rules: Sequence[Rule]) -> Iterator[tuple[int, Rule]]:
    """Finds rules that never apply: the number of each, and an earlier rule that has all its values.

    Rules with very many globs, as planners make them, are not compared: that would take the square of their number.
    """
    globs = sum(len(v) for rule in rules for v in rule.selector.criteria().values() if isinstance(v, tuple))
    if globs > _MOST_COMPARED:
        return
    for number, rule in enumerate(rules):
        for earlier in rules[:number]:
            if earlier.selector.covers(rule.selector):
                yield number, earlier


def normalize(key: str, value: Any) -> Any:
    """Returns a criterion's one spelling: a sorted tuple of globs, a size in bytes, or a bool.

    Raises:
        RematError: when the value is of the wrong type or malformed.
    """
    if key in ("larger_than", "smaller_than"):
        return None if value is None else parse_bytes(value)
    if key == "batch_dims":
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise RematError(f"batch_dims is True, False or None, got {value!r}.")
        return None if value is None else bool(value)
    if value is None or (isinstance(value, tuple) and not value):
        return ()
    if key == "dtype" and not isinstance(value, (str, tuple, list, set, frozenset)):
        value = (value,)
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, dict) or not isinstance(items, Iterable):
        raise RematError(f"{key} is a glob or several, got {value!r} of type {type(value).__name__}.")
    globs = []
    for item in items:
        if key == "dtype":
            item = _dtype_name(item)
        if not isinstance(item, str):
            raise RematError(f"{key} is a glob or several, got {item!r} of type {type(item).__name__}.")
        globs += [_globs.canonical(part, SEPARATORS[key]) for part in _globs.split(item)]
    if not globs:
        raise RematError(f"{key} was given no glob: leave it out, or write '*' for any.")
    return tuple(sorted(set(globs)))


def unknown_key(key: str) -> str:
    """Returns what to say about a criterion that does not exist."""
    return f"there is no criterion {key!r}.{near_matches(key, FIELDS)} The criteria are {', '.join(FIELDS)}."


def _dtype_name(dtype: Any) -> Any:
    if isinstance(dtype, str):
        return "|".join(_DTYPES.get(part, part) for part in _globs.split(dtype))
    try:
        name = None if dtype is None else np.dtype(dtype).name
    except TypeError:
        return dtype
    return dtype if name in (None, "object") else name  # NumPy takes any class for one of objects


def _tails(globs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(glob if glob.startswith(("/", "**/")) else f"**/{glob}" for glob in globs)


def _covers_glob(globs: tuple[str, ...], glob: str, separator: str) -> bool:
    if glob in globs or ("**" if separator else "*") in globs:
        return True
    text = _globs.exact(glob)
    return text is not None and _globs.matches_any(globs, text, separator)
