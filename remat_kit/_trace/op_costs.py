"""What each primitive computes: FLOPs and transcendentals of one equation, from its shapes and parameters.

Each rule takes an equation without nested programs and leaves its bytes to `cost`, where the conventions stand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from remat_kit._trace.jaxprs import JaxprEqn, nbytes


@dataclasses.dataclass(frozen=True)
class Cost:
    """What running something once costs.

    Attributes:
      flops: operations, integer ones included. Multiply and add count apart; a transcendental counts as one.
      bytes: read and written if nothing is fused: an upper bound.
      transcendentals: how many of `flops` are exp, tanh, sqrt and their like. XLA's cost analysis reports these
        beside its flops, so that ours correspond to the sum of the two.
      exact: whether shapes decide the figure. False with a while loop (counted as one iteration), branches that
        differ (the costliest is counted), iterative algorithms, and kernels or primitives that are not known.
    """

    flops: int = 0
    bytes: int = 0
    transcendentals: int = 0
    exact: bool = True

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.transcendentals + other.transcendentals,
            self.exact and other.exact,
        )

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times, self.transcendentals * times, self.exact)

    __rmul__ = __mul__

    def or_costlier(self, other: Cost) -> Cost:
        """The cost of running one or the other, unknown which: the larger of each figure."""
        return Cost(
            max(self.flops, other.flops),
            max(self.bytes, other.bytes),
            max(self.transcendentals, other.transcendentals),
            self == other and self.exact,
        )


def shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def size(v: Any) -> int:
    return math.prod(v.aval.shape) if hasattr(v.aval, "shape") else 0  # tokens have no shape


def dtype(v: Any) -> Any:
    return getattr(v.aval, "dtype", None)


# Matmuls ------------------------------------------------------------------------------------------


def _dot(eqn: JaxprEqn) -> Cost:
    (_, rhs_contract), (_, rhs_batch) = eqn.params["dimension_numbers"]
    return _lhs_by_free(eqn, {*rhs_contract, *rhs_batch})


def _ragged_dot(eqn: JaxprEqn) -> Cost:
    """Each row of the left side meets one group only, so groups don't multiply the work."""
    ragged = eqn.params["ragged_dot_dimension_numbers"]
    (_, rhs_contract), (_, rhs_batch) = ragged.dot_dimension_numbers
    return _lhs_by_free(eqn, {*rhs_contract, *rhs_batch, *ragged.rhs_group_dimensions})


def _scaled_matmul(eqn: JaxprEqn) -> Cost:
    return _lhs_by_free(eqn, {0, 2})  # (batch, M, K) by (batch, N, K), then scales


def _lhs_by_free(eqn: JaxprEqn, rhs_shared: set[int]) -> Cost:
    free = math.prod(n for i, n in enumerate(shape(eqn.invars[1])) if i not in rhs_shared)
    return Cost(2 * size(eqn.invars[0]) * free)


def _conv(eqn: JaxprEqn) -> Cost:
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs, out = (shape(v) for v in (*eqn.invars, eqn.outvars[0]))
    taps = 1
    for d, (low, _) in enumerate(p["padding"]):
        length, kernel = lhs[numbers.lhs_spec[d + 2]], rhs[numbers.rhs_spec[d + 2]]
        result = out[numbers.out_spec[d + 2]]
        taps *= _taps(length, kernel, result, p["window_strides"][d], low, p["lhs_dilation"][d], p["rhs_dilation"][d])
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    return Cost(2 * batch * features * rhs[numbers.rhs_spec[1]] * taps)  # the kernel holds a group's inputs only


