"""sequential and every: what is rematerialized of a chain of functions and of a stack of blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_gradients, held, regions

import remat_kit as rk


def layer(w, x):
    return jnp.tanh(jnp.sin(x @ w))


WS = 0.3 * jax.random.normal(jax.random.key(0), (9, 4, 4))
X = jnp.ones((2, 4))


def chained(ws, x, **options):
    return jnp.sum(rk.sequential([functools.partial(layer, w) for w in ws], x, **options))


def plain(ws, x):
    return jnp.sum(functools.reduce(lambda x, w: layer(w, x), ws, x))


@pytest.mark.parametrize(
    ("segments", "rematerialized"),
    [("sqrt", 2), (1, 0), (4, 3), (9, 8), ([2, 3, 4], 2), ("auto", None)],
)
@pytest.mark.parametrize("policy", [None, "dots"])
def test_gradients_and_number_of_regions(segments, rematerialized, policy):
    run = functools.partial(chained, segments=segments, policy=policy)
    assert_same_gradients(plain, run, WS, X)
    if rematerialized is not None:
        assert regions(run, WS, X) == rematerialized


def test_only_what_goes_between_segments_is_kept():
    """As torch.utils.checkpoint.checkpoint_sequential counts: inputs of segments, and the inside of the last one."""
    fns = [lambda x: jnp.sin(jnp.sin(x))] * 12
    x = jnp.ones(256)

    def values(segments):
        return held(lambda x: jnp.sum(rk.sequential(fns, x, segments=segments)), x) / x.nbytes

    assert values([12]) == 24  # the cosines
    assert values([4, 4, 4]) == 1 + 1 + 2 * 4
    assert values([11, 1]) == 1 + 2


def test_auto_balances_bytes_and_not_functions():
    """One wide function of many: by count it shares a segment with four others, by bytes it is alone."""
    narrow = lambda x: jnp.sin(x)  # noqa: E731
    wide = lambda x: jnp.sum(jnp.sin(jnp.sin(jnp.tile(x, (8, 1)))), 0)  # noqa: E731
    fns = [*[narrow] * 4, wide, *[narrow] * 4]
    x = jnp.ones(64)

    def peak(segments):
        """What is handed on, and the most that a segment keeps while it is differentiated."""
        cuts = [0, *np.cumsum(segments)]
        run = lambda a, b: lambda x: functools.reduce(lambda x, f: f(x), fns[a:b], x)  # noqa: E731
        inside = [held(run(a, b), x) for a, b in zip(cuts, cuts[1:], strict=False)]
        return (len(segments) - 1) * x.nbytes + max(inside)

    from remat_kit._loops.sequential import _auto

    auto = _auto(fns, x)
    assert sum(auto) == 9 and peak(auto) < peak([3, 3, 3])
    every = ([k, m - k, 9 - m] for m in range(2, 9) for k in range(1, m))
    assert peak(auto) <= min(map(peak, every)) + x.nbytes


@pytest.mark.parametrize(
    ("fns", "segments", "message"),
    [
        ([], "sqrt", "one or more"),
        ([1], "sqrt", "takes functions"),
        ([jnp.sin], 2, "1 functions"),
        ([jnp.sin] * 3, [1, 1], "add up to"),
        ([jnp.sin] * 3, [0, 3], "positive sizes"),
        ([jnp.sin] * 3, "best", "segments= is"),
        ([jnp.sin] * 3, True, "segments= is"),
    ],
)
def test_wrong_segments(fns, segments, message):
    with pytest.raises(rk.RematError, match=message):
        rk.sequential(fns, 1.0, segments=segments)


def test_auto_with_what_is_no_array_and_without_jit():
    fns = [lambda x: (jnp.sin(x), "sine"), lambda p: jnp.sin(p[0]) if p[1] == "sine" else p[0], jnp.sin, jnp.cos]
    with jax.disable_jit():
        np.testing.assert_allclose(
            rk.sequential(fns, 1.0, segments="auto"), np.cos(np.sin(np.sin(np.sin(1.0)))), rtol=1e-6
        )
    np.testing.assert_allclose(
        rk.sequential(fns, 1.0, segments=np.array([1, 3])), np.cos(np.sin(np.sin(np.sin(1.0)))), rtol=1e-6
    )


def test_modules_with_state_are_refused():
    from flax import linen as nn

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return rk.sequential([nn.Dense(4) for _ in range(3)], x)

    with pytest.raises(rk.RematError, match="bound Linen module"):
        Stack().init(jax.random.key(0), X)


# every ----------------------------------------------------------------------------------------------------------------


def unrolled(ws, x):
    for i in range(6):
        x = rk.remat(layer, policy="none", block=f"layer_{i}")(ws[i], x)
    return jnp.sum(x)


def test_every_second_of_unrolled_blocks():
    loss = rk.apply(unrolled, rk.every(2, "full"))
    assert regions(loss, WS, X) == 3
    assert_same_gradients(unrolled, loss, WS, X)
    report = rk.residuals(unrolled, WS, X, policy=rk.every(2, "full"))
    assert report.blocks == tuple(f"layer_{i}" for i in range(6))
    three = rk.apply(unrolled, {"layer_[0-3]": rk.every(3, "full"), "layer_*": "dots"})
    assert regions(three, WS, X) == 4


def test_every_second_of_scanned_layers_is_half_of_them():
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0])

    half = rk.apply(loss, rk.every(2, "full"))
    assert_same_gradients(loss, half, WS, X)
    text = str(jax.make_jaxpr(half)(WS, X))
    assert "length=5" in text and "length=4" in text and regions(half, WS, X) == 1
    part = rk.apply(loss, {"scan@0:6": rk.every(3, "full"), "scan": "dots"})
    assert_same_gradients(loss, part, WS, X)
    assert all(f"length={n}" in str(jax.make_jaxpr(part)(WS, X)) for n in (2, 4, 3))
    assert regions(rk.apply(loss, rk.every(1, "full")), WS, X) == 1


@pytest.mark.parametrize("step", [0, True, 1.5, "2"])
def test_wrong_steps(step):
    with pytest.raises(rk.RematError, match="whole number"):
        rk.every(step, "full")
    with pytest.raises(rk.UnknownPolicyError):
        rk.every(2, "fulll")
