"""remat_layers: a model whose layers are switched is the model without, and what its layers make is not kept."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_kit as rk
from tests.helpers import held, regions, residual_bytes

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
DROPOUT = {"dropout": jax.random.key(7)}
X = jax.random.normal(jax.random.key(3), (4, 8))


def assert_same(a, b, rtol=2e-4, atol=1e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


# Linen ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("model", "calls", "every_second"),
    [
        (Compact, 3, 2),
        (Setup, 3, 2),
        (Nested, 6, 3),
        (Attribute, 3, 2),
        (Scanned, 1, 1),
        (functools.partial(Scanned, body=Pair), 2, 1),
        (Carried, 1, 1),
        (Mapped, 1, 1),
        (Tied, 2, 2),
        (Jitted, None, None),
    ],
)
def test_a_switched_linen_model_is_the_same_model(model, calls, every_second):
    layers = ("Block", "Setup?lock") if model is Nested else "Block|SetupBlock"
    plain, params, variables = training(model())
    expected = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    assert regions(jax.grad(lambda p: plain(p)[0]), params) == 0
    for every, count in ((1, calls), (2, every_second)):
        switched = rk.linen.remat_layers(model, layers, every=every)
        loss, _, initial = training(switched())
        assert_same(variables, initial, rtol=0, atol=0)
        assert_same(expected, jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
        found = regions(jax.grad(lambda p, loss=loss: loss(p)[0]), params)
        assert found == count or (count is None and found > 0)
        if every == 1:
            assert held(lambda p, loss=loss: loss(p)[0], params) < held(lambda p: plain(p)[0], params)


def test_what_linen_layers_keep_is_what_the_decorator_keeps():
    class Decorated(nn.Module):
        policy: str

        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = rk.linen.remat(Block, policy=self.policy)(name=f"Block_{_}")(x)
            return nn.Dense(2)(x)

    def kept(model):
        _, params, variables = training(model)
        state = {k: variables[k] for k in ("batch_stats",)}
        run = lambda p: model.apply({**state, "params": p}, X, rngs=DROPOUT, mutable=["batch_stats"])  # noqa: E731
        return residual_bytes(lambda p: jnp.sum(run(p)[0]), params)

    sizes = [kept(rk.linen.remat_layers(Compact(), "Block", policy=p)) for p in ("full", "dots", "none")]
    assert sizes == [kept(Decorated(p)) for p in ("full", "dots", "none")]
    assert sizes[0] < sizes[1] < sizes[2] == kept(Compact())


def test_a_class_a_partial_and_an_instance_come_back_as_such():
    switched = rk.linen.remat_layers(Scanned, "Block")
    assert (switched.__name__, switched.__qualname__, switched.__module__) == ("Scanned", "Scanned", __name__)
    assert issubclass(switched, Scanned) and switched() == switched(Step) and hash(switched()) == hash(switched())
    partial = rk.linen.remat_layers(functools.partial(Scanned, body=Pair), "Block")
    assert isinstance(partial, functools.partial) and partial().body is Pair
    model = rk.linen.remat_layers(Scanned(Pair, name="net"), "Block")
    assert isinstance(model, Scanned) and (model.body, model.name) == (Pair, "net")


def part_of_another(model):
    """A switched model as a submodule, in compact and in setup."""

    class InCompact(nn.Module):
        @nn.compact
        def __call__(self, x):
            return model(name="net")(Block()(x))

    class InSetup(nn.Module):
        def setup(self):
            self.net = rk.linen.remat_layers(Compact(), "Block")

        def __call__(self, x):
            return self.net(x)

    return InCompact(), InSetup()


def test_a_switched_model_inside_another_model():
    in_compact, in_setup = part_of_another(rk.linen.remat_layers(Compact, "Block"))
    for model in (in_compact, in_setup):
        loss, params, _ = training(model)
        assert regions(lambda p, loss=loss: loss(p)[0], params) == 3
    plain, _ = part_of_another(Compact)
    assert_same(training(plain)[2], training(in_compact)[2], rtol=0, atol=0)
    whole = type(in_compact)
    loss, params, _ = training(rk.linen.remat_layers(whole, Block, every=2)())  # the outer switch decides
    assert regions(lambda p: loss(p)[0], params) == 2


class Tree(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x):
        if not self.depth:
            return jnp.sin(jnp.tanh(nn.Dense(8)(x)))
        return Tree(self.depth - 1)(x) + Tree(self.depth - 1)(jnp.sin(x))


def test_only_the_outer_of_nested_linen_layers_is_rematerialized():
    v = Tree(3).init(KEYS, X)
    switched = rk.linen.remat_layers(Tree, "Tree")  # the model itself is none of its layers
    assert regions(lambda v: switched(3).apply(v, X), v) == 2
    switched = rk.linen.remat_layers(Nested, ("Setup", "Compact", "*Block"))
    loss, params, _ = training(switched())
    assert regions(lambda p: loss(p)[0], params) == 2
    half = rk.linen.remat_layers(Nested, ("Setup", "Compact", "*Block"), every=2)
    loss, params, _ = training(half())
    assert regions(lambda p: loss(p)[0], params) == 1


def test_a_class_stands_for_its_subclasses_and_a_name_does_not():
    v = Setup().init(KEYS, X)
    count = lambda layers: regions(  # noqa: E731
        lambda v: rk.linen.remat_layers(Setup, layers)().apply(v, X, rngs=DROPOUT, mutable=True)[0], v
    )
    assert count(Block) == count(nn.Module) - 1 == count("SetupBlock") == 3
    with pytest.raises(rk.RematError, match="no layer of class 'Block'"):
        count("Block")


def test_switching_again_replaces_and_none_switches_off():
    loss, params, _ = training(Compact())
    plain = held(lambda p: loss(p)[0], params)

    def kept(model):
        loss, params, _ = training(model())
        return regions(lambda p: loss(p)[0], params), held(lambda p: loss(p)[0], params)

    full = rk.linen.remat_layers(Compact, "Block")
    dots = rk.linen.remat_layers(full, "Block", policy="dots")
    assert kept(dots)[0] == 3 and kept(full)[1] < kept(dots)[1] < plain
    assert kept(rk.linen.remat_layers(dots, "Dense"))[0] == 4
    assert kept(rk.linen.remat_layers(full, "Block", policy="none")) == (0, plain)


class Decorated(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = self.block()(x)
        return x


def test_decorated_linen_layers_get_the_new_policy():
    decorated = rk.linen.remat(Block, policy="full")
    loss, params, _ = training(Decorated(Block))
    expected = loss(params)

    def kept(policy, every=1, block=decorated):
        switched = rk.linen.remat_layers(Decorated, "Block", policy=policy, every=every)(block)
        loss, params, _ = training(switched)
        assert_same(expected, loss(params))
        return regions(lambda p: loss(p)[0], params), held(lambda p: loss(p)[0], params)

    assert kept("dots", every=2) == kept("dots", every=2, block=Block)
    assert kept("none")[0] == 0


def test_stacks_of_remat_scan_get_the_new_policy():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.sin(jnp.tanh(nn.Dense(8)(x)))

    class Stack(nn.Module):
        policy: str

        @nn.compact
        def __call__(self, x):
            return rk.linen.remat_scan(Layer, lengths=(2, 2), policy=self.policy)()(x)

    v = Stack("full").init(KEYS, X)
    kept = lambda model: held(lambda v: jnp.sum(model.apply(v, X)), v)  # noqa: E731
    for policy in ("none", "full", "dots"):
        for written in ("full", "none"):
            assert kept(rk.linen.remat_layers(Stack(written), "Layer", policy=policy)) == kept(Stack(policy))


class Coder(nn.Module):
    def setup(self):
        self.layer = Half()
        self.out = nn.Dense(3)

    def encode(self, x):
        return self.out(self.layer.encode(x))

    def embed(self, x):
        return self.out(x)


class Half(nn.Module):
    def setup(self):
        self.dense = nn.Dense(8)

    def encode(self, x, flag=True):
        return jnp.sin(jnp.tanh(self.dense(x) if flag else x))

    def __call__(self, x):
        return self.encode(x)


def test_methods_static_arguments_and_blocks():
    model = rk.linen.remat_layers(Coder(), "Half", methods=("__call__", "encode"), static_argnames="flag", block="half")
    v = Coder().init(KEYS, X, method="encode")
    count = lambda method: regions(lambda v: model.apply(v, X, method=method), v)  # noqa: E731
    assert count("encode") == 1
    assert count(lambda model, x: model.out(model.layer(x))) == 1
    with rk.override({"half": "none"}):
        assert count("encode") == 0
    with pytest.raises(rk.RematError, match="'flag' is declared static"):
        model.apply(v, X, method=lambda model, x: model.layer.encode(x, flag=x > 0))


def test_a_model_without_call_warns_of_layers_that_it_has_not_met():
    v = Coder().init(KEYS, X, method="encode")
    model = rk.linen.remat_layers(Coder(), "Half", methods="encode")
    with pytest.warns(rk.RematWarning, match=r"In Coder.embed: remat_layers found no layer of class 'Half'") as told:
        model.apply(v, X, method="embed")
        model.apply(v, X, method="embed")
    assert len(told) == 1
    model = rk.linen.remat_layers(Coder(), "Half")
    with pytest.warns(rk.RematWarning, match=r"covers __call__ of Half, but Coder has only encode of it"):
        model.apply(v, X, method="encode")


def test_interceptors_around_see_each_call_once():
    seen = []

    def doubled(next_fun, args, kwargs, context):
        seen.append((type(context.module).__name__, context.method_name))
        out = next_fun(*args, **kwargs)
        return 2 * out if isinstance(context.module, Block) else out

    model = Compact()
    v = model.init(KEYS, X)
    outs = []
    for m in (model, rk.linen.remat_layers(model, "Block")):
        with nn.intercept_methods(doubled):
            outs.append((m.apply(v, X, False), tuple(seen)))
        seen.clear()
    assert_same(outs[0][0], outs[1][0])
    assert outs[0][1] == outs[1][1]


def test_interceptors_of_the_model_itself_are_refused():
    class Intercepts(nn.Module):
        @nn.compact
        def __call__(self, x):
            with nn.intercept_methods(lambda next_fun, args, kwargs, context: next_fun(*args, **kwargs)):
                return Tree(0)(x)

    v = Intercepts().init(KEYS, X)
    with pytest.raises(rk.RematError, match="Tree.__call__ is called under nn.intercept_methods"):
        rk.linen.remat_layers(Intercepts, "Tree")().apply(v, X)


def test_linen_layers_are_blocks_of_the_analyses():
    loss, params, _ = training(rk.linen.remat_layers(Compact(), "Block"))
    names = [block.path for block in rk.trace(lambda p: loss(p)[0], params).blocks]
    assert [n for n in names if n.startswith("Block_") and "/" not in n] == ["Block_0", "Block_1", "Block_2"]
    by_path = rk.linen.remat_layers(Compact(), "Block", policy="save path=Dense_0")
    assert_same(training(by_path)[0](params), loss(params))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rk.linen.remat_layers(Compact, "Blok")().init(KEYS, X), "'Blok' inside Compact.*Did you mean 'Block'"),
        (lambda: rk.linen.remat_layers(Compact, ("Block", Pair))().init(KEYS, X), "no layer of class 'Pair'"),
        (lambda: rk.linen.remat_layers(Block, "Block")().init(KEYS, X), "classes there: BatchNorm, Dense, Dropout"),
        (
            lambda: rk.linen.remat_layers(Compact, "Block", methods=("__call__", "cal"))().init(KEYS, X),
            "methods has 'cal', but Block has no such method",
        ),
        (
            lambda: rk.linen.remat_layers(Compact, "Block", static_argnames="trian")().init(KEYS, X),
            "static_argnames has 'trian', which is no argument of __call__ of Block .*Did you mean 'train'",
        ),
        (lambda: rk.linen.remat_layers(Compact, "Block", every=0), "every= takes a whole number.*got 0"),
        (lambda: rk.linen.remat_layers(Compact, "Block", every=True), "every= takes a whole number"),
        (lambda: rk.linen.remat_layers(Compact, "Block", every=1.5), "every= takes a whole number"),
        (lambda: rk.linen.remat_layers(Compact, "Block", policy="dotz"), "dotz.*dots"),
        (lambda: rk.linen.remat_layers(Compact, "Block", prevent_cse="yes"), "prevent_cse="),
        (lambda: rk.linen.remat_layers(Compact, "Block", block=3), "block="),
        (lambda: rk.linen.remat_layers(Compact, "Block", methods=()), "methods is empty"),
        (lambda: rk.linen.remat_layers(Compact, "Block", methods=3), "methods= takes .*got 3"),
        (lambda: rk.linen.remat_layers(Compact, "Block", static_argnames=3), "static_argnames= takes .*got 3"),
        (lambda: rk.linen.remat_layers(Compact, ()), "no layers"),
        (lambda: rk.linen.remat_layers(Compact, ("Block", int)), "linen.Module; got <class 'int'>"),
        (lambda: rk.linen.remat_layers(Compact, "Blo["), "glob"),
        (lambda: rk.linen.remat_layers(Compact, ""), "glob"),
        (lambda: rk.linen.remat_layers("Block", "dots"), "module class or an instance"),
        (lambda: rk.linen.remat_layers(lambda x: x, "Block"), "module class or an instance"),
        (lambda: rk.linen.remat_layers(Compact().bind({}), "Block"), "bound already"),
    ],
)
def test_wrong_use_of_linen_is_refused(make, message):
    with pytest.raises(rk.RematError, match=message):
        make()


# NNX -----------------------------------------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, train=True):
        h = self.norm(self.dense(x), use_running_average=not train)
        return x + jnp.sin(jnp.tanh(self.drop(h, deterministic=not train)))

    def encode(self, x):
        return jnp.sin(self(x))


class SubLayer(Layer):
    pass


class Attributes(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second, self.third = Layer(rngs), SubLayer(rngs), Layer(rngs)

    def __call__(self, x):
        return self.third(self.second(self.first(x)))


class Listed(nnx.Module):
    def __init__(self, rngs, length=3, layer=Layer):
        self.layers = nnx.List([layer(rngs) for _ in range(length)])
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.encoder = Attributes(rngs)
        self.parts = nnx.data({"a": [Layer(rngs)]})
        self.tied = self.parts["a"][0]

    def __call__(self, x):
        return self.tied(self.parts["a"][0](self.encoder(x)))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def create(rngs):
            return Layer(rngs)

        self.layers = create(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return run(x, self.layers)


class Parallel(Stacked):
    def __call__(self, x):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x).sum(0)


def pure(model, call=lambda model, x: model(x)):
    """A model as a function of its parameters and input alone, and these."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, x: jnp.sum(call(nnx.merge(graph, params, rest, copy=True), x) ** 2), params, X


