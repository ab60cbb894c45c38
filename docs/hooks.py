"""What mkdocs makes when it builds the site: tables of the presets and of the checkpoint names, from the registry.

`on_page_markdown` is called by mkdocs for each page (`hooks:` in mkdocs.yml) and puts a table where a comment asks;
`on_post_page` keeps pages from fetching anything.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from remat_kit import _names, _presets
from remat_kit._policy import Policy
from remat_kit._rules import Action

_PROJECTS = {"praxis": "Praxis, TransformerEngine", "axlearn": "AXLearn", "easydel": "EasyDeL"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its tables."""
    for comment, table in (("presets", presets), ("checkpoint names", names)):
        place = f"<!-- table: {comment} -->"
        if place in markdown:
            markdown = markdown.replace(place, table())
    return re.sub(r"^\|.*$", _bars_in_code, markdown, flags=re.MULTILINE)


def on_post_page(output: str, **_: Any) -> str:
    """The page without the script that fetches MathJax: the notebooks have no formulas, and the site asks no other."""
    return re.sub(r"<script data-mkdocs-jupyter-mathjax=.*?</script>", "", output, flags=re.DOTALL)


on_post_page.mkdocs_priority = -100  # type: ignore[attr-defined]  # after the plugin that puts it there


def _bars_in_code(row: re.Match[str]) -> str:
    """A row of a table whose code may hold `\\|`, for which Python-Markdown would show the backslash as well."""

    def shown(code: re.Match[str]) -> str:
        text = html.escape(code[1].replace("\\|", "|"))
        return f"<code>{re.sub(r'[|*_]', lambda m: f'&#{ord(m[0])};', text)}</code>"  # what Markdown would read

    return re.sub(r"`([^`]*\\\|[^`]*)`", shown, row[0])


def presets() -> str:
    """A row for each preset, in the order of `remat-kit policies`."""
    aliases: dict[str, list[str]] = {}
    for alias in _presets.presets_and_aliases():
        if alias not in set(_presets.presets):  # a Mapping finds aliases too
            aliases.setdefault(_presets.presets[alias].name, []).append(alias)
    return _table(
        ("Preset", "Keeps and costs", "As text", "In JAX", "Aliases"),
        (
            (f"`{name}`", doc, _code([text]), _code([called]), _code(a for a in aliases.get(name, []) if a != called))
            for name, doc, text in _presets.preset_table()
            for called in [in_jax(_presets.presets[name])]
        ),
    )


def names() -> str:
    """A row for each name of the vocabulary: what it is, and how other projects spell it."""

    def spelled(name: str, project: str) -> str:
        aliases = _names.ALIASES.get(name, {}).get(project, ())
        ends = [alias.rpartition(".")[2] for alias in aliases]  # AXLearn's begin with a class: if several, with any
        return _code(dict.fromkeys(f"*.{e}" if ends.count(e) > 1 else a for a, e in zip(aliases, ends, strict=True)))

    return _table(
        ("Name", "What it is", *_PROJECTS.values()),
        ((f"`{name}`", doc, *(spelled(name, p) for p in _PROJECTS)) for name, doc in _names.VOCABULARY.items()),
    )


def in_jax(preset: Policy) -> str:
    """What JAX calls the same policy, in `jax.checkpoint_policies`; nothing if it has none."""
    policy = preset.as_jax() if preset.remat else None
    if policy is None:
        return ""
    for known in ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"):
        if policy is getattr(jax.checkpoint_policies, known):
            return known
    if not preset.exact_names():
        return "save_any_names_but_these()" if preset.name == "names" else "offload_dot_with_no_batch_dims(...)"
    offloads = Action.OFFLOAD in preset.actions
    return f"{'save_and_offload_only_these_names' if offloads else 'save_only_these_names'}(...)"


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`".replace("|", "\\|") for text in texts if text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
