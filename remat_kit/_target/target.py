"""What to compile for: the attached devices, or a named chip and topology without one."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from remat_kit._errors import RematError, near_matches
from remat_kit._target import installed
from remat_kit._target.chips import CHIPS, Chip


@dataclasses.dataclass(frozen=True)
class Target:
    """A set of devices that programs are compiled for; made by `remat_kit.target`.

    Attributes:
      spec: its name: ``"tpu:v5e:4x4"``.
      platform: JAX's platform: ``"cpu"``, ``"tpu"``, ``"cuda"``.
      device_count: how many devices it has. A program without shardings takes one.
      memory_bytes: what a program can have of one device's memory; None where nobody tells.
      chip: its figures; None for devices that the table of chips does not have.
      topology: what XLA is told of the devices that are not there; empty for attached ones.
    """

    spec: str
    platform: str
    device_count: int
    memory_bytes: int | None
    chip: Chip | None = dataclasses.field(default=None, repr=False)
    topology: str = dataclasses.field(default="", repr=False)

    @property
    def attached(self) -> bool:
        """Whether these devices are here, so that programs can be run and timed."""
        return not self.topology

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices, where attached."""
        return _attached(self.spec) if self.attached else ()

    def mesh(
        self, axis_names: Sequence[str], shape: Sequence[int], axis_types: Sequence[AxisType] | None = None
    ) -> Mesh | AbstractMesh:
        """The mesh to put `jax.sharding.NamedSharding`s of this target's arguments on.

        Args:
          axis_names: names of its axes.
          shape: sizes of its axes; their product is at most the number of devices.
          axis_types: as in `jax.make_mesh`; all ``Auto`` by default.

        Returns:
          A `Mesh` of the attached devices, or an `AbstractMesh` where there are none: `NamedSharding`,
          `with_sharding_constraint` and `shard_map` take both.

        Raises:
          RematError: for more devices than the target has, or names and shape of different lengths.
        """
        try:
            names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
            sizes = tuple(operator.index(n) for n in (shape if isinstance(shape, Iterable) else (shape,)))
        except TypeError:
            raise RematError(f"a mesh has axis names and whole sizes; got {axis_names!r} and {shape!r}.") from None
        if len(names) != len(sizes) or len(set(names)) < len(names) or not all(n > 0 for n in sizes):
            raise RematError(
                f"a mesh has a positive size for each of its distinct axis names; got {names} and {sizes}."
            )
        n = math.prod(sizes)
        if n > self.device_count:
            if self.attached:
                hint = "more of the CPU's: jax_num_cpu_devices" if self.platform == "cpu" else "no more are attached"
            else:
                hint = f"name a larger target, such as {'cuda:h100:8' if self.platform == 'cuda' else 'tpu:v5e:4x4'!r}"
            raise RematError(
                f"a mesh {dict(zip(names, sizes, strict=True))} needs {n} devices, but {self} has {self.device_count}: "
                f"{hint}."
            )
        try:
            types = tuple(axis_types) if axis_types is not None else (AxisType.Auto,) * len(sizes)
            if self.attached:
                return jax.make_mesh(sizes, names, axis_types=types, devices=self.devices[:n])
            return AbstractMesh(sizes, names, axis_types=types)
        except (TypeError, ValueError) as e:
            raise RematError(f"mesh: {e}") from e

    def __str__(self) -> str:
        return self.spec


@dataclasses.dataclass(frozen=True)
class TargetInfo:
    """One line of `remat_kit.targets`: what can be compiled for, or what is missing.

    Attributes:
      spec: what `remat_kit.target` takes.
      title: the device's full name.
      memory_bytes: what a program can have of one device's memory.
      missing: what to install; empty if nothing is missing.
    """

    spec: str
    title: str
    memory_bytes: int | None
    missing: str = ""

    @property
    def usable(self) -> bool:
        return not self.missing

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {**dataclasses.asdict(self), "usable": self.usable}