def state_of(model):
    def plain(leaf):
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(plain, nnx.to_pure_dict(nnx.state(model)))


def trained(model):
    """Loss and gradients of a second step, and the state after it."""
    step = nnx.jit(nnx.value_and_grad(lambda model: jnp.sum(model(X) ** 2)))
    step(model)
    value, grads = step(model)
    return value, nnx.to_pure_dict(grads), state_of(model)


@pytest.mark.parametrize(
    ("model", "calls", "every_second"),
    [(Attributes, 3, 2), (Listed, 3, 2), (Deep, 5, 2), (Stacked, 1, 1), (Parallel, 1, 1)],
)
def test_a_switched_nnx_model_is_the_same_model(model, calls, every_second):
    expected = trained(model(nnx.Rngs(0)))
    plain = held(*pure(model(nnx.Rngs(0))))
    for every, count in ((1, calls), (2, every_second)):
        net = model(nnx.Rngs(0))
        assert rk.nnx.remat_layers(net, Layer, every=every) is net
        fn, *args = pure(net)  # split and merged: the graph definition holds the types
        assert regions(jax.grad(fn), *args) == count
        if every == 1:
            assert held(fn, *args) < plain
        assert_same(expected, trained(net))
    assert_same(expected, trained(rk.nnx.remat_layers(model, "*Layer")(nnx.Rngs(0))))


