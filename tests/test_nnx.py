"""rk.nnx: state, RNG counters and gradients are those of the model without remat, and fewer residuals are kept."""

import functools
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_kit as rk
from tests.helpers import assert_same, held, regions, state_of

X = jax.random.normal(jax.random.key(3), (4, 8))


def pure(model, call=lambda model, x: model(x)):
    """A model as a function of its parameters and input alone, and these."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, x: jnp.sum(call(nnx.merge(graph, params, rest, copy=True), x)), params, X


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(0)

    def __call__(self, x, *, scale=None, train=True):
        h = self.norm(self.dense(x), use_running_average=not train)
        h = jnp.sin(jnp.tanh(self.drop(h, deterministic=not train)))
        self.calls.set_value(self.calls.get_value() + 1)
        return h if scale is None else h * scale

    def twice(self, x):
        return self(self(x))


class Small(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(jnp.tanh(self.dense(x)))


def as_class(model, x, **options):
    return model(x, **options)


def as_function(model, x, **options):
    return rk.nnx.remat(lambda m, x, **options: m(x, **options))(model, x, **options)


def as_bound_method(model, x, **options):
    return rk.nnx.remat(model.__call__)(x, **options)


def as_module(model, x, **options):
    return rk.nnx.remat("full")(model)(x, **options)


def as_partial(model, x, **options):
    return rk.nnx.remat(functools.partial(Block.__call__, model))(x, **options)


@pytest.mark.parametrize("call", [as_class, as_function, as_bound_method, as_module, as_partial])
def test_loss_gradients_state_and_counters_are_the_same(call):
    cls = rk.nnx.remat(Block) if call is as_class else Block
    remat = cls(nnx.Rngs(0))
    assert_same(plain_training(), train(remat, call))
    assert remat.calls.get_value() == 4
    assert remat.drop.rngs.count.get_value() == 4


@functools.cache
def plain_training():
    return train(Block(nnx.Rngs(0)), as_class)


def train(model, call):
    @nnx.jit
    def step(model, x):
        def loss(model):
            y = call(model, call(model, x, scale=jnp.float32(2.0)), train=True)
            return jnp.sum(y**2), y

        return nnx.value_and_grad(loss, has_aux=True)(model)

    step(model, X)
    value, grads = step(model, X)
    return value, nnx.to_pure_dict(grads), state_of(model)


def test_fewer_residuals_are_kept_as_the_policy_says():
    def size(policy):
        return held(*pure(rk.nnx.remat(Small, policy=policy)(nnx.Rngs(0))))

    plain = held(*pure(Small(nnx.Rngs(0))))
    assert size("full") < size("dots") < plain == size("none")
    assert size("dots") == size(jax.checkpoint_policies.dots_saveable)
    assert held(*pure(Small(nnx.Rngs(0)), as_function)) == size("full")


def test_sown_values_and_new_attributes_reach_the_caller():
    class Sows(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            h = jnp.tanh(self.dense(x))
            self.sow(nnx.Intermediate, "aux", jnp.mean(h**2))
            self.last = nnx.Variable(h)
            return h

    def run(cls):
        model = cls(nnx.Rngs(0))
        with pytest.warns(DeprecationWarning, match="sow"):
            grads = nnx.grad(lambda m: jnp.sum(m(X)) + jnp.sum(m(X)))(model)
        return nnx.to_pure_dict(grads), state_of(model)

    plain, remat = run(Sows), run(rk.nnx.remat(Sows))
    assert len(remat[1]["aux"]) == 2
    assert_same(plain, remat)


def test_shared_references_keep_identity():
    @rk.nnx.remat
    def run(a, b, tree, x):
        assert a is b and tree["inner"][0] is a
        a.extra = nnx.Variable(jnp.ones(2))
        return b, a(x), Small(nnx.Rngs(1))

    model = Small(nnx.Rngs(0))
    same, y, new = run(model, model, {"inner": [model]}, X)
    assert same is model and model.extra.shape == (2,)
    assert_same(y, model(X))
    assert_same(state_of(new), state_of(Small(nnx.Rngs(1))))


def test_python_values_stay_python_values():
    @rk.nnx.remat(static_argnames="size")
    def run(model, x, size, flag=True, mode="sin"):
        assert flag is True and isinstance(size, int)
        return {"y": getattr(jnp, mode)(model(x)[:size]), "mode": mode, "size": size}

    out = run(Small(nnx.Rngs(0)), X, 2, mode="cos")
    assert (out["y"].shape, out["mode"], out["size"]) == ((2, 8), "cos", 2)
    model = rk.nnx.remat(Block)(nnx.Rngs(0))
    model(X)
    assert model.calls.get_value() == 1 and isinstance(model.calls.get_value(), int)
    with pytest.raises(rk.RematError, match="'size' is declared static"):
        run(Small(nnx.Rngs(0)), X, jnp.int32(2))


def test_arrays_by_keyword_are_differentiated():
    def loss(model, scale):
        return jnp.sum(model(X, scale=scale, train=False))

    grads = [nnx.grad(loss, argnums=1)(cls(nnx.Rngs(0)), 2.0) for cls in (Block, rk.nnx.remat(Block))]
    assert_same(*grads)


def test_class_keeps_its_name_and_can_be_pickled():
    remat = rk.nnx.remat(Block)
    assert (remat.__name__, remat.__qualname__, remat.__module__) == ("Block", "Block", __name__)
    assert isinstance(remat(nnx.Rngs(0)), Block)
    assert pickle.loads(pickle.dumps(Decorated)) is Decorated
    copy = nnx.clone(Decorated(nnx.Rngs(0)))
    assert type(copy) is Decorated


@rk.nnx.remat("dots")
class Decorated(Small):
    pass


def test_methods_are_covered_and_do_not_nest():
    model = rk.nnx.remat(Block, methods=("__call__", "twice"))(nnx.Rngs(0))
    fn, *args = pure(model, lambda m, x: m.twice(x))
    assert regions(fn, *args) == 1
    assert_same(model.twice(X), Block(nnx.Rngs(0)).twice(X))
    once = rk.nnx.remat(rk.nnx.remat(Small), policy="dots")
    assert regions(*pure(once(nnx.Rngs(0)))) == 1


def test_blocks_can_be_overridden_by_name():
    fn, *args = pure(rk.nnx.remat(Small, block="small")(nnx.Rngs(0)))
    with rk.override({"small": "none"}):
        assert regions(fn, *args) == 0
    assert regions(fn, *args) == 1


# Loops ---------------------------------------------------------------------------------------------


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = Decorated(rngs), Decorated(rngs)

    def __call__(self, x):
        return self.second(rk.nnx.remat(lambda block, x: block(x))(self.first, x))


def test_in_while_and_for_loops():
    model, y = Decoder(nnx.Rngs(0)), X
    for _ in range(4):
        y = model(y)

    @nnx.jit
    def while_loop(model, x):
        step = lambda c: (c[0], c[0](c[1]), c[2] + 1)  # noqa: E731
        return nnx.while_loop(lambda c: c[2] < 4, step, (model, x, 0))[1]

    assert_same(while_loop(model, X), y)
    assert_same(nnx.fori_loop(0, 4, lambda i, c: (c[0], c[0](c[1])), (model, X))[1], y)


def test_over_stacked_layers():
    def train(cls):
        @nnx.vmap(in_axes=0)
        def create(key):
            return cls(nnx.Rngs(key))

        layers = create(jax.random.split(jax.random.key(0), 3))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        value, grads = nnx.jit(nnx.value_and_grad(lambda layers: jnp.sum(run(X, layers) ** 2)))(layers)
        return value, nnx.to_pure_dict(grads), state_of(layers)

    assert_same(train(Stacked), train(rk.nnx.remat(Stacked)))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.sin(self.norm(self.dense(x))))


@pytest.mark.parametrize("graph", [True, False])
def test_without_graph_updates(graph):
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(False):
        plain, remat = (nnx.grad(lambda m: jnp.sum(m(X)))(cls(nnx.Rngs(0))) for cls in (Small, rk.nnx.remat(Small)))
    assert_same(jax.tree.leaves(plain), jax.tree.leaves(remat))


# What is refused -----------------------------------------------------------------------------------

GLOBAL = Small(nnx.Rngs(0))


def captures(kind):
    model, models, variable, unbound = Small(nnx.Rngs(0)), [Small(nnx.Rngs(0))], nnx.Variable(jnp.ones(8)), Small

    def helper(x):
        return models[0](x)

    if kind == "closure":
        return lambda x: model(x)
    if kind == "nested":
        return lambda x: helper(x)
    if kind == "default":
        return lambda x, m=model: m(x)
    if kind == "variable":
        return lambda x: x * variable[...]
    if kind == "method":
        call = model.__call__
        return lambda x: call(x)
    if kind == "partial":
        call = functools.partial(Small.__call__, model)
        return lambda x: call(x)
    if kind == "jitted":
        call = nnx.jit(lambda x: model(x))
        return lambda x: call(x)
    if kind == "global":
        return lambda x: GLOBAL(x)
    return lambda m, x: m(x) if isinstance(m, unbound) else x  # a class is no module


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("closure", r"captures model \(Small\)"),
        ("nested", r"helper -> models \(Small\)"),
        ("default", r"captures m \(Small\)"),
        ("variable", r"captures variable \(Variable\)"),
        ("method", r"call -> self \(Small\)"),
        ("partial", r"call -> partial argument 0 \(Small\)"),
        ("jitted", r"model \(Small\)"),
        ("global", r"captures GLOBAL \(Small\)"),
    ],
)
def test_captured_modules_are_named(kind, named):
    with pytest.raises(rk.RematError, match=named):
        rk.nnx.remat(captures(kind))(X)


def test_classes_and_arrays_may_be_captured():
    assert_same(rk.nnx.remat(captures("none"))(GLOBAL, X), GLOBAL(X))
    scale = jnp.float32(2.0)
    assert_same(rk.nnx.remat(lambda m, x: m(x) * scale)(GLOBAL, X), GLOBAL(X) * 2)


def test_modules_updated_out_of_sight_are_refused():
    class Holder:
        model = Block(nnx.Rngs(0))

    with pytest.raises(rk.RematError, match="not given as an argument"):
        rk.nnx.remat(lambda x: Holder.model(x))(X)


def test_mutable_references_are_refused():
    model = Small(nnx.Rngs(0))
    model.count = nnx.Variable(jnp.zeros(()), ref=True)
    with pytest.raises(rk.RematError, match="mutable reference"):
        rk.nnx.remat(lambda m, x: m(x))(model, X)


class NoCall(nnx.Module):
    def encode(self, x):
        return x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rk.nnx.remat(Block, methods="twise"), "Did you mean 'twice'"),
        (lambda: rk.nnx.remat(Block, methods=()), "empty"),
        (lambda: rk.nnx.remat(NoCall), r"NoCall has no such method \(methods: encode\)"),
        (lambda: rk.nnx.remat(Block, static_argnames=3), "static_argnames= takes .*got 3"),
        (lambda: rk.nnx.remat(Block, static_argnums="x"), "static_argnums= takes .*got 'x'"),
        (lambda: rk.nnx.remat(prevent_cse="yes"), "prevent_cse= is True, False or None.*got 'yes'"),
        (lambda: rk.nnx.remat(Block, block=3), "block= names the block.*got 3"),
        (lambda: rk.nnx.remat(Block, methods=3), "methods= takes .*got 3"),
        (lambda: rk.nnx.remat(Block, static_argnames="trian"), "Did you mean 'train'"),
        (lambda: rk.nnx.remat(lambda m, x: m(x), static_argnums=2), "2, which is no position"),
        (lambda: rk.nnx.remat(Block, policy="dotz"), "dotz.*dots"),
        (lambda: rk.nnx.remat("dots", policy="full"), "two policies"),
        (lambda: rk.nnx.remat(int), "nnx.Module class or a function"),
        (lambda: rk.nnx.remat(3), "nnx.Module class or a function"),
        (lambda: rk.nnx.remat(jax.checkpoint_policies.dots_saveable), "policy="),
    ],
)
def test_wrong_use_is_refused(make, message):
    with pytest.raises(rk.RematError, match=message):
        make()
