"""What `rk.remat` traces and what it leaves in Python: leaves of arguments and results, and declared static ones."""

import dataclasses
import enum
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit as rk


class Mode(enum.Enum):
    SIN = "sin"
    COS = "cos"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Config:  # neither hashable nor a pytree
    kind: str
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    kind: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    x: jax.Array
    label: str
    kind: str = dataclasses.field(metadata={"static": True})


def seen_by(*args, **kwargs):
    """What the function is given, for what it is called with."""
    seen = []

    @rk.remat
    def f(x, *args, **kwargs):
        seen.append((args, kwargs))
        return jnp.sin(x)

    assert np.isclose(jax.grad(f)(1.0, *args, **kwargs), jnp.cos(1.0))
    return seen[-1]


STATICS = [
    "text",
    b"bytes",
    Mode.SIN,
    Level.HIGH,
    Frozen("a"),
    Config("a"),
    jnp.sin,
    lambda x: x,
    jax.nn.relu,
    functools.partial(jnp.sin),
    float,
    np.float32,
    jnp.bfloat16,
    np.dtype("float32"),
    np.array(["a", "b"]),
    np.str_("a"),
    np.datetime64("2020-01-01"),
    range(3),
    slice(0, 2),
    types.SimpleNamespace(x=1),
    {1, 2},
    frozenset({1}),
    ...,
    object(),
    np,
]


@pytest.mark.parametrize("value", STATICS, ids=lambda v: type(v).__name__)
def test_what_is_no_number_or_array_stays_itself(value):
    args, kwargs = seen_by(value, nested=[{"a": value, "b": 1.0}])
    assert args[0] is value and kwargs["nested"][0]["a"] is value
    assert isinstance(kwargs["nested"][0]["b"], jax.core.Tracer)

    f = rk.remat(lambda x: {"x": x, "v": [value, None]})
    for _ in range(3):
        assert f(1.0)["v"][0] is value and f(1.0)["v"][1] is None


@pytest.mark.parametrize("value", [1, 1.0, True, 2j, np.float32(1), np.bool_(True), np.ones(2), jnp.ones(2)], ids=repr)
def test_numbers_and_arrays_are_traced(value):
    (traced,), _ = seen_by(value)
    assert isinstance(traced, jax.core.Tracer)
    assert type(rk.remat(lambda: value)()) is type(jax.checkpoint(lambda: value)())


def test_functions_on_static_values_take_the_right_branch():
    @rk.remat("dots")
    def f(x, mode, act, config):
        return act(x) * config.scale if mode is Mode.SIN else jnp.cos(x)

    grad = jax.grad(f)
    for _ in range(2):
        assert np.isclose(grad(1.0, Mode.SIN, jnp.sin, Config("a", 3.0)), 3 * jnp.cos(1.0))
        assert np.isclose(grad(1.0, Mode.COS, jnp.sin, Config("a", 3.0)), -jnp.sin(1.0))
        assert np.isclose(grad(1.0, Mode.SIN, jnp.tanh, Config("a")), 1 - jnp.tanh(1.0) ** 2)


def test_objects_that_change_are_looked_at_again():
    config, table = Config("a", 2.0), {"scale": "x"}
    f = rk.remat(lambda x, c: x * c.scale)
    g = rk.remat(lambda x, names: x * len(names), static_argnums=1)
    assert (f(1.0, config), g(1.0, table)) == (2.0, 1.0)
    config.scale = 3.0
    table["more"] = "y"
    assert (f(1.0, config), g(1.0, table)) == (3.0, 2.0)


def test_equal_numbers_of_other_types_are_told_apart():
    f = rk.remat(lambda x, flag: x if flag is True else -x, static_argnums=1)
    assert [f(1.0, flag) for flag in (True, 1, 1.0, True)] == [1.0, -1.0, -1.0, 1.0]


def test_pytrees_pass_through():
    @rk.remat
    def f(d, s):
        return {"b": d["a"] + d["b"], "a": State(s.x * 2, s.label, s.kind)}

    out = f({"b": 1.0, "a": 2.0}, State(jnp.ones(2), "label", "kind"))
    assert list(out) == ["a", "b"]  # JAX sorts the keys of dictionaries
    assert (out["a"].label, out["a"].kind) == ("label", "kind")
    np.testing.assert_array_equal(out["a"].x, 2 * np.ones(2))


def test_nothing_to_trace():
    assert rk.remat(lambda: "text")() == "text"
    assert rk.remat(lambda: None)() is None
    assert rk.remat(lambda mode: jnp.ones(2) if mode == "a" else jnp.zeros(2))("a").sum() == 2.0
    assert rk.remat(lambda x: ("a", None))(1.0) == ("a", None)


