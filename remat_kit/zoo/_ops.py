"""The mathematics that models of both Flax interfaces share: attention, the loss, the scale of initial weights.

Plain JAX. Softmaxes are computed in float32 whatever the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

INIT_STD = 0.02
"""Standard deviation of a transformer's initial weights (GPT-2), but for those that `branch_std` is for."""


def branch_std(layers: int) -> float:
    """Initial standard deviation of projections into the residual stream, to which a layer adds twice (GPT-2)."""
    return INIT_STD / (2 * layers) ** 0.5


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    dropout: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al., 2017, equation 1).

    Args:
        query, key, value: ``[batch, length, heads, head_dim]``.
        causal: whether a position sees only itself and earlier ones.
        dropout: applied to the attention weights ``[batch, heads, length, length]``.

    Returns:
        The context, ``[batch, length, heads, head_dim]``, in the dtype of `value`.
    """
    length, head_dim = query.shape[1], query.shape[-1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * head_dim**-0.5
    if causal:
        seen = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    weights = dropout(jax.nn.softmax(scores).astype(value.dtype))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean negative log-likelihood, in nats, of `labels` ``[...]`` (integers) under `logits` ``[..., classes]``."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))
