"""rk.linen.remat_layers: methods and static arguments, what it warns of, and what it refuses."""

import flax.linen as nn
import jax.numpy as jnp
import pytest

import remat_kit as rk
from tests.helpers import assert_same, regions
from tests.linen_models import KEYS, Block, Compact, Pair, Tree, X


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
