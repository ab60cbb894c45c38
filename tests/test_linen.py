"""rk.linen: a model with and without it is the same model, and with it fewer residuals are kept."""

import functools
import pickle
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import remat_kit as rk
from remat_kit import _linen_lift
from tests.helpers import assert_same, held, regions

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
DROPOUT = {"dropout": jax.random.key(7)}
OUTER_POLICY_STOPS_AT_INNER = jax.config.jax_remat3 and jax.__version_info__ < (0, 11)
X = jax.random.normal(jax.random.key(3), (4, 8))


class Block(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, *, scale=None, train: bool = False, mode: str = "tanh"):
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(self.width)(x))
        h = nn.Dropout(0.5)(jnp.sin(getattr(jnp, mode)(h)), deterministic=not train)
        self.sow("intermediates", "aux", jnp.mean(h**2))
        return h if scale is None else h * scale


class Net(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x, train=False):
        x = self.block()(x, train=train)
        shared = self.block(name="shared")
        return shared(shared(x, train=train), train=train, scale=jnp.float32(0.5))


# The same model ------------------------------------------------------------------------------------


def test_parameters_are_the_same_tree_with_the_same_initial_values():
    plain, remat = Net(Block).init(KEYS, X), Net(rk.linen.remat(Block)).init(KEYS, X)
    assert list(remat["params"]) == ["Block_0", "shared"]
    assert_same(plain, remat, rtol=0, atol=0)


def test_loss_gradients_state_masks_and_sown_values_are_the_same():
    v = Net(Block).init(KEYS, X)

    def loss(params, block):
        y, updates = Net(block).apply(
            {**v, "params": params},
            X,
            train=True,
            rngs=DROPOUT,
            mutable=["batch_stats", "intermediates"],
            capture_intermediates=True,
        )
        aux = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates["intermediates"]))
        return jnp.sum(y**2) + aux, (y, updates)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    remat = rk.linen.remat(Block)
    assert_same(step(v["params"], Block), step(v["params"], remat))
    assert held(lambda p: loss(p, remat)[0], v["params"]) < held(lambda p: loss(p, Block)[0], v["params"])
    (_, (_, updates)), _ = step(v["params"], remat)
    moved = updates["batch_stats"]["Block_0"]["BatchNorm_0"]["mean"] / 0.1
    h = X @ v["params"]["Block_0"]["Dense_0"]["kernel"]
    np.testing.assert_allclose(moved, h.mean(0), rtol=1e-4, atol=1e-5)  # one update, not two


def test_dropout_masks_move_on_when_one_module_is_called_twice():
    class Twice(nn.Module):
        block: type

        @nn.compact
        def __call__(self, x):
            block = self.block()
            return block(x), block(x)

    class Masked(nn.Module):
        def setup(self):
            self.drop = nn.Dropout(0.5, deterministic=False)

        def __call__(self, x):
            return self.drop(x) + 0 * jax.random.normal(self.make_rng("dropout"))

    plain = Twice(Masked).apply({}, X, rngs=DROPOUT)
    remat = Twice(rk.linen.remat(Masked)).apply({}, X, rngs=DROPOUT)
    assert_same(plain, remat)
    assert not np.array_equal(remat[0], remat[1])


def test_rng_counters_do_not_depend_on_how_often_a_region_is_traced(monkeypatch):
    plain = Net(Block).init(KEYS, X), Net(Block).apply(Net(Block).init(KEYS, X), X, True, rngs=DROPOUT, mutable=True)

    def trace_twice(region, **options):
        def run(arrays):
            region(arrays)
            return region(arrays)

        return run

    monkeypatch.setattr(_linen_lift, "remat", trace_twice)
    net = Net(rk.linen.remat(Block))
    assert_same(plain, (net.init(KEYS, X), net.apply(net.init(KEYS, X), X, True, rngs=DROPOUT, mutable=True)))


def test_batch_statistics_that_are_not_mutable_are_read():
    net = Net(rk.linen.remat(Block))
    assert_same(net.apply(net.init(KEYS, X), X), Net(Block).apply(Net(Block).init(KEYS, X), X))


FLAG = np.bool_(True)


