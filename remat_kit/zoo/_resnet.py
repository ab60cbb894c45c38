"""`resnet`: an image classifier in Flax Linen, with batch normalization in training mode.

After ResNet (He et al., 2016), bottleneck blocks with the stride in the 3x3 convolution. The defaults are ResNet-50.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import variance_scaling
from jax.typing import DTypeLike

from remat_kit.zoo._common import Check, Model, make
from remat_kit.zoo._ops import cross_entropy

EXPANSION = 4
"""How many times wider a bottleneck block is outside than inside."""


def _layers(dtype: DTypeLike) -> tuple[Any, Any]:
    """Returns the convolution and the batch normalization of every block, both waiting for their sizes and names."""
    kernel_init = variance_scaling(2.0, "fan_out", "normal")
    conv = functools.partial(nn.Conv, use_bias=False, kernel_init=kernel_init, dtype=dtype)
    norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=dtype)
    return conv, norm


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution beside a shortcut: to ``[batch, height/stride, width/stride, 4*features]``."""

    features: int
    stride: int = 1
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv, norm = _layers(self.dtype)
        strides = (self.stride, self.stride)
        outside = EXPANSION * self.features
        y = nn.relu(norm(name="norm_0")(conv(self.features, (1, 1), name="conv_0")(x)))
        y = nn.relu(norm(name="norm_1")(conv(self.features, (3, 3), strides=strides, name="conv_1")(y)))
        y = norm(name="norm_2")(conv(outside, (1, 1), name="conv_2")(y))
        if x.shape != y.shape:
            x = norm(name="norm_shortcut")(conv(outside, (1, 1), strides=strides, name="conv_shortcut")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images ``[batch, height, width, channels]`` to logits ``[batch, classes]``."""

    stages: tuple[int, ...]
    width: int
    classes: int
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        conv, norm = _layers(self.dtype)
        x = conv(self.width, (7, 7), strides=(2, 2), name="stem_conv")(images.astype(self.dtype))
        x = nn.relu(norm(name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                stride = 2 if i > 0 and j == 0 else 1
                x = Bottleneck(self.width * 2**i, stride, self.dtype, name=f"stage_{i}_block_{j}")(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.classes, dtype=self.dtype, kernel_init=nn.initializers.normal(0.01), name="head")(x)


def resnet(
    *,
    stages: Sequence[int] = (3, 4, 6, 3),
    batch: int = 32,
    image: int = 224,
    channels: int = 3,
    width: int = 64,
    classes: int = 1000,
    stats: bool = False,
    dtype: DTypeLike = "bfloat16",
    seed: int = 0,
    abstract: bool = True,
) -> Model:
    """Builds a residual convolutional network (Flax Linen, BatchNorm) and its loss, in training mode.

    Args:
        stages: number of blocks in each stage; every stage after the first halves the side and doubles the channels.
        batch, image, channels: of the images, `image` in pixels.
        width: channels inside the first stage's blocks.
        classes: number of labels.
        stats: whether `fn` gives ``(loss, new_batch_stats)``, for ``has_aux=True``, rather than the loss alone.
        dtype: of the activations; parameters, statistics and images are float32.
        seed: of parameters and data.
        abstract: whether the arguments are `jax.ShapeDtypeStruct`, with nothing allocated, rather than arrays.

    Returns:
        ``(fn, (params, batch_stats, images, labels))``: `fn` gives the mean cross-entropy in nats; `images` is
        ``[batch, image, image, channels]``, `labels` is int32.

    Raises:
        RematError: for a size or dtype that makes no model.
    """
    check = Check("resnet")
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
        raise check.error(f"stages={stages!r} is not a sequence of sizes. Give one such as (3, 4, 6, 3).")
    check.sizes(**{f"stages[{i}]": blocks for i, blocks in enumerate(stages)})
    check.sizes(batch=batch, image=image, channels=channels, width=width, classes=classes)
    check.flags(stats=stats, abstract=abstract)
    check.seed(seed)
    model = ResNet(tuple(stages), width, classes, check.dtype(dtype))

    def loss_and_stats(params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(variables, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels), updates["batch_stats"]

    def loss(params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return loss_and_stats(params, batch_stats, images, labels)[0]

    def arguments() -> tuple[Any, ...]:
        init, data = jax.random.split(jax.random.key(seed))
        images = jax.random.normal(data, (batch, image, image, channels), jnp.float32)
        labels = jax.random.randint(data, (batch,), 0, classes, jnp.int32)
        variables = model.init(init, images)
        return variables["params"], variables["batch_stats"], images, labels

    return (loss_and_stats if stats else loss), make(arguments, abstract=abstract)
