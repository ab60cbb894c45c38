"""What rules mean in a whole program: by path, source and size, nested, and when they match nothing."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_kit as rk
from tests.helpers import assert_same_gradients, residual_bytes

X = jnp.linspace(-1, 1, 64).reshape(4, 16)
W = jnp.eye(16) * 0.5
UP = 4 * 32 * 4  # bytes of the first product of a layer


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(32, use_bias=False, name="up")(x)
        return x + nn.Dense(16, use_bias=False, name="down")(jnp.tanh(h))


class Net(nn.Module):
    layer: type[nn.Module] = Layer

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = self.layer(name=f"layers_{i}")(x)
        return x


@pytest.fixture(scope="module")
def net():
    variables = Net().init(jax.random.key(0), X)
    return lambda v, x: jnp.sum(Net().apply(v, x) ** 2), (variables, X)


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("**/up", ["layers_0/up", "layers_1/up", "layers_2/up"]),
        ("layers_*/up", ["layers_0/up", "layers_1/up", "layers_2/up"]),
        ("layers_1/**", ["layers_1/up"]),  # no rule reads the result of its other product
        ("layers_2/up", ["layers_2/up"]),
    ],
)
def test_rules_by_path_keep_what_the_report_shows_there(net, path, kept):
    loss, args = net
    policy = f"save path={path} op=dot_general"
    report = rk.residuals(loss, *args, policy=policy)
    products = [e for e in report.entries if e.op == "dot_general" and e.action == "saved"]
    assert [e.path for e in products] == kept and all(e.bytes == UP for e in products)
    applied = rk.apply(loss, policy)
    assert sum(e.bytes for e in report.entries if e.action == "saved") == residual_bytes(applied, *args)
    assert_same_gradients(loss, applied, *args)


def test_rules_by_named_scope():
    def f(w, x):
        for name in ("first", "second", "third"):
            with jax.named_scope(name):
                x = jnp.sin(x @ w)
        return jnp.sum(x)

    report = rk.residuals(f, W, X, policy="save path=second op=dot_general")
    assert [e.path for e in report.entries if e.op == "dot_general"] == ["second"]


def both(f, *args):
    """Bytes that reverse mode keeps of a program as it is: by JAX's count, and the report's."""
    held = residual_bytes(f, *args)
    assert rk.residuals(f, *args).total_bytes == held
    return held


@pytest.mark.parametrize("path", ["up", "u*|no", "**/up"])
def test_decorated_linen_classes_know_paths_from_themselves_on(net, path):
    loss, (variables, x) = net

    def decorated(policy):
        layer = rk.linen.remat(Layer, policy=policy)
        return lambda v, x: jnp.sum(Net(layer).apply(v, x) ** 2)

    kept = decorated(f"save path={path} op=dot_general")
    assert both(kept, variables, x) == both(decorated("full"), variables, x) + 3 * UP
    products = [e.path for e in rk.residuals(kept, variables, x).entries if e.op == "dot_general"]
    assert products == ["layers_0/up", "layers_1/up", "layers_2/up"]
    assert_same_gradients(loss, kept, variables, x)
    with pytest.warns(rk.RematWarning, match="path=layers_0/up.*matches no value"):
        decorated("save path=layers_0/up")(variables, x)


def test_decorated_linen_functions_know_paths_from_their_module_on():
    class Pair(nn.Module):
        policy: str

        def setup(self):
            self.a, self.b = Layer(), Layer()

        def __call__(self, x):
            return rk.linen.remat(lambda pair, x: pair.b(pair.a(x)), policy=self.policy)(self, x)

    class Outer(nn.Module):
        policy: str

        @nn.compact
        def __call__(self, x):
            return Pair(self.policy, name="pair")(x)

    def loss(policy):
        return lambda v, x: jnp.sum(Outer(policy).apply(v, x) ** 2)

    variables = Outer("none").init(jax.random.key(0), X)
    full = both(loss("full"), variables, X)
    assert both(loss("save path=a/up op=dot_general"), variables, X) == full + UP
    assert both(loss("save path=*/up op=dot_general"), variables, X) == full + 2 * UP


def test_scanned_layers_know_paths_from_themselves_on(net):
    def loss(policy):
        layers = rk.linen.remat_scan(Layer, length=3, policy=policy)(name="layers")
        return lambda v, x: jnp.sum(layers.apply(v, x) ** 2)

    variables = rk.linen.remat_scan(Layer, length=3)(name="layers").init(jax.random.key(0), X)
    kept = both(loss("save path=up op=dot_general"), variables, X)
    assert kept == both(loss("full"), variables, X) + 3 * UP


def test_decorated_nnx_classes_and_functions_know_paths_from_themselves_on():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    def losses(policy):
        decorated = rk.nnx.remat(Block, policy=policy)
        apply = rk.nnx.remat(lambda block, x: block(x), policy=policy)
        for block, call in ((decorated(nnx.Rngs(0)), lambda b, x: b(x)), (Block(nnx.Rngs(0)), apply)):
            graph, state = nnx.split(block)
            yield (lambda state, x, graph=graph, call=call: jnp.sum(call(nnx.merge(graph, state), x) ** 2)), state

    for (full, _), (kept, state) in zip(losses("full"), losses("save path=up op=dot_general"), strict=True):
        assert residual_bytes(kept, state, X) == residual_bytes(full, state, X) + UP
        assert_same_gradients(full, kept, state, X)


def test_reports_name_the_parts_of_a_decorated_nnx_module():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return jnp.sin(self.up(x))

    class Holder(nnx.Module):
        def __init__(self, layer, rngs):
            self.layers = nnx.List([layer(rngs), layer(rngs)])

        def __call__(self, x):
            return sum(jnp.sum(layer(x)) for layer in self.layers)

    for layer in (rk.nnx.remat("save op=dot_general")(Block), rk.nnx.remat("save op=dot_general path=up")(Block)):
        report = rk.residuals(lambda m, x: m(x), Holder(layer, nnx.Rngs(0)), X)
        assert [e.path for e in report.entries if e.op == "dot_general"] == ["layers/0/up", "layers/1/up"]


def scoped(w, x):
    for name in ("first", "second", "third"):
        with jax.named_scope(name):
            x = jnp.sin(x @ w)
    return x


def test_decorated_functions_know_scopes_and_blocks_inside():
    inner = rk.remat(scoped, policy="none", block="inner")

    def loss(policy, f=scoped):
        decorated = rk.remat(lambda w, x: f(w, x) + 1, policy=policy)

        def summed(w, x):
            with jax.named_scope("outside"):
                return jnp.sum(decorated(w, x))

        return summed

    full = both(loss("full"), W, X)
    assert both(loss("save path=second op=dot_general"), W, X) == full + X.nbytes
    assert both(loss("save path=inner/second op=dot_general", inner), W, X) == full + X.nbytes
    assert_same_gradients(loss("full"), loss("save path=second op=dot_general"), W, X)


def test_overrides_may_select_by_path():
    f = rk.remat(scoped, block="scoped")
    full = residual_bytes(lambda w, x: jnp.sum(f(w, x)), W, X)
    with rk.override({"scoped": "save path=first|second op=dot_general"}):
        assert both(lambda w, x: jnp.sum(f(w, x)), W, X) == full + 2 * X.nbytes


def test_decorated_functions_with_rules_by_path_in_loops_and_jit():
    f = rk.remat(scoped, policy="save path=second op=dot_general")

    def loop(w, x):
        return jnp.sum(jax.lax.scan(lambda x, _: (jax.jit(f)(w, x), None), x, length=3)[0])

    def plain(w, x):
        return jnp.sum(jax.lax.scan(lambda x, _: (scoped(w, x), None), x, length=3)[0])

    assert both(loop, W, X) == 2 * 3 * X.nbytes  # the carry, and one product of each trip
    assert_same_gradients(plain, loop, W, X)


def test_rules_by_source_tell_identical_layers_of_two_files_apart(tmp_path, monkeypatch):
    code = "import jax.numpy as jnp\ndef layer(w, x):\n    return jnp.sin(jnp.sin(x @ w) @ w)\n"
    for name in ("ours", "theirs"):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    ours, theirs = importlib.import_module("ours"), importlib.import_module("theirs")
    a = rk.remat(ours.layer, policy="none", block="layer_0")
    b = rk.remat(theirs.layer, policy="none", block="layer_1")

    def loss(w, x):
        return jnp.sum(b(w, a(w, x)))

    report = rk.residuals(loss, W, X, policy="save op=dot_general source=theirs.py")
    products = [e for e in report.entries if e.op == "dot_general"]
    assert [(e.block, e.source.split(":")[0]) for e in products] == [("layer_1", "theirs.py")] * 2
    for name in ("ours", "theirs"):
        sys.modules.pop(name)


def test_sizes_count_all_trips():
    def f(w, x):
        return jnp.sum(jax.lax.scan(lambda h, _: (jnp.sin(h @ w), None), x, None, length=50)[0])

    kept = rk.residuals(f, W, X, policy=f"save op=dot_general larger_than={50 * X.nbytes - 1}B")
    assert kept.by("op")["dot_general"] == 50 * X.nbytes
    with pytest.warns(rk.RematWarning, match="matches no value"):
        rk.residuals(f, W, X, policy=f"save op=dot_general larger_than={50 * X.nbytes}B")


@pytest.mark.filterwarnings("ignore:policy .* keeps values inside a jax.checkpoint region:remat_kit.RematWarning")
def test_nested_regions_keep_their_policies_to_themselves():
    inner = rk.remat(lambda x: jnp.sin(jnp.tanh(x)), policy="save op=tanh")

    def f(w, x):
        return jnp.sum(jnp.sin(jnp.cos(inner(x @ w))))

    outer = rk.residuals(rk.remat(f, policy="save op=cos"), W, X)
    assert set(outer.by("op")) == {"cos"}  # the outer policy recomputes what the inner one would keep
    if not (jax.config.jax_remat3 and jax.__version_info__ < (0, 11)):  # no policy reaches into a region there
        both = rk.residuals(rk.remat(f, policy="save op=tanh|cos"), W, X)
        assert set(both.by("op")) == {"cos", "tanh"}
    assert_same_gradients(f, rk.remat(f, policy="save op=cos"), W, X)


def test_a_replaced_policy_is_gone():
    layer = rk.remat(lambda w, x: jnp.sin(jnp.cos(jnp.tanh(x @ w))), policy="save op=tanh", block="layer")

    def loss(w, x):
        return jnp.sum(layer(w, layer(w, x)))

    assert set(rk.residuals(loss, W, X).by("op")) >= {"tanh"}
    assert "tanh" not in rk.residuals(loss, W, X, policy={"layer*": "save op=cos"}).by("op")


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("save op=dot_generall", "dot_general"),
        ("save path=layers_9/up", "layers_"),
        ("save source=nofile.py", "nofile"),
        ("save dtype=int7", "int7"),
    ],
)
def test_a_rule_that_matches_nothing_is_said(net, rule, says):
    loss, args = net
    with pytest.warns(rk.RematWarning, match=f"matches no value.*{says}|{says}.*matches no value"):
        rk.residuals(loss, *args, policy=rule)


def test_a_pattern_that_decides_nothing_is_an_error(net):
    loss, args = net
    for policies in ({"layers_*": "full", "layers_2": "none"}, {"layers_0": "full", "layers_0/up": "none"}):
        with pytest.raises(rk.RematError, match="decides nothing"):
            rk.residuals(loss, *args, policy=policies)


def test_a_layer_around_a_loop_is_a_block():
    def layer(w, x):
        x = jnp.sin(jnp.sin(x @ w) @ w)
        x = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0]
        return jnp.sin(jnp.sin(x @ w) @ w)

    marked = [rk.remat(layer, policy="none", block=f"layer_{i}") for i in range(2)]

    def loss(w, x):
        for m in marked:
            x = m(w, x)
        return jnp.sum(x)

    report = rk.residuals(loss, W, X, policy="full")
    assert report.blocks == ("layer_0", "layer_1")
    assert report.total_bytes <= 2 * X.nbytes


def test_caches_do_not_keep_arrays_alive():
    big = jnp.ones((64, 16)) * 2

    def make(big):
        helper = jax.jit(lambda x: jnp.sin(x @ big.T @ big))
        return rk.apply(lambda x: jnp.sum(jnp.sin(helper(x))), "save op=sin")

    f = make(big)
    jax.grad(f)(X)
    alive = weakref.ref(big)
    del big, f
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_compiled_programs_carry_no_marks(net):
    loss, args = net
    layer = rk.linen.remat(Layer, policy="save op=tanh path=*")

    def decorated(v, x):
        return jnp.sum(Net(layer).apply(v, x) ** 2)

    for f in (rk.apply(loss, "save op=tanh"), decorated):
        text = jax.jit(f).lower(*args).as_text(debug_info=True)
        assert "rk:" not in text and "rk#" not in text and "layers_0" in text


def test_a_single_block_is_said_to_save_little():
    report = rk.residuals(lambda w, x: jnp.sum(jnp.sin(x @ w)), W, X, policy="full")
    assert report.blocks == ("whole",) and any("one block" in n for n in report.notes)


def test_in_a_loop_of_the_caller_no_barrier_is_put_in():
    def loss(w, x):
        step = rk.apply(lambda h: jnp.tanh(jnp.sin(h @ w)), "full")
        return jnp.sum(jax.lax.scan(lambda h, _: (step(h), None), x, None, length=3)[0])

    text = str(jax.make_jaxpr(loss)(W, X))
    if "prevent_cse" in text:
        assert "prevent_cse=True" not in text
    np.testing.assert_allclose(loss(W, X), jax.jit(loss)(W, X), rtol=1e-5)
