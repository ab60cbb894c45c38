"""What one run of a compiled program costs: FLOPs of its matrix products, and bytes moved through main memory.

Elementwise work and reductions are not counted as FLOPs, nor is what a custom call of an unknown kind does.
No cache is modelled: every operand that is read is read from memory once by each instruction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence

from remat_kit._target import hlo_loops, sharing
from remat_kit._target.hlo import Computation, Instruction, Module
from remat_kit._target.hlo_shapes import DEVICE, HOST, Shape

_PRODUCTS = re.compile(r"gemm|matmul|dot", re.IGNORECASE)  # in the target of a custom call
_NUMBERS = re.compile(r"\d{1,9}")
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([\d",]*)\]')
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all optimization-barrier domain add-dependency "
    "partition-id replica-id while conditional call async-start".split()
)
_FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")


def products(module: Module) -> dict[str, int]:
    """FLOPs of matrix products by the dtype of what they multiply: one run on one device.

    Two for each multiply-add of a product or convolution, loops multiplied. Products inside fusions and called
    computations count, and those of library calls (cuBLAS, cuDNN, oneDNN). See `hlo_loops.runs` for loops of unknown
    length.
    """
    times = hlo_loops.runs(module)
    found: dict[str, int] = {}
    for computation in module.computations.values():
        for dtype, n in _products(computation).items():
            found[dtype] = found.get(dtype, 0) + times[computation.name] * n
    return found


_DTYPES = {
    f"{a}{bits}": f"{b}{bits}"
    for a, b in {"f": "float", "s": "int", "u": "uint"}.items()
    for bits in (4, 8, 16, 32, 64)
}
_DTYPES |= {"bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}


def flops(module: Module) -> int:
    """FLOPs of all matrix products, see `products`."""
    return sum(products(module).values())


def roofline(module: Module, rate: Callable[[str], float], bandwidth: float) -> float:
    """Seconds of one run on one device, if every instruction ran at the limits of the hardware.

    Each takes the slower of its matrix products at peak rate and its memory traffic at full bandwidth, one after the
    other (Williams, Waterman and Patterson 2009, "Roofline", instruction by instruction). Asynchronous copies run
    beside them. What no product and no memory limits is not seen: latencies, elementwise arithmetic, collectives.

    Args:
      rate: FLOP/s of matrix products by dtype.
      bandwidth: bytes per second of the device's memory.
    """
    times = hlo_loops.runs(module)
    inside: dict[str, dict[str, int]] = {}

    def within(computation: Computation) -> dict[str, int]:
        """The products of a computation and of those that it calls."""
        if computation.name not in inside:
            total = dict(_products(computation))
            for i in computation.instructions:
                for callee in module.called(i):
                    for dtype, n in within(callee).items():
                        total[dtype] = total.get(dtype, 0) + n
            inside[computation.name] = total
        return inside[computation.name]

    seconds = moving = 0.0
    for computation in _scheduled(module):
        for i in computation.instructions:
            if _is_free(i):
                continue
            moved = [*_read(module, computation, i), *_written(module, computation, i)]
            memory = sum(b for b, space in moved if space == DEVICE) / bandwidth
            products = [_product(computation, i), *(p for c in module.called(i) for p in within(c).items())]
            computing = sum(n / rate(dtype) for dtype, n in products if n)
            moving += times[computation.name] * memory
            if module.called(i) or not sharing.starts(i.opcode):  # else a copy that the next ones need not wait for
                seconds += times[computation.name] * max(computing, memory)
    return max(seconds, moving)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one run moves, on one device.

    Attributes:
      read: from main memory of the device.
      written: to main memory of the device.
      from_host: read from host memory.
      to_host: written to host memory.
    """

    read: int = 0
    written: int = 0
    from_host: int = 0
    to_host: int = 0

    @property
    def device(self) -> int:
        """Bytes through the device's main memory."""
        return self.read + self.written

    @property
    def host(self) -> int:
        """Bytes over the link to the host."""
        return self.from_host + self.to_host


