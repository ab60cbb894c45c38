"""Random JAX programs and policies for property tests: hypothesis draws data, `Program.fn` runs it.

A program is a list of steps. Each takes earlier values, chosen by numbers that are wrapped to what fits, so that every
list of steps is a valid program and stays one while hypothesis shrinks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import remat_kit as rk

# JAX 0.10.2's newer implementation of remat lacks offload, `prevent_cse=False`, vmap over names, shard_map in regions
# and regions that return a literal.
OLD_REMAT3 = bool(jax.config.jax_remat3) and jax.__version_info__ < (0, 11)
NAMES = ("a", "b", "c")
CONSTANT = jnp.linspace(-1.0, 1.0, 3)


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation: `pick` chooses operands and variants, `body` holds the steps of what is nested in it."""

    op: str
    pick: tuple[int, ...] = (0, 0, 0)
    body: tuple[Step, ...] = ()

    def __repr__(self) -> str:  # can be pasted
        body = f", ({', '.join(map(repr, self.body))},)" if self.body else ""
        return f"Step({self.op!r}, {self.pick}{body})"


class Pool:
    """The values that a step can take, newest last."""

    def __init__(self, values: Sequence[Any]):
        self.values = list(values)

    def any(self, n: int) -> Any:
        return self.values[-1 - n % len(self.values)]

    def _pick(self, n: int, fits: Callable[[Any], bool], default: Callable[[], Any]) -> Any:
        found = [v for v in self.values if fits(v)]
        return found[-1 - n % len(found)] if found else default()

    def float(self, n: int, least: int = 0, empty: bool = True) -> Any:
        """A floating value of at least `least` dimensions."""

        def fits(v: Any) -> bool:
            return is_float(v) and v.ndim >= least and (empty or v.size > 0)

        return self._pick(n, fits, lambda: jnp.full((2, 3)[:least], jnp.sum(self.float(n)) if least else 0.5))

    def int(self, n: int) -> Any:
        return self._pick(n, lambda v: jnp.issubdtype(v.dtype, jnp.integer), lambda: jnp.arange(2, dtype=jnp.int32))

    def key(self, n: int) -> Any:
        fits = lambda v: jnp.issubdtype(v.dtype, jax.dtypes.prng_key) and v.ndim == 0  # noqa: E731
        return self._pick(n, fits, lambda: jax.random.key(3))


def is_float(v: Any) -> bool:
    return jnp.issubdtype(v.dtype, jnp.floating)


def run(steps: Sequence[Step], values: Sequence[Any]) -> Pool:
    """Runs steps on values and returns these with all results."""
    pool = Pool([jnp.asarray(v) if not hasattr(v, "dtype") else v for v in values])
    for s in steps:
        out = (LEAVES.get(s.op) or NESTED[s.op])(pool, s)
        out = out if isinstance(out, list) else [out]
        pool.values += [jnp.asarray(v) if not hasattr(v, "dtype") else v for v in out]
    return pool


# Steps without a body -----------------------------------------------------------------------------


def unary(fun: Callable[[Any], Any], empty: bool = True, least: int = 0) -> Callable[[Pool, Step], Any]:
    return lambda pool, s: fun(pool.float(s.pick[0], least, empty))


def same_shape(x: Any, y: Any) -> Any:
    """`y` made to go with `x`, elementwise."""
    try:
        shape = jnp.broadcast_shapes(x.shape, y.shape)
        return y if shape == x.shape else jnp.sum(y)
    except ValueError:
        return jnp.sum(y)


def binary(fun: Callable[[Any, Any], Any]) -> Callable[[Pool, Step], Any]:
    def step(pool: Pool, s: Step) -> Any:
        x, y = pool.float(s.pick[0]), pool.float(s.pick[1])
        return fun(x, same_shape(x, y))

    return step


def matmul(pool: Pool, s: Step) -> Any:
    x, y = pool.float(s.pick[0], 1), pool.float(s.pick[1], 1)
    if s.pick[2] % 3 == 0 and x.ndim == 2:
        return lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,))))  # with batch dimensions
    if y.ndim > 2 or y.shape[0] != x.shape[-1]:
        y = y.T if y.ndim == 2 and y.shape[-1] == x.shape[-1] else jnp.full((x.shape[-1], 2), 0.3, x.dtype)
    return x @ y