def test_what_nnx_layers_keep_is_what_the_decorator_keeps():
    for policy in ("full", "dots", "none"):
        switched = rk.nnx.remat_layers(Listed(nnx.Rngs(0)), "Layer", policy=policy)
        decorated = Listed(nnx.Rngs(0), layer=rk.nnx.remat(Layer, policy=policy))
        assert residual_bytes(*pure(switched)) == residual_bytes(*pure(decorated))


def test_nnx_layers_are_counted_in_the_order_of_their_numbers():
    model = rk.nnx.remat_layers(Listed(nnx.Rngs(0), length=12), "Layer", every=5)
    assert [type(layer) is not Layer for layer in model.layers] == [i % 5 == 0 for i in range(12)]
    bag = types.SimpleNamespace(layers=[Layer(nnx.Rngs(i)) for i in range(12)])

    class Numbered(nnx.Module):
        def __init__(self):
            for i, layer in enumerate(bag.layers):
                setattr(self, f"layer{i}", layer)

    rk.nnx.remat_layers(Numbered(), "Layer", every=5)
    assert [type(layer) is not Layer for layer in bag.layers] == [i % 5 == 0 for i in range(12)]


def test_switched_nnx_layers_share_one_type_with_the_name_of_the_class():
    model = rk.nnx.remat_layers(Listed(nnx.Rngs(0)), "Layer", policy="dots")
    other = rk.nnx.remat_layers(Listed(nnx.Rngs(1)), ("Layer",), policy="dots")
    (cls,) = {type(layer) for layer in (*model.layers, *other.layers)}
    assert issubclass(cls, Layer) and cls is not Layer and (cls.__name__, cls.__module__) == ("Layer", __name__)
    assert nnx.graphdef(model) == nnx.graphdef(other)
    assert regions(*pure(nnx.clone(model))) == 3


