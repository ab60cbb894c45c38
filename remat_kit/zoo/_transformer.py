"""The Linen layers that `gpt`, `vit` and `moe` are made of: attention, MLP and the pre-norm layer around them.

Checkpoint names are those of MaxText, at the places where MaxText has them: on what a projection gives, before its
activation function.
"""

from __future__ import annotations

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal
from jax.typing import DTypeLike

from remat_kit.zoo._ops import INIT_STD, attend


class Dropout(nn.Module):
    """Dropout in training, from the rng stream ``dropout``; the identity, without any rng, at rate 0."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(self.rate, deterministic=False)(x) if self.rate else x


class Attention(nn.Module):
    """Multi-head self-attention, ``[batch, length, width]`` to the same."""

    heads: int
    causal: bool
    out_std: float
    dropout: float = 0.0
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]

        def project(name: str) -> jax.Array:
            # No bias: softmax cancels the key's, which would be a parameter without gradient.
            dense = nn.DenseGeneral(
                (self.heads, width // self.heads),
                use_bias=False,
                dtype=self.dtype,
                kernel_init=normal(INIT_STD),
                name=name,
            )
            return checkpoint_name(dense(x), f"{name}_proj")

        query, key, value = project("query"), project("key"), project("value")
        context = attend(query, key, value, causal=self.causal, dropout=Dropout(self.dropout))
        context = checkpoint_name(context, "context")
        out = nn.DenseGeneral(
            width, axis=(-2, -1), use_bias=False, dtype=self.dtype, kernel_init=normal(self.out_std), name="out"
        )
        return checkpoint_name(out(context), "out_proj")


class Mlp(nn.Module):
    """Two dense layers with a GELU between them, ``[..., width]`` to the same."""

    hidden: int
    out_std: float
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = nn.Dense(self.hidden, dtype=self.dtype, kernel_init=normal(INIT_STD), name="wi")(x)
        x = nn.gelu(checkpoint_name(x, "mlpwi"))
        x = nn.Dense(width, dtype=self.dtype, kernel_init=normal(self.out_std), name="wo")(x)
        return checkpoint_name(x, "mlpwo")


class Layer(nn.Module):
    """One pre-norm transformer layer: attention, then an MLP, each on a branch of the residual stream.

    The input's name is ``decoder_layer_input`` in encoders too, so that one policy serves both.
    """

    heads: int
    hidden: int
    causal: bool
    out_std: float
    dropout: float = 0.0
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.forward(x)

    @nn.nowrap  # or a subclass that calls this would have its module path doubled
    def forward(self, x: jax.Array) -> jax.Array:
        """What `__call__` computes, for subclasses whose `__call__` has another form."""
        x = checkpoint_name(x, "decoder_layer_input")
        attention = Attention(self.heads, self.causal, self.out_std, self.dropout, self.dtype, name="attention")
        mlp = Mlp(self.hidden, self.out_std, self.dtype, name="mlp")
        x = x + Dropout(self.dropout)(attention(nn.LayerNorm(dtype=self.dtype, name="attention_norm")(x)))
        return x + Dropout(self.dropout)(mlp(nn.LayerNorm(dtype=self.dtype, name="mlp_norm")(x)))
