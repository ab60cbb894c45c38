"""The hardware that can be compiled for without having it: one table of chips, each figure with its source.

Peaks are the makers' dense figures, never reached in full; bandwidths are of main memory and of the link to the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

GiB = 2**30


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """One kind of accelerator, as JAX sees one device of it.

    Attributes:
      name: its short name, ``"v5e"``.
      title: its full name.
      platform: JAX's platform, ``"tpu"`` or ``"cuda"``.
      memory_bytes: what a program can have of its memory: for TPUs what the compiler allows, for GPUs all of it.
      bandwidth: bytes per second of its memory.
      flops: peak FLOP/s of matrix products by dtype, at JAX's default precision; see `peak`.
      host_bandwidth: bytes per second to or from the host's memory, one way.
      topology: for TPUs the smallest topology that can be compiled for, for GPUs the description of one device.
      kinds: what JAX calls such a device (`device_kind`).
      pod: the most chips that one topology has.
      options: more options of the topology.
    """

    name: str
    title: str
    platform: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    host_bandwidth: float
    topology: str
    kinds: tuple[str, ...]
    pod: int
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def has(self, size: tuple[int, ...]) -> bool:
        """Whether the chip comes in this size: a topology, or a number of GPUs."""
        if len(size) == 1:
            return size[0] <= self.pod
        if len(size) == 2:
            return "x".join(map(str, size)) in _FLAT
        small = size in ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
        return small or (all(n % 4 == 0 for n in size) and math.prod(size) <= self.pod)

    @property
    def sizes(self) -> str:
        """The sizes that it comes in, in words."""
        if self.platform == "cuda":
            return f"1 to {self.pod} GPUs"
        if self.topology.count("x") == 1:
            return ", ".join(_FLAT)
        return f"1x1x1, 2x2x1, 2x2x2, 2x2x4, 2x4x4, and multiples of 4 up to {self.pod} chips"

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype. One that the chip has no units for runs as the next wider one that it has."""
        while dtype not in self.flops and dtype != "float32":
            dtype = "float8" if dtype.startswith("float8_") else _RUNS_AS.get(dtype, "float32")
        return self.flops[dtype]


# cloud.google.com/tpu/docs/v5e and v6e, tables of configurations.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

_RUNS_AS = {"int4": "int8", "uint4": "int8", "uint8": "int8", "float8": "bfloat16", "float16": "bfloat16"}


# Memory: what the compiler itself calls available in its out-of-memory message, libtpu 0.0.42 and 0.0.52.
# Bandwidth and peaks: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, tables of key specifications.
# By default JAX multiplies float32 in one pass of bfloat16 (jax.lax.Precision.DEFAULT), hence the same figure.
# Host link: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter on TPUs: PCIe, 16 GB/s a chip, v6e 32.
def _tpu(
    name: str,
    title: str,
    memory: float,
    bandwidth: float,
    bf16: float,
    int8: float,
    host: float,
    topology: str,
    kinds: tuple[str, ...],
    pod: int,
    **more: str,
) -> Chip:
    flops = {"bfloat16": bf16, "float32": bf16, "int8": int8}
    options = MappingProxyType(dict(more))
    return Chip(name, title, "tpu", int(memory * GiB), bandwidth, flops, host, topology, kinds, pod, options)


# Peaks and bandwidth: NVIDIA's data sheets "A100 Tensor Core GPU" (80GB SXM), "H100 Tensor Core GPU" (SXM) and
# "H200 Tensor Core GPU" (SXM): dense rates, without sparsity. float32 is TF32: what JAX multiplies it in by default
# (jax.lax.Precision.DEFAULT).
# Host link: PCIe 4.0 x16 for the A100, 5.0 x16 for H100 and H200, one way.
# Memory and the fields of the device: read off such devices by XLA (its table of GPU specifications); this set of
# fields parses with JAX 0.10.2 and 0.12.0.1.
def _cuda(
    name: str,
    title: str,
    memory: int,
    bandwidth: int,
    flops: Mapping[str, float],
    host: float,
    kinds: tuple[str, ...],
    *,
    cores: int = 132,
    fpus: int = 128,
    shared: int = 233472,
    optin: int = 232448,
    l2: int = 52428800,
    clock: float = 1.98,
    capability: str = "major: 9 feature_extension: ACCELERATED_FEATURES",
) -> Chip:
    description = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024  threads_per_warp: 32
          shared_memory_per_block: 49152  shared_memory_per_core: {shared}
          threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: {fpus}
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
          memory_bandwidth: {bandwidth}  l2_cache_size: {l2}  clock_rate_ghz: {clock}
          device_memory_size: {memory}  shared_memory_per_block_optin: {optin}
          cuda_compute_capability {{ {capability} }}
          registers_per_core_limit: 65536  registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{title}"
    """
    return Chip(name, title, "cuda", memory, float(bandwidth), flops, host, description, kinds, 4096)


_HOPPER = {"bfloat16": 989.4e12, "float32": 494.7e12, "float64": 66.9e12, "int8": 1978.9e12, "float8": 1978.9e12}
_AMPERE = {"bfloat16": 312e12, "float32": 156e12, "float64": 19.5e12, "int8": 624e12}

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        f"{c.platform}:{c.name}": c
        for c in (
            # Two cores that JAX sees as one device, as on Cloud TPU v4.
            _tpu(
                *("v4", "TPU v4", 30.75, 1228e9, 275e12, 275e12, 16e9, "2x2x1", ("TPU v4",), 4096),
                chip_config_name="megacore",
            ),
            _tpu("v5e", "TPU v5e", 15.75, 819e9, 197e12, 393e12, 16e9, "2x2", ("TPU v5 lite", "TPU v5e"), 256),
            _tpu("v5p", "TPU v5p", 95.73, 2765e9, 459e12, 918e12, 16e9, "2x2x1", ("TPU v5", "TPU v5p"), 6144),
            _tpu(
                "v6e",
                "TPU v6e (Trillium)",
                31.24,
                1638e9,
                918e12,
                1836e12,
                32e9,
                "2x2",
                ("TPU v6 lite", "TPU v6e"),
                256,
            ),
            _cuda(
                "a100",
                "NVIDIA A100 80GB SXM",
                85100068864,
                2039040000000,
                _AMPERE,
                32e9,
                ("NVIDIA A100-SXM4-80GB",),
                cores=108,
                fpus=64,
                shared=167936,
                optin=166912,
                l2=41943040,
                clock=1.41,
                capability="major: 8 feature_extension: NONE",
            ),
            _cuda(
                "h100", "NVIDIA H100 80GB SXM", 84942979072, 3352320000000, _HOPPER, 64e9, ("NVIDIA H100 80GB HBM3",)
            ),
            _cuda("h200", "NVIDIA H200 141GB SXM", 151397597184, 4800000000000, _HOPPER, 64e9, ("NVIDIA H200",)),
        )
    }
)
