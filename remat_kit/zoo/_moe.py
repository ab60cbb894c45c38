"""`moe`: a decoder-only language model in Flax Linen whose MLPs are mixtures of experts, its layers unrolled.

Top-k routing by one-hot dispatch to experts of fixed capacity (GShard, Lepikhin et al., 2021), with the load-balancing
loss of Switch (Fedus et al., 2022) and gated experts as in Mixtral (Jiang et al., 2024).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal
from jax.typing import DTypeLike

from remat_kit.zoo._common import Check, Model, make
from remat_kit.zoo._ops import INIT_STD, branch_std, cross_entropy
from remat_kit.zoo._transformer import Attention


class Routing(NamedTuple):
    """Where tokens go. `dispatch` is one-hot, `combine` is `dispatch` times the gates."""

    dispatch: jax.Array  # [batch, length, experts, capacity], 0 or 1
    combine: jax.Array  # [batch, length, experts, capacity]
    balance: jax.Array  # scalar: 1 where the experts share the tokens evenly, up to their number where one gets all


def route(scores: jax.Array, *, top_k: int, capacity: int) -> Routing:
    """Sends every token to the `top_k` experts it scores highest, as long as these have room.

    A row of the batch is a group: an expert takes at most `capacity` tokens of it, first choices before second
    ones and earlier tokens before later ones; the others are dropped, and only the residual stream carries them.

    Args:
        scores: ``[batch, length, experts]``, float32, before the softmax.
        top_k: number of experts for a token; their gates add up to 1.
        capacity: slots of an expert for each row of the batch.
    """
    batch, length, experts = scores.shape
    probs = jax.nn.softmax(scores)
    gates, choice = jax.lax.top_k(probs, top_k)
    gates = gates / jnp.sum(gates, axis=-1, keepdims=True)

    chosen = jax.nn.one_hot(choice, experts, dtype=jnp.int32)  # [batch, length, top_k, experts]
    queue = jnp.swapaxes(chosen, 1, 2).reshape(batch, top_k * length, experts)
    ahead = jnp.cumsum(queue, axis=1) - queue
    ahead = jnp.swapaxes(ahead.reshape(batch, top_k, length, experts), 1, 2)
    # one_hot of a place beyond the capacity is all zeros: that drops the token
    slots = jax.nn.one_hot(ahead, capacity, dtype=scores.dtype) * chosen[..., None]

    dispatch = jnp.sum(slots, axis=2)
    combine = jnp.einsum("btk,btkec->btec", gates, slots)
    share = jnp.mean(jnp.sum(chosen, axis=2) / top_k, axis=(0, 1))
    balance = experts * jnp.sum(share * jnp.mean(probs, axis=(0, 1)))
    return Routing(dispatch, combine, balance)


class Experts(nn.Module):
    """A routed MLP, ``[batch, length, width]`` to the same, and its load-balancing loss."""

    experts: int
    top_k: int
    capacity: int
    hidden: int
    out_std: float
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        width = x.shape[-1]

        def weight(name: str, std: float, *shape: int) -> jax.Array:
            return self.param(name, normal(std), (self.experts, *shape)).astype(self.dtype)

        wi_0, wi_1 = (weight(name, INIT_STD, width, self.hidden) for name in ("wi_0", "wi_1"))
        wo = weight("wo", self.out_std, self.hidden, width)

        # In float32 throughout: rounding a score to bfloat16 changes which experts win.
        router = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32, kernel_init=normal(INIT_STD), name="router")
        routing = route(router(x), top_k=self.top_k, capacity=self.capacity)

        inputs = jnp.einsum("btec,btd->ebcd", routing.dispatch.astype(self.dtype), x)
        gate = jnp.einsum("ebcd,edf->ebcf", inputs, wi_0)
        up = jnp.einsum("ebcd,edf->ebcf", inputs, wi_1)
        # Both names, as in MaxText: presets for dense models keep the plain ones, finer choices use those with moe_.
        gate = checkpoint_name(checkpoint_name(gate, "mlpwi_0"), "moe_mlpwi_0")
        up = checkpoint_name(checkpoint_name(up, "mlpwi_1"), "moe_mlpwi_1")
        out = jnp.einsum("ebcf,efd->ebcd", nn.silu(gate) * up, wo)
        out = checkpoint_name(checkpoint_name(out, "mlpwo"), "moe_mlpwo")
        return jnp.einsum("btec,ebcd->btd", routing.combine.astype(self.dtype), out), routing.balance


class MoELayer(nn.Module):
    """One pre-norm transformer layer whose MLP is routed; gives its load-balancing loss beside the residual stream."""

    heads: int
    experts: int
    top_k: int
    capacity: int
    hidden: int
    out_std: float
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = checkpoint_name(x, "decoder_layer_input")
        attention = Attention(self.heads, causal=True, out_std=self.out_std, dtype=self.dtype, name="attention")
        moe = Experts(self.experts, self.top_k, self.capacity, self.hidden, self.out_std, dtype=self.dtype, name="moe")
        x = x + attention(nn.LayerNorm(dtype=self.dtype, name="attention_norm")(x))
        out, balance = moe(nn.LayerNorm(dtype=self.dtype, name="moe_norm")(x))
        return x + out, balance


class MoETransformer(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch, length, vocab]`` and the layers' mean load-balancing loss."""

    layers: int
    length: int
    width: int
    heads: int
    experts: int
    top_k: int
    capacity: int
    vocab: int
    mlp_ratio: int = 4
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        init = normal(INIT_STD)
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype, embedding_init=init, name="token_embed")(tokens)
        positions = self.param("position_embed", init, (self.length, self.width))
        x = x + positions[: tokens.shape[1]].astype(self.dtype)
        balance = jnp.float32(0)
        for i in range(self.layers):
            layer = MoELayer(
                heads=self.heads,
                experts=self.experts,
                top_k=self.top_k,
                capacity=self.capacity,
                hidden=self.mlp_ratio * self.width,
                out_std=branch_std(self.layers),
                dtype=self.dtype,
                name=f"layers_{i}",
            )
            x, layer_balance = layer(x)
            balance += layer_balance / self.layers
        x = nn.LayerNorm(dtype=self.dtype, name="final_norm")(x)
        head = nn.Dense(self.vocab, use_bias=False, dtype=self.dtype, kernel_init=init, name="head")
        return head(x), balance


