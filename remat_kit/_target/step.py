"""The program that is compiled: one training step's gradient, or a step as its user wrote it, on a target's devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from remat_kit import _adapters, _loss, _reports
from remat_kit._apply import Policies, Rules, apply
from remat_kit._errors import RematError
from remat_kit._override import override
from remat_kit._target.compile import lower
from remat_kit._target.target import Target, platform_of
from remat_kit._trace import inputs, jaxprs, marks, survey, tracing
from remat_kit._trace.cost import Cost, matmul_flops, program_cost
from remat_kit._trace.report import Residuals


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A program lowered for a target.

    Attributes:
      lowered: JAX's `Lowered`.
      cost: its cost counted from the jaxpr, trip counts included, over all devices.
      matmul_flops: those of its FLOPs that are in matrix products.
      policy: the policy in force, as text.
      residuals: what reverse mode keeps; None for a step as written, whose gradient was taken already.
      labels: names of its arguments' leaves, for each ``leaves[i]`` that the compiled program speaks of.
      given: the leaves of the arguments that the lowered program takes, as the user gave them.
      placed: the same as abstract arrays, placed on the target.
    """

    lowered: Any
    cost: Cost
    matmul_flops: int
    policy: str
    residuals: Residuals | None
    labels: tuple[str, ...]
    given: tuple[Any, ...]
    placed: tuple[Any, ...]


def gradient_step(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policies,
    argnums: int | Sequence[int],
    has_aux: bool,
    target: Target,
) -> Step:
    """The value and the gradient of a loss, as `jax.value_and_grad` computes them, under a policy.

    Raises:
      RematError: as `remat_kit.residuals` does; for arguments on another mesh than the target's.
    """
    with _adapters.adapted(fun, args, kwargs) as call:
        loss = _loss.read(call, policy, argnums, has_aux)
        residuals = _reports.report(loss)
        given = inputs.split((call.args, call.kwargs))[0]
        placed = _placed(given, target)
    program = survey.map_scopes(loss.jaxpr, marks.plain)
    moving = [i for i, d in enumerate(loss.differentiated) if d]
    which = loss.outputs.index(True)
    holomorphic = jnp.issubdtype(jaxprs.opened(program).outvars[which].aval.dtype, jnp.complexfloating)

    def step(*leaves: Any) -> Any:
        def value(*moved: Any) -> Any:
            xs = list(leaves)
            for i, x in zip(moving, moved, strict=True):
                xs[i] = x
            outs = jaxprs.evaluate(program, *xs)
            return outs[which], [*outs[:which], *outs[which + 1 :]]

        moved = [leaves[i] for i in moving]
        return jax.value_and_grad(value, range(len(moved)), has_aux=True, holomorphic=holomorphic)(*moved)

    step.__name__ = step.__qualname__ = getattr(fun, "__name__", "step")
    traced, lowered = lower(jax.jit(step), tuple(placed), {}, target)
    return Step(lowered, *_costs(traced), loss.policy, residuals, loss.traced.labels, tuple(given), tuple(placed))


def step_as_written(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policies, target: Target
) -> Step:
    """A whole step: a function that is jitted already keeps its donation and shardings.

    Args:
      policy: policies of marked blocks, as `remat_kit.override` takes them; any other policy is applied as
        `remat_kit.apply` does, which a step that contains its own gradient refuses.

    Raises:
      RematError: for a policy that a jitted step, or one with its own gradient, cannot take.
    """
    if not callable(fun):
        raise RematError(f"expected a step to measure, got {type(fun).__name__}: {fun!r:.80}")
    jitted = isinstance(fun, _JITTED)
    overriding: Any = contextlib.nullcontext()
    if isinstance(policy, Mapping):
        overriding = override(policy)
    elif policy is not None and jitted:
        raise RematError(
            "a jitted step takes policies of its marked blocks only ({block: policy}, see rk.override): another one "
            "would lose its donation and shardings. Apply it to the function inside, before jax.jit."
        )
    elif policy is not None:
        fun = apply(fun, policy)
    text = "as written" if policy is None else str(Rules.of(policy))
    with overriding:
        if jitted:
            return _jitted_step(fun, args, kwargs, text, target)
        with _adapters.adapted(fun, args, kwargs) as call:
            given, spec = inputs.split((call.args, call.kwargs))
            placed = _placed(given, target)

            def step(*leaves: Any) -> Any:
                a, k = spec.merge(leaves)
                return inputs.seal(call.fun(*a, **k))

            step.__name__ = step.__qualname__ = getattr(fun, "__name__", "step")
            traced, lowered = lower(jax.jit(step), tuple(placed), {}, target)
            labels, _ = tracing.labels(call.fun, call.args, call.kwargs)
    return Step(lowered, *_costs(traced), text, None, labels, tuple(given), tuple(placed))


