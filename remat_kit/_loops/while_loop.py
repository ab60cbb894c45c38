"""while_loop: `jax.lax.while_loop` with reverse mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from remat_kit._errors import RematError
from remat_kit._loops import binomial
from remat_kit._loops.traced import check_arrays, run_as
from remat_kit._numbers import whole
from remat_kit._static_args import name_of
from remat_kit._trace.jaxprs import JaxprEqn


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
    2010, "New algorithms for optimal online checkpointing"). With 16 states this advances about 1 % more steps than the
    best that could be done if the number were known, at most 5 %, in loops of up to 8192 steps; further on only every
    second, fourth, ... state can be kept.

    Forward mode goes through the gradient (`jax.jvp` of `jax.grad`), but not through the loop itself, and the gradient
    is not differentiated in reverse again.

    Args:
      cond_fun, body_fun, init_val: as in `jax.lax.while_loop`. What they close over is differentiated too.
      max_steps: the most steps. The loop ends after these, whatever `cond_fun` says.
      checkpoints: how many states are kept, besides the one being worked on. By default the fewest with which no step
        of a loop of `max_steps` is advanced more than twice, about ``sqrt(2 * max_steps)``, up to 127: memory that is
        taken however early the loop ends. Where `max_steps` is only a bound, give a number.

    Returns:
      The last state.

    Raises:
      RematError: for a number that is none, or a body that writes to a mutable reference; when it is differentiated,
        for a body whose effects must not be repeated (`io_callback`). What `jax.lax.while_loop` raises for functions
        that do not fit together.
    """
    most = whole(max_steps)
    if most is None or not 0 <= most < 2**31:
        raise RematError(
            f"max_steps= is the most steps that the loop may take, a whole number below 2**31, got {max_steps!r}."
        )
    binomial.count_of(checkpoints, 1)
    for name, fun in (("cond_fun", cond_fun), ("body_fun", body_fun)):
        if not callable(fun):
            raise RematError(f"{name} is a function of the state, got {type(fun).__name__}: {fun!r:.80}")
    check_arrays(init_val=init_val)

    def run(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if not most:
            return operands[len(operands) - len(eqn.outvars) :]
        return binomial.while_loop(eqn, operands, most, checkpoints)

    return run_as(run, name_of(body_fun), "while", lambda init: lax.while_loop(cond_fun, body_fun, init), init_val)