def random_mask(pool: Pool, s: Step) -> Any:
    x = pool.float(s.pick[0])
    key = jax.random.fold_in(pool.key(s.pick[1]), s.pick[2])
    return jnp.where(jax.random.bernoulli(key, 0.6, x.shape), x / 0.6, 0).astype(x.dtype)


def solve(pool: Pool, s: Step) -> Any:
    x = pool.float(s.pick[0], 1, empty=False).astype(jnp.float32)
    m = 4 * jnp.eye(2) + jnp.tanh(jnp.sum(x))
    return jnp.linalg.solve(m, jnp.full((2,), jnp.mean(x)))


def convolve(pool: Pool, s: Step) -> Any:
    x = jnp.ravel(pool.float(s.pick[0], 1, empty=False))[None, None]
    w = jnp.ravel(pool.float(s.pick[1], 1, empty=False)).astype(x.dtype)[None, None, :2]
    return lax.conv_general_dilated(x, w, (1,), "SAME")[0]


def gather(pool: Pool, s: Step) -> Any:
    x = pool.float(s.pick[0], 1, empty=False)
    return x[jnp.clip(pool.int(s.pick[1]), 0, x.shape[0] - 1)] if pool.int(s.pick[1]).ndim < 2 else x[0]


@jax.custom_jvp
def bent(x: Any) -> Any:
    return jnp.sin(x) * 0.5


@bent.defjvp
def _(primals: Any, tangents: Any) -> Any:
    out = bent(primals[0])
    return out, tangents[0] * out * jnp.cos(primals[0])


