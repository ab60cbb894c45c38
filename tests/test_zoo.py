"""The reference models are real networks: right shapes, sensible losses, live gradients, nothing allocated."""

from __future__ import annotations

import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_kit import zoo
from remat_kit._errors import RematError

TRANSFORMER = {"layers": 2, "batch": 2, "width": 16, "heads": 2, "mlp_ratio": 2}
TINY = {
    "gpt": {**TRANSFORMER, "length": 6, "vocab": 50},
    "gpt_nnx": {**TRANSFORMER, "length": 6, "vocab": 50},
    "llama": {"layers": 2, "batch": 2, "length": 6, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24, "vocab": 50},
    "vit": {**TRANSFORMER, "layers": 1, "image": 8, "patch": 4, "classes": 10},
    "resnet": {"stages": (1, 1), "batch": 4, "image": 16, "width": 4, "classes": 10},
    "moe": {**TRANSFORMER, "layers": 1, "length": 6, "vocab": 50, "experts": 4, "balance_weight": 0.0},
    "rnn": {"layers": 2, "batch": 2, "length": 6, "width": 16, "vocab": 50},
}
CLASSES = {name: size.get("vocab") or size["classes"] for name, size in TINY.items()}
ALL = pytest.mark.parametrize("name", sorted(TINY))


PROJECTIONS = {"query_proj", "key_proj", "value_proj", "context", "out_proj"}
DENSE = {*PROJECTIONS, "decoder_layer_input", "mlpwi", "mlpwo"}
EXPERTS = {f"{prefix}{name}" for prefix in ("", "moe_") for name in ("mlpwi_0", "mlpwi_1", "mlpwo")}
NAMES = {
    "gpt": DENSE,
    "gpt_nnx": DENSE,
    "llama": {*PROJECTIONS, "decoder_layer_input", "mlpwi_0", "mlpwi_1", "mlpwo"},
    "vit": DENSE,
    "resnet": set[str](),
    "moe": {*PROJECTIONS, "decoder_layer_input", *EXPERTS},
    "rnn": set[str](),
}


@functools.cache
def tiny(name: str, abstract: bool = False, dtype: str = "float32", **settings):
    return zoo.build(name, **TINY[name], dtype=dtype, abstract=abstract, **settings)


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), jax.tree.leaves(tree))


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(sub, "eqns"):
                yield from equations(sub)


@ALL
def test_loss_and_gradients_at_init(name):
    fn, args = tiny(name)
    loss, grads = jax.jit(jax.value_and_grad(fn))(*args)
    assert loss.shape == () and loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(math.log(CLASSES[name]), rel=0.1)
    assert shapes(grads) == shapes(args[0])
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(grad).all(), jax.tree_util.keystr(path)
        assert np.any(grad), jax.tree_util.keystr(path)


@ALL
def test_abstract_arguments_are_those_of_the_real_model(name):
    fn, args = tiny(name)
    same_fn, structs = tiny(name, abstract=True)
    assert shapes(structs) == shapes(args)
    assert jax.tree.structure(structs) == jax.tree.structure(args)
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in jax.tree.leaves(structs))
    assert jax.eval_shape(same_fn, *structs) == jax.eval_shape(fn, *args)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(structs[0]))


@ALL
def test_defaults_are_abstract_and_allocate_nothing(name):
    before = {id(array) for array in jax.live_arrays()}
    fn, structs = zoo.build(name)
    out = jax.eval_shape(fn, *structs)
    sizes = [array.nbytes for array in jax.live_arrays() if id(array) not in before]
    assert sum(sizes) < 2**20  # constants of the trace, not a model of 40 MB and more
    assert out.shape == ()
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(structs))


@ALL
def test_activations_have_the_dtype_and_parameters_float32(name):
    fn, structs = tiny(name, abstract=True, dtype="bfloat16")
    products = [e for e in equations(jax.make_jaxpr(fn)(*structs).jaxpr) if e.primitive.name in ("dot_general", "scan")]
    operands = {v.aval.dtype for e in products if e.primitive.name == "dot_general" for v in e.invars}
    assert jnp.dtype("bfloat16") in operands
    # the router of the experts, and the gates that it makes, stay exact
    assert jnp.dtype("float32") not in operands or name == "moe"
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(structs[0]))


def test_seed_fixes_parameters_and_data():
    _, args = tiny("rnn")
    same, other = (zoo.rnn(**TINY["rnn"], abstract=False, seed=seed)[1] for seed in (0, 1))
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(args), jax.tree.leaves(same), strict=True))
    assert not np.array_equal(args[0]["head"], other[0]["head"]) and not np.array_equal(args[1], other[1])


def bytes_held(fn, args):
    """Bytes of what `jax.vjp` keeps for the backward pass, arguments included."""
    kept = jax.eval_shape(lambda *args: jax.vjp(lambda first: fn(first, *args[1:]), args[0])[1], *args)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