_JITTED = type(jax.jit(lambda: None))  # not what wraps such a function: flax.nnx.jit traces otherwise


def _jitted_step(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: str, target: Target) -> Step:
    """A step that is jitted: traced as it is, so that donation, shardings and static arguments stay."""
    given, treedef = jax.tree.flatten((args, kwargs))
    arrays = [i for i, x in enumerate(given) if hasattr(x, "shape") and inputs.is_dynamic(x)]
    placed = list(given)
    for i, x in zip(arrays, _placed([given[i] for i in arrays], target), strict=True):
        placed[i] = x
    placed_args, placed_kwargs = jax.tree.unflatten(treedef, placed)
    traced, lowered = lower(fun, placed_args, placed_kwargs, target)
    infos = jax.tree.leaves(lowered.args_info)
    if len(infos) != len(given):  # some are static: which, only JAX knows
        given = placed = [jax.ShapeDtypeStruct(i.shape, i.dtype) for i in infos]
    return Step(lowered, *_costs(traced), policy, None, (), tuple(given), tuple(placed))


def _costs(traced: Any) -> tuple[Cost, int]:
    return program_cost(traced.jaxpr), matmul_flops(traced.jaxpr)


def _placed(leaves: Sequence[Any], target: Target) -> list[Any]:
    """The leaves as abstract arrays with the sharding that they have on the target.

    A `NamedSharding` stays. Where there is none, everything lies on the target's first device, in the memory that it
    was in; else what has no sharding is left to the compiler, as in `jax.jit`.

    Raises:
      RematError: for a mesh that is not the target's, and for other shardings over several devices.
    """
    shardings = [getattr(x, "sharding", None) for x in leaves]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    for mesh in meshes:
        _check(mesh, target)
    for s in shardings:
        if isinstance(s, jax.sharding.Sharding) and not isinstance(s, NamedSharding) and s.num_devices > 1:
            raise RematError(f"an argument is sharded by a {type(s).__name__}: use NamedSharding on target.mesh(...).")
    alone = SingleDeviceSharding(target.devices[0]) if target.attached and not meshes else None
    on_host = None
    if any(getattr(s, "memory_kind", None) == _HOST for s in shardings) and not meshes:
        on_host = NamedSharding(target.mesh(("device",), (1,)), PartitionSpec(), memory_kind=_HOST)

    def place(x: Any, sharding: Any) -> Any:
        aval = jaxprs.aval_of(x)
        if not isinstance(sharding, NamedSharding):
            sharding = on_host if getattr(sharding, "memory_kind", None) == _HOST else alone
        weak = getattr(aval, "weak_type", False)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)

    return [place(x, s) for x, s in zip(leaves, shardings, strict=True)]


_HOST = "pinned_host"


def _check(mesh: Any, target: Target) -> None:
    if mesh.size > target.device_count:
        raise RematError(
            f"arguments are sharded over {mesh.size} devices (mesh {dict(mesh.shape)}), but target {target} has "
            f"{target.device_count}. Name a larger target, or shard over a mesh of target.mesh(...)."
        )
    here = isinstance(mesh, jax.sharding.Mesh) and {platform_of(d) for d in mesh.devices.flat} == {target.platform}
    if target.attached and not here:
        raise RematError(
            f"arguments are sharded over a mesh of other devices than those of {target}: use the mesh of "
            f"rk.target({target.spec!r}).mesh(...)."
        )
