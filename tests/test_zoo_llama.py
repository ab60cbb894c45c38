"""`zoo.llama` is the model of its papers, and the same model when it is split over a mesh of devices."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import remat_kit as rk
from remat_kit import zoo

TINY = {"layers": 2, "batch": 8, "length": 6, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab": 64}
SEVEN_B = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocab": 32000, "length": 4096}
MESHES = {"fsdp": (8,), "data model": (4, 2), "data fsdp tensor": (2, 2, 2)}
ON_MESHES = pytest.mark.parametrize(("axes", "sizes"), MESHES.items())


def count(**settings):
    return sum(leaf.size for leaf in jax.tree.leaves(zoo.llama(**settings)[1][0]))


def test_published_sizes():
    assert count(**SEVEN_B) == 6_738_415_616
    assert count(layers=32, width=4096, heads=32) == 6_738_415_616  # what follows from the rest by default
    assert count(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672) == 68_976_648_192


def test_loss_falls_in_training():
    fn, (params, tokens) = zoo.llama(**TINY, dtype="float32", abstract=False)

    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(fn)(params, tokens)
        return loss, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)

    losses = []
    for _ in range(30):
        loss, params = step(params)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(64), rel=0.05)
    assert losses[-1] < 0.9 * losses[0]


def turned(x):
    """Rotary positions of ``[length, heads, head_dim]`` by complex multiplication."""
    length, _, head_dim = x.shape
    half = head_dim // 2
    frequencies = np.array([10_000.0 ** (-2 * i / head_dim) for i in range(half)])
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(np.arange(length), frequencies))[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def test_attention_equals_numpy():
    from remat_kit.zoo._llama import Attention, Config

    config = Config(layers=1, width=24, heads=6, kv_heads=2, hidden=8, vocab=8)
    x = jax.random.normal(jax.random.key(0), (2, 5, 24))
    params = Attention(config).init(jax.random.key(1), x)["params"]
    params = jax.tree.map(lambda p: 30 * p, params)  # far from uniform weights
    out = Attention(config).apply({"params": params}, x)

    w = {name: np.float64(leaf["kernel"]) for name, leaf in params.items()}
    for b in range(2):
        query, key, value = (np.einsum("tw,whd->thd", np.float64(x[b]), w[n]) for n in ("query", "key", "value"))
        query, key = turned(query), turned(key)
        context = np.zeros((5, 6, 4))
        for t, h in np.ndindex(5, 6):
            scores = key[: t + 1, h // 3] @ query[t, h] / np.sqrt(4)
            weights = np.exp(scores - scores.max())
            context[t, h] = weights / weights.sum() @ value[: t + 1, h // 3]
        np.testing.assert_allclose(out[b], np.einsum("thd,hdw->tw", context, w["out"]), rtol=1e-3, atol=1e-3)


def test_rotary_scores_depend_on_distance_alone():
    from remat_kit.zoo._llama import rotate

    query, key = jax.random.normal(jax.random.key(0), (2, 8))
    same = jnp.broadcast_to(query, (1, 9, 1, 8)), jnp.broadcast_to(key, (1, 9, 1, 8))
    scores = np.einsum("qd,kd->qk", *(rotate(x)[0, :, 0] for x in same))
    for distance in range(-8, 9):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert not np.allclose(scores, scores[0, 0], atol=1e-2)


def test_grouped_heads_are_shared_heads():
    grouped, (params, tokens) = zoo.llama(**TINY, dtype="float32", abstract=False)
    single, (structs, _) = zoo.llama(**{**TINY, "kv_heads": 4}, dtype="float32")
    attention = params["layers"]["attention"]
    repeated = {name: {"kernel": jnp.repeat(attention[name]["kernel"], 2, axis=2)} for name in ("key", "value")}
    full = {**params, "layers": {**params["layers"], "attention": {**attention, **repeated}}}
    assert jax.tree.map(jnp.shape, full) == jax.tree.map(jnp.shape, structs)
    np.testing.assert_allclose(jax.jit(single)(full, tokens), jax.jit(grouped)(params, tokens), rtol=1e-6)


def test_mlp_is_gated_and_norms_are_root_mean_square():
    from remat_kit.zoo._llama import Config, Layer

    config = Config(layers=1, width=8, heads=2, kv_heads=2, hidden=12, vocab=8)
    x = jax.random.normal(jax.random.key(0), (1, 3, 8))
    params = Layer(config).init(jax.random.key(1), x, None)["params"]
    params = jax.tree.map(lambda p: 20 * p, params)
    params["attention"]["out"]["kernel"] *= 0  # leaves the MLP
    out, _ = Layer(config).apply({"params": params}, x, None)

    gate, up, down = (np.float64(params["mlp"][name]["kernel"]) for name in ("gate", "up", "down"))
    normed = 20 * np.float64(x) / np.sqrt(np.mean(np.float64(x) ** 2, axis=-1, keepdims=True))
    hidden = normed @ gate / (1 + np.exp(-normed @ gate)) * (normed @ up)
    np.testing.assert_allclose(out, x + hidden @ down, rtol=1e-3, atol=1e-3)


def test_parameters_have_their_dtype():
    fn, args = zoo.llama(**TINY, param_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(args[0])} == {jnp.dtype("bfloat16")}
    assert jax.eval_shape(fn, *args).dtype == jnp.float32


# On a mesh ------------------------------------------------------------------------------------------


@ON_MESHES
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_abstract_arguments_are_split_over_the_mesh(axes, sizes, kind):
    mesh = AbstractMesh(sizes, tuple(axes.split()), axis_types=(kind,) * len(sizes))
    fn, (params, tokens) = zoo.llama(**TINY, mesh=mesh)
    data = np.prod([n for name, n in mesh.shape.items() if name not in ("model", "tensor")])
    assert tokens.sharding.shard_shape(tokens.shape) == (8 // data, 7)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        devices = data if "norm" in jax.tree_util.keystr(path) else 8
        shard = leaf.sharding.shard_shape(leaf.shape)
        assert np.prod(shard) * devices == leaf.size, jax.tree_util.keystr(path)
        assert "layers" not in path[0].key or shard[0] == TINY["layers"]
    lowered = jax.jit(jax.value_and_grad(fn)).trace(params, tokens).lower(lowering_platforms=("tpu",))
    assert "sharding_constraint" in lowered.as_text()


def test_rematerialized_step_of_the_7b_shape_lowers_without_devices():
    mesh = AbstractMesh((256,), ("fsdp",), axis_types=(AxisType.Auto,))
    fn, args = zoo.llama(**SEVEN_B, batch=256, mesh=mesh)
    step = jax.jit(jax.value_and_grad(rk.apply(fn, "full")))
    traced = step.trace(*args)
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(args[0])]
    assert sum(int(np.prod(shard)) for shard in shards) * 256 == 6_738_415_616
    assert traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [pytest.param(*mesh, marks=() if mesh[0].startswith("data fsdp") else pytest.mark.slow) for mesh in MESHES.items()],
)
def test_same_loss_and_gradients_on_devices(axes, sizes):
    """In a process of its own, for the number of CPU devices is fixed when JAX starts."""
    code = f"""