def test_switching_nnx_again_replaces_and_none_switches_off():
    plain = Listed(nnx.Rngs(0))
    model = rk.nnx.remat_layers(Listed(nnx.Rngs(0)), "Layer")
    full = held(*pure(model))
    rk.nnx.remat_layers(model, "Layer", policy="dots")
    assert regions(*pure(model)) == 3 and full < held(*pure(model)) < held(*pure(plain))
    rk.nnx.remat_layers(model, "Linear")
    assert regions(*pure(model)) == 4 and type(model.layers[0]) is Layer
    rk.nnx.remat_layers(model, "Layer", policy="none")
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    switched = rk.nnx.remat_layers(rk.nnx.remat_layers(Listed, "Layer"), "Layer", every=3)
    assert regions(*pure(switched(nnx.Rngs(0)))) == 1
    assert (switched.__name__, switched.__qualname__) == ("Listed", "Listed")


def test_decorated_nnx_layers_get_the_new_policy():
    decorated = rk.nnx.remat(Layer, policy="full")
    for policy, every in (("dots", 1), ("full", 2), ("none", 1)):
        a = rk.nnx.remat_layers(Listed(nnx.Rngs(0), layer=decorated), "Layer", policy=policy, every=every)
        b = rk.nnx.remat_layers(Listed(nnx.Rngs(0)), "Layer", policy=policy, every=every)
        assert regions(*pure(a)) == regions(*pure(b)) and held(*pure(a)) == held(*pure(b))
        assert all(isinstance(layer, decorated) for layer in a.layers)