LEAVES: dict[str, Callable[[Pool, Step], Any]] = {
    "tanh": unary(jnp.tanh),
    "sin": unary(jnp.sin),
    "exp": unary(lambda x: jnp.exp(jnp.minimum(x, 2))),
    "bare_exp": unary(lambda x: jnp.exp(x)),
    "sqrt": unary(lambda x: jnp.sqrt(1 + x * x)),
    "rsqrt": unary(lambda x: lax.rsqrt(1 + x * x)),
    "log": unary(lambda x: jnp.log1p(x * x)),
    "logistic": unary(jax.nn.sigmoid),
    "relu": unary(jax.nn.relu),
    "gelu": unary(jax.nn.gelu),
    "square": unary(jnp.square),
    "double": unary(lambda x: 2.0 * x),
    "negative": unary(jnp.negative),
    "constant": unary(lambda x: x * CONSTANT.astype(x.dtype) if x.ndim and x.shape[-1] == 3 else x + CONSTANT[0]),
    "numpy": unary(lambda x: x[..., None] * np.array([1.0, 2.0], np.float32)),
    "bent": unary(bent),
    "softmax": unary(lambda x: jax.nn.softmax(x, -1), empty=False, least=1),
    "logsumexp": unary(lambda x: jax.nn.logsumexp(x, -1), empty=False, least=1),
    "max": unary(lambda x: jnp.max(x, -1), empty=False, least=1),
    "sort": unary(lambda x: jnp.sort(x, -1), empty=False, least=1),
    "top": unary(lambda x: lax.top_k(x, 1)[0], empty=False, least=1),
    "cumsum": unary(lambda x: jnp.cumsum(x, -1), least=1),
    "cumprod": unary(lambda x: jnp.cumprod(x, -1), least=1),
    "sum": unary(lambda x: jnp.sum(x, -1), least=1),
    "norm": unary(lambda x: x / jnp.sqrt(1e-3 + jnp.mean(x * x, -1, keepdims=True)), empty=False, least=1),
    "transpose": unary(jnp.transpose),
    "ravel": unary(jnp.ravel),
    "pad": unary(lambda x: jnp.pad(x, [(1, 0)] * x.ndim), least=1),
    "flip": unary(lambda x: x[::-1], least=1),
    "grow": unary(lambda x: jnp.broadcast_to(x, (2, *x.shape)) if x.ndim < 3 else jnp.sum(x, 0)),
    "split": unary(lambda x: list(jnp.split(x, [1], 0)), empty=False, least=1),
    "fft": unary(lambda x: jnp.real(jnp.fft.fft(x.astype(jnp.float32))), empty=False, least=1),
    "bfloat16": unary(lambda x: x.astype(jnp.bfloat16)),
    "float32": unary(lambda x: x.astype(jnp.float32)),
    "stop": unary(lax.stop_gradient),
    "barrier": unary(lambda x: lax.optimization_barrier(x)),
    "round": unary(lambda x: lax.reduce_precision(x, 5, 4)),
    "nothing": unary(lambda x: x[:0], least=1),
    "zeros": unary(jnp.zeros_like),
    "literal": lambda pool, s: [jnp.float32(2.0), np.float32(1.5), jnp.zeros((2,))][s.pick[0] % 3],
    "iota": lambda pool, s: jnp.arange(3, dtype=jnp.float32),
    "add": binary(jnp.add),
    "mul": binary(jnp.multiply),
    "divide": binary(lambda x, y: x / (1.5 + y * y)),
    "maximum": binary(jnp.maximum),
    "power": binary(lambda x, y: jnp.power(jnp.abs(x) + 0.5, jnp.tanh(y))),
    "where": binary(lambda x, y: jnp.where(x > 0.1, x, y)),
    "concatenate": binary(lambda x, y: jnp.concatenate([jnp.ravel(x), jnp.ravel(y).astype(x.dtype)])),
    "matmul": matmul,
    "random": random_mask,
    "noise": lambda pool, s: jax.random.normal(pool.key(s.pick[0]), (2, 3)),
    "keys": lambda pool, s: list(jax.random.split(pool.key(s.pick[0]))),
    "solve": solve,
    "convolve": convolve,
    "gather": gather,
    "argmax": unary(lambda x: jnp.argmax(x, -1), empty=False, least=1),
    "one_hot": lambda pool, s: jax.nn.one_hot(pool.int(s.pick[0]), 3),
    "count": lambda pool, s: pool.int(s.pick[0]) + 1,
    "round_to_int": unary(lambda x: jnp.round(jnp.tanh(x)).astype(jnp.int32)),
    "name": lambda pool, s: checkpoint_name(pool.float(s.pick[0]), NAMES[s.pick[1] % 3]),
    "name_any": lambda pool, s: checkpoint_name(pool.any(s.pick[0]), NAMES[s.pick[1] % 3]),
    "again": lambda pool, s: pool.any(s.pick[0]),
}


# Steps with a body --------------------------------------------------------------------------------


def returned(pool: Pool, n: int) -> list[Any]:
    """What a function returns: one or several of its values, one twice, an argument as it is, a literal."""
    last = pool.float(0)
    return [[last], [last, pool.any(1)], [last, last], [last, pool.values[0], jnp.float32(2.0)]][n % 4]


def function(pool: Pool, s: Step) -> tuple[Callable[..., list[Any]], list[Any]]:
    """The body of a step as a function, and its arguments; some values it closes over."""
    args = [pool.float(s.pick[0]), pool.any(s.pick[1])]
    captured = pool.values[:3] if s.pick[2] % 2 else []
    kinds = 3 if OLD_REMAT3 and s.op in ("checkpoint", "remat") else 4  # there a region cannot return a literal
    return lambda *xs: returned(run(s.body, [*captured, *xs]), s.pick[2] % kinds), args


def scoped(pool: Pool, s: Step) -> list[Any]:
    fun, args = function(pool, s)
    with jax.named_scope(f"scope_{s.pick[2]}"):
        return fun(*args)


def jitted(pool: Pool, s: Step) -> list[Any]:
    fun, args = function(pool, s)
    called = jax.jit(fun, inline=s.pick[2] % 5 == 4)
    first = called(*args)
    return first + (called(args[0] * 2, *args[1:]) if s.pick[1] % 2 else [])


POLICIES: tuple[Any, ...] = (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.save_only_these_names("a", "b"),
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_any_names_but_these("a"),
)


