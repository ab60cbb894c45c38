"""Reverse mode of a chain of steps with few states kept: one loop that runs steps again as `revolve` plans it.

Forward, each step first writes its state to the place that a table gives it; states without a place of their own share
the last row, so that this holds the state that was worked on last. Backward, kept states form a stack. Each step takes
the one on top, advances from there, keeping states in the places that are free, and is differentiated.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from remat_kit._errors import RematError, UnsupportedEffectError
from remat_kit._loops.once import once
from remat_kit._trace import jaxprs

Arrays = list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """States that a forward pass keeps.

    Attributes:
      states: one array for each leaf, with a row for each place and one more for the state that was worked on last.
      steps: the number of the step whose state a place holds; -1 for none.
    """

    states: Arrays
    steps: Any

    @classmethod
    def empty(cls, state: Arrays, checkpoints: int) -> Kept:
        rows = checkpoints + 1
        return cls([jnp.broadcast_to(x, (rows, *jnp.shape(x))) for x in state], jnp.full(rows, -1, np.int32))

    def put(self, place: Any, state: Arrays, step: Any) -> Kept:
        states = [lax.dynamic_update_index_in_dim(k, x, place, 0) for k, x in zip(self.states, state, strict=True)]
        return Kept(states, self.steps.at[place].set(step))

    def at(self, place: Any) -> Arrays:
        return [lax.dynamic_index_in_dim(k, place, 0, keepdims=False) for k in self.states]


jax.tree_util.register_dataclass(Kept, ["states", "steps"], [])


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """A loop whose reverse mode keeps few states.

    Attributes:
      step: what the loop closes over, the state and the slice of the inputs -> the new state and the outputs, flat.
      plain: consts, state, inputs -> the last state and all outputs, with nothing kept.
      keeping: the same, and what it kept and how many steps there were.
      betas: `revolve.table` for the states that are kept.
      replays: whether its steps may run again.
      index: the number of a step and of all steps -> where its slices of the inputs and outputs lie.
    """

    step: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    plain: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    keeping: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Kept, Any]]
    betas: np.ndarray
    replays: bool
    index: Callable[[Any], Any] = lambda i: i

    def __call__(self, consts: Arrays, state: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        """Runs the loop, differentiable in reverse mode, and the gradient again in forward mode."""
        run = jax.custom_vjp(self.plain)
        run.defvjp(self._forward, self._backward, symbolic_zeros=True)
        with _forward_mode_said():
            return run(consts, state, xs)

    def _forward(self, *args: Any) -> tuple[Any, Any]:
        if not self.replays:
            raise UnsupportedEffectError(
                "the loop is differentiated and its body has an effect that must not be repeated (io_callback), but "
                "the backward pass runs steps again. Use jax.debug.callback for what may run twice or "
                "jax.pure_callback for what has no side effects, or move the call out of the loop."
            )
        consts, state, xs = jax.tree.map(lambda x: x.value, args, is_leaf=lambda x: hasattr(x, "perturbed"))
        last, ys, kept, length = self.keeping(consts, state, xs)
        asked = _as_shape([_has_derivative(x.value) and x.perturbed for arg in args for x in arg])
        return (last, ys), (consts, xs, kept, length, asked)

    def _backward(self, residuals: Any, cotangents: Any) -> Any:
        consts, xs, kept, length, asked = residuals
        n = len(consts)
        wants = _of_shape(asked, n + len(kept.states) + len(xs))
        wants_consts, wants_xs = wants[:n], wants[len(wants) - len(xs) :]
        ct_last, ct_ys = ([c for c in part if _has_derivative(c)] for part in cotangents)
        inexact = [_has_derivative(k) for k in kept.states]

        def pull(i: Any, state: Arrays, carried: Any) -> Any:
            ct_state, ct_consts, ct_xs = carried
            at = self.index(i)

            def step(some_consts: Arrays, some_state: Arrays, some_x: Arrays) -> Arrays:
                new, y = self.step(
                    _merge(wants_consts, some_consts, consts),
                    _merge(inexact, some_state, state),
                    _merge(wants_xs, some_x, x),
                )
                return [*_some(inexact, new), *(v for v in y if _has_derivative(v))]

            x = _slices(xs, at)
            out, back = jax.vjp(step, _some(wants_consts, consts), _some(inexact, state), _some(wants_xs, x))
            ct_y = [
                jnp.zeros_like(v) if isinstance(c, SymbolicZero) else lax.dynamic_index_in_dim(c, at, 0, keepdims=False)
                for c, v in zip(ct_ys, out[len(ct_state) :], strict=True)
            ]
            more, ct_state, ct_x = back([*ct_state, *ct_y])
            ct_consts = [a + b for a, b in zip(ct_consts, more, strict=True)]
            ct_xs = [lax.dynamic_update_index_in_dim(a, b, at, 0) for a, b in zip(ct_xs, ct_x, strict=True)]
            return ct_state, ct_consts, ct_xs

        states = _some(inexact, kept.states)
        start = (
            [jnp.zeros_like(k[0]) if isinstance(c, SymbolicZero) else c for c, k in zip(ct_last, states, strict=True)],
            [jnp.zeros_like(v) for v in _some(wants_consts, consts)],
            [jnp.zeros_like(v) for v in _some(wants_xs, xs)],
        )

        def advance(i: Any, state: Arrays) -> Arrays:
            return self.step(consts, state, _slices(xs, self.index(i)))[0]

        found = _reverse(advance, pull, kept, length, self.betas, start)
        ct_state, ct_consts, ct_xs = jax.tree.map(once, found)
        return _spread(wants_consts, ct_consts), _spread(inexact, ct_state), _spread(wants_xs, ct_xs)


@contextlib.contextmanager
def _forward_mode_said() -> Iterator[None]:
    """Says what JAX refuses where the loop is differentiated in forward mode. Of a `jax.jit` its own error is seen."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise RematError(
            'a loop that keeps few states (rk.while_loop, or rk.scan with segments="binomial") is differentiated in '
            "forward mode, which it knows of its gradient only. Use jax.lax.while_loop, or rk.scan with a number of "
            "segments or a policy."
        ) from error


