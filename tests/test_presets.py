"""The named policies, the registry, and the vocabulary of checkpoint names."""

import pickle
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from remat_kit import _names, _presets
from remat_kit._errors import RematError, UnknownPolicyError
from remat_kit._policy import Action, Policy, ValueFacts, policy, save
from remat_kit._presets import presets, register, unmatched_names

cp = jax.checkpoint_policies


@pytest.fixture
def registry():
    before = dict(_presets._registry)
    yield
    _presets._registry.clear()
    _presets._registry.update(before)


def test_presets_are_policies_with_a_line_of_documentation():
    assert isinstance(presets, Mapping) and list(presets)[:4] == ["none", "full", "everything", "dots"]
    for name, p in presets.items():
        assert isinstance(p, Policy) and p.name == name and policy(name) is p
        assert p.doc.endswith(".") and 20 < len(p.doc) < 250 and "\n" not in p.doc
        assert Policy.parse(str(p)) == p == Policy.from_json(p.to_json()) == pickle.loads(pickle.dumps(p))
        assert len(_presets.short_text(p)) < 400
        assert policy(_presets.short_text(p)).actions == p.actions


def test_presets_cannot_be_changed_from_outside():
    with pytest.raises(TypeError):
        presets["dots"] = policy("full")  # pyright: ignore[reportIndexIssue]
    with pytest.raises(UnknownPolicyError, match="Did you mean"):
        presets["dot"]
    assert "dot" not in presets and [] not in presets


@pytest.mark.parametrize("name", [n for n in vars(cp) if not n.startswith("_") and n not in _presets.FACTORIES])
def test_jaxs_own_names_mean_jaxs_own_policies(name):
    assert policy(name).as_jax() is getattr(cp, name) and policy(name) == policy(getattr(cp, name))


@pytest.mark.parametrize("name", _presets.FACTORIES)
def test_names_of_jaxs_functions_say_how_to_write_them(name):
    text = _presets.FACTORIES[name]
    assert hasattr(cp, name) and isinstance(policy(text), Policy)
    if name == "offload_dot_with_no_batch_dims":  # has no arguments worth giving, so its name is a policy
        assert policy(name) == policy(text)
    else:
        with pytest.raises(UnknownPolicyError) as caught:
            policy(name)
        assert text in str(caught.value)


QKV = "query_proj value_proj key_proj kv_proj qkv_proj"
MINIMAL = f"{QKV} out_proj mlpwi_0 mlpwi_1 mlpwi mlpwo"
MAXTEXT = {
    "minimal": MINIMAL,
    "minimal_with_context": f"{MINIMAL} context",
    "minimal_flash": f"{MINIMAL} context",
    "minimal_with_quantization": f"{MINIMAL} quantization",
    "minimal_with_context_and_quantization": f"{MINIMAL} context quantization",
    "save_dot_with_context_except_mlp": f"{QKV} context out_proj",
    "save_dot_except_mlpwi": f"{QKV} out_proj mlpwo",
    "save_dot_except_mlp": f"{QKV} out_proj",
    "save_qkv_proj": QKV,
    "save_out_proj": "out_proj",
    "qkv_proj_offloaded": QKV,
    "minimal_offloaded": MINIMAL,
}
PRAXIS = {
    "save_qkv_out_proj": "combined_qkv_proj out_proj",
    "save_qkv_out_proj_separate": "query_proj value_proj key_proj out_proj",
    "save_context": "context",
    "save_out_proj": "out_proj",
    "save_encoded_and_out_proj": "context out_proj",
    "save_dot_for_mlperf_200b": "combined_qkv_proj query_proj value_proj key_proj context out_proj",
    "save_quantized": "context out_proj combined_qkv_proj qlhs qrhs lhs_scale rhs_scale",
    "save_iteration_input": "iteration_input",
    "save_transformer_layer_output": "transformer_layer_out",
    "save_dot_except_logits_ffn1": "combined_qkv_proj query_proj value_proj key_proj context out_proj ffn2",
    "save_dot_except_logits": "combined_qkv_proj query_proj value_proj key_proj context out_proj ffn1 ffn2",
    "save_unet_conv": "conv_out",
    "save_unet_all_conv": "conv_0 conv_1 conv_out",
}
PRAXIS_NAMES = set("iteration_input transformer_layer_out conv_0 conv_1 conv_out".split()) | {
    name for names in PRAXIS.values() for name in names.split()
}  # fmt: skip


@pytest.mark.parametrize("preset", MAXTEXT)
def test_maxtext_presets_keep_what_they_keep_in_maxtext(preset):
    action = Action.OFFLOAD if preset.endswith("offloaded") else Action.SAVE
    decided = policy(preset).exact_names()
    assert {name for name in _names.VOCABULARY if decided.get(name) == action} == set(MAXTEXT[preset].split())


@pytest.mark.parametrize("preset", PRAXIS)
def test_praxis_presets_keep_what_they_keep_in_praxis(preset):
    # of fused and separate projections a Praxis layer has only one kind, so both may be listed
    either = {"combined_qkv_proj", "query_proj", "key_proj", "value_proj"}
    decided = set(policy(preset).exact_names())
    assert set(PRAXIS[preset].split()) <= decided
    assert (decided & PRAXIS_NAMES) - either == set(PRAXIS[preset].split()) - either


def test_presets_of_exact_names_are_jaxs_own():
    for name, p in presets.items():
        through_names = {
            "none",
            "matmuls",
            "offload_matmuls",
            "attention_kernels",
            "te_gemms",
            "dots_and_te_gemms",
            "dots_and_te_gemms_no_batch",
        }
        assert name in through_names or p.as_jax() is not None, name


