"""`rnn`: a recurrent language model in plain JAX, a scan over time in each layer.

After the gated recurrent unit (Cho et al., 2014), with the reset gate behind the product as in cuDNN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.nn.initializers import normal, orthogonal, variance_scaling, zeros
from jax.typing import DTypeLike

from remat_kit.zoo._common import Check, Model, make
from remat_kit.zoo._ops import cross_entropy

Params = dict[str, Any]


def gru_cell(weights: Params, state: jax.Array, x: jax.Array) -> jax.Array:
    """One step in time: state ``[batch, width]`` and input ``[batch, inputs]`` to the next state."""
    from_x = x @ weights["input"] + weights["input_bias"]
    from_state = state @ weights["state"] + weights["state_bias"]
    x_reset, x_update, x_new = jnp.split(from_x, 3, axis=-1)
    state_reset, state_update, state_new = jnp.split(from_state, 3, axis=-1)
    reset = jax.nn.sigmoid(x_reset + state_reset)
    update = jax.nn.sigmoid(x_update + state_update)
    new = jnp.tanh(x_new + reset * state_new)
    return (1 - update) * new + update * state


def logits_of(params: Params, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Tokens ``[batch, length]`` to logits ``[batch, length, vocab]``."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    xs = params["embed"][tokens.T]  # [length, batch, width]: scan runs over the first axis
    for weights in params["layers"]:

        def step(state: jax.Array, x: jax.Array, weights: Params = weights) -> tuple[jax.Array, jax.Array]:
            state = gru_cell(weights, state, x)
            return state, state

        _, xs = jax.lax.scan(step, jnp.zeros(xs.shape[1:], dtype), xs)
    return jnp.swapaxes(xs @ params["head"], 0, 1)


def init_params(key: jax.Array, *, layers: int, width: int, vocab: int) -> Params:
    """Returns float32 parameters: recurrent products start orthogonal, so that states neither grow nor vanish."""
    embed, head, *rest = jax.random.split(key, 2 + layers)

    def gru(key: jax.Array) -> Params:
        from_x, *from_state = jax.random.split(key, 4)
        return {
            "input": variance_scaling(1.0, "fan_in", "normal")(from_x, (width, 3 * width)),
            "input_bias": zeros(from_x, (3 * width,)),
            "state": jnp.concatenate([orthogonal()(k, (width, width)) for k in from_state], axis=1),
            "state_bias": zeros(from_x, (3 * width,)),
        }

    return {
        "embed": normal(1.0)(embed, (vocab, width)),
        "layers": [gru(key) for key in rest],
        "head": normal(0.02)(head, (width, vocab)),
    }


def rnn(
    *,
    layers: int = 2,
    batch: int = 32,
    length: int = 256,
    width: int = 512,
    vocab: int = 8192,
    dtype: DTypeLike = "float32",
    seed: int = 0,
    abstract: bool = True,
) -> Model:
    """Builds a GRU language model (plain JAX, one scan over time per layer) and its next-token loss.

    Args:
        layers, width: of the network; every layer is `width` wide.
        batch, length: of the data; `length` positions are predicted.
        vocab: number of tokens.
        dtype: of the activations; parameters are float32.
        seed: of parameters and data.
        abstract: whether the arguments are `jax.ShapeDtypeStruct`, with nothing allocated, rather than arrays.

    Returns:
        ``(fn, (params, tokens))``: `fn` gives the mean cross-entropy in nats; `tokens` is int32
        ``[batch, length + 1]``, for inputs and targets are one apart.

    Raises:
        RematError: for a size or dtype that makes no model.
    """
    check = Check("rnn")
    check.sizes(layers=layers, batch=batch, length=length, width=width, vocab=vocab)
    check.flags(abstract=abstract)
    check.seed(seed)
    dtype = check.dtype(dtype)

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        return cross_entropy(logits_of(params, tokens[:, :-1], dtype), tokens[:, 1:])

    def arguments() -> tuple[Any, ...]:
        init, data = jax.random.split(jax.random.key(seed))
        tokens = jax.random.randint(data, (batch, length + 1), 0, vocab, jnp.int32)
        return init_params(init, layers=layers, width=width, vocab=vocab), tokens

    return loss, make(arguments, abstract=abstract)
