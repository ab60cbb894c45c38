"""One step of a loop as a flat program: what it closes over, its state and its slice of the inputs go in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit._rewrite import check_effects
from remat_kit._trace import jaxprs


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A function as a flat program.

    Attributes:
      program: a closed program; its inputs are what the function closes over, then its arguments.
      consts: what it closes over.
      out: the structure of its result.
    """

    program: Any
    consts: list[Any]
    out: Any

    @classmethod
    def of(cls, fun: Callable[..., Any], *args: Any) -> Step:
        """Traces a function.

        Raises:
          RematError: if it writes to a mutable reference.
        """
        jaxpr, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        owner = jaxprs.opened(jaxpr)
        program = jaxprs.subprogram(jaxpr, owner.eqns, jaxprs.inputs(jaxpr), owner.outvars)
        check_effects(program)
        return cls(program, jaxprs.constants(jaxpr), jax.tree.structure(out))

    def __call__(self, consts: Sequence[Any], *args: Any) -> list[Any]:
        return jaxprs.evaluate(self.program, *consts, *args)
