"""rk.nnx.remat_layers: a switched model is the model without, and what its layers make is not kept."""

import copy
import functools
import pickle
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_kit as rk
from tests.helpers import assert_same, held, regions, residual_bytes, state_of

X = jax.random.normal(jax.random.key(3), (4, 8))


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
        assert regions(fn, *args) == count
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


def test_a_partial_of_an_nnx_class():
    switched = rk.nnx.remat_layers(functools.partial(Listed, length=2), "Layer")
    assert isinstance(switched, functools.partial)
    assert regions(*pure(switched(nnx.Rngs(0)))) == 2


@pytest.mark.parametrize("wrap", [nnx.jit, nnx.remat])
def test_layers_whose_method_is_transformed(wrap):
    class Wrapped(Layer):
        @wrap
        def __call__(self, x):
            return super().__call__(x)

    plain = Listed(nnx.Rngs(0), layer=Wrapped)
    model = rk.nnx.remat_layers(Listed(nnx.Rngs(0), layer=Wrapped), "Wrapped")
    decorated = Listed(nnx.Rngs(0), layer=rk.nnx.remat(Wrapped))
    assert regions(*pure(model)) == regions(*pure(plain)) + 3
    assert residual_bytes(*pure(model)) == residual_bytes(*pure(decorated))
    assert_same(trained(plain), trained(model))


Renamed = rk.nnx.remat_layers(Listed, "Layer")


@pytest.mark.parametrize(
    "make", [lambda: rk.nnx.remat_layers(Listed(nnx.Rngs(0)), Layer, policy="dots"), lambda: Renamed(nnx.Rngs(0))]
)
def test_a_switched_nnx_model_stays_switched_when_it_is_copied_or_pickled(make):
    model = make()
    expected = trained(make())
    for again in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again.layers[0]) is type(model.layers[0])
        assert regions(*pure(again)) == 3
    assert_same(trained(again), expected)
