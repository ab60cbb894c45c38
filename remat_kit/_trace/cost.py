"""What an equation costs to run: FLOPs, transcendentals and bytes, nested programs and trip counts included.

Counted from shapes alone, before any compiler: no fusion, no common subexpressions, no matmul passes per precision.
Per device wherever the program's types tell: inside a shard_map and with explicit sharding. How the compiler
partitions anything else cannot be seen here, and counts as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from remat_kit._trace.jaxprs import Call, CallKind, JaxprEqn, calls, nbytes, op_of, opened, shard_shape
from remat_kit._trace.op_costs import FREE, MATMULS, RULES, Cost, dtype, size

__all__ = ["Cost", "eqn_cost", "eqn_flops", "is_matmul", "program_cost"]


def program_cost(jaxpr: Any) -> Cost:
    """The cost of one run of a program, closed or open.

    Remembered by object for as long as the program lives, as identical layers share one.
    """
    program = opened(jaxpr)
    cost = _programs.get(program)
    if cost is None:
        cost = _programs[program] = _total(eqn_cost(e) for e in program.eqns)
    return cost


_programs: weakref.WeakKeyDictionary[Any, Cost] = weakref.WeakKeyDictionary()


def eqn_cost(eqn: JaxprEqn) -> Cost:
    """The cost of one run of an equation.

    Conventions, as XLA's HloCostAnalysis where nothing else is said; a complex number is one element, as there:
      matmuls: 2 per multiply-add, `2 * batch * M * N * K`. Convolutions likewise, taps on padding and on the holes
        of dilation left out.
      elementwise (compare, select and type conversion too): 1 per output element; functions that XLA expands count
        the operations of its expansion. Rounding to a type's own precision, as remat marks what it saves, is none.
      reductions: one operation less than elements, per result. Cumulative ones likewise (XLA takes more).
      sort: one comparison per element and level, `n * log2(n)`.
      scatter with a combination: 1 per update element; slices, gathers and other data movement: bytes only.
      random bits: integer operations, 120 per Threefry block and 25 per Philox word (see `op_costs`).
      fft: `5 n log2(n)`, half for real data (the customary operation count of FFT benchmarks).
      linear algebra: leading orders as in Golub and Van Loan, Matrix Computations; the constants of iterative
        algorithms (eigenvalues, SVD) are averages, so not exact.
      collectives: sums and the like 1 per operand element; bytes are those of operands and results.
      jit, remat and custom rules: their body, a custom_vjp's being the function without its forward rule.
      scan: its body times its length. While: condition and body once, not exact. Cond: the costliest branch.
      shard_map: its body, so the work of one device. Explicit sharding: the work divided among the devices of all
        mesh axes that split an operand or a result.
      Pallas: the kernel's own cost estimate, else its body times its grid; never exact.
      unknown primitives: 1 per output element, not exact.

    Bytes are those of operands and results. Names, reshapes and other aliases move none; slices, gathers, updates
    and scatters move what they touch, not the array that they touch it in.
    """
    op = op_of(eqn)
    if op in FREE or op.endswith("_done") or _is_alias(eqn, op):
        return Cost()
    if op == "pallas_call":
        return _pallas(eqn)
    rule = RULES.get(op) or RULES.get(op.removesuffix("_start"))
    if rule is not None:
        computed = rule(eqn)
        if op in _COMBINING:  # the rule says how often their program runs
            computed = dataclasses.replace(program_cost(eqn.params["jaxpr"]) * computed.flops, bytes=0)
    elif nested := calls(eqn):
        return _nested(op, nested)
    else:
        computed = Cost(sum(map(size, eqn.outvars)), exact=False)
    n = _devices(eqn)
    return Cost(-(-computed.flops // n), _traffic(eqn, op), -(-computed.transcendentals // n), computed.exact)


def eqn_flops(eqn: JaxprEqn) -> int:
    """The FLOPs of one run of an equation, see `eqn_cost`."""
    return eqn_cost(eqn).flops


def is_matmul(eqn: JaxprEqn) -> bool:
    """Whether an equation runs on matrix units: a dot, a convolution or one of their scaled and ragged kin."""
    return op_of(eqn) in MATMULS


def matmul_flops(jaxpr: Any) -> int:
    """The FLOPs of a program's matrix products alone, trip counts included."""
    program = opened(jaxpr)
    total = _products.get(program)
    if total is None:
        total = _products[program] = sum(map(_product_flops, program.eqns))
    return total


