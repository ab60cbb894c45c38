"""From a lowered program to what XLA says of it: memory, cost and the text of the optimized module."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from remat_kit._errors import RematError
from remat_kit._target import cache, installed, remote
from remat_kit._target.target import Target

TIMEOUT = 3600.0


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """What a compiler says of a program that does not fit.

    Attributes:
      required_bytes: what the program would need; `of` says of what.
      available_bytes: what there is.
      message: the compiler's sentence.
    """

    required_bytes: int
    available_bytes: int
    message: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """XLA's answer for one program on one target.

    Attributes:
      memory: the figures of `memory_analysis()`, by name; empty if the program does not fit.
      cost: those of `cost_analysis()`, loop bodies counted once; None where the backend has none.
      text: the optimized, scheduled module.
      seconds: what compiling took, when it was compiled.
      cached: whether this is what an earlier compile of the same program said; names and source lines in the text are
        those of that program's.
      moved: whether that program had other names or source lines, which the text then shows.
      oom: why there are no figures.
      executable: the `jax.stages.Compiled` to run, where asked for.
    """

    memory: Mapping[str, int]
    cost: Mapping[str, float] | None
    text: str
    seconds: float
    cached: bool = False
    moved: bool = False
    oom: OutOfMemory | None = None
    executable: Any = None


def lower(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Target) -> tuple[Any, Any]:
    """Traces and lowers a jitted function for the platform of a target.

    Returns:
      JAX's `Traced` and `Lowered`.

    Raises:
      RematError: where JAX cannot lower the program for the platform, and for arrays of 2**63 elements or more.
    """
    for x in jax.tree.leaves((args, kwargs)):
        if math.prod(getattr(x, "shape", ())) >= 2**63:  # XLA of JAX 0.10.2 would end the process
            raise RematError(f"an argument has the shape {x.shape}: more elements than XLA counts.")
    traced = step.trace(*args, **kwargs)
    try:
        return traced, traced.lower() if target.attached else traced.lower(lowering_platforms=(target.platform,))
    except Exception as e:  # of rules of many authors, kernels' among them
        reason = _first_line(e)
        if "is different from the lowering platform" in reason:
            reason = (
                "it calls back into Python (jax.debug.print, pure_callback, io_callback), which JAX lowers only for "
                "devices that are here. Leave the callbacks out for measuring"
            )
        raise RematError(f"JAX cannot lower the program for {target}: {reason}.") from e


def compile_lowered(
    lowered: Any,
    target: Target,
    options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    *,
    to_run: bool = False,
) -> Compiled:
    """Compiles a lowered program for a target, or remembers what compiling it said.

    In this process for attached devices, else in a process of its own (see `remote`).

    Args:
      options: XLA's debug options by name, as in `jax.stages.Lowered.compile`.
      timeout: seconds after which a compiler that runs in a process of its own is ended.
      to_run: whether the executable is wanted, for attached devices; it is compiled anew then.

    Raises:
      RematError: what the compiler says against the program, other than that it does not fit; a compiler that
        crashed or took too long.
    """
    options = dict(options or {})
    bytecode = mlir.module_to_bytecode(lowered.compiler_ir())
    name = cache.key(_without_places(bytecode), _identity(target), repr(sorted(options.items())))
    places = cache.key(bytecode)
    found = None if to_run else _read(cache.load(name), places)
    if found is not None:
        return found
    start = time.perf_counter()
    try:
        compiled = _here(lowered, options) if target.attached else _there(bytecode, target, options, timeout)
    except (remote.CompilerError, RuntimeError) as e:  # JAX's own error is one, and XLA raises others
        oom = out_of_memory(str(e))
        if oom is None:
            raise RematError(f"XLA cannot compile the program for {target}: {_first_line(e)}") from None
        compiled = Compiled({}, None, "", time.perf_counter() - start, oom=oom)
    kept = dataclasses.replace(compiled, executable=None)
    data = {k: v for k, v in dataclasses.asdict(kept).items() if k not in ("cached", "moved", "executable")}
    cache.store(name, {**data, "places": places, "digest": cache.key(compiled.text)})
    return compiled


def _without_places(bytecode: bytes) -> bytes:
    """A module without source lines and name stacks: what is moved within its file is still the same program."""
    with mlir.make_ir_context():
        module = ir.Module.parse(bytecode)
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        return mlir.module_to_bytecode(module)


def _here(lowered: Any, options: Mapping[str, Any]) -> Compiled:
    start = time.perf_counter()
    executable = lowered.compile(compiler_options=dict(options) or None)
    seconds = time.perf_counter() - start
    stats = executable.memory_analysis()
    memory = {k: getattr(stats, k) for k in dir(stats) if k.endswith("bytes") and not k.startswith("_")}
    cost = executable.cost_analysis()
    return Compiled(memory, dict(cost) if cost else None, executable.as_text(), seconds, executable=executable)


def _there(bytecode: bytes, target: Target, options: Mapping[str, Any], timeout: float) -> Compiled:
    assert target.chip is not None
    request: dict[str, Any] = {"topology": target.topology, "devices": target.device_count, "options": options}
    request["topology_options"] = dict(target.chip.options)
    if target.platform == "cuda":  # it has no names for topologies, and wants the device described
        request["topology"] = ""
        request["topology_options"] |= {"topology": target.topology, "target_config": target.chip.topology}
    reply, text = remote.compile_remotely(target.platform, request, bytecode, timeout)
    return Compiled(reply["memory"], reply["cost"], text, reply["seconds"])


def out_of_memory(message: str) -> OutOfMemory | None:
    """Reads the message of a compiler that found no room for a program; None for any other message.

    TPU compilers say "the total memory required ... (24.76G) exceeds available HBM (15.75G)".
    """
    found = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available \w+ \(([\d.]+)([KMGT]?)\)", message)
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        return None
    required, available = (
        int(float(number) * 1024 ** " KMGT".index(unit or " "))
        for number, unit in (found.group(1, 2), found.group(3, 4))
    )
    said = _first_line(message)
    return OutOfMemory(required, available, said[said.find("Ran out of") :] if "Ran out of" in said else said)


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:500]


@functools.cache
def _versions() -> str:
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
    return ", ".join(f"{p} {installed.version(p)}" for p in packages)


# What of JAX's configuration reaches the compiler; some are of newer versions only.
_SETTINGS = (
    *("jax_disable_most_optimizations", "jax_compiler_enable_remat_pass", "jax_optimization_level"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_effort", "jax_memory_fitting_level"),
)
_FLAGS_HERE = remote.flags()  # XLA reads them once in a process


def _identity(target: Target) -> str:
    """Everything beside the program that what is compiled depends on."""
    kinds = [d.device_kind for d in target.devices]
    chip = target.chip.topology if target.chip is not None else ""
    settings = [str(getattr(jax.config, name, None)) for name in _SETTINGS] if target.attached else []
    flags = _FLAGS_HERE if target.attached else remote.flags()
    return repr((target.platform, target.topology, target.device_count, chip, kinds, flags, settings, _versions()))


def _read(data: dict[str, Any] | None, places: str) -> Compiled | None:
    """What the cache holds, if it is one of ours."""
    if data is None or data.get("digest") != cache.key(str(data.get("text"))):
        return None
    try:
        return Compiled(
            {str(k): int(v) for k, v in data["memory"].items()},
            data["cost"] and {str(k): float(v) for k, v in data["cost"].items()},
            str(data["text"]),
            float(data["seconds"]),
            cached=True,
            moved=data["places"] != places,
            oom=_read_oom(**data["oom"]) if data["oom"] else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _read_oom(required_bytes: Any, available_bytes: Any, message: Any) -> OutOfMemory:
    return OutOfMemory(int(required_bytes), int(available_bytes), str(message))
