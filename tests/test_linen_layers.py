"""rk.linen.remat_layers: a switched model is the model without, and what its layers make is not kept."""

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_kit as rk
from tests.helpers import assert_same, held, regions, residual_bytes
from tests.linen_models import (
    DROPOUT,
    KEYS,
    Attribute,
    Block,
    Carried,
    Compact,
    Jitted,
    Mapped,
    Nested,
    Pair,
    Scanned,
    Setup,
    Step,
    Tied,
    Tree,
    X,
    training,
)


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
    assert regions(lambda p: plain(p)[0], params) == 0
    for every, count in ((1, calls), (2, every_second)):
        switched = rk.linen.remat_layers(model, layers, every=every)
        loss, _, initial = training(switched())
        assert_same(variables, initial, rtol=0, atol=0)
        assert_same(expected, jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
        found = regions(lambda p, loss=loss: loss(p)[0], params)
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
    assert (switched.__name__, switched.__qualname__, switched.__module__) == ("Scanned", "Scanned", Scanned.__module__)
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


def test_linen_layers_are_blocks_of_the_analyses():
    loss, params, _ = training(rk.linen.remat_layers(Compact(), "Block"))
    names = [block.path for block in rk.trace(lambda p: loss(p)[0], params).blocks]
    assert [n for n in names if n.startswith("Block_") and "/" not in n] == ["Block_0", "Block_1", "Block_2"]
    by_path = rk.linen.remat_layers(Compact(), "Block", policy="save path=Dense_0")
    assert_same(training(by_path)[0](params), loss(params))


def test_layers_that_share_the_scope_of_the_model_are_found():
    class Shared(nn.Module):
        def setup(self):
            self.block = Block()
            nn.share_scope(self, self.block)

        def __call__(self, x):
            return self.block(x)

    plain, params, variables = training(Shared())
    loss, _, initial = training(rk.linen.remat_layers(Shared, "Block")())
    assert_same(variables, initial, rtol=0, atol=0)
    assert_same(plain(params), loss(params))
    assert regions(lambda p: loss(p)[0], params) == 1


Renamed = rk.linen.remat_layers(Compact, "Block", policy="dots", every=2)


@pytest.mark.parametrize("model", [Renamed, rk.linen.remat_layers(Scanned, Block)])
def test_a_switched_model_stays_switched_when_it_is_copied_or_pickled(model):
    plain, params, _ = training(model())
    count = regions(lambda p: plain(p)[0], params)
    assert count > 0
    assert copy.copy(model()) == copy.deepcopy(model()) == model()
    for again in (copy.deepcopy(model()), pickle.loads(pickle.dumps(model(name="net")))):
        loss, _, _ = training(again)
        assert regions(lambda p, loss=loss: loss(p)[0], params) == count
        assert_same(loss(params), plain(params))
    assert again.name == "net"
