"""From what XLA says of a compiled step to a `Measurement`."""

from __future__ import annotations

import dataclasses
from typing import Any

from remat_kit._errors import RematError
from remat_kit._target import compile as compiling
from remat_kit._target import hlo, hlo_cost, hlo_loops, live, reconcile
from remat_kit._target.effect import offload_findings
from remat_kit._target.measurement import Measurement
from remat_kit._target.setting import Setting
from remat_kit._target.step import Step
from remat_kit._target.target import Target
from remat_kit._target.timeline import Schedule
from remat_kit._target.timing import time_step


def measured(step: Step, setting: Setting, time: bool = False) -> Measurement:
    """Compiles a lowered step and reads what came of it.

    Args:
      time: whether to run it, if it fits.
    """
    target = setting.target
    compiled = compiling.compile_lowered(step.lowered, target, setting.options, setting.timeout, to_run=time)
    figures = _without_figures(compiled.oom) if compiled.oom is not None else _figures(step, target, compiled)
    found = Measurement(
        target=target.spec,
        platform=target.platform,
        policy=step.policy,
        flops=step.cost.flops,
        flops_exact=step.cost.exact,
        counted_matmul_flops=step.matmul_flops,
        compile_seconds=compiled.seconds,
        cached=compiled.cached,
        residuals=step.residuals,
        **figures,
    )
    notes = [*found.notes, *offload_findings(found), *_on_chip(found)]
    if not step.cost.exact:
        notes.append("flops counts loops of unknown length once, and primitives that it does not know by their size.")
    timing = None
    if time and found.fits is False:
        notes.append("It is not timed: it does not fit.")
    elif time:
        try:
            timing = time_step(step, compiled.executable, target.devices[0])
        except RematError as e:
            notes.append(f"It is not timed: {e}")
    return dataclasses.replace(found, timing=timing, notes=tuple(notes))


def _figures(step: Step, target: Target, compiled: compiling.Compiled) -> dict[str, Any]:
    m = compiled.memory
    sizes = {k: m.get(f"{k}_size_in_bytes", 0) for k in ("temp", "argument", "output", "alias", "generated_code")}
    on_host = {k: m.get(f"host_{k}_size_in_bytes", 0) for k in ("temp", "argument", "output", "alias")}
    # XLA's peak counts what lies in host memory too: with temporaries there it may exceed all that a device holds. That
    # of the CPU leaves temporaries out.
    peak = m.get("peak_memory_in_bytes", 0) - on_host["argument"] - on_host["output"]
    most = sizes["temp"] + sizes["argument"] + sizes["output"] - sizes["alias"]
    if target.platform == "cpu" or peak <= 0:
        peak = most
    elif on_host["temp"]:
        peak = min(peak, most)
    module = hlo.parse(compiled.text)
    memory = live.walk(module)
    traffic = hlo_cost.traffic(module)
    cost = compiled.cost or {}
    notes = []
    unknown = hlo_loops.unknown_loops(module)
    if unknown:
        notes.append(
            f"{len(unknown)} loops of the compiled program have an unknown length: its matrix products, traffic and "
            "roofline count them once."
        )
    if not module.is_scheduled:
        notes.append("The compiled text is not in the order of execution: what is live at the peak is a guess.")
    if compiled.moved:
        notes.append("An earlier compile of the same program answered: names and source lines are as they were then.")
    alone = module.num_partitions == 1
    if not alone:
        notes.append("How what is held compares with the predicted residuals is told for one device only.")
    return dict(
        fits=None if target.memory_bytes is None else peak <= target.memory_bytes,
        memory_bytes=target.memory_bytes,
        peak_bytes=peak,
        temp_bytes=sizes["temp"],
        argument_bytes=sizes["argument"],
        output_bytes=sizes["output"],
        alias_bytes=sizes["alias"],
        host_bytes=on_host["temp"],
        host_argument_bytes=on_host["argument"] + on_host["output"] - on_host["alias"],
        code_bytes=sizes["generated_code"],
        matmul_flops=hlo_cost.flops(module),
        xla_flops=cost.get("flops"),
        xla_bytes_accessed=cost.get("bytes accessed"),
        bytes_accessed=traffic.device,
        roofline_seconds=_roofline(target, module, traffic),
        devices=module.num_partitions,
        held=reconcile.held(memory, step.labels, step.residuals),
        held_residual_bytes=reconcile.held_residuals(memory),
        differences=reconcile.differences(memory, step.residuals) if alone else (),
        notes=tuple(notes),
        schedule=Schedule.of(compiled.text, step.labels),
    )


def _without_figures(oom: compiling.OutOfMemory) -> dict[str, Any]:
    """What is known of a program that the compiler found no room for."""
    return dict(
        fits=False,
        memory_bytes=oom.available_bytes,
        peak_bytes=oom.required_bytes,
        notes=(f"The compiler found no room for it: {oom.message}",),
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
    # Transfers to and from the host run beside the rest, and beside each other.
    host = max(traffic.from_host, traffic.to_host) / chip.host_bandwidth
    return max(hlo_cost.roofline(module, chip.peak, chip.bandwidth), host)
