"""Several threads at once, as in notebooks and servers: registry, overrides, traces, measurements, plans, warnings."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import regions

import remat_kit as rk
from remat_kit import _presets
from remat_kit._quiet import quiet

THREADS = 6


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that start together, each in a thread of its own; raises what the first of them raises."""
    barrier = threading.Barrier(len(calls))

    def started(call: Callable[[], Any]) -> Any:
        barrier.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result(timeout=300) for f in [pool.submit(started, call) for call in calls]]


def loss(w: Any) -> Any:
    for i in range(2):
        w = rk.remat("none", block=f"layers_{i}")(lambda w: rk.checkpoint_name(jnp.sin(w) * jnp.tanh(w), "a"))(w)
    return jnp.sum(w)


def sized(n: int) -> Any:
    return jnp.linspace(-1.0, 1.0, n)


def test_the_registry_is_read_while_others_register():
    names = iter(rk.presets)
    next(names)

    def register(k: int) -> None:
        for i in range(60):
            rk.register(f"thread-{k}-{i}", f"save name=t{k}x{i}")
            assert rk.policy(f"thread-{k}-{i}") == rk.save(name=f"t{k}x{i}")

    def read() -> None:
        for _ in range(25):
            assert all(rk.presets[name].rules is not None for name in rk.presets)
            assert len(_presets.preset_table()) >= 10
            with pytest.raises(rk.UnknownPolicyError):
                rk.policy("nothing-of-this-name")

    try:
        at_once(*(lambda k=k: register(k) for k in range(3)), read, read, read)
        assert set(names) < set(rk.presets)  # a list that was begun before goes on
    finally:
        for name in [n for n in _presets._registry if n.startswith("thread-")]:
            del _presets._registry[name]


def test_overrides_stay_in_their_threads():
    block = rk.remat("none", block="mine")(lambda x: jnp.sin(jnp.sin(x)))
    inside = threading.Barrier(THREADS)

    def counted(k: int) -> int:
        policy = "full" if k % 2 else "none"
        for _ in range(3):
            with rk.override({"mine": policy}):
                inside.wait(60)  # all are inside their own
                found = regions(lambda x: jnp.sum(block(x)), sized(4 + k))
                inside.wait(60)
            assert found == k % 2
        return regions(lambda x: jnp.sum(block(x)), sized(4 + k))

    assert at_once(*(lambda k=k: counted(k) for k in range(THREADS))) == [0] * THREADS


def test_one_applied_function_serves_all_threads():
    fn = rk.apply(loss, {"layers_*": "save name=a"})
    plain = jax.jit(jax.grad(loss))

    def gradients(k: int) -> None:
        for n in (3, 4, 5, 3, 4 + k):
            np.testing.assert_allclose(jax.grad(fn)(sized(n)), plain(sized(n)), rtol=1e-5, atol=1e-6)

    at_once(*(lambda k=k: gradients(k) for k in range(THREADS)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(4)(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = Block(name=f"block_{i}")(x)
        return x


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_programs_of_modules_are_read_side_by_side():
    """Calls of modules are marked in the thread that reads them only, and no other call is disturbed."""
    variables = Model().init(jax.random.key(0), jnp.ones((2, 4)))
    call, wanted = NnxBlock.__call__, None

    def linen() -> tuple[str, ...]:
        return tuple(b.path for b in rk.trace(lambda v, x: Model().apply(v, x), variables, jnp.ones((2, 4))).blocks)

    def modules() -> tuple[str, ...]:
        return tuple(b.path for b in rk.trace(lambda m, x: m(x), NnxModel(nnx.Rngs(0)), jnp.ones((2, 4))).blocks)

    def plain() -> None:
        model = NnxModel(nnx.Rngs(0))
        for n in range(2, 8):
            text = str(jax.make_jaxpr(lambda x: model(x))(jnp.ones((n, 4))))
            assert "rk:" not in text

    wanted = linen(), modules()
    for a, b, _, c, d, _ in (at_once(linen, modules, plain, linen, modules, plain) for _ in range(3)):
        assert (a, b) == (c, d) == wanted
    assert NnxBlock.__call__ is call


def test_measurements_and_plans_side_by_side(tmp_path, monkeypatch):
    """The cache on disk is shared by all."""
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path))

    def measured() -> int:
        return rk.measure(loss, sized(64), policy="full").peak_bytes

    def planned() -> rk.Plan:
        return rk.plan(loss, sized(64), budget="700B", compiles=2)

    first, second = measured(), planned()
    for _ in range(2):
        for file in tmp_path.iterdir():
            file.unlink()
        a, b, c, d = at_once(measured, planned, measured, planned)
        assert (a, c) == (first, first)
        assert b.to_dict() == d.to_dict() == second.to_dict()


def test_what_is_quiet_in_one_thread_is_heard_in_another():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        entered, warned = threading.Barrier(2), threading.Barrier(2)

        def silent() -> None:
            with quiet(rk.RematWarning):
                entered.wait(60)
                warnings.warn("not heard", rk.RematWarning, stacklevel=1)
                warnings.warn("another kind", UserWarning, stacklevel=1)
                warned.wait(60)

        def loud() -> None:
            entered.wait(60)
            warnings.warn("heard", rk.RematWarning, stacklevel=1)
            warned.wait(60)

        at_once(silent, loud)
        warnings.warn("after", rk.RematWarning, stacklevel=1)
    assert sorted(str(w.message) for w in heard) == ["after", "another kind", "heard"]


def test_planning_in_threads_leaves_warnings_as_they_were():
    """Two threads that leave in the order in which they came."""
    first_in, first_out, second_in = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with quiet(Warning):
            first_in.set()
            assert second_in.wait(60)
        first_out.set()

    def second() -> None:
        assert first_in.wait(60)
        with quiet(Warning):
            second_in.set()
            assert first_out.wait(60)

    with pytest.warns(rk.RematWarning, match="still"):
        at_once(first, second)
        at_once(*(lambda n=n: rk.plan(loss, sized(n), target=None, budget=8 * n) for n in range(8, 12)))
        warnings.warn("still heard", rk.RematWarning, stacklevel=1)