_products: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _product_flops(eqn: JaxprEqn) -> int:
    if is_matmul(eqn):
        return eqn_cost(eqn).flops
    nested = _running(op_of(eqn), calls(eqn))
    found = [matmul_flops(c.jaxpr) * c.trips for c in nested]
    return max(found, default=0) if nested and nested[0].kind is CallKind.COND else sum(found)


# Nested programs ----------------------------------------------------------------------------------

# Programs that stand beside the one that runs (transposes, rules): which one runs.
_RUNS = {
    "custom_linear_solve": ("jaxprs", 2),  # matvec, vecmat, solve, transpose_solve
    "linear_call": ("callee", None),
    "custom_vmap_call": ("call", None),
    "custom_partitioning": ("call", None),
    "composite": ("jaxpr", None),
    "remat_opt": ("fwd_jaxpr", None),
    "xla_metadata_call": ("jaxpr", None),
}

_COMBINING = {"reduce", "reduce_window"}  # their program joins two elements


def _nested(op: str, nested: Sequence[Call]) -> Cost:
    costs = [program_cost(c.jaxpr) * c.trips for c in nested]
    if nested[0].kind is CallKind.COND:
        return functools.reduce(Cost.or_costlier, costs)
    if nested[0].kind is CallKind.WHILE:
        return _total(costs) + Cost(exact=False)
    if nested[0].kind is not CallKind.OPAQUE:
        return _total(costs)
    total = _total(program_cost(c.jaxpr) * c.trips for c in _running(op, nested))
    return total if any(c.key == _RUNS.get(op) for c in nested) else total + Cost(exact=False)


def _running(op: str, nested: Sequence[Call]) -> Sequence[Call]:
    """Those of an equation's programs that run, as far as is known: others are its transposes and rules."""
    return [c for c in nested if c.key == _RUNS.get(op)] or nested


def _pallas(eqn: JaxprEqn) -> Cost:
    estimate, moved = eqn.params.get("cost_estimate"), _traffic(eqn, "pallas_call")
    if estimate is not None:
        flops, exps = int(estimate.flops), int(estimate.transcendentals)
        return Cost(flops + exps, int(estimate.bytes_accessed) or moved, exps, exact=False)
    steps = math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    body = _total(program_cost(c.jaxpr) for c in calls(eqn)) * steps
    return dataclasses.replace(body, bytes=moved, exact=False)  # what the body moves stays on the chip


def _total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


# Bytes --------------------------------------------------------------------------------------------

_READS_A_PART = {"slice", "dynamic_slice", "gather", "get"}
_WRITES_A_PART = {"dynamic_update_slice": (1, 2), "swap": (1, 2), "addupdate": (1, 3)}  # operand, times it is moved


def _traffic(eqn: JaxprEqn, op: str) -> int:
    """Bytes read and written by one run of an equation alone."""
    reads = [_local_bytes(v.aval) for v in eqn.invars]
    writes = sum(_local_bytes(v.aval) for v in eqn.outvars)
    if op in _READS_A_PART:
        return 2 * writes + sum(reads[1:])
    if op.startswith("scatter"):
        return sum(reads[1:]) + (1 if op == "scatter" else 2) * reads[2]
    if op in _WRITES_A_PART:
        operand, times = _WRITES_A_PART[op]
        return sum(reads[1:]) + (times - 1) * reads[operand]
    return sum(reads) + writes


def _local_bytes(aval: Any) -> int:
    whole = nbytes(aval)
    return whole and whole * math.prod(shard_shape(aval)) // math.prod(aval.shape)


def _devices(eqn: JaxprEqn) -> int:
    """Among how many devices explicit sharding divides an equation: 1 where the types say nothing."""
    split: dict[str, int] = {}
    for v in (*eqn.invars, *eqn.outvars):
        sharding: Any = getattr(v.aval, "sharding", None)
        for names in getattr(sharding, "spec", None) or ():
            for name in names if isinstance(names, tuple) else (names,):
                if isinstance(name, str):  # neither None nor UNCONSTRAINED
                    split[name] = sharding.mesh.shape[name]
    return math.prod(split.values())


def _is_alias(eqn: JaxprEqn, op: str) -> bool:
    """Whether an equation that can move data leaves it as it is."""
    if op == "broadcast_in_dim":
        return size(eqn.invars[0]) == size(eqn.outvars[0])
    if op == "reduce_precision":
        # To its own precision, as `jax.checkpoint` marks what it saves: the same numbers.
        own = jnp.finfo(dtype(eqn.outvars[0]))
        return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (own.nexp, own.nmant)
    return op == "convert_element_type" and dtype(eqn.invars[0]) == dtype(eqn.outvars[0])
