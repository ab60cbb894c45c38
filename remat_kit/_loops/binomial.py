"""scan and while_loop whose reverse mode keeps a given number of states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from remat_kit._errors import RematError
from remat_kit._loops import revolve
from remat_kit._loops.reversal import Arrays, Chain, Kept
from remat_kit._loops.steps import Step
from remat_kit._numbers import whole
from remat_kit._trace import jaxprs


def count_of(checkpoints: Any, length: int) -> int:
    """A number of states to keep, checked; None means the fewest with which no step is advanced more than twice."""
    if checkpoints is None:
        return revolve.checkpoints_for(length)
    count = whole(checkpoints)
    if count is None or count < 1:
        raise RematError(f"checkpoints= is the number of states to keep, 1 or more, got {checkpoints!r}.")
    return min(count, max(length, 1))


def scan(
    body: Callable[..., Any], init: Any, xs: Any, length: int, reverse: bool, unroll: Any, checkpoints: Any
) -> tuple[Any, Any]:
    """A scan over at least one step, with a known number of states kept."""
    checkpoints = count_of(checkpoints, length)
    init = _as_carried(lambda init: lax.scan(body, init, xs, length=length, reverse=reverse)[0], init)
    step = Step.of(body, init, jax.tree.map(lambda x: x[0], xs))
    state, carried = jax.tree.flatten(init)
    n = len(state)

    def run(consts: Arrays, state: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        out = step(consts, *state, *x)
        return out[:n], out[n:]

    def plain(consts: Arrays, state: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return lax.scan(lambda s, x: run(consts, s, x), state, xs, length, reverse, unroll)

    def keeping(consts: Arrays, state: Arrays, xs: Arrays) -> tuple[Arrays, Arrays, Kept, Any]:
        def one(c: Any, x: Any) -> Any:
            i, state, kept = c
            kept = kept.put(places[i], state, i)
            state, y = run(consts, state, x)
            return (i + 1, state, kept), y

        places = jnp.asarray(revolve.slots(length, checkpoints))
        first = (jnp.int32(0), state, Kept.empty(state, checkpoints))
        (_, state, kept), ys = lax.scan(one, first, xs, length, reverse, unroll)
        return state, ys, kept, jnp.int32(length)

    betas = revolve.table(checkpoints, length, revolve.repetitions(length, checkpoints))
    chain = Chain(run, plain, keeping, betas, lambda i: length - 1 - i if reverse else i)
    last, ys = chain(step.consts, state, jax.tree.leaves(xs))
    _, outputs = step.out.children()
    return jax.tree.unflatten(carried, last), jax.tree.unflatten(outputs, ys)


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_steps: int,
    checkpoints: int | None = None,
) -> Any:
    """`jax.lax.while_loop` that reverse mode can differentiate, with memory for a fixed number of states.

    How many steps there will be is not known beforehand, so states are kept online and thinned out as the loop goes on;
    the backward pass advances from them again, keeping states in the places that become free (see Stumm and Walther
    2010, "New algorithms for optimal online checkpointing"). With 16 states this takes about 1 % more steps than the
    best that could be done if the number were known, at most 5 %.

    The gradient can be differentiated again in forward mode (`jax.jvp` of `jax.grad`).

    Args:
      cond_fun, body_fun, init_val: as in `jax.lax.while_loop`. What they close over is differentiated too.
      max_steps: the most steps. The loop ends after these, whatever `cond_fun` says.
      checkpoints: how many states are kept, besides the one being worked on. By default the fewest with which no step
        of a loop of `max_steps` is advanced more than twice, about ``sqrt(2 * max_steps)``.

    Returns:
      The last state.

    Raises:
      RematError: for a number that is none, or a body that writes to a mutable reference; what `jax.lax.while_loop`
        raises for functions that do not fit together.
    """
    most = whole(max_steps)
    if most is None or not 0 <= most < 2**31:
        raise RematError(
            f"max_steps= is the most steps that the loop may take, a whole number below 2**31, got {max_steps!r}."
        )
    init_val = _as_carried(lambda init: lax.while_loop(cond_fun, body_fun, init), init_val)
    if not most:
        return init_val
    going, step = Step.of(cond_fun, init_val), Step.of(body_fun, init_val)
    state, carried = jax.tree.flatten(init_val)
    many = -(-most // _MOST_PLACES)  # steps for each entry of the table of places
    entries = -(-most // many)
    checkpoints = min(count_of(checkpoints, most), entries)

    def goes_on(i: Any, consts: Arrays, state: Arrays) -> Any:
        return (i < most) & going(consts[: len(going.consts)], *state)[0]

    def run(consts: Arrays, state: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        return step(consts[len(going.consts) :], *state), []

    def plain(consts: Arrays, state: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        first = (jnp.int32(0), state)
        return lax.while_loop(
            lambda c: goes_on(c[0], consts, c[1]), lambda c: (c[0] + 1, run(consts, c[1], [])[0]), first
        )[1], []

    def keeping(consts: Arrays, state: Arrays, xs: Arrays) -> tuple[Arrays, Arrays, Kept, Any]:
        def one(c: Any) -> Any:
            i, state, kept = c
            kept = kept.put(jnp.where(i % many == 0, places[i // many], checkpoints), state, i)
            return i + 1, run(consts, state, [])[0], kept

        places = jnp.asarray(revolve.online_slots(entries, checkpoints))
        first = (jnp.int32(0), state, Kept.empty(state, checkpoints))
        length, state, kept = lax.while_loop(lambda c: goes_on(c[0], consts, c[1]), one, first)
        return state, [], kept, length

    # gaps between kept states are those of the table, `many` times as long
    again = (revolve.repetitions(entries, checkpoints) + 2) * (math.isqrt(many) + 1)
    chain = Chain(run, plain, keeping, revolve.table(checkpoints, most, again))
    last, _ = chain([*map(_constant, going.consts), *step.consts], state, [])
    return jax.tree.unflatten(carried, last)


_MOST_PLACES = 2**14


def _constant(x: Any) -> Any:
    """A value that is not differentiated: that a loop goes on has no derivative."""
    return lax.stop_gradient(x) if jaxprs.is_inexact(jax.typeof(x)) else x


def _as_carried(loop: Callable[[Any], Any], init: Any) -> Any:
    """What a loop starts with, in the types that JAX gives its carry: weak ones give way to those of the body."""
    return jax.tree.map(
        lambda x, a: lax.convert_element_type(x, a.dtype) if _weak(x) else x, init, jax.eval_shape(loop, init)
    )


def _weak(x: Any) -> bool:
    return getattr(jax.typeof(x), "weak_type", False)