def test_python_values_stay_python_values():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x, size, flag=FLAG):
            count = self.variable("state", "count", lambda: 0)
            count.value += 1
            assert isinstance(size, int) and flag
            return {"y": x[:size], "kind": "odd", "size": size, "none": None}

    out, state = rk.linen.remat(Odd)().apply({"state": {"count": 3}}, X, 2, mutable=["state"])
    assert (out["kind"], out["size"], out["none"], out["y"].shape) == ("odd", 2, None, (2, 8))
    assert state["state"]["count"] == 4 and isinstance(state["state"]["count"], int)


def test_class_keeps_its_name_fields_equality_and_can_be_pickled():
    remat = rk.linen.remat(Block)
    assert (remat.__name__, remat.__qualname__, remat.__module__) == ("Block", "Block", __name__)
    assert isinstance(remat(4), Block) and issubclass(remat, Block)
    assert remat(4) == remat(width=4) and hash(remat(4)) == hash(remat(width=4)) and remat(4) != remat(5)
    assert pickle.loads(pickle.dumps(Decorated(3))) == Decorated(3)
    assert pickle.loads(pickle.dumps(Decorated)) is Decorated


@rk.linen.remat
class Decorated(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return jnp.sin(nn.Dense(self.width)(x))


def test_a_subclass_with_more_fields_calls_up():
    class Child(Decorated):
        extra: int = 5

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.extra)(super().__call__(x))

    v = jax.eval_shape(Child(3).init, KEYS, X)
    assert v["params"]["Dense_0"]["kernel"].shape == (3, 5)
    assert regions(lambda v: Child(3).apply(v, X), v) == 1


@pytest.mark.parametrize("lift", ["scan", "scan_shared", "vmap", "jit"])
def test_under_other_lifted_transforms(lift):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dropout(0.5)(jnp.sin(nn.Dense(8)(x)), deterministic=not train), None

    def stack(layer):
        rngs = {"params": True, "dropout": True}
        if lift == "scan":
            return nn.scan(layer, variable_axes={"params": 0}, split_rngs=rngs, length=3, in_axes=nn.broadcast)()
        if lift == "scan_shared":
            rngs = {"params": False, "dropout": True}
            return nn.scan(layer, variable_broadcast="params", split_rngs=rngs, length=3, in_axes=nn.broadcast)()
        if lift == "vmap":
            return nn.vmap(layer, in_axes=(0, None), variable_axes={"params": 0}, split_rngs=rngs)()
        return nn.jit(layer, static_argnums=2)()

    def results(layer):
        v = stack(layer).init(KEYS, X, True)
        return v, jax.grad(lambda v: jnp.sum(stack(layer).apply(v, X, True, rngs=DROPOUT)[0] ** 2))(v)

    remat = rk.linen.remat(Layer)
    assert_same(jax.jit(lambda: results(Layer))(), jax.jit(lambda: results(remat))())


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(jnp.sin(nn.Dense(8)(x)))


class Outer(nn.Module):
    attribute: nn.Module

    @nn.compact
    def __call__(self, x, argument=None):
        y = self.attribute(x)
        return nn.Dense(8)(jnp.sin(y if argument is None else argument(y)))


def test_modules_as_attributes_and_arguments_are_shared():
    class Top(nn.Module):
        outer: type
        inner: type

        @nn.compact
        def __call__(self, x):
            first, second = self.inner(), self.inner(name="second")
            outer = self.outer(first)
            return outer(x, argument=second) + first(x) + second(x) + outer(x, second)

    def results(outer, inner):
        v = Top(outer, inner).init(KEYS, X)
        return v, jax.value_and_grad(lambda v: jnp.sum(Top(outer, inner).apply(v, X, rngs=DROPOUT)))(v)

    plain = results(Outer, Inner)
    assert_same(plain, results(rk.linen.remat(Outer), Inner))
    assert_same(plain, results(rk.linen.remat(Outer), rk.linen.remat(Inner)))