def checkpointed(pool: Pool, s: Step) -> list[Any]:
    fun, args = function(pool, s)
    prevent_cse = bool(s.pick[1] % 3) or OLD_REMAT3
    return jax.checkpoint(fun, policy=POLICIES[s.pick[0] % len(POLICIES)], prevent_cse=prevent_cse)(*args)


def marked(pool: Pool, s: Step) -> list[Any]:
    fun, args = function(pool, s)
    return rk.remat("none", block=f"part_{s.pick[2]}")(fun)(*args)


def rematted(pool: Pool, s: Step) -> list[Any]:
    fun, args = function(pool, s)
    return rk.remat(("full", "dots", "save op=tanh|exp|mul")[s.pick[0] % 3], block=f"remat_{s.pick[2]}")(fun)(*args)


def layers(pool: Pool, s: Step) -> list[Any]:
    x, w = pool.float(s.pick[0]), pool.any(s.pick[1])
    for i in range(2 + s.pick[2] % 2):
        x = rk.remat("none", block=f"layers_{i}")(lambda x, w: like(x, run(s.body, [w, x]).float(0)))(x, w)
    return [x]


def like(x: Any, y: Any) -> Any:
    """`y` with the shape and dtype of `x`, depending on both."""
    return y if y.shape == x.shape and y.dtype == x.dtype else (x + 0.1 * jnp.sum(y).astype(x.dtype)).astype(x.dtype)


def scan(pool: Pool, s: Step) -> list[Any]:
    init, xs = pool.float(s.pick[0]), pool.float(s.pick[1], 1)
    captured = pool.values[:2] if s.pick[2] % 2 else []
    n = xs.shape[0]

    def body(carry: Any, x: Any) -> Any:
        c, i, key = carry
        key, sub = jax.random.split(key)
        inner = run(s.body, [*captured, i, sub, x[0], c])
        new = [c, like(c, inner.float(0)), jnp.ones_like(c)][(1, 1, 1, 0, 2)[s.pick[2] % 5]]
        return (new, i + x[1], key), (inner.float(0), inner.any(1))

    carry = (init, jnp.int32(0), pool.key(0))
    variant = {"reverse": s.pick[0] % 2 == 1, "unroll": 2 if s.pick[1] % 4 == 3 else 1}
    (c, i, key), ys = lax.scan(body, carry, (xs, jnp.arange(n)), **variant)
    return [i, key, *ys, c]


def fori(pool: Pool, s: Step) -> list[Any]:
    """A loop with a fixed number of turns, which JAX can differentiate."""
    x = pool.float(s.pick[0])
    captured = pool.values[:2] if s.pick[2] % 2 else []
    return [lax.fori_loop(0, 2, lambda i, c: like(c, run(s.body, [*captured, i, c]).float(0)), x)]


def while_loop(pool: Pool, s: Step) -> list[Any]:
    """A loop of unknown length on values that are not differentiated."""
    x = lax.stop_gradient(pool.float(s.pick[0]))

    def body(carry: Any) -> Any:
        i, c = carry
        return i + 1, lax.stop_gradient(like(c, run(s.body, [i, c]).float(0)))

    return list(lax.while_loop(lambda carry: (carry[0] < 2) & (jnp.sum(carry[1]) < 1e3), body, (jnp.int32(0), x)))


# How a loop of the toolkit is run; "each" is a policy for each step.
LOOPS: tuple[dict[str, Any], ...] = (
    {},
    {"policy": "dots"},
    {"policy": "none", "block": "turn"},
    {"policy": "each"},
    {"segments": "sqrt"},
    {"segments": 2, "policy": "none"},
    {"segments": 3, "policy": "save op=tanh|mul"},
    {"policy": "full", "prevent_cse": True},
)
BINOMIAL: tuple[dict[str, Any], ...] = (
    {},
    {"checkpoints": 1},
    {"checkpoints": 2, "policy": "dots"},
    {"policy": "full"},
)