import jax, numpy as np
from remat_kit import zoo
settings = {TINY} | dict(dtype="float32", abstract=False, length=16)
mesh = jax.make_mesh({sizes}, {tuple(axes.split())}, (jax.sharding.AxisType.Explicit,) * {len(sizes)})
fn, args = zoo.llama(**settings)
split_fn, split_args = zoo.llama(**settings, mesh=mesh)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), split_args, args)
step = jax.jit(jax.value_and_grad(fn)).lower(*args).compile()
split_step = jax.jit(jax.value_and_grad(split_fn)).lower(*split_args).compile()
(loss, grads), (split_loss, split_grads) = step(*args), split_step(*split_args)
np.testing.assert_allclose(split_loss, loss, rtol=1e-6)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), split_grads, grads)
for param, grad in zip(*map(jax.tree.leaves, (split_args[0], split_grads)), strict=True):
    assert len(param.sharding.device_set) == 8
    assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim), (param.sharding, grad.sharding)
temp, split_temp = (f.memory_analysis().temp_size_in_bytes for f in (step, split_step))
assert split_temp < temp / 2, (split_temp, temp)
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mesh": "fsdp"}, "mesh='fsdp' is no mesh"),
        ({"mesh": AbstractMesh((3,), ("fsdp",))}, "batch=8 does not divide by devices along fsdp=3"),
        ({"mesh": AbstractMesh((8,), ("fsdp",)), "abstract": False}, "an AbstractMesh has no devices"),
        ({"kv_heads": 3}, "heads=4 does not divide by kv_heads=3"),
        ({"width": 36}, "width=36 does not divide by 2*heads=8"),
        ({"hidden": 0}, "hidden=0"),
        ({"param_dtype": "int8"}, "param_dtype='int8' is not a dtype of parameters"),
    ],
)
def test_impossible_settings_are_refused(settings, says):
    with pytest.raises(rk.RematError) as error:
        zoo.llama(**{**TINY, **settings})
    assert says in str(error.value)