def test_repeated_results():
    f = rk.remat(lambda x: (x, x, jnp.sin(x), "a", "a"))
    x, same, y, *texts = f(2.0)
    assert (x, same, texts) == (2.0, 2.0, ["a", "a"])
    assert np.isclose(jax.grad(lambda x: sum(f(x)[:3]))(2.0), 2 + jnp.cos(2.0))


def test_results_that_hide_arrays_are_refused():
    def hiding(x):
        return Config("a", jnp.sin(x))

    def closing(x):
        y = jnp.sin(x)
        return lambda: y

    for f in (hiding, closing, lambda x: functools.partial(jnp.add, x)):
        with pytest.raises(rk.RematError, match="no pytree"):
            rk.remat(f)(1.0)


def test_arrays_in_static_arguments_are_differentiated_as_if_closed_over():
    f = rk.remat(lambda x, c: jnp.sin(x * c.scale))
    assert np.isclose(jax.grad(lambda s: f(1.0, Config("a", s)))(2.0), jnp.cos(2.0))
    g = rk.remat(lambda x, h: h(x))
    assert np.isclose(jax.grad(lambda s: g(1.0, lambda x: jnp.sin(x * s)))(2.0), jnp.cos(2.0))
    assert np.allclose(jax.vmap(lambda s: g(1.0, lambda x: x * s))(jnp.arange(3.0)), jnp.arange(3.0))


# Declared static arguments -----------------------------------------------------------------------------


def flagged(x, flag=False, *, mode="sin"):
    y = jnp.sin(x) if mode == "sin" else jnp.cos(x)
    return 2 * y if flag else y


@pytest.mark.parametrize("declared", [{"static_argnums": 1}, {"static_argnums": (-1,)}, {"static_argnames": "flag"}])
def test_by_position_by_keyword_and_at_the_default(declared):
    f = rk.remat(flagged, **declared)
    assert np.isclose(f(1.0, True), flagged(1.0, True))
    assert np.isclose(f(1.0, flag=True), flagged(1.0, True))
    assert np.isclose(f(1.0), flagged(1.0))
    assert np.isclose(jax.grad(f)(1.0, flag=True, mode="cos"), -2 * jnp.sin(1.0))
    assert np.isclose(jax.jit(jax.grad(f), static_argnums=1)(1.0, True), 2 * jnp.cos(1.0))


def test_positions_and_names_together():
    f = rk.remat(lambda a, x, b=1: x * a if b else x, static_argnums=0, static_argnames=["b"])
    assert (f(3, 2.0), f(3, 2.0, b=0), f(3, 2.0, 0)) == (6.0, 2.0, 2.0)
    kwargs = rk.remat(lambda x, **kw: x if kw["flag"] else -x, static_argnames="flag")
    assert (kwargs(1.0, flag=True), kwargs(1.0, flag=False)) == (1.0, -1.0)
    rest = rk.remat(lambda x, *flags: x if flags[-1] else -x, static_argnums=-1)
    assert (rest(1.0, True), rest(1.0, True, False)) == (1.0, -1.0)


def test_undeclared_flags_are_traced():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        rk.remat(flagged)(1.0, True)


def test_unhashable_and_traced_static_values():
    f = rk.remat(lambda x, sizes: x * len(sizes), static_argnums=1)
    assert (f(1.0, [1, 2]), f(1.0, [1, 2, 3]), f(1.0, {"a": 1})) == (2.0, 3.0, 1.0)
    g = rk.remat(lambda x, y: jnp.sin(x * y), static_argnums=1)
    assert np.isclose(jax.grad(lambda y: g(2.0, y))(1.0), 2 * jnp.cos(2.0))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"static_argnames": "flg"}, "no argument of this name.*Did you mean 'flag'"),
        ({"static_argnames": ["flag", "modes"]}, "'modes'"),
        ({"static_argnames": [1]}, r"static_argnames= takes .*strings.*got \[1\]"),
        ({"static_argnames": 3}, "static_argnames= takes .*strings.*got 3"),
        ({"static_argnums": 1.5}, "static_argnums= takes .*whole numbers.*got 1.5"),
        ({"static_argnums": (True,)}, "static_argnums="),
        ({"static_argnums": "flag"}, "static_argnums=.*got 'flag'"),
        ({"prevent_cse": "yes"}, "prevent_cse= is True, False or None.*got 'yes'"),
        ({"prevent_cse": (True, 1)}, r"prevent_cse=.*a tuple of bools.*got \(True, 1\)"),
        ({"block": 3}, "block= names the block.*got 3"),
        ({"block": ""}, "block="),
    ],
)
def test_options_that_cannot_be_right(declared, message):
    with pytest.raises(rk.RematError, match=message):
        rk.remat(flagged, **declared)


def test_a_position_that_a_call_does_not_have():
    with pytest.raises(ValueError, match="static_argnums") as error:  # ValueError as in JAX
        rk.remat(lambda x: x, static_argnums=2)(1.0)
    assert isinstance(error.value, rk.RematError)
