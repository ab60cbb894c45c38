"""measure: one XLA compile of a step on a target, and what it says of memory, cost and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit._apply import Policies
from remat_kit._target.compile import TIMEOUT
from remat_kit._target.effect import effect
from remat_kit._target.figures import measured
from remat_kit._target.measurement import Measurement
from remat_kit._target.setting import Setting
from remat_kit._target.target import Target


def measure(
    fun: Callable[..., Any],
    *args: Any,
    policy: Policies = None,
    target: str | Target = "local",
    grad: bool = True,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    against: Policies = None,
    time: bool = False,
    keep_barriers: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    **kwargs: Any,
) -> Measurement:
    """Compiles a step for a target, with or without the hardware, and reports what XLA makes of it.

    Args:
      fun: a loss, as `jax.grad` takes it; with ``grad=False`` a step as it is: it may hold its own gradient and
        optimizer, and be jitted with donated arguments and shardings.
      *args, **kwargs: its arguments: arrays, `jax.ShapeDtypeStruct`s (nothing is allocated for these), pytrees of
        them, NNX modules. `NamedSharding`s on a mesh of ``target.mesh(...)`` are kept; without any, the program is
        compiled for one device.
      policy: as `apply` takes it; None measures the function as written. With ``grad=False`` a mapping is that of
        `override`: policies of the blocks marked in the step.
      target: what `remat_kit.target` takes.
      grad: whether to compile the value and gradient of `fun`, or `fun` itself.
      argnums, has_aux: as in `jax.grad`; for ``grad=True``.
      against: another policy to compile as well, to see what `policy` does to the compiled program.
      time: run the step and time it; on attached devices only. Abstract arguments are filled with random numbers
        (integers with zeros).
      keep_barriers: on the CPU of JAX 0.10.2, whose compiler merges what is recomputed outside loops with the forward
        pass: switch the responsible pass off (XLA's ``xla_disable_hlo_passes=cse_barrier_expander``).
      compiler_options: XLA's debug options by name, as in `jax.stages.Lowered.compile`.
      timeout: seconds after which the compiler is ended, where it runs in a process of its own (chips that are not
        here).

    Returns:
      A `Measurement`. A program that a TPU's compiler finds no room for is one with ``fits=False``.

    Raises:
      RematError: as `residuals` and `target` do; for a program that cannot be compiled, a compiler that crashed or
        took too long; for a policy on a step that contains its own gradient.
    """
    setting = Setting.of(
        target,
        timeout=timeout,
        grad=grad,
        argnums=argnums,
        has_aux=has_aux,
        compiler_options=compiler_options,
        time=time,
        keep_barriers=keep_barriers,
    )
    found = measured(setting.step(fun, args, kwargs, policy), setting, time)
    if against is None:
        return found
    before = measured(setting.step(fun, args, kwargs, against), setting)
    return dataclasses.replace(found, effect=effect(before, found, setting.keep_barriers))
