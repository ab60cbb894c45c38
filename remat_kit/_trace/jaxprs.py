"""What the toolkit knows of JAX's program representation: primitives' parameters and versions of JAX.

The only file that may touch `jax._src`; each use names the versions it was tried on. Everything else sees a
program through `calls` (the programs nested in an equation), `rebind` (an equation with other nested
programs) and the small readers below.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

# `jax.extend` (0.10.2 to 0.12.0.1) has no equivalent of these:
#   core.eval_jaxpr's equation context, effects' classes and which of them remat takes; linear_util's wrapped
#   functions and their transformations (custom rules are held as such); partial_eval's tracing from exact avals
#   (weak types and shardings included); source_info_util's frames; hijax's primitive (the names and regions of
#   jax_remat3); config's user-visible state that jit's cache looks at.
from jax._src import config as _config  # 0.10.2, 0.12.0.1
from jax._src import core as _core  # 0.10.2, 0.12.0.1
from jax._src import effects as _effects  # 0.10.2, 0.12.0.1
from jax._src import linear_util as _lu  # 0.10.2, 0.12.0.1
from jax._src import source_info_util as _source  # 0.10.2, 0.12.0.1
from jax._src.ad_checkpoint import name_p, remat_p  # 0.10.2, 0.12.0.1
from jax._src.interpreters import partial_eval as _pe  # 0.10.2, 0.12.0.1
from jax._src.state.types import AbstractRef, ReadEffect, RefEffect  # 0.10.2, 0.12.0.1
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var"]


# The toolkit's own frames are nobody's source line; the models of the zoo (no underscore) are.
for _part in ("_", "linen.py", "nnx.py"):
    jex.source_info_util.register_exclusion(os.path.join(os.path.dirname(os.path.dirname(__file__)), _part))


# Programs -----------------------------------------------------------------------------------------


def opened(jaxpr: Any) -> Any:
    """The program without its constants' values. JAX 0.12 has one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> list[Any]:
    """The values of a program's constants, in the order of its constvars."""
    return list(getattr(jaxpr, "consts", ()))


def close(jaxpr: Any) -> Any:
    """A closed program from an open one without constvars (or one that is closed already)."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, [])


def inputs(jaxpr: Any) -> list[Var]:
    """All input variables: constvars, then invars."""
    j = opened(jaxpr)
    return [*j.constvars, *j.invars]


def replace_eqns(jaxpr: Any, eqns: Sequence[JaxprEqn]) -> Any:
    """The same program (closed or open) with other equations."""
    new = opened(jaxpr).replace(eqns=list(eqns))
    if isinstance(jaxpr, ClosedJaxpr) and opened(jaxpr) is not jaxpr:
        return ClosedJaxpr(new, jaxpr.consts)
    return new


def without_dead_code(jaxpr: Any) -> Any:
    """A closed program without the equations, nested ones too, that nothing which it returns depends on."""
    new, _ = _pe.dce_jaxpr(opened(jaxpr), True, instantiate=True)  # tried on 0.10.2, 0.12.0.1
    return ClosedJaxpr(new, jaxpr.consts)


def subprogram(whole: Any, eqns: Sequence[JaxprEqn], invars: Sequence[Var], outvars: Sequence[Var]) -> Any:
    """A closed program made of some equations of another one."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    debug_info = opened(whole).debug_info.with_unknown_names()
    return ClosedJaxpr(Jaxpr((), list(invars), list(outvars), list(eqns), effects, debug_info), [])