@ALL
def test_every_checkpoint_name_can_be_saved(name):
    fn, structs = tiny(name, abstract=True)

    def held(*names):
        return bytes_held(jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(*names)), structs)

    full = held()
    # Not always more: with the first layer's input saved, the embedding is no longer kept to compute it.
    assert [n for n in sorted(NAMES[name]) if held(n) == full] == []
    assert held("no_such_name") == full


@ALL
def test_nothing_is_rematerialized_already(name):
    fn, structs = tiny(name, abstract=True)
    assert bytes_held(fn, structs) > 1.5 * bytes_held(jax.checkpoint(fn), structs)


def test_dropout_draws_from_the_key():
    fn, (_, _, key) = tiny("gpt", abstract=True, dropout=0.5)
    assert key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    params, tokens = tiny("gpt")[1]
    loss = jax.jit(fn)
    assert loss(params, tokens, jax.random.key(6)) == loss(params, tokens, jax.random.key(6))
    assert loss(params, tokens, jax.random.key(6)) != loss(params, tokens, jax.random.key(7))

    fn, (params, images, labels, key) = tiny("vit", abstract=True, dropout=0.5)
    assert shapes(params) == shapes(tiny("vit", abstract=True)[1][0])
    assert jax.eval_shape(fn, params, images, labels, key).shape == ()


def test_nnx_dropout_advances_the_rng_state():
    from flax import nnx

    fn, (model, tokens) = zoo.gpt_nnx(**TINY["gpt_nnx"], dropout=0.5, abstract=False)
    _, (struct, _) = zoo.gpt_nnx(**TINY["gpt_nnx"], dropout=0.5)
    assert shapes(nnx.state(model)) == shapes(nnx.state(struct))

    def counts():
        return [int(count) for count in jax.tree.leaves(nnx.state(model, nnx.RngCount))]

    before = counts()
    step = nnx.jit(nnx.value_and_grad(fn))
    (first, grads), (second, _) = step(model, tokens), step(model, tokens)
    assert first != second
    assert all(now > then for now, then in zip(counts(), before, strict=True))
    assert all(np.isfinite(grad).all() for grad in jax.tree.leaves(grads))


def test_nnx_model_is_the_linen_model():
    from flax import nnx

    from remat_kit.zoo._gpt_nnx import GPT

    fn, (params, tokens) = tiny("gpt")
    nnx_fn, (model, _) = zoo.gpt_nnx(**TINY["gpt_nnx"], dtype="float32")
    assert isinstance(model, GPT)

    graph, state = nnx.split(model)
    filled = []
    for path, variable in nnx.to_flat_state(state):
        weight = params
        for key in path:
            # Linen has no number in its path, for the layers are stacked, and holds the positions without a module.
            if isinstance(key, str) and isinstance(weight, dict):
                weight = weight[key]
        number = [key for key in path if isinstance(key, int)]
        filled.append((path, variable.replace(weight[number[0]] if number else weight)))
    model = nnx.merge(graph, nnx.from_flat_state(filled))
    with_nnx, with_linen = jax.jit(lambda *args: (nnx_fn(args[0], args[2]), fn(*args[1:])))(model, params, tokens)
    np.testing.assert_allclose(with_nnx, with_linen, rtol=1e-6)


@pytest.mark.parametrize("name", ["gpt", "gpt_nnx", "llama", "moe", "rnn"])
def test_logits_do_not_see_later_tokens(name):
    _, (params, tokens) = tiny(name)
    later = tokens.at[:, 4].set((tokens[:, 4] + 1) % 50)
    logits = jax.jit(functools.partial(logits_of, name))
    before, after = logits(params, tokens[:, :-1]), logits(params, later[:, :-1])
    np.testing.assert_allclose(before[:, :4], after[:, :4], rtol=1e-5, atol=1e-6)
    assert not np.allclose(before[:, 4:], after[:, 4:], rtol=1e-3)


def logits_of(name, params, tokens):
    from remat_kit.zoo._gpt import GPT
    from remat_kit.zoo._llama import Config, Llama
    from remat_kit.zoo._moe import MoETransformer
    from remat_kit.zoo._rnn import logits_of

    sizes = {key: size for key, size in TINY[name].items() if key not in ("batch", "balance_weight")}
    if name == "rnn":
        return logits_of(params, tokens, jnp.float32)
    if name == "gpt_nnx":
        return params(tokens)
    if name == "llama":
        del sizes["length"]
        return Llama(Config(**sizes)).apply({"params": params}, tokens)
    if name == "gpt":
        return GPT(**sizes).apply({"params": params}, tokens)
    return MoETransformer(**sizes, top_k=2, capacity=6).apply({"params": params}, tokens)[0]


