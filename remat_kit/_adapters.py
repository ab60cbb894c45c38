"""Calls as pure functions: objects that hold state (NNX modules) are taken apart before a function is traced.

The core knows no framework; the adapter for NNX loads where Flax NNX already is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from remat_kit._errors import RematError


def _same(out: Any) -> Any:
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a function, as a pure function of pytrees.

    Attributes:
      fun: the pure function.
      args, kwargs: its arguments, in the positions of the original's.
      result: from the pure function's result to the original's, without writing anything back.
      finish: the same, and new state is written back.
      trainable: for each dynamic leaf of ``(args, kwargs)``, whether it may be differentiated; None: all may.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Callable[[Any], Any] = _same
    finish: Callable[[Any], Any] = _same
    trainable: tuple[bool, ...] | None = None


def refuse_modules(name: str, tree: Any) -> None:
    """Refuses Flax modules that would lose state in a plain rematerialized function.

    Raises:
      RematError: for an NNX module, or a Linen module that is bound to variables, in the pytree.
    """
    if "flax.nnx" in sys.modules:
        from remat_kit import _nnx_state

        for found in _nnx_state.modules(tree):
            raise RematError(
                f"{name} is given the NNX module {type(found).__name__}: what it changes there inside rk.remat would "
                "be lost. Use rk.nnx.remat."
            )
    if "flax.linen" in sys.modules:
        from flax import linen

        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, linen.Module) and leaf.scope is not None:
                raise RematError(
                    f"{name} is given the bound Linen module {type(leaf).__name__}: its variables would leak out of "
                    "rk.remat. Use rk.linen.remat."
                )


def refuse_without_variables(fun: Any) -> None:
    """Refuses a Linen module, or a class of them, in place of a function: it is called with its variables.

    Raises:
      RematError: saying how.
    """
    if "flax.linen" not in sys.modules:
        return
    from flax import linen

    cls = fun if isinstance(fun, type) else type(fun)
    if issubclass(cls, linen.Module) and (cls is fun or fun.scope is None):
        raise RematError(
            f"expected a function, got {'the Linen module class' if cls is fun else 'a Linen module:'} {cls.__name__}. "
            "Pass a function of its variables, such as lambda variables, x: model.apply(variables, x)."
        )


@contextlib.contextmanager
def state_errors(name: str) -> Iterator[None]:
    """Says in the toolkit's words that a rematerialized function changes NNX state which it captures.

    Raises:
      RematError: in place of Flax's error about trace levels.
    """
    try:
        yield
    except Exception as error:
        flax_errors = sys.modules.get("flax.errors")
        if flax_errors is None or not isinstance(error, flax_errors.TraceContextError):
            raise
        reason = str(error).partition(" (http")[0]
        raise RematError(
            f"{name} changes a module or Variable that it was not given as an argument ({reason}). Inside a "
            "rematerialized region only arguments can be updated: use rk.nnx.remat, and pass that module in."
        ) from error


@contextlib.contextmanager
def adapted(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Call]:
    """Takes apart the arguments of a call that hold state, for as long as the call lasts; others pass as they are."""
    refuse_without_variables(fun)
    if "flax.nnx" in sys.modules:
        from remat_kit import _nnx_capture, _nnx_state

        captured = _nnx_capture.captured_modules(fun)
        if captured:
            listing = ", ".join(f"{name} ({kind})" for name, kind in captured.items())
            raise RematError(
                f"the function captures NNX state: {listing}. What it changes there would be lost, and later "
                "values would not be seen. Pass it as an argument."
            )
        if _nnx_state.has_modules((args, kwargs)):
            with _nnx_state.adapted(fun, args, kwargs) as call, nesting_said():
                yield call
            return
    with nesting_said():
        yield Call(fun, args, kwargs)


@contextlib.contextmanager
def nesting_said() -> Iterator[None]:
    """Says that a program nests too deeply: JAX calls itself for each level, and so does much that reads it.

    Raises:
      RematError: in place of a RecursionError.
    """
    try:
        yield
    except RecursionError as error:
        raise RematError(
            f"the function nests too deeply for Python's recursion limit of {sys.getrecursionlimit()} frames. JAX "
            "takes up to 14 of them for each jit, scan, cond or checkpoint inside another. Unless the function calls "
            "itself without end, nest it less, or raise the limit with sys.setrecursionlimit (Python 3.12 has one more "
            "limit, for calls through C, that nothing raises)."
        ) from error