def trace(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Any:
    """Traces a flat function at exact avals (weak types and shardings included) to a closed program."""
    info = _core.DebugInfo("remat_kit", getattr(fun, "__name__", "function"), None, None)
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(_lu.wrap_init(fun, debug_info=info), list(avals))
    return ClosedJaxpr(jaxpr, consts)


def evaluate(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluates a closed program on flat arguments."""
    for eqn in opened(jaxpr).eqns:
        if is_custom_vjp(eqn) and eqn.params["symbolic_zeros"]:
            _forget(eqn.params["fwd_jaxpr_thunk"])
    return list(as_function(jaxpr)(*args))


def as_function(jaxpr: Any) -> Callable[..., Sequence[Any]]:
    """A closed program as a flat function."""
    return jex.core.jaxpr_as_fun(close(jaxpr))


# Equations ----------------------------------------------------------------------------------------


class CallKind(enum.StrEnum):
    """How an equation runs a program nested in it."""

    JIT = "jit"
    REMAT = "remat"
    SCAN = "scan"
    WHILE = "while"
    COND = "cond"
    SHARD_MAP = "shard_map"
    CUSTOM = "custom"  # custom_jvp, custom_vjp: its rules are Python, the body is only for evaluation
    OPAQUE = "opaque"  # linear solves, Pallas kernels, ...: looked at, never rewritten


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A program nested in an equation.

    Attributes:
      kind: how it is run.
      jaxpr: the program, closed.
      key: where it stands: the parameter and, inside a tuple of programs, the index.
      operands: for each invar of the program, the index of the equation's operand that feeds it.
      trips: iterations in one run of the equation: a scan's length, else 1 (a while loop's is not known).
      num_consts, num_carry: of a scan or a while loop.
    """

    kind: CallKind
    jaxpr: Any
    key: tuple[str, int | None]
    operands: tuple[int, ...]
    trips: int = 1
    num_consts: int = 0
    num_carry: int = 0

    @property
    def rewritable(self) -> bool:
        return self.kind not in (CallKind.CUSTOM, CallKind.OPAQUE)


_CUSTOM = {"custom_jvp_call", "custom_vjp_call"}
_INLINE = {"jit", "closed_call", "eval_jaxpr"}


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Number of constants and of carried values of a scan."""
    if "num_carry" in params:  # JAX 0.10.2
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.12
    return len(list(consts)), len(list(carry))


def calls(eqn: JaxprEqn) -> tuple[Call, ...]:
    """The programs nested in an equation, in the order in which they run."""
    p, name, n = eqn.params, eqn.primitive.name, len(eqn.invars)
    everything = tuple(range(n))
    if name == "scan":
        consts, carry = scan_counts(p)
        return (Call(CallKind.SCAN, close(p["jaxpr"]), ("jaxpr", None), everything, p["length"], consts, carry),)
    if name == "while":
        c, b = p["cond_nconsts"], p["body_nconsts"]
        carry = everything[c + b :]
        return (
            Call(CallKind.WHILE, close(p["cond_jaxpr"]), ("cond_jaxpr", None), (*range(c), *carry), 1, c, len(carry)),
            Call(
                CallKind.WHILE,
                close(p["body_jaxpr"]),
                ("body_jaxpr", None),
                (*range(c, c + b), *carry),
                1,
                b,
                len(carry),
            ),
        )
    if name == "cond":
        return tuple(
            Call(CallKind.COND, close(j), ("branches", i), everything[1:]) for i, j in enumerate(p["branches"])
        )
    region = remat_region(eqn)
    if region is not None:
        return (Call(CallKind.REMAT, region.jaxpr, ("jaxpr", None), everything),)
    if name == "shard_map":
        return (Call(CallKind.SHARD_MAP, close(p["jaxpr"]), ("jaxpr", None), everything),)
    if name in _CUSTOM or name in _INLINE:
        key = "call_jaxpr" if "call_jaxpr" in p else "jaxpr"
        if key not in p:
            return ()
        kind = CallKind.CUSTOM if name in _CUSTOM else CallKind.JIT
        return (Call(kind, close(p[key]), (key, None), everything),)
    found = []
    for k, v in p.items():
        for i, j in enumerate(v if isinstance(v, tuple) else (v,)):
            if isinstance(j, (Jaxpr, ClosedJaxpr)):
                found.append(Call(CallKind.OPAQUE, j, (k, i if isinstance(v, tuple) else None), ()))
    return tuple(found)


def context(eqn: JaxprEqn) -> Any:
    """Context manager: the name stack, source and configuration under which an equation was traced."""
    info = eqn.source_info
    stack = _source.current_name_stack() + info.name_stack
    return _Contexts(_source.user_context(info.traceback, name_stack=stack), eqn.ctx.manager)


class _Contexts:
    def __init__(self, *managers: Any):
        self.managers = managers

    def __enter__(self) -> None:
        for m in self.managers:
            m.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for m in reversed(self.managers):
            m.__exit__(*exc)


def bind(eqn: JaxprEqn, operands: Sequence[Any], programs: Mapping[tuple[str, int | None], Any] | None = None) -> list:
    """Binds an equation again, under its own context, with other nested programs where given.

    Args:
      programs: for each `Call.key` the closed program to put in its place. For a shard_map the value is
        instead a flat function, as its body can only be traced with the mesh's axes bound.
    """
    with context(eqn):
        if eqn.primitive.name == "shard_map" and programs:
            (body,) = programs.values()
            out = _shard_map(eqn, body, operands)
        else:
            params = _with_programs(eqn.params, programs) if programs else eqn.params
            out = eqn.primitive.bind(*operands, **_bind_params(eqn, params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_parts(eqn: JaxprEqn, operands: Sequence[Any], parts: Sequence[tuple[int, int, Any]]) -> list[Any]:
    """Binds a scan as several, one behind the other: the carry goes on, what is stacked is cut and joined.

    Args:
      parts: for each its first iteration, the one behind its last, and the program of its body, in that order; they
        make up the whole scan.
    """
    (call,) = calls(eqn)
    first, last = call.num_consts, call.num_consts + call.num_carry
    consts, carry, stacked = operands[:first], list(operands[first:last]), operands[last:]
    results: dict[int, list[Any]] = {}
    reverse = eqn.params["reverse"]
    with context(eqn):
        for start, stop, program in reversed(parts) if reverse else parts:
            cut = [jax.lax.slice_in_dim(x, start, stop) for x in stacked]
            params = {**_with_programs(eqn.params, {call.key: program}), "length": stop - start}
            out = eqn.primitive.bind(*consts, *carry, *cut, **eqn.primitive.get_bind_params(params))
            carry, results[start] = list(out[: len(carry)]), list(out[len(carry) :])
        joined = [jax.lax.concatenate(list(ys), 0) for ys in zip(*(results[s] for s in sorted(results)), strict=True)]
    return [*carry, *joined]


def _with_programs(params: Mapping[str, Any], programs: Mapping[tuple[str, int | None], Any]) -> dict[str, Any]:
    new = dict(params)
    for (key, index), program in programs.items():
        if index is None:
            new[key] = program
        else:
            branches = list(new[key])
            branches[index] = program
            new[key] = tuple(branches)
    return new


def _shard_map(eqn: JaxprEqn, body: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Sequence[Any]:
    p = eqn.params
    mapped = jax.shard_map(
        lambda *xs: tuple(body(*xs)),
        mesh=p["mesh"],
        in_specs=tuple(p["in_specs"]),
        out_specs=tuple(p["out_specs"]),
        check_vma=p["check_vma"],
        axis_names=set(p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]),
    )
    return mapped(*operands)


# Rematerialization ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """An existing `jax.checkpoint` region, of either implementation.

    Attributes:
      jaxpr: its body, closed.
      policy: the policy it was written with (a JAX callable, or None for nothing saveable).
      prevent_cse: as written.
      differentiated: whether it stands in an already differentiated program.
    """

    jaxpr: Any
    policy: Any
    prevent_cse: Any
    differentiated: bool


def remat_region(eqn: JaxprEqn) -> Region | None:
    """Reads a `jax.checkpoint` equation; None for any other."""
    p = eqn.params
    if eqn.primitive is remat_p:
        return Region(close(p["jaxpr"]), p["policy"], p["prevent_cse"], p["differentiated"])
    prim = p.get("_prim")
    if prim is not None and type(prim).__name__ == "RematTraced":
        return Region(prim.jaxpr, prim.policy, getattr(prim, "prevent_cse", True), False)
    return None


def name_of(eqn: JaxprEqn) -> str | None:
    """The name that a `checkpoint_name` equation gives, of either implementation; None for any other."""
    if eqn.primitive is name_p:
        return str(eqn.params["name"])
    prim = eqn.params.get("_prim")
    if prim is not None and type(prim).__name__ in ("CheckpointName", "CheckpointNameFwd"):
        return str(prim.name)
    return None


def op_of(eqn: JaxprEqn) -> str:
    """The name of an equation's primitive, the same under both remat implementations."""
    if name_of(eqn) is not None:
        return "name"
    if remat_region(eqn) is not None:
        return "checkpoint"
    prim = eqn.params.get("_prim")
    return eqn.primitive.name if prim is None else getattr(prim, "name", type(prim).__name__)


def remat3() -> bool:
    """Whether JAX's newer implementation of remat is in force (`jax_remat3`)."""
    return bool(_config.remat3.value)


def keeps(policy: Callable[..., Any], eqn: JaxprEqn) -> bool:
    """Whether one of JAX's policies keeps the results of an equation, on the device or on the host."""
    name = name_of(eqn)
    if name is not None:
        case = policy(name_p, eqn.invars[0].aval, name=name)
    else:
        case = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    return not isinstance(_pe.ensure_enum(case), _pe.RecomputeType)


def cache_key() -> Any:
    """What `jax.jit`'s caches depend on besides the function and its arguments: flags, mesh, contexts."""
    return _config.trace_context()


def name_custom_vjp(eqn: JaxprEqn, operands: Sequence[Any], name: str) -> list[Any]:
    """Binds a custom_vjp call whose forward rule names all it hands to the backward rule.

    Naming the call's outputs alone does not keep what its forward rule makes besides (a kernel's
    log-sum-exp), so that the kernel would run again. Names in forward rules are honoured by JAX's classic
    remat; `jax_remat3` ignores them.
    """
    with context(eqn):
        params = _bind_params(eqn, eqn.params)
        fun, fwd, bwd = params["subfuns"]
        params["subfuns"] = (fun, _name_outputs(fwd, name), bwd)
        return list(eqn.primitive.bind(*operands, **params))


def through_forward_rule(eqn: JaxprEqn, operands: Sequence[Any], evaluate: Callable[..., Sequence[Any]]) -> list[Any]:
    """Binds a custom_vjp call whose forward rule, when it is differentiated, runs as `evaluate(program, args)`."""
    with context(eqn):
        params = _bind_params(eqn, eqn.params)
        fun, fwd, bwd = params["subfuns"]
        params["subfuns"] = (fun, _evaluated_by(fwd, evaluate), bwd)
        return list(eqn.primitive.bind(*operands, **params))


@_lu.transformation2
def _evaluated_by(fun: Callable[..., Any], evaluate: Callable[..., Sequence[Any]], *args: Any) -> Any:
    values, perturbed = args[::2], args[1::2]  # each argument is followed by whether it is differentiated

    def flat(*xs: Any) -> Any:
        return fun(*(y for pair in zip(xs, perturbed, strict=True) for y in pair))

    return evaluate(trace(flat, [_core.typeof(x) for x in values]), values)


def forward_rule(eqn: JaxprEqn) -> Any:
    """The forward rule of a custom_vjp call as a program; None if it cannot be traced alone."""
    thunk = eqn.params["fwd_jaxpr_thunk"]
    traced, structures = _rule_memory(thunk)
    before = [dict(memo) for memo in traced], [s._store._val for s in structures]
    try:
        program, consts = thunk.call_wrapped(*(False for _ in eqn.invars[eqn.params["num_consts"] :]))[:2]
    except Exception:  # a rule that is wrong is JAX's to report, when it is used
        return None
    finally:  # as if it had not been asked
        for memo, was in zip(traced, before[0], strict=True):
            memo.clear()
            memo.update(was)
        for s, value in zip(structures, before[1], strict=True):
            s._store._val = value
    return ClosedJaxpr(program, consts) if program.constvars else program


def _rule_memory(thunk: Any) -> tuple[list[dict[Any, Any]], list[Any]]:
    """What JAX remembers of a forward rule: its programs by which arguments are differentiated, and where it keeps the
    structure of the residuals.

    There is one structure, that of the program traced last: asking for an earlier one again does not bring it back. A
    rule with `symbolic_zeros` may hand on other residuals for other arguments, and then they are taken for what they
    are not (JAX 0.10.2 to 0.12.0.1).
    """
    memos: list[dict[Any, Any]] = []
    structures: list[Any] = []
    todo = [thunk]
    while todo:
        f = todo.pop()
        if isinstance(f, _lu.WrappedFun):
            structures += [s for s in f.stores if isinstance(s, _lu.EqualStore)]
            f = f.f
        cells: Any = getattr(f, "__closure__", None)
        if not cells or not (getattr(f, "__module__", None) or "").startswith("jax._src"):
            continue
        held = dict(zip(f.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))
        if isinstance(held.get("cells"), dict):
            memos.append(held["cells"])
        todo += [x for x in held.values() if callable(x) or isinstance(x, _lu.WrappedFun)]
    return memos, structures


def _bind_params(eqn: JaxprEqn, params: Mapping[str, Any]) -> dict[str, Any]:
    """What an equation is bound with. A forward rule that is asked again is traced again; see `_rule_memory`."""
    found = eqn.primitive.get_bind_params(params)
    if is_custom_vjp(eqn) and params["symbolic_zeros"]:
        fun, fwd, bwd = found["subfuns"]
        found["subfuns"] = (fun, _anew(fwd, params["fwd_jaxpr_thunk"]), bwd)
    return found


@_lu.transformation2
def _anew(fun: Callable[..., Any], thunk: Any, *args: Any) -> Any:
    _forget(thunk)
    return fun(*args)


def _forget(thunk: Any) -> None:
    """Lets a forward rule be traced again; see `_rule_memory`."""
    for memo in _rule_memory(thunk)[0]:
        memo.clear()


@_lu.transformation2
def _name_outputs(fun: Callable[..., Any], name: str, *args: Any) -> Any:
    return [named(x, name) if isinstance(x, jax.Array) else x for x in fun(*args)]


def named(x: Any, name: str) -> Any:
    """A value with a checkpoint name; a complex one by its parts, as JAX (to 0.12.0.1) cannot keep one by its name."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(checkpoint_name(jnp.real(x), name), checkpoint_name(jnp.imag(x), name))
    return checkpoint_name(x, name)


def is_custom_vjp(eqn: JaxprEqn) -> bool:
    """Whether an equation calls a `jax.custom_vjp` function."""
    return eqn.primitive.name.startswith("custom_vjp_call")


# Values ---------------------------------------------------------------------------------------------


def nbytes(aval: Any) -> int:
    """Bytes of a value: typed keys count their physical words, refs what they refer to."""
    if isinstance(aval, AbstractRef):
        aval = aval.inner_aval
    if not hasattr(aval, "shape"):
        return 0
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        physical: Any = _core.physical_aval(aval)
        return math.prod(physical.shape) * physical.dtype.itemsize
    return math.prod(aval.shape) * dtype.itemsize


def shard_shape(aval: Any) -> tuple[int, ...]:
    """The shape that one device holds, where the type says so (explicit sharding), else the whole shape."""
    sharding = getattr(aval, "sharding", None)
    spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
    if not spec or mesh is None or not mesh.axis_names:
        return tuple(aval.shape)
    shape = list(aval.shape)
    for i, axes in enumerate(spec):
        if axes is not None and axes is not jax.sharding.PartitionSpec.UNCONSTRAINED:
            names = axes if isinstance(axes, tuple) else (axes,)
            shape[i] = -(-shape[i] // math.prod(mesh.shape[a] for a in names))
    return tuple(shape)


def on_host(aval: Any) -> bool:
    """Whether a value lives in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def is_ref(aval: Any) -> bool:
    """Whether a value is a mutable reference."""
    return isinstance(aval, AbstractRef)


def is_inexact(aval: Any) -> bool:
    """Whether a value can carry a gradient. A mutable reference has none of its own."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact) and not is_ref(aval)


def writes(jaxpr: Any) -> list[str]:
    """The mutable references that a program is given and writes to, as text; empty for a pure program."""
    written = _written(opened(jaxpr).effects)
    return [v.aval.str_short() for v in inputs(jaxpr) if v in written]


def replays(program: Any) -> bool:
    """Whether `jax.checkpoint` runs the effects of a program or an equation again in the backward pass, if any."""
    return not _effects.remat_allowed_effects.filter_not_in(opened(program).effects)


def _written(effects: Any) -> list[Var]:
    return [e.input for e in effects if isinstance(e, RefEffect) and not isinstance(e, ReadEffect)]


# Where an equation comes from -------------------------------------------------------------------------


def scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The `jax.named_scope` names that an equation stands under, relative to its own program."""
    return tuple(s.name for s in eqn.source_info.name_stack.stack if isinstance(s, _source.Scope))


def transposed(eqn: JaxprEqn) -> bool:
    """Whether an equation was made by the backward pass of a gradient."""
    return any(isinstance(s, _source.Transform) and s.name == "transpose" for s in eqn.source_info.name_stack.stack)


def with_scopes(eqn: JaxprEqn, names: Sequence[str]) -> JaxprEqn:
    """The same equation under other scopes."""
    stack = _source.NameStack(tuple(_source.Scope(n) for n in names))
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def with_programs(eqn: JaxprEqn, programs: Mapping[tuple[str, int | None], Any]) -> dict[str, Any]:
    """The parameters of an equation with other nested programs (closed, of the same type)."""
    prim = eqn.params.get("_prim")
    if prim is not None:  # jax_remat3's region holds its program in the primitive itself
        (program,) = programs.values()
        more = (prim.prevent_cse,) if hasattr(prim, "prevent_cse") else ()
        return {**eqn.params, "_prim": type(prim)(program, prim.policy, *more)}
    like = {}
    for (key, index), program in programs.items():
        old = eqn.params[key] if index is None else eqn.params[key][index]
        like[key, index] = program if isinstance(old, ClosedJaxpr) else opened(program)
    return _with_programs(eqn.params, like)


_LIBRARIES = tuple(
    os.path.join("site-packages", name, "") for name in ("flax", "haiku", "equinox", "optax", "chex", "einops")
)


def source_line(eqn: JaxprEqn) -> tuple[str, int, str]:
    """File, line and function of the user's code that an equation comes from; ("", 0, "") if unknown.

    Frames of neural network libraries are passed over where there are others: the line that calls a layer
    says more than the line in the library that multiplies.
    """
    frames = list(_source.user_frames(eqn.source_info.traceback))
    frame = next((f for f in frames if not any(x in f.file_name for x in _LIBRARIES)), frames[0] if frames else None)
    return ("", 0, "") if frame is None else (frame.file_name, frame.start_line, frame.function_name)


def is_tracer(x: Any) -> bool:
    """Whether a value is being traced."""
    return isinstance(x, _core.Tracer)


def is_tracer_type(cls: type) -> bool:
    """Whether instances of a class are values being traced."""
    return issubclass(cls, _core.Tracer)


def tracer_line(x: Any) -> str:
    """The user's source line at which a traced value was made, ``"model.py:41 (attention)"``; empty if unknown."""
    info = getattr(x, "_line_info", None)
    frame = next(iter(_source.user_frames(info.traceback)), None) if info is not None else None
    return "" if frame is None else f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})"