def test_gpt_without_tied_embeddings_has_a_head():
    _, (tied, _) = tiny("gpt", abstract=True)
    fn, (untied, tokens) = tiny("gpt", abstract=True, tied=False)
    assert set(untied) - set(tied) == {"head"}
    assert jax.eval_shape(fn, untied, tokens).shape == ()
    fn, (model, tokens) = tiny("gpt_nnx", abstract=True, tied=False)
    assert jax.eval_shape(fn, model, tokens).shape == ()


def test_attention_is_softmax_of_scaled_products():
    from remat_kit.zoo._ops import attend

    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
    out = attend(query, key, value, causal=True, dropout=lambda weights: weights)
    for b, h, t in np.ndindex(2, 2, 5):
        scores = np.array(key[b, : t + 1, h] @ query[b, t, h]) / 2.0
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(out[b, t, h], weights @ np.array(value[b, : t + 1, h]), rtol=2e-5, atol=1e-6)


def test_cross_entropy_is_the_mean_negative_log_likelihood():
    from remat_kit.zoo._ops import cross_entropy

    logits = jax.random.normal(jax.random.key(0), (2, 3, 4))
    labels = jnp.array([[0, 1, 2], [3, 0, 1]])
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.mean([np.log(probs[i, j, labels[i, j]]) for i, j in np.ndindex(2, 3)])
    np.testing.assert_allclose(cross_entropy(logits, labels), expected, rtol=1e-6)


def test_moe_routes_each_token_to_its_best_experts():
    from remat_kit.zoo._moe import route

    scores = jax.random.normal(jax.random.key(0), (2, 5, 4))
    routing = route(scores, top_k=2, capacity=5)
    probs = np.array(jax.nn.softmax(scores))
    for b, t in np.ndindex(2, 5):
        best = np.argsort(-probs[b, t])[:2]
        gates = np.zeros(4)
        gates[best] = probs[b, t, best] / probs[b, t, best].sum()
        np.testing.assert_allclose(routing.combine[b, t].sum(-1), gates, rtol=1e-5)
        np.testing.assert_array_equal(routing.dispatch[b, t].sum(-1), gates > 0)
    assert np.max(routing.dispatch.sum(1)) == 1  # no slot has two tokens


def test_moe_drops_what_exceeds_the_capacity():
    from remat_kit.zoo._moe import route

    scores = jnp.tile(jnp.array([3.0, 2.0, 0.0]), (1, 5, 1))
    routing = route(scores, top_k=2, capacity=3)
    np.testing.assert_array_equal(routing.dispatch.sum(-1)[0], [[1, 1, 0]] * 3 + [[0, 0, 0]] * 2)

    # first choices go before second ones, even of earlier tokens
    scores = jnp.array([[[2.0, 3.0], [3.0, 2.0]]])
    routing = route(scores, top_k=2, capacity=1)
    np.testing.assert_array_equal(routing.dispatch.sum(-1)[0], [[0, 1], [1, 0]])


def test_moe_balance_loss_grows_with_imbalance():
    from remat_kit.zoo._moe import route

    even = 20.0 * jax.nn.one_hot(jnp.arange(8) % 4, 4)[None]
    uneven = 20.0 * jax.nn.one_hot(jnp.zeros(8, int), 4)[None]
    assert float(route(even, top_k=1, capacity=8).balance) == pytest.approx(1)
    assert float(route(uneven, top_k=1, capacity=8).balance) == pytest.approx(4)

    fn, args = tiny("moe")
    settings = {**TINY["moe"], "balance_weight": 1.0}
    weighted, _ = zoo.moe(**settings, dtype="float32")
    both = jax.jit(lambda *args: (weighted(*args), fn(*args)))
    with_balance, without = both(*args)
    assert 0.9 < float(with_balance - without) < 4


def test_moe_experts_equal_a_loop_over_tokens():
    from remat_kit.zoo._moe import Experts

    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    model = Experts(experts=4, top_k=2, capacity=5, hidden=6, out_std=0.02)
    params = model.init(jax.random.key(1), x)["params"]
    params = jax.tree.map(lambda p: 20 * p, params)  # far from zero
    out, _ = model.apply({"params": params}, x)
    probs = np.array(jax.nn.softmax(x @ params["router"]["kernel"]))
    for b, t in np.ndindex(2, 5):
        best = np.argsort(-probs[b, t])[:2]
        expected = np.zeros(8)
        for expert in best:
            hidden = jax.nn.silu(x[b, t] @ params["wi_0"][expert]) * (x[b, t] @ params["wi_1"][expert])
            expected += probs[b, t, expert] / probs[b, t, best].sum() * np.array(hidden @ params["wo"][expert])
        np.testing.assert_allclose(out[b, t], expected, rtol=1e-4, atol=1e-6)


