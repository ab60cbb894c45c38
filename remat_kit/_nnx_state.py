"""NNX modules as arguments: taken apart into graph and state, put together inside, their new state written back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from remat_kit._adapters import Call
from remat_kit._trace import marks
from remat_kit._trace.inputs import is_dynamic

_TAG = "remat_kit.apply"


def has_modules(tree: Any) -> bool:
    """Whether a pytree holds NNX modules or other objects with NNX's reference semantics."""
    return any(map(_is_node, jax.tree.leaves(tree, is_leaf=_is_node)))


def modules(tree: Any) -> list[Any]:
    """The NNX modules, and other objects with reference semantics, in a pytree; Variables in a State are none."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_node) if _is_node(x) and not isinstance(x, nnx.Variable)]


def _is_node(x: Any) -> bool:
    # To NNX a mutable reference is a node too.
    return isinstance(x, nnx.Variable) or (nnx.graphlib.is_graph_node(x) and not is_dynamic(x))


@contextlib.contextmanager
def adapted(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Call]:
    """Takes the modules in a call's arguments apart; what they become is written back by `Call.finish`."""
    with nnx.update_context(_TAG):
        pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=_TAG)

        @functools.wraps(fun)
        def pure(*xs: Any, **ks: Any) -> Any:
            inner = nnx.from_tree((xs, ks), ctxtag=_TAG, is_inner=True)
            with marks.given(tuple(jax.tree.leaves(inner, is_leaf=_is_node))):
                out = fun(*inner[0], **inner[1])
            return nnx.to_tree((nnx.extract.clear_non_graph_nodes(inner), out), ctxtag=_TAG)

        yield Call(
            fun=pure,
            args=pure_args,
            kwargs=pure_kwargs,
            result=lambda out: out[1],
            finish=lambda out: nnx.from_tree(out, ctxtag=_TAG, is_inner=False)[1],
            trainable=_trainable((pure_args, pure_kwargs)),
        )


def _trainable(tree: Any) -> tuple[bool, ...]:
    """For each dynamic leaf, whether `nnx.grad` would differentiate it: `nnx.Param`s, and arrays of no Variable."""
    out: list[bool] = []
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        kind = x.type if hasattr(x, "type") and isinstance(x.type, type) else type(x)
        trains = not (isinstance(x, nnx.Variable) or issubclass(kind, nnx.Variable)) or issubclass(kind, nnx.Param)
        out += [trains for leaf in jax.tree.leaves(x) if is_dynamic(leaf)]
    return tuple(out)