def moe(
    *,
    layers: int = 8,
    batch: int = 8,
    length: int = 1024,
    width: int = 512,
    heads: int = 8,
    experts: int = 8,
    top_k: int = 2,
    capacity_factor: float = 1.25,
    balance_weight: float = 0.01,
    vocab: int = 32768,
    mlp_ratio: int = 4,
    dtype: DTypeLike = "bfloat16",
    seed: int = 0,
    abstract: bool = True,
) -> Model:
    """Builds a mixture-of-experts language model (Flax Linen, unrolled ``layers_0``, ...) and its next-token loss.

    Args:
        layers, width, heads: of the transformer; `width` must divide by `heads`.
        batch, length: of the data; `length` positions are predicted.
        experts, top_k: experts in each layer, and how many of them each token goes to.
        capacity_factor: slots of all experts over choices of all tokens, at least 1; ``experts / top_k`` drops none.
        balance_weight: of the load-balancing loss in `fn`.
        vocab: number of tokens.
        mlp_ratio: width of an expert's hidden layer, in multiples of `width`.
        dtype: of the activations; parameters and the router are float32.
        seed: of parameters and data.
        abstract: whether the arguments are `jax.ShapeDtypeStruct`, with nothing allocated, rather than arrays.

    Returns:
        ``(fn, (params, tokens))``: `fn` gives the mean cross-entropy in nats plus the weighted load-balancing loss;
        `tokens` is int32 ``[batch, length + 1]``, for inputs and targets are one apart.

    Raises:
        RematError: for a size, factor or dtype that makes no model.
    """
    check = Check("moe")
    check.sizes(layers=layers, batch=batch, length=length, width=width, heads=heads, vocab=vocab)
    check.sizes(experts=experts, top_k=top_k, mlp_ratio=mlp_ratio)
    check.divides("heads", heads, "width", width)
    check.number("capacity_factor", capacity_factor, low=1)
    check.number("balance_weight", balance_weight, low=0)
    check.flags(abstract=abstract)
    check.seed(seed)
    if top_k > experts:
        raise check.error(f"top_k={top_k} experts for a token, but there are only experts={experts}. Give fewer.")
    capacity = min(length, math.ceil(capacity_factor * top_k * length / experts))
    model = MoETransformer(layers, length, width, heads, experts, top_k, capacity, vocab, mlp_ratio, check.dtype(dtype))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits, balance = model.apply({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]) + balance_weight * balance  # pyright: ignore[reportOperatorIssue]

    def arguments() -> tuple[Any, ...]:
        init, data = jax.random.split(jax.random.key(seed))
        tokens = jax.random.randint(data, (batch, length + 1), 0, vocab, jnp.int32)
        return model.init(init, tokens[:, :-1])["params"], tokens

    return loss, make(arguments, abstract=abstract)