def traffic(module: Module) -> Traffic:
    """Bytes that the scheduled instructions of one run move, loops multiplied.

    A fusion reads its operands and writes its results. A slice reads what it takes, an update in place writes
    what it changes. Views cost nothing, and on-chip memory is not counted.
    """
    times = hlo_loops.runs(module)
    read, written = [0, 0], [0, 0]
    for computation in _scheduled(module):
        for i in computation.instructions:
            if _is_free(i):
                continue
            for total, moved in ((read, _read(module, computation, i)), (written, _written(module, computation, i))):
                for n, space in enumerate((DEVICE, HOST)):
                    total[n] += times[computation.name] * sum(b for b, s in moved if s == space)
    return Traffic(read[0], written[0], read[1], written[1])


def _is_free(i: Instruction) -> bool:
    return i.opcode in _FREE or i.opcode.endswith(("-done", "-update")) or i.custom_call_target in _FREE_TARGETS


# --- FLOPs of one instruction ---


def _products(computation: Computation) -> dict[str, int]:
    """FLOPs of a computation's own products, by dtype."""
    found: dict[str, int] = {}
    for i in computation.instructions:
        dtype, n = _product(computation, i)
        if n:
            found[dtype] = found.get(dtype, 0) + n
    return found


def _product(computation: Computation, i: Instruction) -> tuple[str, int]:
    n = _flops(computation, i)
    dtype = computation.operands(i)[0].shape.dtype if n else ""
    return _DTYPES.get(dtype, dtype), n


def _flops(computation: Computation, i: Instruction) -> int:
    operands = [o.shape for o in computation.operands(i)]
    if len(operands) < 2:
        return 0
    result = i.shape.arrays[0][1] if i.shape.arrays else i.shape
    if i.opcode == "dot":
        return 2 * result.size * _extent(operands[0], i.attributes.get("lhs_contracting_dims", ""))
    if i.opcode == "convolution":
        return _convolution(i, operands[0], operands[1], result)
    target = i.custom_call_target
    if "conv" in target.lower() and "dim_labels" in i.attributes:
        if "BackwardInput" in target:
            return _convolution(i, result, operands[1], operands[0])
        if "BackwardFilter" in target:
            return _convolution(i, operands[0], result, operands[1])
        return _convolution(i, operands[0], operands[1], result)
    if _PRODUCTS.search(target):
        named = _CONTRACTED.search(i.backend_config)
        last = operands[0].dims[-1] if operands[0].dims else 1
        return 2 * result.size * (_extent(operands[0], named[1]) if named else last)
    return 0


def _extent(shape: Shape, dimensions: str) -> int:
    numbers = [int(n) for n in _NUMBERS.findall(dimensions)]
    return math.prod(shape.dims[n] for n in numbers if n < len(shape.dims))


