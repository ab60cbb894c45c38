"""The policies with a public name: JAX's own, the matrix product ones, and those of transformer code bases.

Each has a line that says what it keeps and costs. The names in them come from _names.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from remat_kit import _globs, _names
from remat_kit._errors import RematError, UnknownPolicyError, near_matches
from remat_kit._html_view import HtmlView
from remat_kit._policy import Policy, named, policy
from remat_kit._policy_jax import FACTORIES
from remat_kit._rules import Action

_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj", "kv_proj")
_MLP = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")
_EXPERTS = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")
_MINIMAL = (*_QKV, "out_proj", *_MLP)
_MATMULS = "*dot_general|ragged_dot*|conv_general_dilated|scaled_matmul*|te_*gemm*"


def _by_name(action: str, *names: str) -> str:
    """The rule for names of the vocabulary, in all spellings."""
    return f"{action} name={'|'.join(_globs.literal(s) for name in names for s in _names.spellings(name))}"


# name, text form, doc, aliases
_BUILT_IN: list[tuple[str, str, str, tuple[str, ...]]] = [
    (
        "none",
        "none",
        "No remat at all: autodiff keeps what it needs. Most memory, no recomputation.",
        (),
    ),
    (
        "full",
        "recompute rest",
        "Keeps only each block's inputs. Least memory, about one more forward pass.",
        ("nothing_saveable", "save_nothing"),
    ),
    (
        "everything",
        "save rest",
        "Keeps all that autodiff needs, inside a jax.checkpoint. Memory as with 'none', no recomputation.",
        ("everything_saveable", "save_everything"),
    ),
    (
        "dots",
        "save op=dot_general|conv_general_dilated|scaled_matmul_wrapper",
        "Keeps every matrix product and convolution, attention scores too. Recomputes only elementwise work.",
        ("dots_saveable", "checkpoint_dots", "save_dot_only"),
    ),
    (
        "dots_no_batch",
        "save op=dot_general|scaled_matmul_wrapper batch_dims=no",
        "Keeps products with weights, not attention scores. Recomputes attention; keeps nothing under vmap or of MoE "
        "einsums, whose products have batch dimensions.",
        (
            "dots_with_no_batch_dims_saveable",
            "checkpoint_dots_with_no_batch_dims",
            "save_dot_with_no_batch_dims",
        ),
    ),
    (
        "offload_dots_no_batch",
        "offload op=dot_general batch_dims=no",
        "As dots_no_batch, but kept in host memory: little device memory, at the cost of two transfers for each value.",
        ("offload_dots", "offload_dot_with_no_batch_dims"),
    ),
    (
        "names",
        "save name=*",
        "Keeps every value with a checkpoint name. Recomputes all that lies between them.",
        ("named",),
    ),
    (
        "matmuls",
        f"save op={_MATMULS}",
        "Keeps every matrix product: MoE einsums, ragged and scaled products, convolutions and TransformerEngine's "
        "kernels, under vmap too. Attention scores are among them. Recomputes only elementwise work.",
        (),
    ),
    (
        "offload_matmuls",
        f"offload op={_MATMULS}",
        "As matmuls, but kept in host memory, at the cost of two transfers for each value.",
        (),
    ),
    (
        "attention_kernels",
        "save op=custom_vjp_call*",
        "Keeps all that custom_vjp calls (fused attention kernels) hand to their backward rules, so that none runs "
        "again. Recomputes everything else. Not under jax_remat3, which ignores names in forward rules.",
        (),
    ),
    (
        "te_gemms",
        "save op=te_*gemm*|scaled_matmul_wrapper",
        "Keeps TransformerEngine's products and scaled products only. Recomputes JAX's own products.",
        ("te_gemms_saveable",),
    ),
    (
        "dots_and_te_gemms",
        "save op=dot_general|conv_general_dilated|scaled_matmul_wrapper|te_*gemm*",
        "As dots, with TransformerEngine's products. Recomputes only elementwise work.",
        ("checkpoint_dots_and_te_gemms",),
    ),
    (
        "dots_and_te_gemms_no_batch",
        "save op=te_*gemm*|scaled_matmul_wrapper; save op=dot_general batch_dims=no",
        "As dots_no_batch, with TransformerEngine's products. Recomputes attention.",
        ("dots_and_te_gemms_with_no_batch_dims",),
    ),
    (
        "minimal",
        _by_name("save", *_MINIMAL),
        "Keeps the named projections of attention and MLP. Recomputes attention itself and elementwise work.",
        (),
    ),
    (
        "minimal_with_context",
        _by_name("save", *_MINIMAL, "context"),
        "As minimal, and keeps attention's output. Recomputes elementwise work only: the fastest, and most memory.",
        ("minimal_flash", "save_dot_except_logits"),
    ),
    (
        "minimal_with_experts",
        _by_name("save", *_MINIMAL, *_EXPERTS),
        "As minimal, and keeps the products of mixture-of-experts layers. Recomputes attention itself, routing and "
        "elementwise work.",
        (),
    ),
    (
        "minimal_with_quantization",
        _by_name("save", *_MINIMAL, "quantization"),
        "As minimal, and keeps quantized operands with their scales, so that nothing is quantized twice.",
        (),
    ),
    (
        "minimal_with_context_and_quantization",
        _by_name("save", *_MINIMAL, "context", "quantization"),
        "As minimal_with_context, and keeps quantized operands with their scales.",
        (),
    ),
    (
        "save_dot_with_context_except_mlp",
        _by_name("save", *_QKV, "context", "out_proj"),
        "Keeps attention's projections and output. Recomputes the MLP.",
        ("save_dot_for_mlperf_200b",),
    ),
    (
        "save_dot_except_mlpwi",
        _by_name("save", *_QKV, "out_proj", "mlpwo"),
        "Keeps attention's projections and the MLP's output. Recomputes attention itself and the MLP's wide products.",
        (),
    ),
    (
        "save_dot_except_logits_ffn1",
        _by_name("save", *_QKV, "context", "out_proj", "mlpwo"),
        "Keeps attention's projections and output and the MLP's output. Recomputes the MLP's wide products.",
        (),
    ),
    (
        "save_dot_except_mlp",
        _by_name("save", *_QKV, "out_proj"),
        "Keeps attention's projections. Recomputes attention itself and the MLP.",
        ("save_qkv_out_proj", "save_qkv_out_proj_separate"),
    ),
    (
        "save_qkv_proj",
        _by_name("save", *_QKV),
        "Keeps queries, keys and values, fused or not. Recomputes attention itself, its output projection and the MLP.",
        (),
    ),
    (
        "save_out_proj",
        _by_name("save", "out_proj"),
        "Keeps attention's output projection. Recomputes the rest, attention too.",
        (),
    ),
    (
        "save_context",
        _by_name("save", "context"),
        "Keeps the attention kernel's output. Recomputes projections and the MLP, but not attention.",
        (),
    ),
    (
        "save_encoded_and_out_proj",
        _by_name("save", "context", "out_proj"),
        "Keeps attention's output before and after its projection. Recomputes other projections and the MLP.",
        ("save_context_and_out_proj",),
    ),
    (
        "save_mlp",
        _by_name("save", *_MLP, *_EXPERTS),
        "Keeps the products of the MLP and of experts. Recomputes attention and its projections.",
        (),
    ),
    (
        "save_quantized",
        _by_name("save", "context", "out_proj", "qkv_proj", "quantization"),
        "Keeps attention's fused projections and output and quantized operands. Recomputes the MLP.",
        (),
    ),
    (
        "save_transformer_layer_output",
        _by_name("save", "layer_output"),
        "Keeps each layer's output, for blocks of several layers. Recomputes within layers.",
        (),
    ),
    (
        "save_iteration_input",
        _by_name("save", "iteration_input"),
        "Keeps the input of each pipeline iteration. Recomputes the iteration.",
        (),
    ),
    (
        "save_unet_conv",
        _by_name("save", "conv_out"),
        "Keeps each block's last convolution. Recomputes the others.",
        (),
    ),
    (
        "save_unet_all_conv",
        _by_name("save", "conv_0", "conv_1", "conv_out"),
        "Keeps each block's named convolutions. Recomputes normalization and elementwise work.",
        (),
    ),
    (
        "qkv_proj_offloaded",
        _by_name("offload", *_QKV),
        "Keeps queries, keys and values, fused or not, in host memory. Recomputes as save_qkv_proj, plus transfers.",
        (),
    ),
    (
        "minimal_offloaded",
        _by_name("offload", *_MINIMAL),
        "As minimal, but kept in host memory, at the cost of two transfers for each value.",
        (),
    ),
]

_registry: dict[str, Policy] = {name: named(Policy.parse(text), name, doc) for name, text, doc, _ in _BUILT_IN}
_aliases: dict[str, str] = {alias: name for name, _, _, aliases in _BUILT_IN for alias in aliases}
_reserved = frozenset([*_registry, *_aliases, *FACTORIES, *Action, "rest"])


class Presets(Mapping[str, Policy], HtmlView):
    """The named policies: each is a Policy that also has `name` and `doc`. Aliases are found, but not listed."""

    def __getitem__(self, name: str) -> Policy:
        try:
            return _registry[_aliases.get(name, name)]
        except (KeyError, TypeError):
            raise unknown(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(_registry))  # other threads may register meanwhile

    def __len__(self) -> int:
        return len(_registry)

    def __repr__(self) -> str:
        return f"presets({', '.join(_registry)})"


presets = Presets()


def register(name: str, policy: Policy | str | Callable, doc: str = "") -> Policy:
    """Gives a policy a name, under which it is then found everywhere.

    Args:
        name: letters, digits, ``_``, ``-`` and ``.``, beginning with a letter. A name registered before is replaced.
        policy: what `policy()` takes.
        doc: one line on what it keeps and costs.

    Returns:
        The policy, with its `name` and `doc`.

    Raises:
        RematError: for a built-in name or alias, a malformed name, or a malformed policy.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,99}", name):
        raise RematError(
            f"a preset's name is made of letters, digits, '_', '-' and '.' and begins with a letter, got {name!r}."
        )
    if name in _reserved:
        what = "a built-in preset" if name in _registry or name in _aliases else "a word of the policy language"
        raise RematError(f"{name!r} is {what} and cannot be registered: choose another name.")
    if not isinstance(doc, str):
        raise RematError(f"a preset's doc is text, got {doc!r} of type {type(doc).__name__}.")
    _registry[name] = named(_policy(policy), name, doc)
    return _registry[name]


