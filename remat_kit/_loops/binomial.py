"""scan and while_loop whose reverse mode keeps a given number of states."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from remat_kit._errors import RematError
from remat_kit._loops import revolve
from remat_kit._loops.reversal import Arrays, Chain, Kept
from remat_kit._numbers import whole
from remat_kit._rewrite import check_effects
from remat_kit._trace import jaxprs
from remat_kit._trace.jaxprs import JaxprEqn


def count_of(checkpoints: Any, length: int) -> int:
    """A number of states to keep, checked; None means the fewest with which no step is advanced more than twice."""
    if checkpoints is None:
        return revolve.checkpoints_for(length)
    count = whole(checkpoints)
    if count is None or count < 1:
        raise RematError(f"checkpoints= is the number of states to keep, 1 or more, got {checkpoints!r}.")
    return min(count, max(length, 1))


def scan(body: Any, consts: Arrays, state: Arrays, xs: Arrays, eqn: JaxprEqn, checkpoints: Any) -> list[Any]:
    """Runs a scan of at least one step with a known number of states kept.

    Args:
      body: consts, state and a step's inputs, flat -> the new state and the step's outputs, flat.
      eqn: the scan as it was traced.
    """
    length, reverse, unroll = (eqn.params[k] for k in ("length", "reverse", "unroll"))
    checkpoints = count_of(checkpoints, length)
    n = len(state)

    def run(consts: Arrays, state: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        out = body(consts, state, x)
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
    chain = Chain(
        run, plain, keeping, betas, jaxprs.replays(eqn.params["jaxpr"]), lambda i: length - 1 - i if reverse else i
    )
    last, ys = chain(consts, state, xs)
    return [*last, *ys]


def while_loop(eqn: JaxprEqn, operands: Arrays, most: int, checkpoints: Any) -> list[Any]:
    """Runs a while loop of at most so many steps with a number of states kept.

    Args:
      eqn: the loop as it was traced, with its operands.
    """
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    going, step = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    check_effects(step)
    places = revolve.Places(most)
    checkpoints = min(count_of(checkpoints, min(most, revolve.EXACT) if checkpoints is None else most), places.entries)

    def goes_on(i: Any, consts: Arrays, state: Arrays) -> Any:
        return (i < most) & jaxprs.evaluate(going, *consts[:cond_consts], *state)[0]

    def run(consts: Arrays, state: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        return jaxprs.evaluate(step, *consts[cond_consts:], *state), []

    def plain(consts: Arrays, state: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        def one(c: Any) -> Any:
            return c[0] + 1, run(consts, c[1], [])[0]

        return lax.while_loop(lambda c: goes_on(c[0], consts, c[1]), one, (jnp.int32(0), state))[1], []

    def keeping(consts: Arrays, state: Arrays, xs: Arrays) -> tuple[Arrays, Arrays, Kept, Any]:
        def one(c: Any) -> Any:
            i, state, kept = c
            entry, is_one = places.entry(i)
            kept = kept.put(jnp.where(is_one, table[entry], checkpoints), state, i)
            return i + 1, run(consts, state, [])[0], kept

        table = jnp.asarray(revolve.online_slots(places, checkpoints))
        first = (jnp.int32(0), state, Kept.empty(state, checkpoints))
        length, state, kept = lax.while_loop(lambda c: goes_on(c[0], consts, c[1]), one, first)
        return state, [], kept, length

    # gaps between kept states are as far apart as the places, at most
    again = (revolve.repetitions(places.entries, checkpoints) + 2) * (math.isqrt(places.widest) + 1)
    chain = Chain(run, plain, keeping, revolve.table(checkpoints, most, again), jaxprs.replays(step))
    constants = [*map(_constant, operands[:cond_consts]), *operands[cond_consts : cond_consts + body_consts]]
    return chain(constants, operands[cond_consts + body_consts :], [])[0]


def _constant(x: Any) -> Any:
    """A value that is not differentiated: that a loop goes on has no derivative."""
    return lax.stop_gradient(x) if jaxprs.is_inexact(jax.typeof(x)) else x
