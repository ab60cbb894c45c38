"""measure: one XLA compile of a step on a target, and what it says of memory, cost and time."""

from __future__ import annotations

import dataclasses
import os
import re
import time as clock
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit._apply import Policies
from remat_kit._errors import RematError
from remat_kit._target import compile as compiling
from remat_kit._target import hlo, hlo_cost, live, reconcile
from remat_kit._target.effect import effect, offload_findings
from remat_kit._target.measurement import Measurement, Timing
from remat_kit._target.step import Step, gradient_step, step_as_written
from remat_kit._target.target import Target
from remat_kit._target.target import target as as_target
from remat_kit._target.timing import time_step


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
    timeout: float = compiling.TIMEOUT,
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
    setting = Setting.of(target, time, keep_barriers, compiler_options, timeout)

    def one(policy: Policies, time: bool) -> Measurement:
        if grad:
            step = gradient_step(fun, args, kwargs, policy, argnums, has_aux, setting.target)
        else:
            step = step_as_written(fun, args, kwargs, policy, setting.target)
        return measured(step, setting, time)

    found = one(policy, time)
    return (
        found
        if against is None
        else dataclasses.replace(found, effect=effect(one(against, False), found, keep_barriers))
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """What programs are compiled for, and how.

    Attributes:
      target: the devices.
      options: XLA's debug options by name.
      timeout: seconds that a compiler in a process of its own may take.
    """

    target: Target
    options: Mapping[str, Any]
    timeout: float

    @classmethod
    def of(
        cls,
        target: str | Target,
        time: bool,
        keep_barriers: bool,
        compiler_options: Mapping[str, Any] | None,
        timeout: float,
    ) -> Setting:
        """Reads the options of `measure`.

        Raises:
          RematError: for an unknown target, timing on one that is not attached, barriers on another than the CPU.
        """
        where = as_target(target)
        if time and not where.attached:
            raise RematError(
                f"time=True runs the step, but {where} is not attached. Leave it out (the roofline is reported), or "
                "measure on target='local'."
            )
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
            raise RematError(f"timeout is a number of seconds, got {timeout!r}.")
        options = dict(compiler_options or {})
        if keep_barriers:
            if where.platform != "cpu":
                raise RematError(f"keep_barriers=True is for the CPU's compiler; {where} keeps them by itself.")
            passes = "xla_disable_hlo_passes"
            flags = re.findall(rf"--{passes}=([^\s'\"]*)", os.environ.get("XLA_FLAGS", ""))
            options[passes] = ",".join(dict.fromkeys([*flags, *_listed(options.get(passes)), _BARRIER_PASS]))
        return cls(where, options, timeout)


_BARRIER_PASS = "cse_barrier_expander"


def _listed(value: Any) -> list[str]:
    return [str(value)] if value else []


def measured(step: Step, setting: Setting, time: bool = False) -> Measurement:
    """Compiles a lowered step and reads what came of it.

    Args:
      time: whether to run it.
    """
    target = setting.target
    timing: Timing | None = None
    if time:
        start = clock.perf_counter()
        executable = step.lowered.compile(compiler_options=dict(setting.options) or None)
        compiled = compiling.facts(executable, clock.perf_counter() - start)
        timing = time_step(step, executable, target.devices[0])
    else:
        compiled = compiling.compile_lowered(step.lowered, target, setting.options, setting.timeout)
    found = _without_figures(step, target, compiled) if compiled.oom else _figures(step, target, compiled)
    notes = [*offload_findings(found), *_on_chip(found)]
    if not step.cost.exact:
        notes.append("flops counts loops of unknown length once, and primitives that it does not know by their size.")
    return dataclasses.replace(found, timing=timing, notes=(*found.notes, *notes))


def _figures(step: Step, target: Target, compiled: compiling.Compiled) -> Measurement:
    m = compiled.memory
    sizes = {k: m.get(f"{k}_size_in_bytes", 0) for k in ("temp", "argument", "output", "alias", "generated_code")}
    on_host = {k: m.get(f"host_{k}_size_in_bytes", 0) for k in ("temp", "argument", "output", "alias")}
    host = on_host["temp"] + on_host["argument"] + on_host["output"] - on_host["alias"]
    # XLA's peak counts arguments and outputs in host memory; that of the CPU leaves temporaries out.
    peak = m.get("peak_memory_in_bytes", 0) - on_host["argument"] - on_host["output"]
    if target.platform == "cpu" or peak <= 0:
        peak = sizes["temp"] + sizes["argument"] + sizes["output"] - sizes["alias"]
    module = hlo.parse(compiled.text)
    timeline = live.walk(module)
    products, traffic = hlo_cost.products(module), hlo_cost.traffic(module)
    cost = compiled.cost or {}
    memory = target.memory_bytes
    return Measurement(
        target=target.spec,
        platform=target.platform,
        policy=step.policy,
        fits=None if memory is None else peak <= memory,
        memory_bytes=memory,
        peak_bytes=peak,
        temp_bytes=sizes["temp"],
        argument_bytes=sizes["argument"],
        output_bytes=sizes["output"],
        alias_bytes=sizes["alias"],
        host_bytes=host,
        code_bytes=sizes["generated_code"],
        flops=step.cost.flops,
        flops_exact=step.cost.exact,
        counted_matmul_flops=step.matmul_flops,
        matmul_flops=sum(products.values()),
        xla_flops=cost.get("flops"),
        xla_bytes_accessed=cost.get("bytes accessed"),
        bytes_accessed=traffic.device,
        roofline_seconds=_roofline(target, module, traffic),
        compile_seconds=compiled.seconds,
        cached=compiled.cached,
        devices=module.num_partitions,
        residuals=step.residuals,
        held=reconcile.held(timeline, step.labels, step.residuals),
        held_residual_bytes=reconcile.held_residuals(timeline),
        # Over several devices the residuals are known as a whole only.
        differences=reconcile.differences(timeline, step.residuals) if module.num_partitions == 1 else (),
    )


_ON_CHIP = 256 * 2**20  # more than the on-chip memory of the TPUs in the table


def _on_chip(m: Measurement) -> list[str]:
    if m.platform != "tpu" or m.fits is False or m.peak_bytes > _ON_CHIP:
        return []
    return ["The TPU compiler's peak counts on-chip memory too, which shows in a program as small as this one."]


def _roofline(target: Target, module: hlo.Module, traffic: hlo_cost.Traffic) -> float | None:
    chip = target.chip
    if chip is None:
        return None
    # Transfers to and from the host run beside the rest.
    return max(hlo_cost.roofline(module, chip.peak, chip.bandwidth), traffic.host / chip.host_bandwidth)


def _without_figures(step: Step, target: Target, compiled: compiling.Compiled) -> Measurement:
    """What is known of a program that the compiler found no room for."""
    oom = compiled.oom
    assert oom is not None
    return Measurement(
        target=target.spec,
        platform=target.platform,
        policy=step.policy,
        fits=False,
        memory_bytes=oom.available_bytes,
        peak_bytes=oom.required_bytes,
        temp_bytes=None,
        argument_bytes=None,
        output_bytes=None,
        alias_bytes=None,
        host_bytes=None,
        code_bytes=None,
        flops=step.cost.flops,
        flops_exact=step.cost.exact,
        counted_matmul_flops=step.matmul_flops,
        matmul_flops=None,
        xla_flops=None,
        xla_bytes_accessed=None,
        bytes_accessed=None,
        roofline_seconds=None,
        compile_seconds=compiled.seconds,
        cached=compiled.cached,
        residuals=step.residuals,
        notes=(f"The compiler found no room for it: {oom.message}",),
    )