def test_flax_layers_partials_and_lazy_initialization():
    x = jnp.ones((2, 5, 4))
    cell, plain = nn.RNN(rk.linen.remat(nn.LSTMCell)(3)), nn.RNN(nn.LSTMCell(3))
    assert jax.eval_shape(cell.init, KEYS, x) == jax.eval_shape(plain.init, KEYS, x)
    norm = rk.linen.remat(nn.BatchNorm)()
    assert "batch_stats" in jax.eval_shape(lambda x: norm.init(KEYS, x, use_running_average=False), X)
    dense = rk.linen.remat(functools.partial(nn.Dense, features=3), policy="dots")()
    shapes = jax.tree.map(jnp.shape, dense.lazy_init(KEYS, jax.ShapeDtypeStruct((4, 8), jnp.float32)))
    assert shapes == {"params": {"bias": (3,), "kernel": (8, 3)}}
    assert regions(lambda v: dense.apply(v, X), dense.init(KEYS, X)) == 1


def test_checks_inside_a_block_work():
    class Log(nn.Module):
        @nn.compact
        def __call__(self, x):
            checkify.check(jnp.all(x > 0), "need positive input")
            return jnp.sum(jnp.log(x)) * self.param("a", nn.initializers.ones, ())

    def fn(x):
        return rk.linen.remat(Log)().apply({"params": {"a": jnp.ones(())}}, x)

    for wrapped in (fn, jax.jit(fn), jax.grad(fn)):
        assert "need positive input" in checkify.checkify(wrapped)(jnp.array([-1.0, 2.0]))[0].get()
        assert checkify.checkify(wrapped)(jnp.array([1.0, 2.0]))[0].get() is None


# Arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [{}, {"static_argnames": "train"}, {"static_argnums": 1}, {"static_argnums": -1}])
def test_flags_by_position_keyword_and_default(static):
    class Flagged(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(2)(x) if train else nn.Dense(2)(-x)

    m = rk.linen.remat(**static)(Flagged)()
    v = m.init(KEYS, X)
    grad = jax.grad(lambda v, *a, **k: jnp.sum(m.apply(v, X, *a, **k)))
    plain = jax.grad(lambda v, *a, **k: jnp.sum(Flagged().apply(v, X, *a, **k)))
    assert_same(grad(v), plain(v))
    assert_same(grad(v, True), plain(v, True))
    assert_same(grad(v, train=True), plain(v, train=True))
    with pytest.raises((rk.RematError, jax.errors.TracerBoolConversionError)):
        m.apply(v, X, jnp.bool_(True))


def test_arrays_by_keyword_are_differentiated():
    v = Block().init(KEYS, X)

    def slope(block):
        return jax.grad(lambda scale: jnp.sum(block().apply(v, X, scale=scale, mode="cos")))(2.0)

    assert_same(slope(Block), slope(rk.linen.remat(Block)))


def test_an_array_in_a_static_argument_is_named():
    m = rk.linen.remat(Block, static_argnames=("train", "mode"))()
    with pytest.raises(rk.RematError, match=r"Block.__call__: 'train' is declared static.*bool\[\]"):
        m.init(KEYS, X, train=jnp.bool_(True))

    class Free(nn.Module):
        @nn.compact
        def __call__(self, x, *rest, **options):
            return x

    with pytest.raises(rk.RematError, match="'argument 2' is declared static"):
        rk.linen.remat(Free, static_argnums=2)().apply({}, X, 1, X)
    with pytest.raises(rk.RematError, match="'flag' is declared static"):
        rk.linen.remat(Free, static_argnames="flag")().apply({}, X, flag=X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"static_argnames": "trian"}, "'trian'.*Did you mean 'train'"),
        ({"static_argnums": 1}, r"1, which is no position in Block.__call__\(x\)"),
        ({"static_argnums": -2}, "not self"),
        ({"methods": "encode"}, "no such method"),
        ({"methods": ("setup",)}, "setup creates submodules"),
        ({"methods": ()}, "empty"),
        ({"policy": "dotz"}, "dotz.*dots"),
    ],
)
def test_wrong_options_are_refused_when_decorating(options, message):
    with pytest.raises(rk.RematError, match=message):
        rk.linen.remat(Block, **options)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Block(), "instance of Block"),
        (jax.checkpoint_policies.dots_saveable, "policy="),
        (3, "module class"),
        (int, "module class"),
        (Block().__call__, "bound method"),
    ],
)
def test_wrong_targets_are_refused(target, message):
    with pytest.raises(rk.RematError, match=message):
        rk.linen.remat(target)


