"""Whether a function is one of its arguments only: traced again it is the same program, and leaves no tracer behind.

JAX traces a rematerialized function when it likes and as often as it likes. What depends on Python state (counters, the
time, global random numbers) is then another function each time, or one that was frozen at its first trace.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._trace import jaxprs
from remat_kit._trace.jaxprs import ClosedJaxpr, Jaxpr, Literal
from remat_kit._trace.tracing import Traced

_anew: Any = jax.make_user_context(default_value=None)  # JAX's caches look at it: nothing traced before is used again
_traces = itertools.count(1)
_AHEAD = 100_003  # seconds


def impurities(fun: Callable[..., Any], first: Traced, trace: Callable[[], Traced]) -> list[str]:
    """What a second trace shows of a function, one sentence for each fault.

    Args:
      fun: the function, for the names of what it captures.
      first: its first trace.
      trace: traces it again.
    """
    generators = _generators()
    found: list[str] = []
    with leaks(fun) as leaked:
        with _later():
            second = trace()
        used = [name for name, state in _generators().items() if state != generators[name]]
        if first.outputs.reusable and second.outputs.reusable and first.outputs != second.outputs:
            found.append("Traced twice, the function returns two structures, or two values that are no arrays.")
        difference = first_difference(first.jaxpr, second.jaxpr)
        if difference is not None:
            what, eqn = difference
            where = f" at {_line(eqn)}" if eqn is not None and _line(eqn) else ""
            cause = (
                f"It draws from {' and '.join(used)}."
                if used
                else (
                    "It depends on more than its arguments: Python state that changes, the time, an unseeded generator."
                )
            )
            found.append(f"Traced twice, the function is two programs: they first differ{where}, {what}. {cause}")
            del eqn
        elif used:
            found.append(f"While it is traced, the function draws from {' and '.join(used)}.")
        del second, difference
    if leaked:
        found.append(
            f"The function leaks a traced value{leaked[0]}: used later it is an error, and under remat it may be one "
            "of several traces. Return it instead."
        )
    return found


@contextlib.contextmanager
def leaks(fun: Callable[..., Any]) -> Iterator[list[str]]:
    """Finds the traced values that outlive what is traced inside, in which nothing is taken from JAX's caches.

    `jax.checking_leaks` looks for what refers to every traced value in turn, which takes minutes in a large process.

    Args:
      fun: the function that is traced, for the names of what it captures.

    Yields:
      A list that stays empty where there are none; else where one of them is held and made, as far as that is known,
      ``" into history, made at model.py:9 (layer)"``.
    """
    known = list(_tracers())
    found: list[str] = []
    with _anew(next(_traces)):
        yield found
    gc.collect()
    ids = set(map(id, known))
    left = [t for t in _tracers() if id(t) not in ids]
    if left:
        holder, held = _holder(fun, set(map(id, left)))
        line = next(filter(None, map(jaxprs.tracer_line, [held, *left])), "")
        found.append((f" into {holder}" if holder else "") + (f", made at {line}" if line else ""))


@contextlib.contextmanager
def _later() -> Iterator[None]:
    """Puts this thread's clock forward, as single precision does not see the time between two traces."""
    clocks = {name: getattr(time, name) for name in ("time", "time_ns")}
    thread = threading.get_ident()

    def shifted(name: str) -> Callable[[], Any]:
        real, ahead = clocks[name], _AHEAD * (10**9 if name.endswith("ns") else 1)
        return lambda: real() + (ahead if threading.get_ident() == thread else 0)

    try:
        for name in clocks:
            setattr(time, name, shifted(name))
        yield
    finally:
        for name, real in clocks.items():
            setattr(time, name, real)


def _tracers() -> Iterator[Any]:
    """All traced values that are alive, wherever they are held."""
    return (x for x in gc.get_objects() if jaxprs.is_tracer_type(type(x)))


def _generators() -> dict[str, Any]:
    return {"Python's random": random.getstate(), "NumPy's global generator": repr(np.random.get_state(legacy=False))}