_policy = policy


def find(word: str) -> Policy | None:
    """Returns the preset of that name or alias, or None when the text is not a single word but rules.

    Raises:
        UnknownPolicyError: for a single word that no preset is named.
    """
    known = frozenset(presets_and_aliases())
    if word in known:
        return presets[word]
    if word and re.fullmatch(r"[^\s;=<>]+", word) and word not in tuple(Action):
        raise unknown(word)
    for part in word.split(";"):
        if part.strip() in known and part.strip() != word:
            raise RematError(
                f"{part.strip()!r} is a preset and cannot stand among rules: combine policies with |, as in "
                f"policy({part.strip()!r}) | policy('save name=a')."
            )
    return None


def presets_and_aliases() -> tuple[str, ...]:
    """Returns all words that name a preset."""
    return (*_registry, *_aliases)


def unknown(name: object) -> UnknownPolicyError:
    """Returns the error for a name that no preset has."""
    shown = repr(name)[:100]
    if isinstance(name, str) and name in FACTORIES:
        return UnknownPolicyError(
            f"{shown} is no policy: in JAX it is a function that makes one from names. Write {FACTORIES[name]!r}."
        )
    near = near_matches(name, presets_and_aliases()) if isinstance(name, str) and len(name) < 100 else ""
    listed = ", ".join(_registry)
    return UnknownPolicyError(
        f"there is no policy named {shown}.{near or f' The names are {listed}.'} "
        "A policy can also be written out, as in 'save name=a'."
    )