def test_rnn_equals_a_loop_over_time():
    fn, (params, tokens) = tiny("rnn")
    params, tokens = jax.tree.map(np.array, (params, tokens))

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    xs = [params["embed"][tokens[:, t]] for t in range(6)]
    for w in params["layers"]:
        state, states = np.zeros((2, 16)), []
        for x in xs:
            i_r, i_u, i_n = np.split(x @ w["input"] + w["input_bias"], 3, axis=-1)
            s_r, s_u, s_n = np.split(state @ w["state"] + w["state_bias"], 3, axis=-1)
            update, new = sigmoid(i_u + s_u), np.tanh(i_n + sigmoid(i_r + s_r) * s_n)
            state = (1 - update) * new + update * state
            states.append(state)
        xs = states
    logits = np.stack(xs, axis=1) @ params["head"]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.mean([log_probs[b, t, tokens[b, t + 1]] for b, t in np.ndindex(2, 6)])
    np.testing.assert_allclose(fn(params, tokens), expected, rtol=1e-5)


def test_resnet_gives_new_statistics_when_asked():
    fn, args = tiny("resnet")
    with_stats, structs = tiny("resnet", abstract=True, stats=True)
    grads, stats = jax.eval_shape(jax.grad(with_stats, has_aux=True), *structs)
    assert shapes(stats) == shapes(args[1]) and shapes(grads) == shapes(args[0])
    loss, (same_loss, stats) = jax.jit(lambda *args: (fn(*args), with_stats(*args)))(*args)
    assert loss == same_loss
    moved = [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(args[1]), strict=True)]
    assert all(moved)

    # one step of the moving average over what the first convolution gives
    params, old, images, _ = args
    features = jax.lax.conv_general_dilated(
        images, params["stem_conv"]["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    expected = 0.9 * old["stem_norm"]["mean"] + 0.1 * features.mean((0, 1, 2))
    np.testing.assert_allclose(stats["stem_norm"]["mean"], expected, rtol=1e-4, atol=1e-6)


def test_resnet_50_and_gpt_2_have_their_published_sizes():
    def count(model, **settings):
        return sum(leaf.size for leaf in jax.tree.leaves(zoo.build(model, **settings)[1][0]))

    assert count("resnet") == 25_557_032
    # 124,439,808 with biases on the attention's four projections, which are left out here
    assert count("gpt", vocab=50257) == 124_439_808 - 12 * 4 * 768
    assert count("gpt_nnx", vocab=50257) == count("gpt", vocab=50257)


def test_names_and_functions_agree():
    assert set(zoo.names()) == set(TINY)
    for name in zoo.names():
        assert getattr(zoo, name).__name__ == name and name in dir(zoo)
    with pytest.raises(AttributeError):
        zoo.no_such_model  # noqa: B018


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("gtp", {}, "Did you mean 'gpt'"),
        ("gpt", {"layer": 3}, "Did you mean 'layers'"),
        ("gpt", {"layers": 0}, "layers=0"),
        ("gpt", {"layers": "12"}, "layers='12'"),
        ("gpt", {"layers": True}, "layers=True"),
        ("rnn", {"batch": 2.0}, "batch=2.0"),
        ("gpt", {"width": 100, "heads": 16}, "width=100 does not divide by heads=16 (4 left over)"),
        ("gpt_nnx", {"width": 100, "heads": 16}, "The nearest width that does is 96"),
        ("vit", {"image": 225}, "image=225 does not divide by patch=16"),
        ("vit", {"dropout": 1.0}, "dropout=1.0"),
        ("gpt", {"dropout": -0.1}, "dropout=-0.1"),
        ("gpt", {"dtype": "bfloat"}, "Did you mean 'bfloat16'"),
        ("gpt", {"dtype": "int32"}, "dtype='int32'"),
        ("gpt", {"dtype": "float64"}, "jax_enable_x64"),
        ("gpt", {"seed": -1}, "seed=-1"),
        ("gpt", {"abstract": "false"}, "abstract='false'"),
        ("moe", {"top_k": 9}, "top_k=9"),
        ("moe", {"capacity_factor": 0.5}, "capacity_factor=0.5"),
        ("resnet", {"stages": ()}, "stages=()"),
        ("resnet", {"stages": (3, 0)}, "stages[1]=0"),
    ],
)
def test_impossible_settings_are_refused(name, settings, says):
    with pytest.raises(RematError) as error:
        zoo.build(name, **settings)
    assert says in str(error.value)


def test_flax_is_imported_only_for_the_models_made_of_it():
    code = (
        "import sys, remat_kit.zoo as zoo; zoo.names(); zoo.rnn(); "
        "assert 'flax' not in sys.modules; zoo.gpt(); assert 'flax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
