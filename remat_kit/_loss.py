"""A loss as reverse mode sees it: its program under a policy, what is differentiated, which output is the loss."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax

from remat_kit._adapters import Call
from remat_kit._apply import Chosen, Policies, Rules, rewritten
from remat_kit._errors import RematError
from remat_kit._options import check_flags
from remat_kit._trace import jaxprs, tracing


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A function that `jax.grad` takes, traced.

    Attributes:
      call: the call that was traced.
      traced: the function as written.
      jaxpr: its program under the policy.
      differentiated: for each input of the program, whether the gradient is taken with respect to it.
      outputs: for each output of the program, whether it is the loss.
      rules: the policy; None means as written.
      applied: the blocks that the policy came to; None means as written.
    """

    call: Call
    traced: tracing.Traced
    jaxpr: Any
    differentiated: tuple[bool, ...]
    outputs: tuple[bool, ...]
    rules: Rules | None
    applied: Chosen | None

    @property
    def policy(self) -> str:
        """The policy as text."""
        return "as written" if self.rules is None else str(self.rules)


def read(call: Call, policy: Policies, argnums: int | Sequence[int], has_aux: bool, *, allow_int: bool = False) -> Loss:
    """Traces a loss and applies a policy to it.

    Args:
      policy: as `remat_kit.apply` takes it; None leaves the function as written.
      argnums, has_aux: as in `jax.grad`.
      allow_int: whether leaves of the differentiated arguments that are no floating or complex numbers are passed over.

    Raises:
      RematError: for a result that is not a scalar, a differentiated argument without numbers to differentiate,
        an unknown policy, block or name.
    """
    check_flags(has_aux=has_aux)
    traced = tracing.trace(call.fun, call.args, call.kwargs)
    differentiated = _differentiated(traced, argnums, len(call.args), call, allow_int)
    outputs = _outputs(traced, call, has_aux)
    if policy is None:
        return Loss(call, traced, traced.jaxpr, differentiated, outputs, None, None)
    rules = Rules.of(policy)
    jaxpr, applied = rewritten(traced, rules)
    return Loss(call, traced, jaxpr, differentiated, outputs, rules, applied)


def _differentiated(
    traced: tracing.Traced, argnums: int | Sequence[int], n: int, call: Call, allow_int: bool
) -> tuple[bool, ...]:
    try:
        numbers = tuple(map(operator.index, argnums if isinstance(argnums, Sequence) else (argnums,)))
    except TypeError:
        raise RematError(f"argnums is a position or several, as in jax.grad; got {argnums!r}.") from None
    if not numbers or not all(-n <= i < n for i in numbers):
        raise RematError(f"argnums={argnums!r} does not fit: the function was given {n} positional arguments.")
    wanted = {i % n for i in numbers}
    avals = [v.aval for v in jaxprs.opened(traced.jaxpr).invars]
    out = []
    trainable = call.trainable or (True,) * len(avals)
    for aval, label, position, trains in zip(avals, traced.labels, traced.argnums, trainable, strict=True):
        mine = position in wanted and trains and (not allow_int or jaxprs.is_inexact(aval))
        if mine and not jaxprs.is_inexact(aval):
            raise RematError(
                f"cannot differentiate with respect to {label} of type {aval.str_short()}: gradients need floating or "
                "complex numbers. Choose other argnums, or pass such leaves in another argument."
            )
        out.append(mine)
    if not any(out):
        raise RematError(
            f"nothing to differentiate: argument {', '.join(map(str, sorted(wanted)))} holds no arrays of numbers."
        )
    return tuple(out)


@dataclasses.dataclass(frozen=True)
class _Output:
    """Stands for one output of a program in the structure of its result."""

    index: int
    aval: Any


def _outputs(traced: tracing.Traced, call: Call, has_aux: bool) -> tuple[bool, ...]:
    """Which outputs of the program are the loss."""
    avals = [v.aval for v in jaxprs.opened(traced.jaxpr).outvars]
    loss = call.result(traced.outputs.merge(_Output(i, a) for i, a in enumerate(avals)))
    if has_aux:
        if not isinstance(loss, tuple) or len(loss) != 2:
            found = loss.aval.str_short() if isinstance(loss, _Output) else type(loss).__name__
            raise RematError(f"has_aux=True needs a function that returns (loss, aux); it returned {found}.")
        loss = loss[0]
    leaves = jax.tree.leaves(loss)
    out = loss if isinstance(loss, _Output) else None
    if out is None or out.aval.shape != ():
        found = (
            ", ".join(x.aval.str_short() if isinstance(x, _Output) else type(x).__name__ for x in leaves) or "nothing"
        )
        if isinstance(loss, (list, dict)):
            found += f" in a {type(loss).__name__}"
        more = (
            " It returned a pair: pass has_aux=True if the second is auxiliary."
            if isinstance(loss, tuple) and len(loss) == 2
            else ""
        )
        raise RematError(
            f"the function must return one scalar, as jax.grad requires, but returned {found}.{more} "
            "To look at a layer, sum its output: lambda *a: f(*a).sum()."
        )
    if not jaxprs.is_inexact(out.aval):
        raise RematError(f"the function must return a floating or complex scalar, but returned {out.aval.str_short()}.")
    return tuple(i == out.index for i in range(len(avals)))