def _holder(fun: Any, leaked: set[int]) -> tuple[str, Any]:
    """The name of what a function captures that holds one of the traced values, and that value; or "" and None."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = list(_captures(fun))
    while todo:
        name, value = todo.pop(0)
        if id(value) in seen or len(seen) > 10_000:
            continue
        seen.add(id(value))
        if id(value) in leaked:
            return name, value
        if isinstance(value, (list, tuple, set)):
            held = [(name, x) for x in value]
        elif isinstance(value, dict):
            held = [(f"{name}[{k!r}]", x) for k, x in value.items()]
        elif isinstance(value, types.FunctionType):
            held = list(_captures(value))
        else:
            held = [(f"{name}.{k}", x) for k, x in getattr(value, "__dict__", {}).items()]
            held = [] if isinstance(value, (type, types.ModuleType)) else held
        todo += held
    return "", None


def _captures(fun: Any) -> Iterator[tuple[str, Any]]:
    fun = getattr(fun, "__wrapped__", fun)
    if isinstance(fun, types.MethodType):
        yield "self", fun.__self__
        fun = fun.__func__
    code = getattr(fun, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a name that is not assigned yet
            yield name, cell.cell_contents
    yield from ((n, fun.__globals__[n]) for n in code.co_names if n in fun.__globals__)


def _line(eqn: Any) -> str:
    file, line, function = jaxprs.source_line(eqn)
    return f"{os.path.basename(file)}:{line} ({function})" if file else ""


# Programs compared -----------------------------------------------------------------------------------------


def first_difference(a: Any, b: Any) -> tuple[str, Any] | None:
    """Where two closed programs first differ: what, and the equation of the first one (if any). None if they do not.

    Values count, those of literals and of constants, and so do the forward rules of custom_vjp functions. Other rules
    of custom derivatives do not: they are Python until they are used.
    """
    return _Comparison().visit(a, b)


class _Comparison:
    def __init__(self) -> None:
        self.done: dict[tuple[int, int], Any] = {}  # kept alive, so that no other takes their place

    def visit(self, a: Any, b: Any) -> tuple[str, Any] | None:
        p, q = jaxprs.opened(a), jaxprs.opened(b)
        if (id(p), id(q)) in self.done:
            return None
        self.done[id(p), id(q)] = (p, q)
        if len(p.constvars) != len(q.constvars):
            return f"which closes over {len(p.constvars)} arrays the first time and {len(q.constvars)} then", None
        number = {v: i for i, v in enumerate(jaxprs.inputs(a))}
        other = {v: i for i, v in enumerate(jaxprs.inputs(b))}
        changed = {
            v for v, x, y in zip(p.constvars, jaxprs.constants(a), jaxprs.constants(b), strict=False) if not _same(x, y)
        }
        for e, f in zip(p.eqns, q.eqns, strict=False):
            read = next((v for v in e.invars if not isinstance(v, Literal) and v in changed), None)
            if read is not None:
                reader = _reader(e, read)
                return f"in a constant array that {jaxprs.op_of(reader)} reads", reader
            if found := self._equation(e, f, number, other):
                return found, e
            for c, d in zip(_nested(e), _nested(f), strict=False):
                if found := self.visit(c, d):
                    return found[0], found[1] or e
            for mine, theirs in ((e, number), (f, other)):
                for v in mine.outvars:
                    theirs[v] = len(theirs)
        if len(p.eqns) != len(q.eqns):
            rest = (p.eqns if len(p.eqns) > len(q.eqns) else q.eqns)[min(len(p.eqns), len(q.eqns))]
            return f"in {jaxprs.op_of(rest)}, which one of them lacks", rest
        if len(p.outvars) != len(q.outvars) or any(
            self._operand(v, w, number, other) for v, w in zip(p.outvars, q.outvars, strict=False)
        ):
            return "in what they return", None
        return None

    def _equation(self, e: Any, f: Any, number: dict[Any, int], other: dict[Any, int]) -> str:
        op = jaxprs.op_of(e)
        if op != jaxprs.op_of(f):
            return f"in {op} the first time and {jaxprs.op_of(f)} then"
        if len(e.invars) != len(f.invars) or [v.aval for v in e.outvars] != [v.aval for v in f.outvars]:
            return f"in the shapes of {op}"
        for v, w in zip(e.invars, f.invars, strict=True):
            if found := self._operand(v, w, number, other):
                return f"in {found} of {op}"
        if len(jaxprs.calls(e)) != len(jaxprs.calls(f)) or not _same(e.params, f.params):
            return f"in the parameters of {op}"
        return ""

    def _operand(self, v: Any, w: Any, number: dict[Any, int], other: dict[Any, int]) -> str:
        if isinstance(v, Literal) and isinstance(w, Literal):
            return "" if _same(v.val, w.val) else f"the number {v.val} against {w.val}"
        if isinstance(v, Literal) or isinstance(w, Literal):
            return "an operand"
        return "" if number.get(v) == other.get(w) else "an operand"


def _nested(eqn: Any) -> list[Any]:
    """The programs nested in an equation, and the forward rule that it has."""
    rule = jaxprs.forward_rule(eqn) if jaxprs.is_custom_vjp(eqn) else None
    return [*(c.jaxpr for c in jaxprs.calls(eqn)), *([] if rule is None else [rule])]


def _reader(eqn: Any, var: Any) -> Any:
    """The equation that reads a variable, within the programs nested in one that is given it."""
    for call in jaxprs.calls(eqn):
        program = jaxprs.opened(call.jaxpr)
        for inner, operand in zip(program.invars, call.operands, strict=False):
            for e in program.eqns:
                if eqn.invars[operand] is var and any(v is inner for v in e.invars):
                    return _reader(e, inner)
    return eqn


def _same(x: Any, y: Any) -> bool:
    """Whether two parameters or constants are equal, as far as they can be compared by value."""
    if x is y or isinstance(x, (Jaxpr, ClosedJaxpr)):  # programs are compared by themselves
        return True
    if isinstance(x, (np.ndarray, np.generic, jax.Array)):
        return _same_array(x, y)
    if type(x) is not type(y):
        return False
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same(v, y[k]) for k, v in x.items())
    if callable(x) or type(x).__eq__ is object.__eq__:
        return True
    try:
        return bool(x == y) or repr(x) == repr(y)
    except Exception:  # what cannot be compared
        return True


def _same_array(x: Any, y: Any) -> bool:
    if jaxprs.is_tracer(x) or jaxprs.is_tracer(y) or jaxprs.is_ref(jaxprs.aval_of(x)):
        return True
    if getattr(x, "shape", None) != getattr(y, "shape", None) or x.dtype != getattr(y, "dtype", None):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    x, y = np.asarray(x), np.asarray(y)
    return x.tobytes() == y.tobytes()