def test_two_policies_and_modules_in_results_are_refused():
    with pytest.raises(rk.RematError, match="two policies"):
        rk.linen.remat("dots", policy="full")
    with pytest.raises(rk.UnknownPolicyError):
        rk.linen.remat("dotz")

    class Returns(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)

    with pytest.raises(rk.RematError, match="returned a Dense"):
        rk.linen.remat(Returns)().init(KEYS, X)


# Methods, functions, policies ----------------------------------------------------------------------


class Coder(nn.Module):
    def setup(self):
        self.dense = nn.Dense(8)

    def encode(self, x):
        return jnp.sin(jnp.tanh(self.dense(x)))

    def decode(self, x):
        return self._half(self.encode(x))

    def _half(self, x):
        return x / self.half()

    @nn.nowrap
    def half(self):
        return 2

    def __call__(self, x):
        return self.decode(self.encode(x))


def test_every_listed_method_is_covered_and_they_do_not_nest():
    m = rk.linen.remat("full", methods=("__call__", "encode"))(Coder)()
    v = m.init(KEYS, X)
    assert_same(v, Coder().init(KEYS, X))
    assert regions(lambda v: m.apply(v, X), v) == 1
    assert regions(lambda v: m.apply(v, X, method="encode"), v) == 1


def test_other_methods_warn_once_when_called_directly():
    m = rk.linen.remat(Coder)()
    v = m.init(KEYS, X)  # decode and encode are called inside: no warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert m.half() == 2
    with pytest.warns(rk.RematWarning, match=r"Coder.decode runs without remat.*__call__ only.*'decode'") as told:
        y = m.apply(v, X, method="decode")
        m.apply(v, X, method="decode")
    assert len(told) == 1  # and none for encode, which decode called
    assert_same(y, Coder().apply(v, X, method="decode"))


def test_nowrap_methods_cannot_be_covered():
    with pytest.raises(rk.RematError, match="nowrap"):
        rk.linen.remat(Coder, methods="half")


def test_functions_of_a_module_and_methods_in_the_class_body():
    class Above(nn.Module):
        @rk.linen.remat("full", static_argnames="flag")
        @nn.compact
        def __call__(self, x, flag=True):
            return jnp.sin(nn.Dense(8)(x) if flag else x)

    class Below(nn.Module):
        @nn.compact
        @rk.linen.remat
        def __call__(self, x):
            return jnp.sin(nn.Dense(8)(x))

    class Within(nn.Module):
        @nn.compact
        def __call__(self, x):
            return rk.linen.remat(lambda module, x: jnp.sin(nn.Dense(8, name="Dense_0")(x)))(self, x)

    expected = Decorated(8).init(KEYS, X)
    for cls in (Above, Below, Within):
        assert_same(cls().init(KEYS, X), expected)
        assert regions(lambda v, cls=cls: cls().apply(v, X), expected) == 1
    with pytest.raises(rk.RematError, match="first argument is of type"):
        rk.linen.remat(lambda x: x)(X)
    with pytest.raises(rk.RematError, match="is a function"):
        rk.linen.remat(lambda m, x: x, methods="encode")


def test_policies_choose_what_is_kept():
    v = Coder().init(KEYS, X)

    def size(policy):
        return held(lambda v: jnp.sum(rk.linen.remat(Coder, policy=policy)().apply(v, X)), v)

    plain = held(lambda v: jnp.sum(Coder().apply(v, X)), v)
    assert size("full") < size("dots") < plain
    assert size("none") == plain
    assert size(jax.checkpoint_policies.dots_saveable) == size("dots")


def test_decorating_again_replaces_the_policy():
    v = Coder().init(KEYS, X)
    twice = rk.linen.remat(rk.linen.remat(Coder), policy="dots")
    assert regions(lambda v: twice().apply(v, X), v) == 1


def test_blocks_can_be_overridden_by_name():
    m = rk.linen.remat(Coder, block="coder")()
    v = Coder().init(KEYS, X)
    with rk.override({"coder": "none"}):
        assert regions(lambda v: m.apply(v, X), v) == 0
    assert regions(lambda v: m.apply(v, X), v) == 1


