"""A loop as JAX traces it, run another way.

Types, checks and errors are JAX's, and the functions of the loop are traced as often as JAX traces them: random streams
of modules that they close over stand where they would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from remat_kit import _adapters
from remat_kit._errors import RematError
from remat_kit._trace import jaxprs, marks
from remat_kit._trace.inputs import is_dynamic
from remat_kit._trace.jaxprs import JaxprEqn, Literal, Var

Run = Callable[[JaxprEqn, list[Any]], list[Any]]


def check_arrays(**given: Any) -> None:
    """Refuses what JAX cannot trace: loops go over arrays and numbers.

    Raises:
      RematError: naming the argument and the leaf of it.
    """
    for name, tree in given.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not is_dynamic(leaf):
                raise RematError(
                    f"{name}{jax.tree_util.keystr(path)} is {leaf!r:.80} of type {type(leaf).__name__}, which is no "
                    "array or number. Let the function of the loop close over what stays the same."
                )


def run_as(run: Run, name: str, primitive: str, loop: Callable[..., Any], *args: Any, by_path: bool = False) -> Any:
    """Traces a call of one of JAX's loops, and runs the loop in it as `run` does.

    Args:
      run: the equation of the loop and its operands -> its results.
      name: what messages call the user's function.
      primitive: that of the loop.
      loop: the call.
      *args: its arguments.
      by_path: whether module paths matter, which only a reading leaves in what is traced.
    """
    _adapters.refuse_modules(name, args)
    with (
        jax.disable_jit(False),
        marks.read() if by_path else contextlib.nullcontext(),
        _adapters.state_errors(name),
    ):
        jaxpr, out = jax.make_jaxpr(loop, return_shape=True)(*args)
    owner = jaxprs.opened(jaxpr)
    env: dict[Var, Any] = dict(
        zip(jaxprs.inputs(jaxpr), [*jaxprs.constants(jaxpr), *jax.tree.leaves(args)], strict=True)
    )

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in owner.eqns:
        operands = [read(v) for v in eqn.invars]
        results = run(eqn, operands) if eqn.primitive.name == primitive else jaxprs.bind(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return jax.tree.unflatten(jax.tree.structure(out), [read(v) for v in owner.outvars])