def _convolution(i: Instruction, image: Shape, kernel: Shape, result: Shape) -> int:
    """Two for each multiply-add at a place inside the image: products with padding do not count, as in XLA."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", i.attributes.get("dim_labels", ""))
    if labels is None or [len(g) for g in labels.groups()] != [len(s.dims) for s in (image, kernel, result)]:
        return 0
    inputs, kernels, outputs = labels.groups()
    if not {"b", "f"} <= set(inputs) or not {"i", "o"} <= set(kernels):
        return 0
    spatial = sorted(c for c in kernels if c.isdigit() and c in inputs and c in outputs)
    window = {k: v.split("x") for k, v in re.findall(r"(\w+)=([\dx_\-]+)", i.attributes.get("window", ""))}
    places = 1
    for n, label in enumerate(spatial):
        numbers = {k: v[n] for k, v in window.items() if n < len(v)}
        places *= _places(
            kernel.dims[kernels.index(label)],
            image.dims[inputs.index(label)],
            result.dims[outputs.index(label)],
            int(numbers.get("stride", "1")[:9]) or 1,
            int((numbers.get("pad", "0").split("_")[0] or "0")[:9]),
            int(numbers.get("lhs_dilate", "1")[:9]) or 1,
            int(numbers.get("rhs_dilate", "1")[:9]) or 1,
        )
    groups = _NUMBERS.match(i.attributes.get("batch_group_count", "1"))
    batch = image.dims[inputs.index("b")] // max(int(groups[0]) if groups else 1, 1)
    return 2 * batch * kernel.dims[kernels.index("i")] * kernel.dims[kernels.index("o")] * places


@functools.lru_cache(maxsize=4096)
def _places(size: int, image: int, result: int, stride: int, low: int, spread: int, dilation: int) -> int:
    """How many pairs of a kernel's place and an output's place meet an element of the (spread out) image."""
    total = 0
    common = math.gcd(stride, spread)
    period = spread // common
    inverse = pow(stride // common, -1, period) if period > 1 else 0
    for k in range(min(size, 1 << 16)):
        offset = k * dilation - low  # the image is met at stride * o + offset, a multiple of `spread`
        if offset % common:
            continue
        first = max(0, -(offset // stride))
        last = min(result - 1, ((image - 1) * spread - offset) // stride)
        phase = (-offset // common * inverse) % period
        if last >= first:
            total += (last - phase) // period - (first - 1 - phase) // period
    return total


# --- bytes of one instruction ---

_Moved = list[tuple[int, int]]  # bytes and their memory space


def _scheduled(module: Module) -> Sequence[Computation]:
    """The computations whose instructions run one by one: not those inside fusions and reductions."""
    names = {module.entry.name}
    for caller in reversed(tuple(module.computations.values())):
        if caller.name in names:
            for i in caller.instructions:
                if i.opcode in ("while", "conditional", "call", "async-start"):
                    names.update(i.called)
    return [c for c in module.computations.values() if c.name in names]


def _plain(shape: Shape) -> _Moved:
    return [(s.nbytes, s.space) for _, s in shape.arrays]


def _read(module: Module, computation: Computation, i: Instruction) -> _Moved:
    kind = i.opcode.removesuffix("-start")
    operands = computation.operands(i)
    callees = module.called(i)
    if kind == "fusion" and callees:
        return [m for n, o in enumerate(operands) for m in _read_inside(module, callees[0], n, o.shape)]
    if kind in _SLICES and operands:
        taken = _result(i).nbytes
        return [(taken, operands[0].shape.space), *(m for o in operands[1:] for m in _plain(o.shape))]
    if kind in _UPDATES and operands:
        return [m for o in operands[1:] for m in _plain(o.shape)]
    return [m for o in operands for m in _plain(o.shape)]


def _read_inside(module: Module, callee: Computation, number: int, shape: Shape) -> _Moved:
    """What a fused computation reads of one parameter: only slices of it, nothing, or all. Fusions nest."""
    names = {p.name for p in callee.parameters if p.index == number}
    total = 0
    for i in callee.instructions:
        if names.isdisjoint(i.operands):
            continue
        if i.opcode == "bitcast":
            names.add(i.name)
        elif i.opcode in _SLICES and i.operands[0] in names and names.isdisjoint(i.operands[1:]):
            total += i.shape.size * shape.bits // 8
        elif i.opcode == "fusion" and (inner := module.called(i)) and inner[0] is not callee:
            for n, operand in enumerate(i.operands):
                if operand in names:
                    total += sum(b for b, _ in _read_inside(module, inner[0], n, shape))
        elif not (i.opcode in _UPDATES and i.operands[0] in names and names.isdisjoint(i.operands[1:])):
            return _plain(shape)
    return [(min(total, shape.nbytes), shape.space)]


def _written(module: Module, computation: Computation, i: Instruction) -> _Moved:
    kind = i.opcode.removesuffix("-start")
    operands = computation.operands(i)
    result = _result(i)
    if kind in _UPDATES and len(operands) > 1:
        return [(operands[1 if kind == "dynamic-update-slice" else -1].shape.nbytes, result.space)]
    callees = module.called(i)
    if kind != "fusion" or not callees:
        return _plain(result)
    changed = [_changed(callees[0], root) for root in sharing.roots(callees[0])]
    moved = _plain(result)
    return [
        (b if c is None else min(b, c), s) for (b, s), c in zip(moved, [*changed, *[None] * len(moved)], strict=False)
    ]


def _changed(callee: Computation, root: Instruction) -> int | None:
    """Bytes that a result changes of what was there before; None where all of it is new."""
    target = sharing.behind(callee, root, ("bitcast",))
    operands = callee.operands(target)
    if target.opcode not in _UPDATES or len(operands) < 2:
        return None
    return operands[1 if target.opcode == "dynamic-update-slice" else -1].shape.nbytes


def _result(i: Instruction) -> Shape:
    """What an instruction writes: of one that only starts, without its operands and the bookkeeping."""
    if not sharing.starts(i.opcode) or i.shape.parts is None or i.opcode == "all-reduce-start":
        return i.shape
    return i.shape.at((0,) if i.opcode == "copy-start" else (1,)) or i.shape
