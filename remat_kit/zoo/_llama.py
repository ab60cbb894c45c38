"""`llama`: a decoder-only language model in Flax Linen, its layers scanned; on a mesh of devices if one is given.

After Llama 2 (Touvron et al., 2023): RMS norms before each branch, rotary positions (Su et al., 2021), SwiGLU MLPs
(Shazeer, 2020), grouped-query attention (Ainslie et al., 2023), no biases, an output head of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal
from jax.typing import DTypeLike

from remat_kit.zoo._common import Check, Model, make
from remat_kit.zoo._ops import INIT_STD, attend, branch_std, cross_entropy
from remat_kit.zoo._sharding import Layout

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5
TENSOR_DIMS = {
    "token_embed": -2,
    "head": -1,
    "query": -2,
    "key": -2,
    "value": -2,
    "out": -3,
    "gate": -1,
    "up": -1,
    "down": -2,
}
"""The dimension of each weight that tensor parallelism splits: its tokens, heads or hidden units."""


@dataclass(frozen=True)
class Config:
    """What the modules need to know; `hidden` is the width of the MLP, `kv_heads` the heads of keys and values."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    dtype: DTypeLike = "float32"
    param_dtype: DTypeLike = "float32"
    layout: Layout = Layout()

    def dense(self, features: int | tuple[int, ...], name: str, std: float = INIT_STD, axes: int = 1) -> nn.Module:
        """Returns a product with a weight, over the last `axes` dimensions."""
        return nn.DenseGeneral(
            features,
            axis=tuple(range(-axes, 0)),
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=normal(std),
            name=name,
        )

    def norm(self, name: str) -> nn.Module:
        """Returns a root-mean-square norm (Zhang and Sennrich, 2019), computed in float32."""
        return nn.RMSNorm(epsilon=NORM_EPSILON, dtype=self.dtype, param_dtype=self.param_dtype, name=name)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of queries or keys ``[batch, length, heads, head_dim]``, computed in float32.

    Features ``i`` and ``i + head_dim / 2`` are one complex number, turned by ``position * 10000 ** (-2 i / head_dim)``
    (Su et al., 2021, equation 34, with the features in another order).
    """
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(length)[:, None, None] * ROTARY_BASE ** (-jnp.arange(half) / half)
    real, imag = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([real * cos - imag * sin, imag * cos + real * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, ``[batch, length, width]`` to the same.

    Query head ``h`` attends to key and value head ``h // (heads / kv_heads)``.
    """

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, split = self.config, self.config.layout.split
        head_dim = config.width // config.heads

        def project(name: str, heads: int) -> jax.Array:
            out = config.dense((heads, head_dim), name)(x)
            return checkpoint_name(split(out, tensor=-2), f"{name}_proj")

        query = rotate(project("query", config.heads))
        key = rotate(project("key", config.kv_heads))
        value = project("value", config.kv_heads)

        grouped = query.reshape(*query.shape[:2], config.kv_heads, -1, head_dim)
        one = functools.partial(attend, causal=True, dropout=lambda weights: weights)
        context = jax.vmap(one, in_axes=(3, None, None), out_axes=3)(grouped, key, value)
        context = checkpoint_name(split(context.reshape(query.shape), tensor=-2), "context")

        out = config.dense(config.width, "out", branch_std(config.layers), axes=2)(context)
        return checkpoint_name(split(out), "out_proj")


class Mlp(nn.Module):
    """A gated MLP (SwiGLU), ``[..., width]`` to the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, split = self.config, self.config.layout.split
        gate = checkpoint_name(split(config.dense(config.hidden, "gate")(x), tensor=-1), "mlpwi_0")
        up = checkpoint_name(split(config.dense(config.hidden, "up")(x), tensor=-1), "mlpwi_1")
        out = config.dense(config.width, "down", branch_std(config.layers))(nn.silu(gate) * up)
        return checkpoint_name(split(out), "mlpwo")


class Layer(nn.Module):
    """One pre-norm layer, in the form of a scan body: the residual stream is the carry, and there is nothing else."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        config = self.config
        x = checkpoint_name(config.layout.split(x), "decoder_layer_input")
        x = x + Attention(config, name="attention")(config.norm("attention_norm")(x))
        return x + Mlp(config, name="mlp")(config.norm("mlp_norm")(x)), None


