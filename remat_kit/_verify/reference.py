"""The same loss in a wider type, to tell which of two results is nearer to the truth.

The function is traced anew at arguments that are cast up. What it casts itself (a model's `dtype`) stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit import _loss
from remat_kit._adapters import Call
from remat_kit._errors import RematError
from remat_kit._rewrite import without_regions
from remat_kit._trace import inputs, jaxprs, survey

WIDTHS = {"float32": 4, "float64": 8}
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator")


def check_name(reference: Any) -> None:
    """Refuses anything but None and the names of two types.

    Raises:
      RematError: for it.
    """
    if reference is not None and (not isinstance(reference, str) or reference not in WIDTHS):
        raise RematError(f"reference= is None, 'float32' or 'float64'; got {reference!r:.80}.")


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """A loss without remat in a wider type.

    Attributes:
      jaxpr: its program.
      leaves: its arguments, cast up.
      wide: whether 64-bit types are in force.
    """

    jaxpr: Any
    leaves: list[Any]
    wide: bool

    @classmethod
    def of(cls, call: Call, leaves: Sequence[Any], asked: Any, plain: Any, name: str) -> Reference:
        """Traces a call at wider arguments.

        Args:
          leaves: the real arguments.
          asked: which are differentiated and whether there is an auxiliary output, as `remat_kit._loss.read` takes it.
          plain: the program that it is the reference for.

        Raises:
          RematError: where the function is another one there, or none.
        """
        wide = name == "float64"
        with types(wide):
            up = [_cast(x, WIDTHS[name]) for x in leaves]
            args, kwargs = inputs.split((call.args, call.kwargs))[1].merge(up)
            try:
                loss = _loss.read(dataclasses.replace(call, args=args, kwargs=kwargs), None, **asked)
            except Exception as error:  # the user's function, at types that it was not written for
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise RematError(f"the function does not run at {name}: {reason[:300]}") from error
        if _draws(loss.traced.jaxpr) != _draws(plain):
            raise RematError(f"the function draws other random numbers at {name}, and so is another function there")
        return cls(without_regions(loss.traced.jaxpr), up, wide)


def types(wide: bool) -> Any:
    """Context manager: whether 64-bit types are in force."""
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _cast(x: Any, width: int) -> Any:
    aval = jaxprs.aval_of(x)
    if not jaxprs.is_inexact(aval):
        return x
    is_complex = jnp.issubdtype(aval.dtype, jnp.complexfloating)
    have = aval.dtype.itemsize // (2 if is_complex else 1)
    if have >= width:
        return x
    dtype = np.dtype(f"c{2 * width}" if is_complex else f"f{width}")
    return jnp.asarray(x).astype(dtype)


def _draws(jaxpr: Any) -> list[str]:
    """The random numbers that a program draws, by type."""
    eqns = (e for p in survey.programs(jaxpr) for e in p.eqns)
    return sorted(f"{e.primitive.name} {e.outvars[0].aval.str_short()}" for e in eqns if e.primitive.name in _RANDOM)
