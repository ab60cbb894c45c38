"""Assertions for a user's tests: gradients are what they were, residuals are those expected, blocks are rematerialized.

Each raises an AssertionError that says what was found. Nothing here needs pytest or Flax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from remat_kit import _adapters, _reports
from remat_kit._apply import Policies, apply
from remat_kit._bytes import parse_bytes
from remat_kit._errors import RematError, near_matches
from remat_kit._globs import matches
from remat_kit._loss import read
from remat_kit._reports import differentiable
from remat_kit._trace import blocks, cost, default
from remat_kit._trace.blocks import Candidate
from remat_kit._trace.linearized import linearize
from remat_kit._trace.report import Kind, Residual, Residuals
from remat_kit._units import format_bytes, format_shape, printable
from remat_kit._verify.check import check
from remat_kit._verify.result import Check

__all__ = ["assert_remat_in", "assert_residuals", "assert_same_gradients"]

_MOST = 10  # values listed in a message
_NEARLY = 0.95  # the share of a block's FLOPs in regions from which it counts as rematerialized


def assert_same_gradients(fun: Callable[..., Any], *args: Any, policy: Policies = None, **options: Any) -> Check:
    """Asserts that loss, auxiliary outputs, new state and gradients are the same with and without remat.

    Args:
      fun, *args: as `remat_kit.check` takes them: abstract arguments are given random values.
      policy: what is compared with no remat; None means the function as written.
      **options: further options of `remat_kit.check`, and keyword arguments of `fun`. Without ``derivatives=`` only
        first derivatives in reverse mode are compared.

    Returns:
      The `Check`.

    Raises:
      AssertionError: naming the first array that differs, or what makes the function impure.
      RematError: as `check` does.
    """
    __tracebackhide__ = True
    found = check(fun, *args, policy=policy, **{"derivatives": "reverse", **options})
    if not found.ok:
        raise AssertionError(found.message())
    unsupported = [d for d in found.derivatives if d.status == "unsupported"]
    if len(unsupported) == len(found.derivatives):
        raise AssertionError(f"there are no gradients to compare: {unsupported[0].reason}")
    return found


def assert_residuals(
    fun: Callable[..., Any],
    *args: Any,
    policy: Policies = None,
    names: Iterable[str] | None = None,
    max_bytes: int | str | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Residuals:
    """Asserts which intermediates reverse mode keeps, on the device or on the host, and how many bytes they take.

    Nothing is run. Arguments, constants and views of values that are kept as well do not count.

    Args:
      fun, *args, argnums, has_aux, **kwargs: as `remat_kit.residuals` takes them.
      policy: as `remat_kit.residuals` takes it; None means the function as written.
      names: globs (``*`` stops at ``/``, ``**`` does not). Every value that is kept must match one with a checkpoint
        name or with its label in the report (``layers_0/mlp/dot_general``), and every glob must match a value.
      max_bytes: the most that may be kept on the device, as a number of bytes or a text such as ``"1GiB"``.

    Returns:
      The report.

    Raises:
      AssertionError: naming each value that is kept and not expected (bytes, type, source line), each expected name
        that is not kept, or the largest values where they are too many bytes.
      RematError: as `residuals` does; for neither names nor bytes.
    """
    __tracebackhide__ = True
    is_list = names is None or (isinstance(names, Iterable) and not isinstance(names, str))
    if not is_list or (names is None and max_bytes is None):
        raise RematError(f"assert_residuals takes names=[...], max_bytes= or both; got names={names!r}.")
    most = None if max_bytes is None else parse_bytes(max_bytes)
    globs = None if names is None else tuple(names)
    if any(not isinstance(g, str) or not g for g in globs or ()):
        raise RematError(f"names= takes globs, got {globs!r:.120}.")
    for g in globs or ():
        matches(g, "", "/")  # one that cannot be read is refused even if there is nothing to match
    report = _reports.residuals(fun, *args, policy=policy, argnums=argnums, has_aux=has_aux, **kwargs)
    kept = [e for e in report.entries if e.action in (Kind.SAVED, Kind.OFFLOADED) and not e.alias_of]
    said = [] if globs is None else _against_names(kept, globs)
    if most is not None and report.total_bytes > most:
        said.append(
            f"{format_bytes(report.total_bytes)} are kept on the device, more than {format_bytes(most)}. Largest:\n"
            + _listed([e for e in kept if e.action is Kind.SAVED])
        )
    if said:
        raise AssertionError(f"residuals under {report.policy!r} are not what was expected.\n" + "\n".join(said))
    return report


def _against_names(kept: Sequence[Residual], globs: Sequence[str]) -> list[str]:
    def fits(e: Residual, glob: str) -> bool:
        return any(matches(glob, text, "/") for text in (*e.names, e.label))

    new = [e for e in kept if not any(fits(e, g) for g in globs)]
    lost = [g for g in globs if not any(fits(e, g) for e in kept)]
    said = []
    if new:
        said.append(f"Kept and not expected ({format_bytes(sum(e.bytes for e in new))}):\n{_listed(new)}")
    if lost:
        known = {text for e in kept for text in (*e.names, e.label)}
        said += [f"Expected and not kept: {g!r}.{near_matches(g, known)}" for g in lost]
    return said


def _listed(entries: Sequence[Residual]) -> str:
    order = sorted(entries, key=lambda e: -e.bytes)
    lines = [
        f"  {printable(e.label)}: {format_bytes(e.bytes)}, {format_shape(e.dtype, e.shape)}"
        + (" on the host" if e.action is Kind.OFFLOADED else "")
        + (f", at {printable(e.source)}" if e.source else "")
        for e in order[:_MOST]
    ]
    rest = order[_MOST:]
    if rest:
        lines.append(f"  ... and {len(rest)} more ({format_bytes(sum(e.bytes for e in rest))})")
    return "\n".join(lines)


def assert_remat_in(
    glob: str,
    fun: Callable[..., Any],
    *args: Any,
    policy: Policies = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> tuple[str, ...]:
    """Asserts that every block whose path matches is rematerialized: it lies in `jax.checkpoint` regions, which keep
    fewer bytes of it than no remat does.

    A block is a module call, a marked function (``rk.remat(block=...)``), a scan's body or a region, as `trace` lists
    them. It counts if it is a region, lies in one, or if regions inside it do at least 95 % of its FLOPs. Nothing is
    run.

    Args:
      glob: of block paths: ``"layers_*"``; ``*`` stops at ``/``, ``**`` does not.
      fun, *args, argnums, has_aux, **kwargs: as `remat_kit.residuals` takes them.
      policy: what to apply first; None looks at the function as written.

    Returns:
      The paths of the blocks.

    Raises:
      AssertionError: listing each block that is not rematerialized; for a glob that no block matches.
      RematError: as `residuals` does.
    """
    __tracebackhide__ = True
    if not isinstance(glob, str) or not glob:
        raise RematError(f"assert_remat_in takes a glob of block paths first, got {glob!r:.80}.")
    matches(glob, "", "/")
    applied = fun if policy is None else apply(fun, policy)
    with _adapters.adapted(applied, args, kwargs) as call:
        loss = read(call, None, argnums, has_aux)
        candidates = blocks.find(loss.traced.jaxpr)
        held = [
            blocks.held_bytes(
                candidates,
                default.kept(
                    differentiable(
                        lambda without=without: linearize(
                            loss.traced.jaxpr,
                            loss.differentiated,
                            loss.outputs,
                            without_remat=without,
                            backward=False,
                        )
                    )
                ),
            )
            for without in (True, False)
        ]
    asked = [c for c in candidates if matches(glob, c.path, "/")]
    if not asked:
        paths = list(dict.fromkeys(c.path for c in candidates))
        raise AssertionError(
            f"no block of the program matches {glob!r}. Its blocks: {printable(', '.join(paths)[:600]) or 'none'}."
            + near_matches(glob, paths)
        )
    wrong: dict[str, str] = {}
    for path in dict.fromkeys(c.path for c in asked):
        same = [c for c in asked if c.path == path]
        before, after = (max(h[id(c)] for c in same) for h in held)
        if not any(_covered(c, candidates) for c in same):
            wrong[path] = f"is in no jax.checkpoint region and keeps {format_bytes(after)}"
        elif after >= before > 0:
            wrong[path] = f"is rematerialized, but keeps all of its {format_bytes(before)}"
    if wrong:
        shown = [f"  {printable(path)} {why}" for path, why in list(wrong.items())[:_MOST]]
        more = [f"  ... and {len(wrong) - _MOST} more"] if len(wrong) > _MOST else []
        raise AssertionError(
            f"{len(wrong)} of {len({c.path for c in asked})} blocks that match {glob!r} are not rematerialized:\n"
            + "\n".join([*shown, *more])
        )
    return tuple(dict.fromkeys(c.path for c in asked))


def _covered(block: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Whether what a block computes lies in regions: in itself, one around it, or those inside it taken together."""
    if any(c.kind == "checkpoint" for c in (block, *block.ancestors())):
        return True
    inside = [c for c in candidates if c.kind == "checkpoint" and any(a is block for a in c.ancestors())]
    outermost = [c for c in inside if not any(a in inside for a in c.ancestors())]
    whole = _flops(block)
    return bool(outermost) and sum(_flops(c) for c in outermost) >= _NEARLY * whole


def _flops(c: Candidate) -> int:
    """FLOPs of all runs of a block."""
    around = c.runs // max(c.trips, 1)  # the cost of a scan counts its trips already
    return around * sum(cost.eqn_flops(c.owner.eqns[i]) for i in c.eqns)
