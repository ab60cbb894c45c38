r"""Glob patterns over names and module paths, matched in time linear in the text.

``*`` any run, ``?`` one character, ``[abc]`` ``[a-z]`` ``[!a]`` one of a set, ``a|b`` either, ``\`` takes the next
character as it is. With a separator, ``*`` and ``?`` stop at it and ``**`` does not. Patterns may come from strangers.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from remat_kit._errors import RematError

_SPECIAL = "*?[\\|"
_LONGEST = 8192  # characters of one glob; twice the longest path that systems know


class _Token(NamedTuple):
    kind: str  # "char", "one", "star", "deep", "set"; in programs also "fork"
    text: str = ""  # the character
    items: tuple[tuple[str, str], ...] = ()  # ranges of a set, both ends included
    negated: bool = False


def split(pattern: str) -> list[str]:
    """Splits ``a|b`` into its alternatives; an escaped bar does not count."""
    parts, start, i = [], 0, 0
    while i < len(pattern):
        if pattern[i] == "|":
            parts.append(pattern[start:i])
            start = i + 1
        i += 2 if pattern[i] == "\\" else 1
    return [*parts, pattern[start:]]


def literal(text: str) -> str:
    """Returns the pattern that matches exactly ``text``."""
    return "".join("\\" + c if c in _SPECIAL else c for c in text)


def canonical(pattern: str, separator: str = "") -> str:
    """Returns the one spelling of an alternative: needless escapes and repeated stars removed.

    Raises:
        RematError: for an empty pattern, an unclosed or empty set, a lone backslash, or control characters.
    """
    if not pattern:
        raise RematError("an empty glob matches nothing: write a name, or '*' for any.")
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in pattern):
        raise RematError(f"the glob {pattern!r:.80} holds control characters.")
    return "".join(_spell(token) for token in _tokens(pattern, separator))


def exact(pattern: str) -> str | None:
    """Returns the only text that a canonical pattern matches, or None when it has wildcards."""
    tokens = _tokens(pattern, "")
    return "".join(t.text for t in tokens) if all(t.kind == "char" for t in tokens) else None


def matches(pattern: str, text: str, separator: str = "") -> bool:
    """Tells whether one pattern (without ``|``) matches the whole text.

    Args:
        pattern: a glob without alternatives.
        text: what to match.
        separator: ``"/"`` for paths: ``*`` then stops at it, ``**`` does not, ``**/x`` also matches ``x`` and ``x/**``
            also matches ``x``.
    """
    tokens, skips = _program(pattern, separator)

    def close(states: Iterable[int]) -> set[int]:
        reached, todo = set(), list(states)
        while todo:
            at = todo.pop()
            if at in reached:
                continue
            reached.add(at)
            if at in skips:
                todo.append(skips[at])
            if at < len(tokens) and tokens[at].kind in ("star", "deep", "fork"):
                todo.append(at + 1)
        return reached

    states = close([0])
    for char in text:
        step = []
        for at in states:
            if at < len(tokens) and tokens[at].kind != "fork" and _takes(tokens[at], char, separator):
                step.append(at if tokens[at].kind in ("star", "deep") else at + 1)
        if not step:
            return False
        states = close(step)
    return len(tokens) in states


@lru_cache(maxsize=4096)
def _divided(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    texts = {pattern: exact(pattern) for pattern in patterns}
    return (
        frozenset(text for text in texts.values() if text is not None),
        tuple(pattern for pattern, text in texts.items() if text is None),
    )


@lru_cache(maxsize=65536)
def matches_any(patterns: tuple[str, ...], text: str, separator: str = "") -> bool:
    """Tells whether any of the patterns matches the whole text; see `matches`."""
    fixed, wild = _divided(patterns)
    return text in fixed or any(matches(pattern, text, separator) for pattern in wild)


@lru_cache(maxsize=4096)
def _program(pattern: str, separator: str) -> tuple[tuple[_Token, ...], dict[int, int]]:
    """The tokens, and the steps that may be skipped: ``**/`` at the start of a segment and ``/**`` at the end."""
    tokens: list[_Token] = []
    skips: dict[int, int] = {}
    plain = _tokens(pattern, separator)
    bars = [separator != "" and t == _Token("char", separator) for t in plain] + [False]
    for i, token in enumerate(plain):
        if token.kind == "deep" and (i == 0 or bars[i - 1]):
            if bars[i + 1]:
                skips[len(tokens)] = len(tokens) + 3  # over the fork, the stars and the bar
                tokens.append(_Token("fork"))  # a place of its own: once among the stars there is no way back to it
            elif i == len(plain) - 1 and i > 0:
                skips[len(tokens) - 1] = len(tokens) + 1
        tokens.append(token)
    return tuple(tokens), skips


@lru_cache(maxsize=4096)
def _char(char: str) -> _Token:
    return _Token("char", char)


@lru_cache(maxsize=4096)
def _tokens(pattern: str, separator: str) -> tuple[_Token, ...]:
    if len(pattern) > _LONGEST:
        raise RematError(f"a glob has at most {_LONGEST} characters, got {len(pattern)}: {pattern!r:.80} ...")
    tokens, i = [], 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            if i + 1 == len(pattern):
                raise RematError(f"the glob {pattern!r:.80} ends in a lone backslash: write '\\\\' for a backslash.")
            tokens.append(_char(pattern[i + 1]))
            i += 2
        elif char == "*":
            end = i + 1
            while pattern[end : end + 1] == "*":
                end += 1
            tokens.append(_Token("deep" if end > i + 1 and separator else "star"))
            i = end
        elif char == "[":
            token, i = _set(pattern, i)
            tokens.append(token)
        else:
            tokens.append(_Token("one") if char == "?" else _char(char))
            i += 1
    return tuple(tokens)


def _set(pattern: str, start: int) -> tuple[_Token, int]:
    """Reads ``[...]`` from its bracket; returns it and the place behind it."""
    i = start + 1
    negated = pattern[i : i + 1] == "!"
    i += negated
    chars: list[tuple[str, bool]] = []  # the character, and whether it stands for a range
    while i < len(pattern) and pattern[i] != "]":
        escaped = pattern[i] == "\\"
        i += escaped
        if i < len(pattern):
            chars.append((pattern[i], not escaped and pattern[i] == "-"))
        i += 1
    if i >= len(pattern):
        raise RematError(f"the glob {pattern!r:.80} has a '[' without ']': write '\\[' for a bracket.")
    if not chars:
        raise RematError(f"the glob {pattern!r:.80} has an empty set '[]': write '\\[' for a bracket.")
    items, k = [], 0
    while k < len(chars):
        low = high = chars[k][0]
        if k + 2 < len(chars) and chars[k + 1][1]:
            high = chars[k + 2][0]
            k += 2
        if low > high:
            raise RematError(f"the glob {pattern!r:.80} has an empty range '{low}-{high}'.")
        items.append((low, high))
        k += 1
    return _Token("set", items=tuple(sorted(set(items))), negated=negated), i + 1


def _spell(token: _Token) -> str:
    if token.kind != "set":
        return {"char": literal(token.text), "one": "?", "star": "*", "deep": "**"}[token.kind]

    def inner(char: str) -> str:
        return "\\" + char if char in "]\\-![|" else char

    ranges = "".join(inner(a) if a == b else f"{inner(a)}-{inner(b)}" for a, b in token.items)
    return f"[{'!' if token.negated else ''}{ranges}]"


def _takes(token: _Token, char: str, separator: str) -> bool:
    if token.kind == "char":
        return char == token.text
    if token.kind == "deep":
        return True
    if separator and char == separator:
        return False
    return token.kind != "set" or any(a <= char <= b for a, b in token.items) != token.negated