@pytest.mark.parametrize(
    "names",
    [
        ("query_proj", "out_proj", "mlpwo"),
        ("combined_qkv_proj", "out_proj", "ffn2"),
        ("GroupedQueryAttention.q_proj", "GroupedQueryAttention.o_proj", "TransformerFeedForwardLayer.linear2"),
        ("attn_query", "attn_output", "mlp_down"),
    ],
    ids=["maxtext", "praxis", "axlearn", "easydel"],
)
@pytest.mark.parametrize(("preset", "saved"), [("full", 0), ("save_qkv_proj", 1), ("minimal", 2)])
def test_one_preset_serves_every_vocabulary(names, preset, saved):
    def layer(x):
        x = jnp.sin(checkpoint_name(jnp.sin(x), names[0]))
        x = jnp.sin(checkpoint_name(jnp.sin(x), names[1]))
        return checkpoint_name(jnp.sin(x), names[2]).sum()

    block = jax.checkpoint(layer, policy=policy(preset).as_jax())
    avals = jax.make_jaxpr(lambda x: jax.vjp(block, x))(jnp.ones(7)).out_avals
    assert sum(aval.shape == (7,) for aval in avals) - 1 == saved  # one is x itself


@pytest.mark.parametrize(
    ("op", "batch_dims", "kept_by"),
    [
        ("dot_general", False, {"dots", "dots_no_batch", "matmuls", "dots_and_te_gemms", "dots_and_te_gemms_no_batch"}),
        ("dot_general", True, {"dots", "matmuls", "dots_and_te_gemms"}),
        ("ragged_dot_general", None, {"matmuls"}),
        ("conv_general_dilated", None, {"dots", "matmuls", "dots_and_te_gemms"}),
        ("te_gemm_v2_ffi_wrapper", None, {"matmuls", "te_gemms", "dots_and_te_gemms", "dots_and_te_gemms_no_batch"}),
        (
            "te_grouped_gemm_ffi_wrapper",
            None,
            {"matmuls", "te_gemms", "dots_and_te_gemms", "dots_and_te_gemms_no_batch"},
        ),
        ("add", None, set()),
    ],
)
def test_presets_on_products(op, batch_dims, kept_by):
    value = ValueFacts(op=op, batch_dims=batch_dims)
    presets_on_products = {n for n, p in presets.items() if "op=" in str(p) and Action.SAVE in p.actions}
    assert {n for n in presets_on_products if policy(n).action(value) == Action.SAVE} == kept_by


def test_ragged_dot_is_called_what_the_preset_thinks():
    jaxpr = jax.make_jaxpr(jax.lax.ragged_dot)(jnp.ones((4, 2)), jnp.ones((2, 2, 3)), jnp.array([1, 3]))
    ops = [eqn.primitive.name for eqn in jaxpr.jaxpr.eqns]
    assert any(policy("matmuls").action(ValueFacts(op=op)) == Action.SAVE for op in ops), ops


def test_aliases_are_found_but_not_listed():
    assert policy("offload_dots") is presets["offload_dots"] is presets["offload_dots_no_batch"]
    assert "offload_dots" in presets and "offload_dots" not in list(presets)
    rows = _presets.preset_table()
    assert [row[0] for row in rows] == list(presets) and all(len(row) == 3 for row in rows)


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(UnknownPolicyError, match="Did you mean 'minimal'"):
        policy("minmal")
    with pytest.raises(KeyError):
        policy("Xyzzy")
    with pytest.raises(RematError, match="combine policies with"):
        policy("minimal; offload name=x")


def test_registering(registry):
    mine = register("mine", "save name=a*", doc="Keeps a.")
    assert policy("mine") is mine is presets["mine"] and mine == save(name="a*")
    assert (mine.name, mine.doc) == ("mine", "Keeps a.") and repr(mine) == "policy('mine')"
    assert policy("dots") == register("again", cp.dots_saveable) and policy("dots").name == "dots"
    assert register("mine", "full") == policy("mine") == policy("full")


@pytest.mark.parametrize("name", ["dots", "minimal_flash", "offload_dots", "save", "rest", "save_only_these_names"])
def test_built_in_names_cannot_be_taken(name, registry):
    with pytest.raises(RematError, match="cannot be registered"):
        register(name, "full")


@pytest.mark.parametrize("name", ["", "a b", "1a", "a;b", "a=b", "é", "a\n", 3, None, "a" * 101])
def test_malformed_names_are_refused(name, registry):
    with pytest.raises(RematError):
        register(name, "full")


def test_malformed_policies_are_not_registered(registry):
    for args in [("mine", "minmal"), ("mine", None), ("mine", "full", 3)]:
        with pytest.raises(RematError):
            register(*args)
    assert "mine" not in presets


def test_every_spelling_belongs_to_one_name():
    seen = {}
    for name in _names.VOCABULARY:
        for spelling in _names.spellings(name):
            assert seen.setdefault(spelling, name) == name
    assert set(_names.ALIASES) <= set(_names.VOCABULARY)


def test_names_that_a_program_lacks():
    assert unmatched_names(policy("minimal"), ["attn_query"]) == ()
    assert "query_proj" in unmatched_names(policy("minimal"), ["other"])
    assert unmatched_names(policy("minimal") | save(name="contxt"), ["attn_query"]) == ("contxt",)
    assert unmatched_names(policy("save name=query_proj|context|attn_*"), ["query_proj"]) == ("attn_*", "context")
    assert unmatched_names(policy("dots"), []) == ()
