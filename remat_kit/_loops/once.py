"""What may be differentiated in forward mode only: values that a reversed loop has made.

The loop that runs backward has as many steps as the data say, and JAX's message for it would speak of a while loop that
the user has not written.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from remat_kit._errors import RematError


def once(x: Any) -> Any:
    """Returns a value as it is; RematError where it is differentiated in reverse."""
    return _once.bind(x)


def _refuse(*_: Any) -> Any:
    raise RematError(
        "a gradient is differentiated in reverse again, and goes through a loop that keeps few states (rk.while_loop, "
        'or rk.scan with segments="binomial"). Take the second derivative in forward mode, jax.jvp(jax.grad(f), ...) '
        "or jax.hessian(f), or give rk.scan a number of segments or a policy."
    )


_once = Primitive("once")
_once.def_impl(lambda x: x)
_once.def_abstract_eval(lambda x: x)
ad.deflinear2(_once, _refuse)
batching.defvectorized(_once)
mlir.register_lowering(_once, lambda ctx, x: [x])