def toolkit_scan(pool: Pool, s: Step, **options: Any) -> list[Any]:
    init, xs = pool.float(s.pick[0]), pool.float(s.pick[1], 1)
    captured = pool.values[:2] if s.pick[0] % 2 else []

    def body(carry: Any, x: Any) -> Any:
        c, i = carry
        inner = run(s.body, [*captured, i, x, c])
        return (like(c, inner.float(0)), i + 1), (inner.float(0), inner.any(1))

    if options.get("policy") == "each":
        options["policy"] = [("full", "none", "dots")[(i + s.pick[1]) % 3] for i in range(xs.shape[0])]
    unroll = 2 if s.pick[1] % 4 == 3 else 1
    (c, i), ys = rk.scan(body, (init, jnp.int32(0)), xs, reverse=s.pick[1] % 2 == 1, unroll=unroll, **options)
    return [i, *ys, c]


def scan_in_parts(pool: Pool, s: Step) -> list[Any]:
    return toolkit_scan(pool, s, **LOOPS[s.pick[2] % len(LOOPS)])


def scan_binomial(pool: Pool, s: Step) -> list[Any]:
    return toolkit_scan(pool, s, segments="binomial", **BINOMIAL[s.pick[2] % len(BINOMIAL)])


def toolkit_while(pool: Pool, s: Step) -> list[Any]:
    """A loop of unknown length that is differentiated."""
    captured = pool.values[:2] if s.pick[1] % 2 else []

    def body(carry: Any) -> Any:
        i, c = carry
        return i + 1, like(c, run(s.body, [*captured, i, c]).float(0))

    def going(carry: Any) -> Any:
        return (carry[0] < 3) & (jnp.sum(carry[1]) < 1e3)

    init = (jnp.int32(0), pool.float(s.pick[0]))
    return list(rk.while_loop(going, body, init, max_steps=s.pick[2] % 5, checkpoints=(None, 1, 2)[s.pick[1] % 3]))


def sequential(pool: Pool, s: Step) -> list[Any]:
    x, captured = pool.float(s.pick[0]), pool.values[:2] if s.pick[1] % 2 else []
    parts = [s.body, s.body[:1], s.body]
    fns = [lambda x, part=part: run(part, [*captured, x]).float(0) for part in parts]
    segments = ("sqrt", 2, "auto", [1, 1, 1], 3)[s.pick[2] % 5]
    return [rk.sequential(fns, x, segments=segments, policy=(None, "dots", "none")[s.pick[1] % 3])]


def cond(pool: Pool, s: Step) -> list[Any]:
    x, y = pool.float(s.pick[0]), pool.any(s.pick[1])
    captured = pool.values[:2] if s.pick[2] % 2 else []

    def taken(x: Any, y: Any) -> list[Any]:
        inner = run(s.body, [*captured, y, x])
        return [inner.float(0), inner.any(1)]

    shapes = jax.eval_shape(taken, x, y)

    def other(x: Any, y: Any) -> list[Any]:
        first = jnp.broadcast_to(jnp.sum(jnp.tanh(x)), shapes[0].shape).astype(shapes[0].dtype)
        shape, dtype = shapes[1].shape, shapes[1].dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return [first, jax.random.split(jax.random.key(1), shape)]
        return [first, jnp.zeros(shape, dtype)]

    if s.pick[2] % 3 == 2:
        return lax.switch(pool.int(0).ravel()[:1].sum() % 3, [other, taken, taken], x, y)
    return lax.cond(jnp.sum(pool.int(0)) > s.pick[2] % 3, taken, other, x, y)


def custom_vjp(pool: Pool, s: Step) -> list[Any]:
    """Like an attention kernel: the forward rule hands on more than it was given, part of it named."""
    x, y = pool.float(s.pick[0]), pool.any(s.pick[1])

    def plain(x: Any, y: Any) -> Any:
        return run(s.body, [y, x]).float(0)

    def forward(x: Any, y: Any) -> Any:
        extra = jnp.tanh(x)
        if s.pick[2] % 2:
            extra = checkpoint_name(extra, "a")
        return plain(x, y), (x, y, extra)

    def backward(kept: Any, ct: Any) -> Any:
        x, y, extra = kept
        if is_float(y):
            dx, dy = jax.vjp(plain, x, y)[1](ct)
        else:
            (dx,), dy = jax.vjp(lambda x: plain(x, y), x)[1](ct), None
        return dx * (1 - extra * extra), dy

    fun = jax.custom_vjp(plain)
    fun.defvjp(forward, backward)
    return [fun(x, y)]


