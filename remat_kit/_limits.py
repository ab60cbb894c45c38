"""What the remat implementation in force would pass over in silence: refused, or said in a warning.

`jax_remat3` honours far fewer policies than JAX's classic remat, and JAX 0.10.2's version fewer than later ones.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from remat_kit._errors import RematError, RematWarning, UnsupportedEffectError, UnsupportedVmapError, first_line
from remat_kit._naming import values
from remat_kit._policy import Action, Policy
from remat_kit._trace import jaxprs, survey

_EARLY = jax.__version_info__ < (0, 11)
_ASKED = ("name", "dot_general", "conv_general_dilated")  # what later versions ask a policy about


def check(policy: Policy, jaxpr: Any, *, chosen_cse: bool = False) -> None:
    """Compares what a policy asks for in a closed program with what the implementation in force honours.

    Args:
      chosen_cse: whether the user chose `prevent_cse` to be anything but True.

    Raises:
      RematError: for offloading under `jax_remat3` before JAX 0.11, which would recompute instead.

    Warns:
      RematWarning: for values that the policy saves and the implementation recomputes, or a `prevent_cse` that it
        ignores.
    """
    if not jaxprs.remat3():
        return
    where = f"jax_remat3 of JAX {jax.__version__}"
    classic = "Use the classic implementation (jax.config.update('jax_remat3', False))"
    if Action.OFFLOAD in policy.actions and _EARLY:
        raise RematError(
            f"policy {str(policy)!r} offloads, which {where} ignores (everything would be recomputed). "
            f"{classic} or a newer JAX."
        )
    native = policy.as_jax()
    lost = ignored(native, jaxpr) if native is not None else []
    if lost:
        early, later = "only JAX's own policies for names and dot_general", f"policies only for {', '.join(_ASKED)}"
        warnings.warn(
            f"policy {policy.name or str(policy)!r} keeps the results of {', '.join(lost[:8])}, but {where} recomputes "
            f"them: it honours {early if _EARLY else later}. {classic}, or name the values and save them by name.",
            RematWarning,
            stacklevel=4,
        )
    if _EARLY and not policy.is_full and _reached_in_regions(policy, jaxpr):
        warnings.warn(
            f"policy {policy.name or str(policy)!r} keeps values inside a jax.checkpoint region in the block, which "
            f"{where} recomputes: an outer policy does not reach into a region there. {classic} or a newer JAX.",
            RematWarning,
            stacklevel=4,
        )
    if chosen_cse and _EARLY:
        warnings.warn(
            f"prevent_cse is ignored by {where}, which always keeps recomputation apart. {classic} or a newer JAX.",
            RematWarning,
            stacklevel=4,
        )


@contextlib.contextmanager
def refusals_said() -> Iterator[None]:
    """Says what JAX refuses while a region is bound: effects that it does not repeat, and names that it cannot map.

    JAX refuses effects when it splits the region in two, which is here unless the derivative is taken of a `jax.jit` or
    a loop around the region; there its own error is seen.
    """
    try:
        yield
    except NotImplementedError as error:
        if "Effects not supported" in str(error):
            raise UnsupportedEffectError(
                f"{first_line(error)}. Recomputation would repeat them. Use jax.debug.callback for what may run twice "
                "or jax.pure_callback for what has no side effects, move the call out of the function, or leave this "
                "part without remat."
            ) from error
        if jaxprs.remat3() and "CheckpointName" in str(error):
            raise UnsupportedVmapError(
                f"jax.vmap of a rematerialized function with checkpoint names: jax_remat3 of JAX {jax.__version__} "
                "cannot map over names, in a function without remat neither. Use the classic implementation "
                "(jax.config.update('jax_remat3', False)) or a newer JAX."
            ) from error
        raise


def _reached_in_regions(policy: Policy, jaxpr: Any) -> bool:
    """Whether a policy would keep a value of a `jax.checkpoint` region inside a program."""
    native = policy.native
    for program in survey.programs(jaxpr):
        for region in filter(None, map(jaxprs.remat_region, program.eqns)):
            if native is not None:
                eqns = (e for p in survey.programs(region.jaxpr) for e in p.eqns if not jaxprs.calls(e))
                if any(jaxprs.keeps(native, e) for e in eqns):
                    return True
            elif any(policy.action(f) is not Action.RECOMPUTE for f in values(region.jaxpr)):
                return True
    return False


def ignored(native: Any, jaxpr: Any) -> list[str]:
    """The primitives in a program whose results one of JAX's policies keeps and `jax_remat3` recomputes."""
    everything = jax.checkpoint_policies.everything_saveable
    if native is jax.checkpoint_policies.nothing_saveable or (native is everything and not _EARLY):
        return []
    found: dict[str, None] = {}
    todo = [jaxpr]
    while todo:
        for eqn in jaxprs.opened(todo.pop()).eqns:
            nested = [c.jaxpr for c in jaxprs.calls(eqn) if c.rewritable]
            todo += nested
            op = jaxprs.op_of(eqn)
            if not nested and not _honours(native, op) and jaxprs.keeps(native, eqn):
                found[op] = None
    return sorted(found)


def _honours(native: Any, op: str) -> bool:
    """Whether the implementation asks a policy about a primitive."""
    if not _EARLY:
        return op in _ASKED
    kind = type(native).__name__
    everything = jax.checkpoint_policies.everything_saveable
    if op == "name":
        return kind in ("SaveOnlyTheseNames", "SaveAnyNamesButThese") or native is everything
    return op == "dot_general" and kind == "DotsSaveable"