class Llama(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch, length, vocab]``."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, split = self.config, self.config.layout.split
        embed = nn.Embed(
            config.vocab,
            config.width,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            embedding_init=normal(INIT_STD),
            name="token_embed",
        )
        scanned = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=config.layers)
        x, _ = scanned(config, name="layers")(split(embed(tokens)), None)
        x = split(config.norm("final_norm")(x))
        return split(config.dense(config.vocab, "head")(x), tensor=-1)


def llama(
    *,
    layers: int = 8,
    batch: int = 8,
    length: int = 1024,
    width: int = 512,
    heads: int = 8,
    kv_heads: int | None = None,
    hidden: int | None = None,
    vocab: int = 32000,
    dtype: DTypeLike = "bfloat16",
    param_dtype: DTypeLike = "float32",
    mesh: Any = None,
    seed: int = 0,
    abstract: bool = True,
) -> Model:
    """Builds a Llama 2 language model (Flax Linen, scanned layers) and its next-token loss.

    Llama 2 7B is ``layers=32, width=4096, heads=32, kv_heads=32, hidden=11008, vocab=32000`` (6,738,415,616
    parameters), trained at ``length=4096``; 70B is ``layers=80, width=8192, heads=64, kv_heads=8, hidden=28672``.

    Args:
        layers, width, heads: of the transformer; ``width / heads`` is an even number.
        batch, length: of the data; `length` positions are predicted.
        kv_heads: heads of keys and values, each for ``heads / kv_heads`` heads of queries; by default `heads`.
        hidden: width of the MLP's hidden layer; by default ``8 / 3 * width``, rounded up to a multiple of 256.
        vocab: number of tokens.
        dtype: of the activations.
        param_dtype: of the parameters.
        mesh: a `jax.sharding.Mesh` or `jax.sharding.AbstractMesh` to split the arguments and activations over: axes
            named ``model`` or ``tensor`` split heads, hidden units and vocabulary, all others the batch and every
            parameter. XLA's partitioner does it, whatever the types of the axes.
        seed: of parameters and data.
        abstract: whether the arguments are `jax.ShapeDtypeStruct`, with nothing allocated, rather than arrays.

    Returns:
        ``(fn, (params, tokens))``: `fn` gives the mean cross-entropy in nats; `tokens` is int32
        ``[batch, length + 1]``, for inputs and targets are one apart. With a mesh, every argument, and every gradient
        by `params`, has a `jax.sharding.NamedSharding` on it.

    Raises:
        RematError: for a size, dtype or mesh that makes no model.
    """
    check = Check("llama")
    kv_heads = heads if kv_heads is None else kv_heads
    check.sizes(layers=layers, batch=batch, length=length, width=width, heads=heads, kv_heads=kv_heads, vocab=vocab)
    hidden = -(-8 * width // (3 * 256)) * 256 if hidden is None else hidden
    check.sizes(hidden=hidden)
    check.divides("2*heads", 2 * heads, "width", width)
    check.divides("kv_heads", kv_heads, "heads", heads)
    check.flags(abstract=abstract)
    check.seed(seed)
    layout = Layout.on(mesh, check, batch=batch, abstract=abstract)
    dtypes = check.dtype(dtype), check.dtype(param_dtype, "param_dtype", "parameters")
    model = Llama(Config(layers, width, heads, kv_heads, hidden, vocab, *dtypes, layout))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": layout.pin(params, TENSOR_DIMS)}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])  # pyright: ignore[reportArgumentType]

    def arguments() -> tuple[Any, ...]:
        init, data = jax.random.split(jax.random.key(seed))
        tokens = jax.random.randint(data, (batch, length + 1), 0, vocab, jnp.int32)
        return model.init(init, tokens[:, :-1])["params"], tokens

    return loss, make(arguments, abstract=abstract, place=lambda args: layout.arguments(args, TENSOR_DIMS))