def short_text(policy: Policy) -> str:
    """Returns the text form for showing: of a name that is there in all spellings, only the vocabulary's own."""
    rules = []
    for rule in policy.rules:
        globs = rule.selector.name
        whole = _whole_groups(globs)
        others = {spelling for name in whole for spelling in _names.spellings(name)} - set(whole)
        kept = tuple(glob for glob in globs if _globs.exact(glob) not in others)
        rules.append(replace(rule, selector=replace(rule.selector, name=kept)) if others else rule)
    return str(replace(policy, rules=tuple(rules)))


def preset_table() -> list[tuple[str, str, str]]:
    """Returns ``(name, doc, short text form)`` of each preset, in the order of the documentation."""
    return [(name, preset.doc, short_text(preset)) for name, preset in tuple(_registry.items())]


def unmatched_names(policy: Policy, present: Iterable[str]) -> tuple[str, ...]:
    """Returns the names and globs in a policy that no checkpoint name of a program matches.

    A rule that lists all spellings of a name, as presets do, is content when the program has any of its names; if it
    has none, the vocabulary's spellings are returned.

    Args:
        policy: any policy.
        present: the checkpoint names that the program has.
    """
    present = tuple(present)
    missing: list[str] = []
    for rule in policy.rules:
        globs = rule.selector.name
        unmet = [g for g in globs if not any(_globs.matches(g, name) for name in present)]
        whole = _whole_groups(globs)
        covered = {spelling for name in whole for spelling in _names.spellings(name)}
        if len(covered) > len(whole):  # some name is there in several spellings: the rule is a preset's
            missing += [g for g in unmet if _globs.exact(g) not in covered]
            if all(glob in unmet for glob in globs):
                missing += whole
        else:
            missing += unmet
    return tuple(dict.fromkeys(missing))


def _whole_groups(globs: Iterable[str]) -> list[str]:
    """The names of the vocabulary that are there in all their spellings."""
    texts = {_globs.exact(glob) for glob in globs}
    return [name for name in _names.VOCABULARY if texts.issuperset(_names.spellings(name))]