@functools.lru_cache(maxsize=4096)
def _taps(length: int, kernel: int, result: int, stride: int, low: int, lhs_dilation: int, rhs_dilation: int) -> int:
    """Pairs of a result and a kernel position that meet an element, not padding or a hole, along one dimension."""
    last = (length - 1) * lhs_dilation
    (few, few_step), (many, step) = sorted([(kernel, rhs_dilation), (result, stride)])
    count = 0
    for i in range(few):
        at = i * few_step - low
        start, stop = max(0, -(at // step)), min(many - 1, (last - at) // step)  # 0 <= at + j * step <= last
        for r in range(lhs_dilation):
            if (at + r * step) % lhs_dilation == 0 and start <= stop:
                count += (stop - r) // lhs_dilation - (start - 1 - r) // lhs_dilation
    return count


def _attention(eqn: JaxprEqn) -> Cost:
    """A fused attention kernel: two products and a softmax over all pairs, masked ones too."""
    query, key = eqn.invars[:2]
    heads_first = eqn.params.get("layout") == 1
    pairs = size(query) // shape(query)[-1] * shape(key)[2 if heads_first else 1]
    return Cost(4 * pairs * shape(query)[-1] + 5 * pairs, transcendentals=pairs)


MATMULS: dict[str, Callable[[JaxprEqn], Cost]] = {
    "dot_general": _dot,
    "scaled_dot": _dot,
    "ragged_dot_general": _ragged_dot,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
    "conv_general_dilated": _conv,
}

# Elementwise --------------------------------------------------------------------------------------

_ONE = """abs add add_any addupdate and ceil clamp clz complex convert_element_type div eq eq_to floor ge gt imag
is_finite le le_to lt lt_to lu_pivots_to_permutation max min mul mulhi ne neg not or population_count real reciprocal
reduce_precision rem round select_n shift_left shift_right_arithmetic shift_right_logical sign square
stochastic_round sub xor""".split()
_ONE_TRANSCENDENTAL = "atan atan2 cbrt cos erf exp expm1 log log1p pow rsqrt sin sqrt tan tanh".split()

# Operations and transcendentals of XLA's expansion in float32 (its cost analysis on a CPU, JAX 0.10.2).
_EXPANDED = {
    "acos": (3, 2), "acosh": (7, 4), "asin": (5, 2), "asinh": (11, 3), "atanh": (6, 2), "bessel_i0e": (83, 1),
    "bessel_i1e": (83, 1), "conj": (4, 0), "cosh": (3, 2), "digamma": (73, 3), "erf_inv": (37, 2), "erfc": (60, 1),
    "exp2": (1, 1), "iota_2x32_shape": (2, 0), "lgamma": (52, 4), "log2": (1, 1), "logistic": (3, 1),
    "nextafter": (23, 0), "one_minus_square": (2, 0), "sinh": (10, 3),
}  # fmt: skip

# Series and samplers that run until they converge: one pass of theirs.
_ITERATED = {
    "igamma": (268, 6), "igammac": (268, 6), "igamma_grad_a": (268, 6), "polygamma": (254, 19),
    "random_gamma": (500, 10), "random_gamma_grad": (522, 10), "regularized_incomplete_beta": (300, 10),
    "zeta": (122, 11),
}  # fmt: skip


def _elementwise(operations: int, transcendentals: int, exact: bool = True) -> Callable[[JaxprEqn], Cost]:
    def rule(eqn: JaxprEqn) -> Cost:
        n = size(eqn.outvars[0]) if eqn.outvars else size(eqn.invars[1])  # addupdate has a value and no result
        return Cost((operations + transcendentals) * n, 0, transcendentals * n, exact)

    return rule


def _polynomial(eqn: JaxprEqn) -> Cost:
    """Horner's rule, a multiplication and an addition per degree."""
    return Cost(2 * max(len(eqn.invars) - 2, 0) * size(eqn.outvars[0]))


def _integer_pow(eqn: JaxprEqn) -> Cost:
    """Multiplications by repeated squaring, and a division for a negative power."""
    y = eqn.params["y"]
    multiplications = max(0, abs(y).bit_length() - 1 + abs(y).bit_count() - 1)
    return Cost((multiplications + (y < 0)) * size(eqn.outvars[0]))


# Reductions, windows, sorting -----------------------------------------------------------------------


def _reduce(eqn: JaxprEqn) -> Cost:
    return Cost(max(0, size(eqn.invars[0]) - size(eqn.outvars[0])))  # an empty axis sums to a constant


def _cumulative(eqn: JaxprEqn) -> Cost:
    n = shape(eqn.invars[0])[eqn.params["axis"]]
    return Cost(size(eqn.invars[0]) // max(n, 1) * max(n - 1, 0))


def _cumlogsumexp(eqn: JaxprEqn) -> Cost:
    n = _cumulative(eqn).flops
    return Cost(10 * n, transcendentals=2 * n)  # a logaddexp each: exp, log1p and eight more in XLA


def _window(eqn: JaxprEqn) -> Cost:
    return Cost(size(eqn.outvars[0]) * (math.prod(eqn.params["window_dimensions"]) - 1))


def _select_window(eqn: JaxprEqn) -> Cost:
    """Pooling's derivative: for each window a selection among its elements and one addition."""
    return Cost(size(eqn.invars[0]) * math.prod(eqn.params["window_dimensions"]))


def _select_and_gather(eqn: JaxprEqn) -> Cost:
    return Cost(size(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"]))


def _sort(eqn: JaxprEqn) -> Cost:
    n = shape(eqn.invars[0])[eqn.params["dimension"]]
    return Cost(size(eqn.invars[0]) * _levels(n))


def _top_k(eqn: JaxprEqn) -> Cost:
    """A heap of k."""
    return Cost(size(eqn.invars[0]) * _levels(eqn.params["k"] + 1))


def _search_sorted(eqn: JaxprEqn) -> Cost:
    """Bisection: a comparison, a midpoint and a choice per level."""
    return Cost(3 * size(eqn.outvars[0]) * _levels(max(shape(eqn.invars[0])) + 1))


def _nonzero(eqn: JaxprEqn) -> Cost:
    """A comparison, a running count and a scatter."""
    return Cost(3 * size(eqn.invars[0]))


def _levels(n: int) -> int:
    return max(n - 1, 0).bit_length()  # ceil(log2(n))


def _per_update(eqn: JaxprEqn) -> Cost:
    return Cost(size(eqn.invars[2]))


def _all_operands(eqn: JaxprEqn) -> Cost:
    return Cost(sum(map(size, eqn.invars)))


def _nothing(eqn: JaxprEqn) -> Cost:
    return Cost()


# Random bits ----------------------------------------------------------------------------------------

_THREEFRY_BLOCK = 120  # 20 rounds of add, rotate (3) and xor; 5 key injections of 3; 4 to begin: rounded up
_PHILOX_WORD = 25  # 10 rounds of 4 products, 4 xors, 2 additions, for 4 words


def _random_bits(eqn: JaxprEqn) -> Cost:
    """JAX's partitionable threefry takes a block per element, whatever its width; rbg keys make Philox words."""
    (out,) = eqn.outvars
    if "fry" in str(dtype(eqn.invars[0])):
        return Cost(size(out) * _THREEFRY_BLOCK)
    return Cost(-(-nbytes(out.aval) // 4) * _PHILOX_WORD)


def _new_keys(eqn: JaxprEqn) -> Cost:
    return Cost(sum(nbytes(v.aval) for v in eqn.outvars) // 8 * _THREEFRY_BLOCK)


def _words(cost: int) -> Callable[[JaxprEqn], Cost]:
    return lambda eqn: Cost(sum(-(-nbytes(v.aval) // 4) for v in eqn.outvars) * cost)


# Transforms and linear algebra ------------------------------------------------------------------------


def _fft(eqn: JaxprEqn) -> Cost:
    n = math.prod(eqn.params["fft_lengths"])
    real = dtype(eqn.invars[0]) != dtype(eqn.outvars[0])
    transforms = max(size(eqn.invars[0]), size(eqn.outvars[0])) // max(n, 1)  # the real side is the larger
    return Cost(round((2.5 if real else 5) * transforms * n * math.log2(max(n, 1))))


def _matrices(count: Callable[..., float], exact: bool = True) -> Callable[[JaxprEqn], Cost]:
    """A rule from `count(m, n, eqn)`, the FLOPs for one m x n matrix of the first operand."""

    def rule(eqn: JaxprEqn) -> Cost:
        *batch, m, n = shape(eqn.invars[0])
        return Cost(round(math.prod(batch) * count(m, n, eqn)), exact=exact)

    return rule


def _reflect(m: int, n: int, k: int) -> float:
    """k Householder reflections of an m x n matrix, of shrinking size: a QR factorization, or forming its Q."""
    return 4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3


def _lu(m: int, n: int, eqn: JaxprEqn) -> float:
    k = min(m, n)
    return 2 * m * n * k - (m + n) * k**2 + 2 * k**3 / 3


def _qr(m: int, n: int, eqn: JaxprEqn) -> float:
    k = min(m, n)
    return _reflect(m, n, k) + _reflect(m, shape(eqn.outvars[0])[-1], k)


def _ormqr(m: int, k: int, eqn: JaxprEqn) -> float:
    *_, rows, columns = shape(eqn.invars[2])
    length, other = (rows, columns) if eqn.params.get("left", True) else (columns, rows)
    return 4 * length * other * k - 2 * other * k**2


def _eig(m: int, n: int, eqn: JaxprEqn) -> float:
    return (25 if len(eqn.outvars) > 1 else 10) * n**3


def _svd(m: int, n: int, eqn: JaxprEqn) -> float:
    m, n = max(m, n), min(m, n)
    if len(eqn.outvars) == 1:
        return 4 * m * n**2 - 4 * n**3 / 3
    return 4 * m**2 * n + 22 * n**3 if eqn.params.get("full_matrices") else 6 * m * n**2 + 20 * n**3


def _tridiagonal_solve(eqn: JaxprEqn) -> Cost:
    return Cost(3 * size(eqn.invars[1]) + 5 * size(eqn.invars[3]))


_LINEAR_ALGEBRA: dict[str, Callable[[JaxprEqn], Cost]] = {
    "cholesky": _matrices(lambda m, n, eqn: n**3 / 3),
    "cholesky_update": _matrices(lambda m, n, eqn: 3 * n**2),
    "triangular_solve": lambda eqn: Cost(size(eqn.invars[1]) * shape(eqn.invars[0])[-1]),
    "tridiagonal_solve": _tridiagonal_solve,
    "lu": _matrices(_lu),
    "qr": _matrices(_qr),
    "geqrf": _matrices(lambda m, n, eqn: _reflect(m, n, min(m, n))),
    "geqp3": _matrices(lambda m, n, eqn: _reflect(m, n, min(m, n))),
    "householder_product": _matrices(lambda m, n, eqn: _reflect(m, n, shape(eqn.invars[1])[-1])),
    "ormqr": _matrices(_ormqr),
    "symmetric_product": _matrices(lambda n, k, eqn: n**2 * k + 2 * n**2),
    "hessenberg": _matrices(lambda m, n, eqn: 10 * n**3 / 3),
    "tridiagonal": _matrices(lambda m, n, eqn: 4 * n**3 / 3),
    "eigh": _matrices(lambda m, n, eqn: 9 * n**3, exact=False),
    "eig": _matrices(_eig, exact=False),
    "schur": _matrices(_eig, exact=False),
    "svd": _matrices(_svd, exact=False),
    "fft": _fft,
}

# The tables -----------------------------------------------------------------------------------------

# Nothing runs: other names, types or places for the same bytes, or a handful of scalars.
FREE = frozenset(
    """after_all axis_index bitcast bitcast_convert_type create_token dimension_size dma_wait empty empty2 empty_ref
    free_ref from_edtype has_memory_space inspect_sharding layout_constraint multiple_of name num_programs
    optimization_barrier
    pbroadcast pin platform_index preduced program_id pvary random_clone random_unwrap random_wrap
    reduced_vary_cast reduced_vary_cast_p reshape shape_assertion sharding_constraint squeeze stop_gradient tie
    to_edtype unpin vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint""".split()
)

_MOVES = """all_gather all_gather_invariant all_gather_reduced all_to_all broadcast_in_dim broadcast_to concatenate copy
debug_callback debug_print device_put dma_start dynamic_slice dynamic_update_slice freeze gather get iota
masked_load masked_swap new_ref pad ppermute ragged_all_to_all random_seed reshard rev roll scatter slice split stack
swap tile transpose unstack zeros_like""".split()

# What compilers compute element by element inside the loop of whatever reads it.
ELEMENTWISE = frozenset(
    (
        *_ONE,
        *_ONE_TRANSCENDENTAL,
        *_EXPANDED,
        *_ITERATED,
        "integer_pow",
        "broadcast_in_dim",
        "iota",
        "slice",
        "pad",
        "rev",
    )
)

RULES: dict[str, Callable[[JaxprEqn], Cost]] = {
    **MATMULS,
    **_LINEAR_ALGEBRA,
    **dict.fromkeys(_MOVES, _nothing),
    **dict.fromkeys(_ONE, _elementwise(1, 0)),
    **dict.fromkeys(_ONE_TRANSCENDENTAL, _elementwise(0, 1)),
    **{op: _elementwise(*counts) for op, counts in _EXPANDED.items()},
    **{op: _elementwise(*counts, exact=False) for op, counts in _ITERATED.items()},
    **dict.fromkeys([f"reduce_{k}" for k in ("sum", "max", "min", "prod", "and", "or", "xor")], _reduce),
    **dict.fromkeys(["reduce", "argmax", "argmin"], _reduce),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin"], _cumulative),
    **dict.fromkeys(["reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"], _window),
    **dict.fromkeys(["select_and_scatter", "select_and_scatter_add"], _select_window),
    **dict.fromkeys([f"scatter-{k}" for k in ("add", "sub", "mul", "max", "min")], _per_update),
    **dict.fromkeys(["psum", "psum_invariant", "pmax", "pmin", "reduce_scatter"], _all_operands),
    **dict.fromkeys([f"unreduced_{k}" for k in ("psum", "pmax", "pmin", "reduce_scatter")], _all_operands),
    **dict.fromkeys(["threefry2x32", "threefry4x32"], _words(_THREEFRY_BLOCK // 2)),
    **dict.fromkeys(["philox2x32", "philox4x32", "rng_bit_generator", "rng_uniform"], _words(_PHILOX_WORD)),
    **dict.fromkeys(["random_split", "random_fold_in"], _new_keys),
    **dict.fromkeys(["dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"], _attention),
    "Nonzero": _nonzero,  # JAX 0.12
    "SearchSorted": _search_sorted,  # JAX 0.12
    "cumlogsumexp": _cumlogsumexp,
    "integer_pow": _integer_pow,
    "polynomial": _polynomial,
    "random_bits": _random_bits,
    "select_and_gather_add": _select_and_gather,
    "sort": _sort,
    "top_k": _top_k,
}
