"""What PyTorch's activation memory budget does to a stack of GPT blocks: a peer to compare plans of remat_kit with.

    pip install 'torch==2.13.0' --index-url https://download.pytorch.org/whl/cpu
    python benchmarks/peers/torch_budget.py --layers 1 4 12 --json out.json
    python benchmarks/peers/torch_budget.py --layers 48 96      # deep stacks: one budget, for the partitioner's time

The stack is traced from fake tensors to a joint forward and backward graph by AOTAutograd, and partitioned by
`min_cut_rematerialization_partition` under each value of `torch._functorch.config.activation_memory_budget`; nothing is
compiled or run, and no accelerator is needed. Partitioner and solver (`dp`) are as `torch.compile` has them by default.
Its pattern matcher is left out, which would replace the attention that is written out here.

Each row has, read from the two graphs that the partitioner gives:

- saved: what the forward graph hands to the backward graph, each storage once, without inputs and parameters;
- recomputed: operations of the matrix products in the backward graph that are in the forward graph too;
- roofline: the time of all nodes that are recomputed, each max(FLOP / peak, bytes / bandwidth) of a TPU v5e, views
  free; *fused* counts matrix products and reductions only, as if pointwise nodes cost nothing;
- backward peak: the bytes alive at once over the backward graph, in its order, at one allocation per node. What was
  saved is alive from the start to its last use; inputs, parameters and their gradients are left out;
- partition: the seconds that the partitioner took.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import pathlib
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.fx import Graph, GraphModule, Node

MISSING = "PyTorch is missing: pip install 'torch==2.13.0' --index-url https://download.pytorch.org/whl/cpu"
BUDGETS = tuple(step / 20 for step in range(21))
DEEP = 24  # stacks of more layers are partitioned at DEEP_BUDGET only, unless budgets are given
DEEP_BUDGET = 0.2
PEAK_FLOPS, BANDWIDTH = 197e12, 819e9  # a TPU v5e: bf16 operations and bytes of HBM, a second
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    batch: int = 8
    length: int = 1024
    width: int = 1024
    heads: int = 16
    mlp: int = 4096


@dataclass(frozen=True)
class Row:
    """A line of the table; the seconds of the roofline are those of the recomputed nodes."""

    layers: int
    budget: float
    saved_bytes: int
    recompute_flops: int
    roofline_seconds_unfused: float
    roofline_seconds_fused: float
    backward_peak_bytes: int
    partition_seconds: float


# The model


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Layer norm without a bias: bf16 in and out; the decomposition computes in float32, the scale included."""
    from torch.nn.functional import layer_norm

    return layer_norm(x, (x.shape[-1],), scale)


