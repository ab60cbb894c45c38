"""`vit`: an image classifier in Flax Linen, its layers unrolled.

After ViT (Dosovitskiy et al., 2021): patches, a class token, learned positions, pre-norm encoder layers.
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


class ViT(nn.Module):
    """Images ``[batch, height, width, channels]`` to logits ``[batch, classes]``."""

    layers: int
    patch: int
    width: int
    heads: int
    classes: int
    mlp_ratio: int = 4
    dropout: float = 0.0
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        init = normal(INIT_STD)
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, strides=size, padding="VALID", dtype=self.dtype, name="patch_embed")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("class_token", init, (1, 1, self.width)).astype(self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.width)), x], axis=1)
        x = x + self.param("position_embed", init, x.shape[1:]).astype(self.dtype)
        x = Dropout(self.dropout)(x)

        for i in range(self.layers):
            layer = Layer(
                heads=self.heads,
                hidden=self.mlp_ratio * self.width,
                causal=False,
                out_std=branch_std(self.layers),
                dropout=self.dropout,
                dtype=self.dtype,
                name=f"layers_{i}",
            )
            x = layer(x)

        x = nn.LayerNorm(dtype=self.dtype, name="final_norm")(x[:, 0])
        # The paper starts the head at zero, at which no other parameter has a gradient.
        return nn.Dense(self.classes, dtype=self.dtype, kernel_init=init, name="head")(x)


def vit(
    *,
    layers: int = 12,
    batch: int = 32,
    image: int = 224,
    patch: int = 16,
    channels: int = 3,
    width: int = 768,
    heads: int = 12,
    classes: int = 1000,
    mlp_ratio: int = 4,
    dropout: float = 0.0,
    dtype: DTypeLike = "bfloat16",
    seed: int = 0,
    abstract: bool = True,
) -> Model:
    """Builds a vision transformer (Flax Linen, unrolled layers ``layers_0``, ``layers_1``, ...) and its loss.

    Args:
        layers, width, heads: of the transformer; `width` must divide by `heads`.
        batch, channels: of the images.
        image, patch: sides in pixels, of images and patches; `image` must divide by `patch`.
        classes: number of labels.
        mlp_ratio: width of the MLP's hidden layer, in multiples of `width`.
        dropout: rate after the embedding, on attention weights and on both branches of a layer.
        dtype: of the activations; parameters and images are float32.
        seed: of parameters and data.
        abstract: whether the arguments are `jax.ShapeDtypeStruct`, with nothing allocated, rather than arrays.

    Returns:
        ``(fn, (params, images, labels))``, or ``(fn, (params, images, labels, key))`` where there is dropout: `fn`
        gives the mean cross-entropy in nats; `images` is ``[batch, image, image, channels]``, `labels` is int32.

    Raises:
        RematError: for a size, rate or dtype that makes no model.
    """
    check = Check("vit")
    check.sizes(layers=layers, batch=batch, image=image, patch=patch, channels=channels, width=width)
    check.sizes(heads=heads, classes=classes, mlp_ratio=mlp_ratio)
    check.divides("heads", heads, "width", width)
    check.divides("patch", patch, "image", image)
    check.number("dropout", dropout, low=0, below=1)
    check.flags(abstract=abstract)
    check.seed(seed)
    model = ViT(layers, patch, width, heads, classes, mlp_ratio, dropout, check.dtype(dtype))

    def loss(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array | None = None) -> jax.Array:
        rngs = None if key is None else {"dropout": key}
        logits = model.apply({"params": params}, images, rngs=rngs)
        return cross_entropy(logits, labels)  # pyright: ignore[reportArgumentType]

    def arguments() -> tuple[Any, ...]:
        init, data, drop = jax.random.split(jax.random.key(seed), 3)
        images = jax.random.normal(data, (batch, image, image, channels), jnp.float32)
        labels = jax.random.randint(data, (batch,), 0, classes, jnp.int32)
        params = model.init({"params": init, "dropout": drop}, images)["params"]
        return (params, images, labels, drop) if dropout else (params, images, labels)

    return loss, make(arguments, abstract=abstract)
