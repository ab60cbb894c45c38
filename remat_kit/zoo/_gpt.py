"""`gpt`: a decoder-only language model in Flax Linen, its layers scanned.

After GPT-2 (Radford et al., 2019): pre-norm, learned positions, tied embeddings.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import normal
from jax.typing import DTypeLike

from remat_kit.zoo._common import Check, Model, make
from remat_kit.zoo._ops import INIT_STD, branch_std, cross_entropy
from remat_kit.zoo._transformer import Dropout, Layer


class ScannedLayer(Layer):
    """A `Layer` in the form of a scan body: the residual stream is the carry, and there is nothing else."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:  # pyright: ignore
        return self.forward(x), None


class GPT(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch, length, vocab]``."""

    layers: int
    length: int
    width: int
    heads: int
    vocab: int
    mlp_ratio: int = 4
    dropout: float = 0.0
    tied: bool = True
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = normal(INIT_STD)
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype, embedding_init=init, name="token_embed")
        positions = self.param("position_embed", init, (self.length, self.width))
        x = embed(tokens) + positions[: tokens.shape[1]].astype(self.dtype)
        x = Dropout(self.dropout)(x)

        scanned = nn.scan(
            ScannedLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        layers = scanned(
            heads=self.heads,
            hidden=self.mlp_ratio * self.width,
            causal=True,
            out_std=branch_std(self.layers),
            dropout=self.dropout,
            dtype=self.dtype,
            name="layers",
        )
        x, _ = layers(x, None)

        x = nn.LayerNorm(dtype=self.dtype, name="final_norm")(x)
        if self.tied:
            return embed.attend(x)
        return nn.Dense(self.vocab, use_bias=False, dtype=self.dtype, kernel_init=init, name="head")(x)


def gpt(
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
    """Builds a GPT language model (Flax Linen, scanned layers) and its next-token loss.

    Args:
        layers, width, heads: of the transformer; `width` must divide by `heads`.
        batch, length: of the data; `length` positions are predicted.
        vocab: number of tokens.
        mlp_ratio: width of the MLP's hidden layer, in multiples of `width`.
        dropout: rate after the embedding, on attention weights and on both branches of a layer.
        tied: whether the embedding also makes the logits.
        dtype: of the activations; parameters are float32.
        seed: of parameters and data.
        abstract: whether the arguments are `jax.ShapeDtypeStruct`, with nothing allocated, rather than arrays.

    Returns:
        ``(fn, (params, tokens))``, or ``(fn, (params, tokens, key))`` where there is dropout: `fn` gives the mean
        cross-entropy in nats; `tokens` is int32 ``[batch, length + 1]``, for inputs and targets are one apart.

    Raises:
        RematError: for a size, rate or dtype that makes no model.
    """
    check = Check("gpt")
    check.sizes(layers=layers, batch=batch, length=length, width=width, heads=heads, vocab=vocab)
    check.sizes(mlp_ratio=mlp_ratio)
    check.divides("heads", heads, "width", width)
    check.number("dropout", dropout, low=0, below=1)
    check.flags(tied=tied, abstract=abstract)
    check.seed(seed)
    model = GPT(layers, length, width, heads, vocab, mlp_ratio, dropout, tied, check.dtype(dtype))

    def loss(params: Any, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        rngs = None if key is None else {"dropout": key}
        logits = model.apply({"params": params}, tokens[:, :-1], rngs=rngs)
        return cross_entropy(logits, tokens[:, 1:])  # pyright: ignore[reportArgumentType]

    def arguments() -> tuple[Any, ...]:
        init, data, drop = jax.random.split(jax.random.key(seed), 3)
        tokens = jax.random.randint(data, (batch, length + 1), 0, vocab, jnp.int32)
        params = model.init({"params": init, "dropout": drop}, tokens[:, :-1])["params"]
        return (params, tokens, drop) if dropout else (params, tokens)

    return loss, make(arguments, abstract=abstract)