def without(steps: Sequence[Step], *ops: str) -> tuple[Step, ...]:
    """The steps without those of some kinds, nested ones included."""
    return tuple(Step(s.op, s.pick, without(s.body, *ops)) for s in steps if s.op not in ops)


TOOLKIT_LOOPS = ("scan_in_parts", "scan_binomial", "toolkit_while", "sequential")
# Steps without forward mode, and those whose gradient has no reverse mode again.
NO_FORWARD = ("custom_vjp", "scan_binomial", "toolkit_while")
ONCE = ("scan_binomial", "toolkit_while")


def custom_jvp(pool: Pool, s: Step) -> list[Any]:
    x, body = pool.float(s.pick[0]), without(s.body, *NO_FORWARD)

    @jax.custom_jvp
    def fun(x: Any) -> Any:
        return run(body, [x]).float(0)

    @fun.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        out, tangent = jax.jvp(lambda x: run(body, [x]).float(0), primals, tangents)
        return out, tangent * 0.5

    return [fun(x)]


def mapped(pool: Pool, s: Step) -> list[Any]:
    x = pool.float(s.pick[0], 1, empty=False)
    y = pool.float(s.pick[1])
    body = without(s.body, "name", "name_any", "custom_vjp", "remat", *TOOLKIT_LOOPS) if OLD_REMAT3 else s.body
    return list(jax.vmap(lambda x: returned(run(body, [y, x]), s.pick[2] % 3))(x))


def inner_grad(pool: Pool, s: Step) -> list[Any]:
    y = pool.any(s.pick[1])

    def scalar(x: Any) -> Any:
        return jnp.sum(run(without(s.body, *ONCE), [y, x]).float(0).astype(jnp.float32))

    return [jax.grad(scalar)(pool.float(s.pick[0]))]


def inner_jvp(pool: Pool, s: Step) -> list[Any]:
    x, y, body = pool.float(s.pick[0]), pool.any(s.pick[1]), without(s.body, *NO_FORWARD)
    return list(jax.jvp(lambda x: run(body, [y, x]).float(0), (x,), (jnp.ones_like(x),)))


def sharded(pool: Pool, s: Step) -> list[Any]:
    """A body over the one device there is; its values vary over the mesh's axis."""
    x = pool.float(s.pick[0], 1)
    spec = jax.sharding.PartitionSpec("i")
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,))

    def body(x: Any) -> Any:
        y = jnp.ravel(run([Step(t.op, t.pick) for t in s.body if t.op in PLAIN], [x]).float(0))
        return y * lax.psum(jnp.sum(x), "i").astype(y.dtype) if s.pick[1] % 2 else y

    return [jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=s.pick[2] % 2 == 0)(x)]


PLAIN = ("tanh", "sin", "exp", "mul", "add", "matmul", "name", "softmax", "relu", "square", "bfloat16", "transpose")
NESTED: dict[str, Callable[[Pool, Step], list[Any]]] = {
    "scope": scoped,
    "jit": jitted,
    "checkpoint": checkpointed,
    "mark": marked,
    "remat": rematted,
    "layers": layers,
    "scan": scan,
    "fori": fori,
    "while": while_loop,
    "scan_in_parts": scan_in_parts,
    "scan_binomial": scan_binomial,
    "toolkit_while": toolkit_while,
    "sequential": sequential,
    "cond": cond,
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "vmap": mapped,
    "grad": inner_grad,
    "jvp": inner_jvp,
}
if not OLD_REMAT3:  # which cannot differentiate a shard_map
    NESTED["shard_map"] = sharded


