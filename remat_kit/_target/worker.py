"""The process that compiles for chips that are not there: lowered programs in, XLA's figures out.

Run as a script, of JAX and the standard library alone, so that a compiler that crashes or holds a lock takes nobody
with it. `remote.py` starts it with the environment that libtpu and the CUDA plugin want, and speaks with it over a
pipe: a request is JSON and the program's MLIR bytecode, a reply is JSON and the text of the optimized module.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

# Where the process that asks finds its packages; behind the standard library, which a user's files may shadow.
sys.path.extend(p for p in os.environ.get("REMAT_KIT_PATH", "").split(os.pathsep) if p and p not in sys.path)

import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.interpreters import mlir  # noqa: E402
from jaxlib import _jax  # type: ignore  # noqa: E402  # the compiler's options have no public home. JAX 0.10.2 to 0.12.0.1
from jaxlib.mlir import ir  # noqa: E402

_UNSHARDED = ("sdy.sharding", "mhlo.sharding")


@functools.cache
def _topology(platform: str, name: str, options: str) -> Any:
    return topologies.get_topology_desc(name, platform=platform, **json.loads(options))


def devices(request: dict[str, Any]) -> tuple[Any, ...]:
    """The devices of the topology that a request names, in the order of their ids."""
    name = request["topology"]
    found = _topology(request["platform"], name, json.dumps(request.get("topology_options", {}))).devices
    return tuple(sorted(found, key=lambda d: d.id))


def compile_module(request: dict[str, Any], bytecode: bytes) -> tuple[dict[str, Any], str]:
    """Compiles one module for as many of the topology's devices as it has partitions."""
    with mlir.make_ir_context():
        module = ir.Module.parse(bytecode)
        partitions = _partitions(module)
        found = devices(request)
        if partitions > request["devices"]:  # the topology may have more
            raise ValueError(f"the program is split over {partitions} devices, the target has {request['devices']}")
        options = _options(module, found[:partitions], request.get("options", {}))
        start = time.perf_counter()
        executable = found[0].client.compile(module, _jax.DeviceList(found[:partitions]), options)
        seconds = time.perf_counter() - start
    return _facts(executable, seconds), executable.hlo_modules()[0].to_string()


def _partitions(module: Any) -> int:
    """Over how many devices a module is split: those of its largest mesh.

    JAX's own figure leaves out meshes that no argument lies on, as of a `shard_map` of unsharded arguments.
    """
    written = ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value
    meshes = [str(op) for op in module.body.operations if op.operation.name == "sdy.mesh"]
    sizes = [math.prod(map(int, re.findall(r'"=(\d+)', mesh.partition("{")[0]))) for mesh in meshes]
    return max(written, *sizes) if sizes else written


def _options(module: Any, found: tuple[Any, ...], overrides: dict[str, Any]) -> Any:
    """The options that `jax.jit` would compile the module with, JAX's settings of effort and level left alone."""
    options = _jax.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(found)
    options.device_assignment = _jax.DeviceAssignment.create(np.array([[d.id for d in found]]))
    options.env_option_overrides = list(overrides.items())
    build = options.executable_build_options
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    # As in JAX: what has no sharding gets the one that the partitioner finds.
    inputs, outputs = _unsharded(module)
    build.allow_spmd_sharding_propagation_to_parameters = inputs
    build.allow_spmd_sharding_propagation_to_output = outputs
    return options


def _unsharded(module: Any) -> tuple[list[bool], list[bool]]:
    """Which inputs and outputs of a module's main function have no sharding of their own."""
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")

    def free(attributes: Any) -> list[bool]:
        return [not any(name in a for name in _UNSHARDED) for a in attributes]

    return free(main.arg_attrs), free(main.attributes["res_attrs"]) if "res_attrs" in main.attributes else [True]


def _facts(executable: Any, seconds: float) -> dict[str, Any]:
    memory = executable.get_compiled_memory_stats()
    sizes = {k: getattr(memory, k) for k in dir(memory) if k.endswith("bytes") and not k.startswith("_")}
    try:
        cost = executable.cost_analysis()
    except Exception:  # the CUDA plugin has none without a device
        cost = None
    return {"memory": sizes, "cost": cost, "seconds": seconds}


def serve(connection: Connection) -> None:
    """Answers requests until the other side closes."""
    while True:
        try:
            request, bytecode = json.loads(connection.recv_bytes()), connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            reply, text = compile_module(request, bytecode)
        except Exception as e:  # told to the caller, who knows what was asked
            reply, text = {"error": str(e), "type": type(e).__name__}, ""
        connection.send_bytes(json.dumps(reply).encode())
        connection.send_bytes(text.encode())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