def _reverse(
    advance: Callable[[Any, Arrays], Arrays],
    pull: Callable[[Any, Arrays, Any], Any],
    kept: Kept,
    length: Any,
    betas: np.ndarray,
    cotangents: Any,
) -> Any:
    """Runs the steps backward.

    Args:
      advance: number of a step and its state -> the next state.
      pull: number of a step, its state and what is carried backward -> the same before the step.
      length: number of steps, maybe traced.
      betas: `revolve.table`.

    Returns:
      What is carried backward, before the first step.
    """
    checkpoints = kept.steps.shape[0] - 1
    table = jnp.asarray(betas)
    steps = kept.steps.at[checkpoints].set(jnp.where(kept.steps[checkpoints] == length - 1, length - 1, -1))
    used = steps >= 0
    stack = jnp.argsort(jnp.where(used, steps, np.iinfo(np.int32).max))  # places, the used ones first, by their steps

    def split(gap: Any, free: Any) -> Any:  # revolve.split
        row, below = table[free], table[free - 1]
        r = jnp.sum(row[2:] < gap)
        return jnp.maximum(jnp.maximum(1, row[r]), gap - below[r + 2])

    def back(carried: Any) -> Any:
        i, kept, top, cotangents = carried

        def run(at: Any, state: Arrays, to: Any) -> Arrays:
            return lax.fori_loop(at, to, advance, state)

        def keep(c: Any) -> Any:
            at, state, kept, top = c
            to = at + split(i + 1 - at, checkpoints - top)
            state = run(at, state, to)
            return to, state, kept.put(stack[top + 1], state, to), jnp.where(to < i, top + 1, top)

        start = (kept.steps[stack[top]], kept.at(stack[top]), kept, top)
        at, state, kept, top = lax.while_loop(lambda c: (c[0] < i) & (c[3] < checkpoints - 1), keep, start)
        state = run(at, state, i)
        top = jnp.where(kept.steps[stack[top]] == i, top - 1, top)
        return i - 1, kept, top, pull(i, state, cotangents)

    first = (jnp.asarray(length - 1, np.int32), Kept(kept.states, steps), jnp.sum(used, dtype=np.int32) - 1, cotangents)
    return lax.while_loop(lambda c: c[0] >= 0, back, first)[-1]


_BITS = 30  # of one size


def _as_shape(flags: Sequence[bool]) -> Any:
    """An empty array whose shape holds flags.

    The backward rule is told of the forward pass by residuals alone. That they are laid out in another way where other
    arguments are differentiated is no message: JAX (0.10.2 to 0.12.0.1) remembers one layout for all calls of a jitted
    function.
    """
    words = [sum(bool(f) << k for k, f in enumerate(flags[i : i + _BITS])) for i in range(0, len(flags), _BITS)]
    return jnp.zeros((0, *words), np.bool_)


def _of_shape(x: Any, count: int) -> list[bool]:
    return [bool(x.shape[1 + i // _BITS] >> i % _BITS & 1) for i in range(count)]


def _slices(xs: Arrays, at: Any) -> Arrays:
    return [lax.dynamic_index_in_dim(x, at, 0, keepdims=False) for x in xs]


def _has_derivative(x: Any) -> bool:
    return jaxprs.is_inexact(x.aval if isinstance(x, SymbolicZero) else jax.typeof(x))


def _some(wanted: Sequence[bool], values: Sequence[Any]) -> Arrays:
    return [v for w, v in zip(wanted, values, strict=True) if w]


def _merge(wanted: Sequence[bool], some: Sequence[Any], values: Sequence[Any]) -> Arrays:
    rest = iter(some)
    return [next(rest) if w else v for w, v in zip(wanted, values, strict=True)]


def _spread(wanted: Sequence[bool], some: Sequence[Any]) -> Arrays:
    rest = iter(some)
    return [next(rest) if w else None for w in wanted]
