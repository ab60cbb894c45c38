"""`gpt_nnx`: the model of `gpt` in Flax NNX, its layers unrolled.

The module is the first argument of `fn`; with dropout it carries rng state, which every call of `fn` advances.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal
from jax.typing import DTypeLike

from remat_kit.zoo._common import Check, Model
from remat_kit.zoo._ops import INIT_STD, attend, branch_std, cross_entropy


def _dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    # Without rate no rngs, so that the module holds parameters alone and `jax.grad` takes it as it is.
    return nnx.Dropout(rate, rngs=rngs if rate else None)


class Attention(nnx.Module):
    """Causal multi-head self-attention, ``[batch, length, width]`` to the same."""

    def __init__(
        self, width: int, heads: int, *, out_std: float, dropout: float, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        def project() -> nnx.LinearGeneral:
            # No bias: softmax cancels the key's, which would be a parameter without gradient.
            return nnx.LinearGeneral(
                width, (heads, width // heads), use_bias=False, dtype=dtype, kernel_init=normal(INIT_STD), rngs=rngs
            )

        self.query, self.key, self.value = project(), project(), project()
        self.out = nnx.LinearGeneral(
            (heads, width // heads),
            width,
            axis=(-2, -1),
            use_bias=False,
            dtype=dtype,
            kernel_init=normal(out_std),
            rngs=rngs,
        )
        self.dropout = _dropout(dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query = checkpoint_name(self.query(x), "query_proj")
        key = checkpoint_name(self.key(x), "key_proj")
        value = checkpoint_name(self.value(x), "value_proj")
        context = attend(query, key, value, causal=True, dropout=self.dropout)
        return checkpoint_name(self.out(checkpoint_name(context, "context")), "out_proj")


class Mlp(nnx.Module):
    """Two dense layers with a GELU between them, ``[..., width]`` to the same."""

    def __init__(self, width: int, hidden: int, *, out_std: float, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.wi = nnx.Linear(width, hidden, dtype=dtype, kernel_init=normal(INIT_STD), rngs=rngs)
        self.wo = nnx.Linear(hidden, width, dtype=dtype, kernel_init=normal(out_std), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.gelu(checkpoint_name(self.wi(x), "mlpwi"))
        return checkpoint_name(self.wo(x), "mlpwo")


class Layer(nnx.Module):
    """One pre-norm transformer layer: attention, then an MLP, each on a branch of the residual stream."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        out_std: float,
        dropout: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.attention_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = Attention(width, heads, out_std=out_std, dropout=dropout, dtype=dtype, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.mlp = Mlp(width, hidden, out_std=out_std, dtype=dtype, rngs=rngs)
        self.dropout = _dropout(dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = checkpoint_name(x, "decoder_layer_input")
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nnx.Module):
    """Tokens ``[batch, length]`` to logits ``[batch, length, vocab]``."""

    def __init__(
        self,
        *,
        layers: int,
        length: int,
        width: int,
        heads: int,
        vocab: int,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        tied: bool = True,
        dtype: DTypeLike = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        init = normal(INIT_STD)
        self.token_embed = nnx.Embed(vocab, width, dtype=dtype, embedding_init=init, rngs=rngs)
        self.position_embed = nnx.Embed(length, width, dtype=dtype, embedding_init=init, rngs=rngs)
        self.dropout = _dropout(dropout, rngs)
        self.layers = nnx.List(
            Layer(width, heads, mlp_ratio * width, out_std=branch_std(layers), dropout=dropout, dtype=dtype, rngs=rngs)
            for _ in range(layers)
        )
        self.final_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = None if tied else nnx.Linear(width, vocab, use_bias=False, dtype=dtype, kernel_init=init, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token_embed(tokens) + self.position_embed(jnp.arange(tokens.shape[1]))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        x = self.final_norm(x)
        return self.token_embed.attend(x) if self.head is None else self.head(x)


def gpt_nnx(
    *,
    layers: int = 12,
    batch: int = 8,
    length: int = 1024,
    width: int = 768,
    heads: int = 12,
    vocab: int = 32768,
    mlp_ratio: int = 4,
    dropout: float = 0.0,
    tied: bool = True,
    dtype: DTypeLike = "bfloat16",
    seed: int = 0,
    abstract: bool = True,
) -> Model:
    """Builds a GPT language model (Flax NNX, unrolled layers) and its next-token loss.

    Args:
        layers, width, heads: of the transformer; `width` must divide by `heads`.
        batch, length: of the data; `length` positions are predicted.
        vocab: number of tokens.
        mlp_ratio: width of the MLP's hidden layer, in multiples of `width`.
        dropout: rate after the embedding, on attention weights and on both branches of a layer. Above 0 the module
            holds rng keys and counts besides parameters: differentiate with `nnx.grad`.
        tied: whether the embedding also makes the logits.
        dtype: of the activations; parameters are float32.
        seed: of parameters and data.
        abstract: whether the arguments are `jax.ShapeDtypeStruct`, with nothing allocated, rather than arrays; the
            module is then a real one whose variables hold such structs, as `nnx.eval_shape` gives it.

    Returns:
        ``(fn, (model, tokens))``: `fn` gives the mean cross-entropy in nats; `tokens` is int32
        ``[batch, length + 1]``, for inputs and targets are one apart.

    Raises:
        RematError: for a size, rate or dtype that makes no model.
    """
    check = Check("gpt_nnx")
    check.sizes(layers=layers, batch=batch, length=length, width=width, heads=heads, vocab=vocab)
    check.sizes(mlp_ratio=mlp_ratio)
    check.divides("heads", heads, "width", width)
    check.number("dropout", dropout, low=0, below=1)
    check.flags(tied=tied, abstract=abstract)
    check.seed(seed)
    dtype = check.dtype(dtype)

    def loss(model: GPT, tokens: jax.Array) -> jax.Array:
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    def arguments() -> tuple[Any, ...]:
        init, data = jax.random.split(jax.random.key(seed))
        tokens = jax.random.randint(data, (batch, length + 1), 0, vocab, jnp.int32)
        model = GPT(
            layers=layers,
            length=length,
            width=width,
            heads=heads,
            vocab=vocab,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            tied=tied,
            dtype=dtype,
            rngs=nnx.Rngs(init),
        )
        return model, tokens

    return loss, (nnx.eval_shape(arguments) if abstract else nnx.jit(arguments)())