def attention(h: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, heads: int) -> torch.Tensor:
    """Causal attention without the output projection; scores and mask in bf16, the softmax in float32."""
    import torch

    batch, length, width = h.shape
    q, k, v = ((h @ w).view(batch, length, heads, width // heads).transpose(1, 2) for w in (wq, wk, wv))
    scores = (q @ k.transpose(-1, -2)) * (width // heads) ** -0.5
    position = torch.arange(length, device=h.device)
    causal = position[:, None] >= position[None, :]
    scores = torch.where(causal, scores, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores.float(), -1).to(h.dtype)
    return (weights @ v).transpose(1, 2).reshape(batch, length, width)


def block(x: torch.Tensor, params: Sequence[torch.Tensor], heads: int) -> torch.Tensor:
    """A pre-LN GPT block; activations and parameters are bf16, and there are no biases."""
    from torch.nn.functional import gelu

    scale1, wq, wk, wv, wo, scale2, w_in, w_out = params
    x = x + attention(norm(x, scale1), wq, wk, wv, heads) @ wo
    return x + gelu(norm(x, scale2) @ w_in, approximate="tanh") @ w_out


def shapes(sizes: Sizes) -> list[tuple[int, ...]]:
    """The shapes of a block's parameters, in the order in which `block` takes them."""
    d, m = sizes.width, sizes.mlp
    return [(d,), (d, d), (d, d), (d, d), (d, d), (d,), (d, m), (m, d)]


def trace(layers: int, sizes: Sizes, table: dict[Any, Any]) -> GraphModule:
    """The joint graph of `layers` blocks, a last layer norm and a sum in float32; the first input is the data."""
    import torch
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._subclasses.fake_tensor import FakeTensorMode

    per_block = shapes(sizes)

    def loss(x: torch.Tensor, last_scale: torch.Tensor, *params: torch.Tensor) -> tuple[torch.Tensor]:
        for start in range(0, len(params), len(per_block)):
            x = block(x, params[start : start + len(per_block)], sizes.heads)
        return (norm(x, last_scale).float().sum(),)

    with FakeTensorMode():
        x = torch.empty(sizes.batch, sizes.length, sizes.width, dtype=torch.bfloat16)
        params = [
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in [(sizes.width,)] + per_block * layers
        ]
        return aot_export_joint_simple(loss, (x, *params), trace_joint=True, decompositions=table)


def decompositions(name: str) -> dict[Any, Any]:
    """Rules that break up layer norm, softmax and gelu: those of Inductor, or core ATen's with ones for these."""
    import torch

    if name == "inductor":
        from torch._inductor.decomposition import select_decomp_table

        return select_decomp_table()
    from torch._decomp import core_aten_decompositions, get_decompositions

    aten = torch.ops.aten
    norms = [aten.native_layer_norm, aten.native_layer_norm_backward]
    rest = [aten._softmax, aten._softmax_backward_data, aten.gelu, aten.gelu_backward]
    return {**core_aten_decompositions(), **get_decompositions(norms + rest)}


# The partitioner


def partition(joint: GraphModule, budget: float) -> tuple[Graph, Graph, float]:
    """The forward graph and the backward graph under a budget, and the seconds that it took; `joint` is left alone."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch, about its own copying
        joint = copy.deepcopy(joint)
    inputs = sum(is_primal(node) for node in joint.graph.nodes)
    with config.patch(activation_memory_budget=budget):
        start = time.perf_counter()
        forward, backward = min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=1, static_lifetime_input_indices=list(range(1, inputs))
        )
        seconds = time.perf_counter() - start
    return forward.graph, backward.graph, seconds


def is_primal(node: Node) -> bool:
    """Whether a node is an input of the model: data or parameter."""
    return node.op == "placeholder" and str(node.target).startswith("primals")


# Reading the graphs


def tensors(node: Node) -> list[torch.Tensor]:
    """The tensors that a node gives."""
    import torch

    value = node.meta.get("val")
    return [item for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, torch.Tensor)]


def storages(nodes: Iterable[Node]) -> dict[int, int]:
    """The bytes of each storage that the nodes give; views of one storage have one entry."""
    found = (tensor.untyped_storage() for node in nodes for tensor in tensors(node))
    return {storage._cdata: storage.nbytes() for storage in found}


def is_view(node: Node) -> bool:
    """Whether all that a node gives lies in storages of its arguments."""
    return storages([node]).keys() <= storages(node.all_input_nodes).keys()


def flops(node: Node) -> int:
    """The operations of a matrix product, two for each multiplication; 0 for other nodes."""
    from torch.fx import map_arg
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    return count(*args, **kwargs, out_val=node.meta["val"])


def bytes_moved(node: Node) -> int:
    """The bytes that a node reads and writes; what is broadcast is read once."""
    moved = [tensor for other in [node, *node.all_input_nodes] for tensor in tensors(other)]
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in moved)


def is_pointwise(node: Node) -> bool:
    """Whether a node is neither a matrix product nor a reduction, which gives less than it reads."""
    read = max((tensor.numel() for other in node.all_input_nodes for tensor in tensors(other)), default=0)
    return not flops(node) and all(tensor.numel() >= read for tensor in tensors(node))


def seconds_of(node: Node) -> float:
    """The roofline's time of one node that is not fused with others."""
    return 0.0 if is_view(node) else max(flops(node) / PEAK_FLOPS, bytes_moved(node) / BANDWIDTH)


def recomputed(forward: Graph, backward: Graph) -> list[Node]:
    """The nodes of the backward graph that are in the forward graph too; the partitioner keeps the names."""
    names = {node.name for node in forward.nodes if node.op == "call_function"}
    return [node for node in backward.nodes if node.op == "call_function" and node.name in names]


def saved_bytes(forward: Graph) -> int:
    """What the forward graph returns beside the loss, without what lies in inputs and parameters."""
    _, *saved = forward.output_node().args[0]
    given = storages(node for node in forward.nodes if is_primal(node))
    return sum(size for storage, size in storages(saved).items() if storage not in given)


def backward_peak(backward: Graph) -> int:
    """The most bytes alive at once; a node's results are there before its arguments are freed."""
    nodes = list(backward.nodes)
    apart = storages(node for node in nodes if is_primal(node)) | storages(backward.output_node().all_input_nodes)
    last = {}
    for index, node in enumerate(nodes):
        last |= dict.fromkeys(storages([node, *node.all_input_nodes]), index)
    ends: list[list[int]] = [[] for _ in nodes]
    for storage, index in last.items():
        ends[index].append(storage)

    alive = {key: size for key, size in storages(backward.find_nodes(op="placeholder")).items() if key not in apart}
    now = peak = sum(alive.values())
    for node, ending in zip(nodes, ends, strict=True):
        for storage, size in storages([node]).items():
            if node.op == "call_function" and storage not in alive and storage not in apart:
                alive[storage] = size
                now += size
        peak = max(peak, now)
        now -= sum(alive.pop(storage, 0) for storage in ending)
    return peak


# The benchmark


def measure(layers: int, budgets: Iterable[float], table: dict[Any, Any]) -> Iterable[Row]:
    """The rows of one stack, as they are there."""
    joint = trace(layers, Sizes(), table)
    for budget in budgets:
        forward, backward, seconds = partition(joint, budget)
        again = recomputed(forward, backward)
        yield Row(
            layers=layers,
            budget=budget,
            saved_bytes=saved_bytes(forward),
            recompute_flops=sum(map(flops, again)),
            roofline_seconds_unfused=sum(map(seconds_of, again)),
            roofline_seconds_fused=sum(seconds_of(node) for node in again if not is_pointwise(node)),
            backward_peak_bytes=backward_peak(backward),
            partition_seconds=seconds,
        )


def show(row: Row) -> None:
    cells = (
        f"{row.layers}",
        f"{row.budget:g}",
        f"{row.saved_bytes / MIB:.0f}",
        f"{row.recompute_flops / 1e9:.0f}",
        f"{row.roofline_seconds_unfused * 1e3:.2f}",
        f"{row.roofline_seconds_fused * 1e3:.2f}",
        f"{row.backward_peak_bytes / MIB:.0f}",
        f"{row.partition_seconds:.2f}",
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PyTorch's activation memory budget on a stack of GPT blocks.")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 12])
    parser.add_argument(
        "--budgets", type=float, nargs="+", help=f"default: 0 to 1 by 0.05; {DEEP_BUDGET} for more than {DEEP} layers"
    )
    parser.add_argument(
        "--decompositions",
        choices=["inductor", "core"],
        default="inductor",
        help="what breaks up layer norm, softmax and gelu: the rules of torch.compile (default), or core ATen's",
    )
    parser.add_argument("--json", type=pathlib.Path, help="a file to write the rows to")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        import torch
    except ModuleNotFoundError:
        sys.exit(MISSING)

    table = decompositions(args.decompositions)
    partition(trace(1, Sizes(batch=1, length=8, width=16, heads=2, mlp=32), table), 0.5)  # PyTorch loads much at first

    print(f"PyTorch {torch.__version__}, decompositions: {args.decompositions}\n")
    print(
        "| layers | budget | saved MiB | recomputed GFLOP | unfused ms | fused ms | backward peak MiB | partition s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for layers in args.layers:
        for row in measure(layers, args.budgets or (BUDGETS if layers <= DEEP else (DEEP_BUDGET,)), table):
            show(row)
            rows.append(dataclasses.asdict(row))
    if args.json:
        result = {
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "decompositions": args.decompositions,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
