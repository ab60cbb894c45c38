"""A program and its derivatives as flat functions, each output with a label, so that two programs can be compared.

A derivative is asked of JAX for both programs: where the one without remat has none (a custom_vjp function in forward
mode, a while loop in reverse mode) there is nothing to compare; where only the other has none, remat has broken it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._adapters import Call
from remat_kit._errors import RematError, near_matches
from remat_kit._loss import Loss
from remat_kit._trace import inputs, jaxprs, tracing

DERIVATIVES = ("reverse", "forward", "forward_over_reverse", "reverse_over_reverse")


def chosen(derivatives: Any) -> tuple[str, ...]:
    """Reads which derivatives to compare.

    Raises:
      RematError: for a name that is none of them, or no name.
    """
    asked = (derivatives,) if isinstance(derivatives, str) else derivatives
    if not isinstance(asked, (tuple, list, set, frozenset)) or not asked:
        raise RematError(f"derivatives= takes names of {', '.join(DERIVATIVES)}; got {derivatives!r:.80}.")
    for name in asked:
        if name not in DERIVATIVES:
            raise RematError(
                f"derivatives= takes names of {', '.join(DERIVATIVES)}; got {name!r:.80}."
                + (near_matches(name, DERIVATIVES) if isinstance(name, str) else "")
            )
    return tuple(d for d in DERIVATIVES if d in asked)


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """What one derivative of a loss consists of.

    Attributes:
      labels: the label of each output: a leaf of the arguments, of the auxiliary output or of the state.
      kinds: what each is: "loss", "aux", "state", "gradient", "tangent", "product" (of the Hessian and a vector).
    """

    labels: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """What is compared: a loss on flat arguments.

    Attributes:
      differentiated, outputs: as in `Loss`.
      labels: of its inputs.
      results: label and kind of each output of the program.
    """

    differentiated: tuple[bool, ...]
    outputs: tuple[bool, ...]
    labels: tuple[str, ...]
    results: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, loss: Loss) -> Subject:
        """Reads the labels of a loss that was read."""
        return cls(
            loss.differentiated, loss.outputs, loss.traced.labels, _results(loss.traced, loss.call, loss.outputs)
        )

    @property
    def moving(self) -> list[int]:
        """The inputs that are differentiated."""
        return [i for i, d in enumerate(self.differentiated) if d]

    def described(self, derivative: str, avals: Sequence[Any]) -> Outputs:
        """The outputs of a derivative.

        Args:
          avals: the types of the program's outputs.
        """
        which = self.outputs.index(True)
        rest = [i for i in range(len(self.outputs)) if i != which]
        moved = [self.labels[i] for i in self.moving]
        if derivative == "reverse":
            found = [self.results[i] for i in (which, *rest)] + [(label, "gradient") for label in moved]
        elif derivative == "forward":
            found = [(self.results[i][0], "tangent") for i in (which, *rest) if jaxprs.is_inexact(avals[i])]
        else:
            found = [(label, "product") for label in moved]
        return Outputs(tuple(label for label, _ in found), tuple(kind for _, kind in found))

    def function(self, derivative: str, jaxpr: Any) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
        """One derivative of a program: a function of its inputs, and of a vector for each that is differentiated."""
        which, moving = self.outputs.index(True), self.moving

        def compute(leaves: Sequence[Any], vectors: Sequence[Any]) -> list[Any]:
            def value(*moved: Any) -> tuple[Any, list[Any]]:
                xs = list(leaves)
                for i, x in zip(moving, moved, strict=True):
                    xs[i] = x
                outs = jaxprs.evaluate(jaxpr, *xs)
                return outs[which], [*outs[:which], *outs[which + 1 :]]

            def gradient(*moved: Any) -> Any:
                out, pull, _ = jax.vjp(value, *moved, has_aux=True)
                return pull(jnp.ones_like(out))

            point = [leaves[i] for i in moving]
            vectors = [jnp.asarray(v).astype(jnp.result_type(x)) for v, x in zip(vectors, point, strict=True)]
            if derivative == "reverse":
                out, pull, aux = jax.vjp(value, *point, has_aux=True)
                return [out, *aux, *pull(jnp.ones_like(out))]
            if derivative == "forward":
                _, (tangent, aux) = jax.jvp(value, point, vectors)
                return [tangent, *(t for t in aux if t.dtype != jax.dtypes.float0)]
            if derivative == "forward_over_reverse":
                return list(jax.jvp(gradient, point, vectors)[1])
            return list(jax.vjp(gradient, *point)[1](tuple(vectors)))

        return compute

    def vectors(self, leaves: Sequence[Any], seed: int) -> list[Any]:
        """A random direction in the space of what is differentiated."""
        found = []
        for i in self.moving:
            aval = jaxprs.aval_of(leaves[i])
            found.append(np.random.default_rng((seed, i)).standard_normal(aval.shape).astype(np.float32))
        return found


class _Place(int):
    """Stands for one output of a program in the structure of its result."""


def _results(traced: tracing.Traced, call: Call, outputs: Sequence[bool]) -> tuple[tuple[str, str], ...]:
    """A label for each output of a program, and whether it is the loss, auxiliary or new state."""
    places = traced.outputs.merge(map(_Place, range(len(outputs))))
    found: dict[int, tuple[str, str]] = {outputs.index(True): ("loss", "loss")}
    result = call.result(places)
    aux = result[1] if isinstance(result, tuple) and len(result) == 2 else result
    for path, place in jax.tree_util.tree_flatten_with_path(aux)[0]:
        if isinstance(place, _Place):
            found.setdefault(int(place), ("aux" + jax.tree_util.keystr(path), "aux"))
    if result is not places:  # new state stands beside it, in the form of the arguments
        args, kwargs = places[0]
        labels, _ = tracing.labels(call.fun, args, kwargs)
        for place, label in zip(inputs.split((args, kwargs))[0], labels, strict=True):
            found.setdefault(int(place), (label, "state"))
    return tuple(found[i] for i in range(len(outputs)))