# remat_scan ----------------------------------------------------------------------------------------


class Layer(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, mask=None, *, train=False, power=1):
        h = nn.Dropout(0.5)(jnp.sin(jnp.tanh(nn.Dense(self.width, name="d")(x))), deterministic=not train)
        return h**power * (1.0 if mask is None else mask)


class Stack(nn.Module):
    policy: object = "full"
    lengths: tuple = (16,)

    @nn.compact
    def __call__(self, x, mask=None, train=False):
        layers = rk.linen.remat_scan(Layer, lengths=self.lengths, policy=self.policy)
        return layers(name="layers")(x, mask, train=train, power=2)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, mask, train):
        return Layer.__call__(self, x, mask, train=train, power=2), None

    width: int = 8


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None, train=False):
        split = {"params": True, "dropout": True}
        layers = nn.scan(Step, variable_axes={"params": 0}, split_rngs=split, in_axes=nn.broadcast, length=16)
        return layers(name="layers")(x, mask, train)[0]


def test_remat_scan_is_scan():
    mask = jnp.arange(8.0) / 4

    def results(net):
        v = net.init(KEYS, X)
        loss = lambda v, mask: jnp.sum(net.apply(v, X, mask, train=True, rngs=DROPOUT))  # noqa: E731
        return v, jax.value_and_grad(loss, (0, 1))(v, mask)

    assert_same(jax.jit(lambda: results(Scanned()))(), jax.jit(lambda: results(Stack()))())


def test_every_level_of_remat_scan_rematerializes():
    v = Stack().init(KEYS, X)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(v))

    def kept(policy, lengths):
        nested = jax.tree.map(lambda p: p.reshape(*lengths, *p.shape[1:]), v)
        return held(lambda v: jnp.sum(Stack(policy, lengths).apply(v, X)), nested) - parameters

    plain, carry = kept("none", (16,)), X.nbytes
    assert 16 * carry <= kept("full", (16,)) < 17 * carry + 64 < plain
    assert kept("full", (16,)) < kept("dots", (16,)) < plain
    assert 4 * carry <= kept("full", (4, 4)) < 5 * carry + 64  # the carries of the outer loop
    assert kept("dots", (4, 4)) == kept("full", (4, 4))
    if not OUTER_POLICY_STOPS_AT_INNER:
        assert kept("full", (4, 4)) < kept(("dots", "dots"), (4, 4))
    assert kept("none", (4, 4)) == plain
    nested = jax.tree.map(lambda p: p.reshape(4, 4, *p.shape[1:]), v)
    assert regions(lambda v: Stack("full", (4, 4)).apply(v, X), nested) == 2
    flat = jax.grad(lambda v: jnp.sum(Stack().apply(v, X)))(v)
    deep = jax.grad(lambda v: jnp.sum(Stack("full", (4, 4)).apply(v, X)))(nested)
    assert_same(jax.tree.map(lambda g: g.reshape(16, *g.shape[2:]), deep), flat)


def test_scanned_arguments_stacked_results_and_shared_or_carried_variables():
    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x, bias, mask):
            n = self.variable("state", "n", lambda: jnp.zeros(()))
            n.value += 1
            self.sow("intermediates", "mean", x.mean())
            return jnp.sin(nn.Dense(8)(x) + bias) * mask, x.sum()

    layers = rk.linen.remat_scan(
        Counted,
        3,
        in_axes=(0, nn.broadcast),
        out_axes=0,
        variable_axes={"intermediates": 0},
        variable_broadcast="params",
        variable_carry="state",
        split_rngs={"params": False},
    )()
    bias, mask = jnp.arange(24.0).reshape(3, 8), jnp.ones(8)
    v = Counted().init(KEYS, X, bias[0], mask)
    v = {key: v[key] for key in ("params", "state")}
    (y, sums), updates = layers.apply(v, X, bias, mask, mutable=["state", "intermediates"])
    expected, out = X, []
    for i in range(3):
        (expected, s), _ = Counted().apply(v, expected, bias[i], mask, mutable=["state"])
        out.append(s)
    assert_same((y, sums), (expected, jnp.stack(out)))
    assert updates["state"]["n"] == v["state"]["n"] + 3
    assert updates["intermediates"]["mean"][0].shape == (3,)
    with pytest.raises(rk.RematError, match="in_axes has 2 entries.*3 positional"):
        layers.apply(v, X, bias, mask, mask, mutable=True)