class Outer(nnx.Module):
    def __init__(self, rngs, layer=Layer):
        self.inner = layer(rngs)

    def __call__(self, x):
        return jnp.sin(self.inner(x))


@pytest.mark.parametrize("inner", [Layer, rk.nnx.remat(Layer)])
def test_only_the_outer_of_nested_nnx_layers_is_rematerialized(inner):
    make = lambda: Listed(nnx.Rngs(0), layer=functools.partial(Outer, layer=inner))  # noqa: E731
    model = rk.nnx.remat_layers(make(), ("Outer", "Layer"))
    assert regions(*pure(model)) == 3
    assert regions(*pure(rk.nnx.remat_layers(model, ("Outer", "Layer"), every=2))) == 2
    assert regions(*pure(rk.nnx.remat_layers(model, "Layer"))) == 3


def test_methods_static_arguments_and_blocks_of_nnx_layers():
    model = Attributes(nnx.Rngs(0))
    rk.nnx.remat_layers(model, Layer, methods=("__call__", "encode"), static_argnames="train", block="layer")
    fn, *args = pure(model, lambda model, x: model.first.encode(x))
    assert regions(fn, *args) == 1
    with rk.override({"layer": "none"}):
        assert regions(fn, *args) == 0
    with pytest.raises(rk.RematError, match="'train' is declared static"):
        model.first(X, train=jnp.bool_(True))


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ("Layr", {}, "'Layr' inside Attributes.*Layer, Linear, SubLayer.*Did you mean 'Layer'"),
        (("Layer", Listed), {}, "no layer of class 'Listed'"),
        ("Attributes", {}, "no layer of class 'Attributes'"),  # the model itself is none of its layers
        ("Layer", {"methods": "decode"}, "covers decode of Layer, but Attributes has only __call__, encode of it"),
        ("Layer", {"methods": ("__call__", "encod")}, "no such method.*Did you mean 'encode'"),
        ("Layer", {"static_argnames": "trian"}, "'trian', which is no argument of __call__ of Layer .*'train'"),
        ("Layer", {"every": 0}, "every= takes a whole number"),
        ("Layer", {"policy": "dotz"}, "dotz.*dots"),
        ("Layer", {"prevent_cse": "yes"}, "prevent_cse="),
        ("Layer", {"block": 3}, "block="),
        (nn.Dense, {}, "nnx.Module; got"),
    ],
)
def test_wrong_use_of_nnx_is_refused_and_changes_nothing(layers, options, message):
    model = rk.nnx.remat_layers(Attributes(nnx.Rngs(0)), "SubLayer")
    before = nnx.graphdef(model)
    with pytest.raises(rk.RematError, match=message):
        rk.nnx.remat_layers(model, layers, **options)
    assert nnx.graphdef(model) == before


def test_what_is_no_nnx_model_is_refused():
    for target in ("Layer", nn.Dense, 3):
        with pytest.raises(rk.RematError, match="NNX module or class"):
            rk.nnx.remat_layers(target, "Layer")
