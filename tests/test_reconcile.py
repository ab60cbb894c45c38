"""From compiled buffers back to the program: names, module paths, source lines, and what became of the residuals."""

import doctest

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import remat_kit as rk
from remat_kit._target import reconcile

OPTIMIZED = True


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(512, name="up")(x)
        h = rk.checkpoint_name(h, "hidden")
        return x + nn.Dense(64, name="down")(jnp.sin(h))


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = Layer(name=f"layers_{i}")(x)
        return x


@pytest.fixture(scope="module")
def measured():
    model = Stack()
    x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(p, x):
        return jnp.sum(model.apply(p, x) ** 2)

    return rk.measure(loss, params, x, policy="save name=hidden", target="cpu", keep_barriers=True)


def test_buffers_have_the_names_of_the_program(measured):
    hidden = [h for h in measured.held if h.name == "hidden"]
    assert hidden and sum(h.bytes for h in hidden) >= 3 * 256 * 512 * 4
    assert all(h.phase == "forward" and h.path.startswith("layers_") for h in hidden)
    assert any(h.path == "layers_3/down" and h.phase == "backward" for h in measured.held)


def test_buffers_have_source_lines_and_arguments_their_names(measured):
    assert any("test_reconcile.py:" in h.source for h in measured.held)
    arguments = {h.name for h in measured.held if h.kind == "argument"}
    assert "p['params']['layers_0']['up']['kernel']" in arguments


def test_what_is_held_is_what_was_predicted(measured):
    assert measured.predicted_bytes == 4 * (256 * 512 + 256 * 64) * 4  # with the last output, without the first input
    if jax.config.jax_remat3 and jax.__version_info__ < (0, 11):
        pytest.skip("on the CPU it recomputes before the backward pass begins")
    assert measured.held_residual_bytes == pytest.approx(measured.predicted_bytes, rel=0.2)


def test_what_xla_does_not_hold_is_said():
    def loss(w, x):
        y = jnp.broadcast_to(jnp.sin(x @ w)[:, None, :], (64, 128, 64)) * 2.0  # kept small by the compiler
        return jnp.sum(y * y)

    args = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32))
    m = rk.measure(loss, *args, target="cpu")
    assert m.held_residual_bytes < m.predicted_bytes
    assert any("without a buffer" in note and "mul" in note for note in m.differences)


def test_a_forward_pass_alone_hands_nothing_over():
    m = rk.measure(lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((64, 64), jnp.float32), grad=False, target="cpu")
    assert m.held_residual_bytes is None


def test_examples_in_docstrings():
    assert doctest.testmod(reconcile).failed == 0