@pytest.mark.parametrize(
    ("metadata", "lengths", "expected"),
    [
        (None, (6,), (None, None, "mlp")),
        ({nn.PARTITION_NAME: "layers"}, (6,), ("layers", None, "mlp")),
        ({nn.PARTITION_NAME: "layers"}, (2, 3), ("layers", None, None, "mlp")),
        (({nn.PARTITION_NAME: "stage"}, {nn.PARTITION_NAME: "layers"}), (2, 3), ("stage", "layers", None, "mlp")),
    ],
)
def test_partitioned_parameters_get_a_layer_axis(metadata, lengths, expected):
    class Sharded(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "mlp"))
            return jnp.sin(nn.Dense(8, kernel_init=init)(x))

    layers = rk.linen.remat_scan(Sharded, lengths=lengths, metadata_params=metadata)()
    v = jax.eval_shape(layers.init, KEYS, X)
    kernel = v["params"]["Dense_0"]["kernel"]
    assert kernel.names == expected
    assert kernel.value.shape == (*lengths, 8, 8)
    grads = jax.eval_shape(jax.grad(lambda v: jnp.sum(layers.apply(v, X))), v)
    assert grads["params"]["Dense_0"]["kernel"].names == expected


def test_remat_scan_of_a_partial_and_of_a_decorated_class():
    dense = rk.linen.remat_scan(functools.partial(nn.Dense, 8), 3)
    assert jax.eval_shape(dense().init, KEYS, X)["params"]["kernel"].shape == (3, 8, 8)
    layers = rk.linen.remat_scan(rk.linen.remat(Layer, policy="dots"), 3)()
    v = jax.eval_shape(layers.init, KEYS, X)
    assert type(layers).__name__ == "ScanLayer"
    assert regions(lambda v: layers.apply(v, X), v) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rk.linen.remat_scan(Layer), "number of layers"),
        (lambda: rk.linen.remat_scan(Layer, 2, lengths=(2,)), "number of layers"),
        (lambda: rk.linen.remat_scan(Layer, 0), "positive whole numbers"),
        (lambda: rk.linen.remat_scan(lambda m, x: x, 2), "jax.lax.scan"),
        (lambda: rk.linen.remat_scan(Layer, 2, policy=("full", "full")), "2 entries for 1 levels"),
        (lambda: rk.linen.remat_scan(Layer, 2, metadata_params=({}, {})), "2 entries for 1 levels"),
        (lambda: rk.linen.remat_scan(Layer, 2, static_argnames="trian"), "Did you mean 'train'"),
        (lambda: rk.linen.remat_scan(Step, 2)().init(KEYS, X, None, False), "needs out_axes=0"),
        (lambda: rk.linen.remat_scan(Layer, 2, out_axes=0)().init(KEYS, X), r"return \(carry, out\)"),
        (lambda: rk.linen.remat_scan(nn.Dense, 2)(5).init(KEYS, X), r"float32\[4, 8\] became float32\[4, 5\]"),
        (lambda: rk.linen.remat_scan(nn.Dense, 2)(8, dtype="bfloat16").init(KEYS, X), "became bfloat16"),
    ],
)
def test_wrong_stacks_are_refused(make, message):
    with pytest.raises(rk.RematError, match=message):
        make()


@pytest.mark.parametrize("decorate", [rk.linen.remat, lambda cls, **options: rk.linen.remat_scan(cls, 2, **options)])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"static_argnames": 3}, "static_argnames= takes .*got 3"),
        ({"static_argnums": "x"}, "static_argnums= takes .*got 'x'"),
        ({"prevent_cse": "yes"}, "prevent_cse= is True, False or None.*got 'yes'"),
        ({"block": 3}, "block= names the block.*got 3"),
        ({"methods": 3}, "methods= takes .*got 3"),
    ],
)
def test_options_of_the_wrong_type_are_refused(decorate, options, message):
    with pytest.raises(rk.RematError, match=message):
        decorate(Layer, **options)
