r"""The text form of policies: ``offload name=attn_*; save op=dot_general larger_than=1MiB; recompute rest``.

Rules are separated by ``;``, criteria by blanks; a backslash takes the next character as it is. Errors point at the
spot. The grammar is in docs/policies.md.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from remat_kit._bytes import format_bytes
from remat_kit._errors import RematError, near_matches
from remat_kit._rules import FIELDS, MOST_RULES, Action, Rule, Selector, normalize, unknown_key, useless
from remat_kit._units import printable

_WORD = re.compile(r"(?:\\.|[^\\\s;]|\\\Z)+|;", re.DOTALL)
_CRITERION = re.compile(r"([^=<>]*)(=|<|>)(.*)", re.DOTALL)
_LONGEST = 2**20  # characters; what a person or a planner writes is far below
_YES_NO = {"yes": True, "true": True, "no": False, "false": False}


class _Word(NamedTuple):
    text: str
    at: int


def parse(text: str) -> tuple[tuple[Rule, ...], Action | None]:
    """Reads rules from text.

    Returns:
        The rules in order, and the action of the ``<action> rest`` rule or None without one.

    Raises:
        RematError: with the text and a mark below the spot that is wrong.
    """
    rules: list[Rule] = []
    places: list[tuple[int, int]] = []
    rest: Action | None = None
    if not text.strip():
        raise RematError("the policy's text is empty: write a preset's name or a rule such as 'save name=a'.")
    if len(text) > _LONGEST:
        raise RematError(f"the policy's text has {len(text)} characters, and may have {_LONGEST}.")
    for start, words in _statements(text):
        if not words:
            _fail(text, start, 1, "an empty rule: remove the ';' or write a rule such as 'save name=a'.")
        head, *criteria = words
        if head.text not in tuple(Action):
            _fail(
                text, *_span(head), f"{head.text!r} is no action.{near_matches(head.text, [a.value for a in Action])} "
                f"A rule begins with {', '.join(Action)}.",
            )  # fmt: skip
        action = Action(head.text)
        if rest is not None:
            _fail(text, *_span(head), f"a rule after '{rest} rest' never applies: put 'rest' last.")
        if not criteria:
            _fail(
                text, *_span(head),
                f"an empty rule: say which values to {action}, as in '{action} name=a', or '{action} rest'.",
            )  # fmt: skip
        if criteria[0].text == "rest":
            if len(criteria) > 1:
                _fail(text, *_span(criteria[1]), "'rest' stands alone: it means all other values.")
            rest = action
            continue
        if len(rules) == MOST_RULES:
            _fail(text, *_span(head), f"a policy has at most {MOST_RULES} rules; use globs such as name=a|b.")
        rules.append(Rule(action, _selector(text, criteria)))
        places.append((head.at, criteria[-1].at + len(criteria[-1].text) - head.at))
    for number, earlier in useless(rules):
        _fail(
            text, *places[number],
            f"this rule never applies: '{format_rule(earlier)}' comes before it and the first match wins.",
        )  # fmt: skip
    return tuple(rules), rest


def format_rule(rule: Rule) -> str:
    """Returns a rule as text that `parse` reads back as an equal rule."""
    return " ".join([rule.action, *(f"{key}={_format(value)}" for key, value in rule.selector.criteria().items())])


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_bytes(value)
    assert isinstance(value, tuple)
    # a canonical glob may hold an escaped blank only as the blank itself, so every one here needs its backslash
    return "|".join("".join("\\" + c if c == ";" or c.isspace() else c for c in glob) for glob in value)


def _statements(text: str) -> list[tuple[int, list[_Word]]]:
    """The words of each rule, with the place of the rule's end; one ``;`` at the very end is allowed."""
    statements: list[tuple[int, list[_Word]]] = []
    words: list[_Word] = []
    for found in _WORD.finditer(text):
        if found[0] == ";":
            statements.append((found.start(), words))
            words = []
        else:
            words.append(_Word(found[0], found.start()))
    return [*statements, (len(text), words)] if words or not statements else statements


def _selector(text: str, words: list[_Word]) -> Selector:
    criteria: dict[str, object] = {}
    for word in words:
        found = _CRITERION.fullmatch(word.text)
        if word.text == "rest":
            _fail(text, *_span(word), "'rest' stands alone: it means all other values.")
        if not found:
            _fail(
                text, *_span(word),
                f"{word.text!r} is no criterion: write key=value, as in 'name=attn_*'."
                + (" Is a blank on one side of the '='?" if word.text in FIELDS else ""),
            )  # fmt: skip
        key, sign, value = found.groups()
        if key == "size" and sign in "<>":
            key = "larger_than" if sign == ">" else "smaller_than"
        elif sign != "=":
            _fail(text, *_span(word), f"only sizes are compared, as in 'size{sign}1MiB'; here write '{key}=...'.")
        if key not in FIELDS:
            if key == "size":
                _fail(text, word.at, len(key), "write 'size>1MiB' or 'size<1MiB'.")
            _fail(text, word.at, max(len(key), 1), unknown_key(key))
        if key in criteria:
            hint = "" if "_" in key else f": write '{key}=a|b' for either"
            _fail(text, word.at, len(key), f"{key} is given twice in one rule{hint}.")
        value_at = (word.at + found.start(3), max(len(value), 1))
        if not value:
            _fail(text, *value_at, f"{key} is empty.")
        if key == "batch_dims":
            if value not in _YES_NO:
                _fail(text, *value_at, f"batch_dims is yes or no, got {value!r}.")
            criteria[key] = _YES_NO[value]
            continue
        try:
            criteria[key] = normalize(key, value)
        except RematError as error:
            _fail(text, *value_at, str(error))
    try:
        return Selector(**criteria)  # pyright: ignore[reportArgumentType]
    except RematError as error:
        _fail(text, words[0].at, words[-1].at + len(words[-1].text) - words[0].at, str(error))


def _span(word: _Word) -> tuple[int, int]:
    return word.at, len(word.text)


def _fail(text: str, at: int, length: int, message: str) -> NoReturn:
    """Raises an error that shows the line of the text and marks the spot."""
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    line = text[start : end if end >= 0 else len(text)]
    first = max(0, at - start - 60)  # long texts are shown around the spot only
    before, marked, after = (
        printable(line[i:j])
        for i, j in (
            (first, at - start),
            (at - start, min(at - start + length, first + 120)),
            (at - start + length, first + 120),
        )
    )
    mark = " " * len(before) + "^" * max(1, len(marked))
    place = f"column {at - start + 1}" + (f" of line {text.count(chr(10), 0, at) + 1}" if "\n" in text else "")
    said = message if len(message) <= _MESSAGE else f"{message[:_MESSAGE]} ..."
    raise RematError(f"cannot read the policy at {place}: {said}\n    {before}{marked}{after}\n    {mark}") from None


_MESSAGE = 1000  # it may quote the text
