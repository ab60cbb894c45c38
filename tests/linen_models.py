"""Linen models whose layers are put together in every way that there is, and their losses."""

import flax.linen as nn
import jax
import jax.numpy as jnp

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
DROPOUT = {"dropout": jax.random.key(7)}
X = jax.random.normal(jax.random.key(3), (4, 8))


class Block(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, train: bool = True):
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(self.width)(x))
        h = nn.Dropout(0.5)(jnp.sin(jnp.tanh(h)), deterministic=not train)
        self.sow("intermediates", "aux", jnp.mean(h**2))
        return x + h


class SetupBlock(Block):
    """The same in setup."""

    def setup(self):
        self.norm, self.dense = nn.BatchNorm(momentum=0.9), nn.Dense(self.width)
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, train: bool = True):
        h = self.norm(self.dense(x), use_running_average=not train)
        return x + self.drop(jnp.sin(jnp.tanh(h)), deterministic=not train)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return Block(name="block")(x, train), None


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return Block()(Block()(x, train), train), None


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(3):
            x = Block()(x, train)
        return nn.Dense(2)(x)


class Setup(nn.Module):
    def setup(self):
        self.layers = [SetupBlock() for _ in range(3)]
        self.head = nn.Dense(2)

    def __call__(self, x, train=True):
        for layer in self.layers:
            x = layer(x, train)
        return self.head(x)


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return Setup(name="decoder")(Compact(name="encoder")(jnp.sin(x), train) @ jnp.ones((2, 8)), train)


class Attribute(nn.Module):
    layer: nn.Module = Block()

    @nn.compact
    def __call__(self, x, train=True):
        return self.layer(self.layer(x, train), train) + Block(name="last")(x, train)


AXES = {"params": 0, "batch_stats": 0, "intermediates": 0}


def scanned(body):
    split = {"params": True, "dropout": True}
    return nn.scan(body, variable_axes=AXES, split_rngs=split, in_axes=nn.broadcast, length=3)


class Scanned(nn.Module):
    body: type = Step

    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dense(2)(scanned(self.body)(name="layers")(x, train)[0])


class Carried(nn.Module):
    """A scan over the layer class itself."""

    @nn.compact
    def __call__(self, x, train=True):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, train):
                return jnp.sin(jnp.tanh(nn.Dense(8)(nn.Dropout(0.5)(x, deterministic=not train)))), None

        return scanned(Block)()(x, train)[0]


class Mapped(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        split = {"params": True, "dropout": True}
        layers = nn.vmap(Block, in_axes=(None, None), variable_axes=AXES, split_rngs=split, axis_size=2)
        return layers()(x, train).sum(0)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        block = Block()
        return block(block(x, train), train)


JitBlock = nn.jit(Block, static_argnums=2)  # its traces are cached


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return JitBlock()(JitBlock()(x, train), train)


class Tree(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x):
        if not self.depth:
            return jnp.sin(jnp.tanh(nn.Dense(8)(x)))
        return Tree(self.depth - 1)(x) + Tree(self.depth - 1)(jnp.sin(x))


def training(model):
    """The model's loss as a function of its parameters, and these."""
    variables = jax.jit(model.init)(KEYS, X)
    state = {k: v for k, v in variables.items() if k not in ("params", "intermediates")}

    def loss(params):
        y, updates = model.apply(
            {**state, "params": params},
            X,
            rngs=DROPOUT,
            mutable=["batch_stats", "intermediates"],
            capture_intermediates=True,
        )
        aux = sum(jnp.mean(leaf**2) for leaf in jax.tree.leaves(updates.get("intermediates", {})))
        return jnp.mean(y**2) + aux, (y, updates)

    return loss, variables["params"], variables