def key_impl(dtype: Any) -> str:
    """The generator of typed keys, as `jax.random.wrap_key_data` takes it."""
    return dtype._impl.name  # tried on 0.10.2, 0.12.0.1


def as_jit(eqn: JaxprEqn, program: Any) -> JaxprEqn:
    """An equation that runs the program under `jax.jit` instead of in a `jax.checkpoint` region.

    The program is not traced again, as the axes of a shard_map around it are bound nowhere here.
    """
    jitted = jax.jit(lambda xs: [jnp.float32(i) for i in range(len(eqn.outvars))])
    scalar = _core.ShapedArray((), jnp.float32)
    made = opened(trace(lambda *xs: jitted(list(xs)), [scalar] * len(eqn.invars))).eqns[-1]
    params = with_programs(made, {("jaxpr", None): close(program)})
    return eqn.replace(primitive=made.primitive, params=params)


def aval_of(x: Any) -> Any:
    """The type of a value, real or abstract."""
    return _core.shaped_abstractify(x)


_LOOP_BODIES = ("scan", "while_body", "fori_loop")


def in_loop_body() -> bool:
    """Whether the code being traced stands directly in the body of a scan or a while loop.

    Directly: not in a function inside it whose trace JAX would use again elsewhere (jit), nor in one that is
    differentiated inside the body, where XLA could merge recomputation and forward pass after all.
    """
    trace = _core.trace_ctx.trace
    while type(trace).__name__ == "BatchTrace":
        trace = trace.parent_trace
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return info is not None and info.traced_for in _LOOP_BODIES