def target(spec: str | Target) -> Target:
    """What to compile for.

    Args:
      spec: ``"local"`` (the attached devices that JAX uses by default), ``"cpu"``, or a chip that need not be here:
        ``"tpu:v5e"`` (one chip; also v4, v5p, v6e), ``"tpu:v5e:4x4"`` (a topology), ``"cuda:h100"`` (one GPU; also
        h200, a100), ``"cuda:h100:8"`` (eight of them). A `Target` passes as it is.

    Raises:
      RematError: for an unknown target, or one that needs a package that is not installed (named in the message).
    """
    if isinstance(spec, Target):
        return spec
    if not isinstance(spec, str):
        raise RematError(f"a target is a string such as 'tpu:v5e', got {type(spec).__name__}: {spec!r:.80}")
    if spec in ("local", "cpu"):
        return _attached_target(spec)
    name, size = _parse(spec)
    chip = CHIPS[name]
    missing = installed.missing(chip.platform)
    if missing:
        raise RematError(f"target {spec!r} cannot be compiled for here: {missing}.")
    if chip.platform == "cuda":
        n = math.prod(size)
        return Target(spec, "cuda", n, int(chip.memory_bytes * _gpu_fraction()), chip, f"1x1x{n}")
    # One chip is the first of the smallest topology's.
    topology = chip.topology if math.prod(size) == 1 else "x".join(map(str, size))
    return Target(spec, "tpu", math.prod(size), chip.memory_bytes, chip, f"{chip.name}:{topology}")


def targets() -> tuple[TargetInfo, ...]:
    """Everything that can be compiled for by name, and what to install for what cannot be here."""
    out = []
    for name in ("local", "cpu"):
        here = _attached_target(name)
        kinds = sorted({d.device_kind for d in here.devices})
        out.append(TargetInfo(name, f"{here.device_count} x {', '.join(kinds)} (attached)", here.memory_bytes))
    for name, chip in CHIPS.items():
        share = _gpu_fraction() if chip.platform == "cuda" else 1
        out.append(TargetInfo(name, chip.title, int(chip.memory_bytes * share), installed.missing(chip.platform)))
    return tuple(out)


def _parse(spec: str) -> tuple[str, tuple[int, ...]]:
    """From ``"tpu:v5e:4x4"`` to the chip's name and its size: a topology, or a number of GPUs."""
    platform, _, rest = spec.partition(":")
    chip, _, size = rest.partition(":")
    name = f"{platform}:{chip}"
    if name not in CHIPS:
        known = ("local", "cpu", *CHIPS)
        raise RematError(f"unknown target {spec!r:.80}. Known: {', '.join(known)}.{near_matches(name[:80], known)}")
    known = CHIPS[name]
    dims = 1 if platform == "cuda" else len(known.topology.split("x"))
    if not size:
        return name, (1,) * dims
    # At most six digits: larger ones are no machine, and int() would take its time.
    found = re.fullmatch(r"[1-9]\d{0,5}" + r"x[1-9]\d{0,5}" * (dims - 1), size)
    sizes = tuple(map(int, size.split("x"))) if found else ()
    if not sizes or not known.has(sizes):
        raise RematError(f"target {spec!r:.80}: {size!r:.80} is no size of a {name}. It comes as {known.sizes}.")
    return name, sizes


@functools.cache
def _attached(spec: str) -> tuple[Any, ...]:
    return tuple(jax.local_devices(backend="cpu") if spec == "cpu" else jax.local_devices())


def _attached_target(spec: str) -> Target:
    devices = _attached(spec)
    first = devices[0]
    return Target(spec, platform_of(first), len(devices), _memory_of(first), _chip_of(first))


def _memory_of(device: Any) -> int | None:
    """Bytes that JAX's allocator can hand out on an attached device: for the CPU, the machine's memory."""
    if device.platform == "cpu":
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):  # Windows
            return None
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:
        return None


def _chip_of(device: Any) -> Chip | None:
    return next((c for c in CHIPS.values() if device.device_kind in c.kinds), None)


def platform_of(device: Any) -> str:
    """The platform of a device in this package's words: JAX calls both makers' GPUs ``"gpu"``."""
    version = str(getattr(device.client, "platform_version", "")).lower()
    return "cuda" if device.platform == "gpu" and "cuda" in version else device.platform


def _gpu_fraction() -> float:
    """The share of a GPU's memory that JAX's allocator takes: three quarters unless the environment says more.

    JAX's documentation, "GPU memory allocation".
    """
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        try:
            fraction = float(os.environ.get(name, ""))
        except ValueError:
            continue
        if 0 < fraction <= 1:
            return fraction
    return 0.75