# Programs and policies ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A scalar function of parameters and data. With `aux` it returns its values besides, one of them twice."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...] = (0,)
    aux: bool = False

    @property
    def fn(self) -> Callable[..., Any]:
        def loss(params: Any, x: Any, ids: Any, key: Any) -> Any:
            pool = run(self.steps, [key, ids, params["empty"], params["half"], params["b"], params["w"], x])
            total = sum((0.1 * jnp.sum(pool.float(n).astype(jnp.float32)) for n in self.outputs), jnp.float32(0))
            return (total, {"last": pool.values[-3:], "twice": (total, total), "two": 2.0}) if self.aux else total

        return loss

    def args(self) -> tuple[Any, ...]:
        params = {
            "w": jnp.array([[0.5, -0.3, 0.2], [0.1, 0.7, -0.6], [-0.4, 0.25, 0.9]]),
            "b": jnp.array([0.3, -0.8, 0.45]),
            "half": jnp.array([[0.5, -1.0, 0.25], [0.75, 0.125, -0.5]], jnp.bfloat16),
            "empty": jnp.zeros((0, 3)),
        }
        x = jnp.array([[0.9, -0.2, 0.4], [-0.7, 0.6, 1.1]])
        return params, x, jnp.array([1, 0], jnp.int32), jax.random.key(7)


LOOP_OPS = ("scan", "fori", "while", "layers", *TOOLKIT_LOOPS)


def programs(depth: int = 2, longest: int = 5, loop: bool = False) -> st.SearchStrategy[Program]:
    """Programs whose steps nest up to `depth`; with `loop`, one of the outermost steps is a loop."""
    steps = _steps(depth, longest)
    if loop:
        pick, body = st.tuples(*[st.integers(0, 7)] * 3), _steps(max(depth - 1, 0), max(1, longest - 2))
        one = st.builds(Step, st.sampled_from(LOOP_OPS), pick, body)
        steps = st.builds(lambda before, loop, after: (*before, loop, *after), steps, one, steps)
    return st.builds(
        Program,
        steps=steps,
        outputs=st.lists(st.integers(0, 4), min_size=1, max_size=2).map(tuple),
        aux=st.booleans(),
    )


def _steps(depth: int, longest: int) -> st.SearchStrategy[tuple[Step, ...]]:
    pick = st.tuples(*[st.integers(0, 7)] * 3)
    step = leaf = st.builds(Step, st.sampled_from(list(LEAVES)), pick)
    if depth:
        nested = st.builds(Step, st.sampled_from(list(NESTED)), pick, _steps(depth - 1, max(1, longest - 2)))
        step = leaf | nested
    return st.lists(step, min_size=1, max_size=longest).map(tuple)


OPS = """tanh sin exp mul add sqrt max reduce_* dot_general custom_jvp_call custom_vjp_call random_* scan cond while jit
name convert_element_type transpose broadcast_in_dim *""".split()
CRITERIA = (
    *(f"op={op}" for op in OPS),
    *(f"name={name}" for name in (*NAMES, "a|b", "*")),
    *("dtype=float32", "dtype=bfloat16", "dtype=int32|bool", "larger_than=12", "smaller_than=20", "source=programs.py"),
    *("path=**", "path=scope_*|**/scope_*", "path=part_*/**", "op=dot_general batch_dims=no", "op=tanh dtype=float32"),
)


def policies(offload: bool = True) -> st.SearchStrategy[str]:
    """Policies as text: rules drawn at random, and presets. Some name values that a program does not have."""
    actions = ["save", "save", "recompute", *(["offload"] if offload else [])]
    rule = st.tuples(st.sampled_from(actions), st.sampled_from(CRITERIA)).map(" ".join)
    text = st.builds(
        lambda rules, rest: "; ".join([*rules, f"{rest} rest"]),
        st.lists(rule, min_size=1, max_size=3),
        st.sampled_from(["recompute", "recompute", "save"]),
    )
    presets = ["none", "full", "everything", "dots", "dots_no_batch", "names", "matmuls"]
    if offload:
        presets += ["offload_dots_no_batch", "offload_matmuls"]
    return text.filter(_readable) | st.sampled_from(presets)


def _readable(text: str) -> bool:
    """Whether every rule can apply: a rule after a wider one is refused."""
    try:
        rk.policy(text)
    except rk.RematError:
        return False
    return True
