"""One vocabulary of checkpoint names, and how other projects spell each.

The names are MaxText's, the widest known set. Presets list every spelling of a name, exactly and without globs, so that
they cover programs written with any of these projects and still map to JAX's own policies.
"""

from __future__ import annotations

from collections.abc import Iterable

# What each name stands for.
VOCABULARY: dict[str, str] = {
    "query_proj": "queries, after their projection",
    "key_proj": "keys, after their projection",
    "value_proj": "values, after their projection",
    "qkv_proj": "queries, keys and values from one fused projection",
    "kv_proj": "keys and values from one fused projection",
    "query_wa_proj": "compressed queries (multi-head latent attention)",
    "kv_wa_proj": "compressed keys and values (multi-head latent attention)",
    "mla_q": "queries rebuilt from the compressed ones",
    "mla_kv": "keys and values rebuilt from the compressed ones",
    "context": "output of the attention kernel, with what its backward pass needs",
    "attention_out": "attention's output before its output projection",
    "out_proj": "attention's output projection",
    "mlpwi": "the MLP's first product (fused gate and up)",
    "mlpwi_0": "the MLP's gate product",
    "mlpwi_1": "the MLP's up product",
    "mlpwo": "the MLP's down product",
    "moe_mlpwi_0": "the experts' gate product",
    "moe_mlpwi_1": "the experts' up product",
    "moe_mlpwo": "the experts' down product",
    "quantization": "quantized operands and their scales",
    "decoder_layer_input": "input of a layer",
    "layer_output": "output of a layer",
    "iteration_input": "input of a pipeline iteration",
    "conv_0": "first convolution of a residual block",
    "conv_1": "second convolution of a residual block",
    "conv_out": "last convolution of a block",
}

# AXLearn names a value after the class of the layer, "ClassName.name"; these are the classes it ships.
_AXLEARN_ATTENTION = (
    "FlashAttention",
    "GroupedQueryAttention",
    "MultiheadAttention",
    "MultiheadAttentionXL",
    "SigmoidAttention",
    "WindowedAttention",
)
_AXLEARN_MLP = ("TransformerFeedForwardLayer", "DiTFeedForwardLayer")


def _axlearn(classes: Iterable[str], name: str) -> tuple[str, ...]:
    return tuple(f"{cls}.{name}" for cls in classes)


# How each project spells a name, where not as in the vocabulary. "praxis" stands for Praxis and TransformerEngine,
# which share theirs; MaxText's spellings are the vocabulary itself.
ALIASES: dict[str, dict[str, tuple[str, ...]]] = {
    "query_proj": {"axlearn": _axlearn(_AXLEARN_ATTENTION, "q_proj"), "easydel": ("attn_query",)},
    "key_proj": {"axlearn": _axlearn(_AXLEARN_ATTENTION, "k_proj"), "easydel": ("attn_key",)},
    "value_proj": {"axlearn": _axlearn(_AXLEARN_ATTENTION, "v_proj"), "easydel": ("attn_value",)},
    "qkv_proj": {"praxis": ("combined_qkv_proj",), "easydel": ("attn_qkv",)},
    "kv_proj": {"praxis": ("combined_kv_proj",), "easydel": ("attn_key_value",)},
    "query_wa_proj": {"easydel": ("attn_query_a",)},
    "context": {"axlearn": (*_axlearn(_AXLEARN_ATTENTION, "context"), "flash_residuals")},
    "out_proj": {"axlearn": _axlearn(_AXLEARN_ATTENTION, "o_proj"), "easydel": ("attn_output", "attn_dense")},
    "mlpwi": {"praxis": ("ffn1",), "easydel": ("mlp_gate_up",)},
    "mlpwi_0": {"axlearn": _axlearn(_AXLEARN_MLP, "linear1_0"), "easydel": ("mlp_gate",)},
    "mlpwi_1": {"axlearn": _axlearn(_AXLEARN_MLP, "linear1_1"), "easydel": ("mlp_up",)},
    "mlpwo": {"praxis": ("ffn2",), "axlearn": _axlearn(_AXLEARN_MLP, "linear2"), "easydel": ("mlp_down",)},
    "moe_mlpwi_0": {"axlearn": ("TransformerFeedForwardMoE.linear1_0",), "easydel": ("moe_gate",)},
    "moe_mlpwi_1": {"axlearn": ("TransformerFeedForwardMoE.linear1_1",), "easydel": ("moe_up",)},
    "moe_mlpwo": {"axlearn": ("TransformerFeedForwardMoE.linear2",), "easydel": ("moe_expert_output",)},
    "quantization": {"praxis": ("qlhs", "qrhs", "lhs_scale", "rhs_scale")},
    "layer_output": {"praxis": ("transformer_layer_out",), "easydel": ("layer_output",)},
}


def spellings(name: str) -> tuple[str, ...]:
    """Returns all spellings of a name of the vocabulary, its own first; of any other name that name alone."""
    aliases = (alias for project in ALIASES.get(name, {}).values() for alias in project)
    return tuple(dict.fromkeys((name, *aliases)))


# The names that a custom remat policy of MaxText can place (its base.yml, "remat_policy: custom").
_MAXTEXT = (
    *("decoder_layer_input", "context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1"),
    *("moe_mlpwo", "query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj", "query_wa_proj", "kv_wa_proj"),
    *("mla_q", "mla_kv", "attention_out", "out_proj"),
)
MAXTEXT_NAMES: dict[str, str] = {spelling: name for name in _MAXTEXT for spelling in spellings(name)}
