"""Plans as text for a terminal: figures, blocks, what was compiled; and the explanation value by value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from remat_kit._show.draw import draw, to_str
from remat_kit._show.parts import GAP, Pairs, Part, line, table
from remat_kit._units import format_bytes, format_flops, format_seconds, printable

if TYPE_CHECKING:
    from remat_kit._plan.frontier import Frontier
    from remat_kit._plan.plan import Plan, PlannedBlock, PlannedValue, Rival


def title(p: Plan) -> str:
    """What reports call a plan: ``plan for 14.0 GiB of tpu:v5e``."""
    return f"plan for {format_bytes(p.budget_bytes)}" + (f" of {printable(p.target)}" if p.target else "")


def view(p: Plan) -> Iterator[Part]:
    """The figures of a plan and its blocks, equal ones together."""
    yield Pairs(printable(title(p)[0].upper() + title(p)[1:]), tuple(_figures(p)))
    rows = [[paths(blocks), treatment(blocks[0]), *_block_figures(blocks)] for blocks in alike(p)]
    if rows:
        columns = ["block", "policy", "kept", "host", "working", "FLOPs again"]
        yield table(columns, rows, right=range(2, 6), whole=(0,))
        yield line("kept, host, working, FLOPs again: predicted")
    for text in _said(p):
        yield line(printable(text), "yellow")


def explanation(p: Plan) -> Iterator[Part]:
    """A plan with what binds its peak, the best preset beside it, and what becomes of each value, and why."""
    yield from view(p)
    yield from (GAP, line(_binding(p)), line(_against(p)))
    for blocks in alike(p):
        b = blocks[0]
        if b.values:
            yield from (GAP, line(f"{paths(blocks)}: {printable(str(b.policy))}"))
            columns = ["action", "value", "bytes", "FLOPs", "time", "why"]
            yield table(columns, map(_value, b.values), right=(2, 3, 4), whole=(1,))


def print_plan(p: Plan, console: Console | None = None) -> None:
    """Prints the figures of a plan and its blocks."""
    draw(view(p), console)


def plan_to_str(p: Plan) -> str:
    """Returns what `print_plan` prints, without colours."""
    return to_str(view(p))


def print_explanation(p: Plan, console: Console | None = None) -> None:
    """Prints what `explain` returns."""
    draw(explanation(p), console)


def explain(p: Plan) -> str:
    """Per block and value what becomes of it and why, what binds the peak, and the best preset beside it."""
    return to_str(explanation(p))


def _value(v: PlannedValue) -> list[str]:
    figures = [format_bytes(v.bytes), format_flops(v.flops), format_seconds(v.seconds)]
    return [v.action, printable(v.label), *figures, printable(v.why)]


def _figures(p: Plan) -> list[tuple[str, str]]:
    peak = f"{format_bytes(p.peak_bytes)} {'compiled' if p.measured is not None else 'predicted'}"
    if p.measured is not None:
        peak += f" ({format_bytes(p.predicted.peak_bytes)} predicted at first)"
    share = p.predicted.recompute_flops / p.predicted.flops if p.predicted.flops else 0.0
    cost = f"{format_flops(p.predicted.recompute_flops)} again, {share:.1%} of the step's; "
    cost += f"{format_seconds(p.predicted.remat_seconds)} by {printable(p.rates)} (predicted)"
    figures = [
        ("budget", f"{format_bytes(p.budget_bytes)} on one device" + ("" if p.within else ": not kept")),
        ("peak", peak),
        ("recomputation", cost),
        ("minimized", f"{p.minimize}; at most {p.gap:.2%} of the step above the cheapest in the model"),
    ]
    if p.predicted.host_bytes:
        host = f"{format_bytes(p.predicted.host_bytes)} predicted"
        if p.measured is not None:
            host += f", {format_bytes(p.measured.host_bytes)} compiled"
        figures.append(("host memory", host))
    if p.attempts:
        tried = ", ".join(f"{format_bytes(a.peak_bytes)}{'' if a.within else ' (over)'}" for a in p.attempts)
        figures.append(("compiled peaks", tried))
    if p.names_only:
        figures.append(("saved names", printable(", ".join(p.saved_names)) or "none"))
        if p.offloaded_names:
            figures.append(("offloaded names", printable(", ".join(p.offloaded_names))))
        figures += [("for JAX", p.as_jax()), ("as text", printable(str(p.blocks[0].policy)) if p.blocks else "")]
        figures.append(("for MaxText", "\n".join(map(printable, p.as_maxtext().split("\n")))))
    return figures


def _said(p: Plan) -> list[str]:
    said = list(p.notes)
    if not p.within:
        said.insert(0, f"No plan keeps within the budget. The smallest peak found is {_parts(p)}")
    return said


def _parts(p: Plan) -> str:
    q = p.predicted
    return (
        f"{format_bytes(p.peak_bytes)}{' compiled' if p.measured is not None else ''}; "
        f"{format_bytes(q.peak_bytes)} were predicted, in the backward pass of {_where(p)}: {parts_of_peak(p)}."
    )


def parts_of_peak(p: Plan) -> str:
    """What the predicted peak is made of."""
    q = p.predicted
    return (
        f"arguments {format_bytes(q.argument_bytes)} + outputs {format_bytes(q.output_bytes)} + kept "
        f"{format_bytes(q.kept_bytes + q.other_bytes)} + working set {format_bytes(q.working_bytes)}"
    )


def _binding(p: Plan) -> str:
    return f"The peak lies in the backward pass of {_where(p)}: {parts_of_peak(p)} (predicted)."


def _where(p: Plan) -> str:
    return printable(p.predicted.binding) or "the program"


def frontier_view(f: Frontier) -> Iterator[Part]:
    """One row for each plan of a frontier."""
    memory = format_bytes(f.memory_bytes) if f.memory_bytes is not None else "unknown"
    head = (("target", printable(f.target) or "none"), ("memory", f"{memory} on one device"), ("minimized", f.minimize))
    yield Pairs("Frontier", head)
    rows = [
        [
            format_bytes(p.peak_bytes),
            "compiled" if p.measured is not None else "predicted",
            format_bytes(p.predicted.host_bytes) if p.predicted.host_bytes else "",
            format_flops(p.predicted.recompute_flops),
            format_seconds(p.predicted.remat_seconds),
            f"{p.gap:.2%}",
        ]
        for p in f.plans
    ]
    yield table(["peak", "", "host", "FLOPs again", "time", "gap"], rows, right=(0, 2, 3, 4, 5))
    yield line("time: of recomputation and of keeping the rest; all but compiled peaks: predicted;")
    yield line("gap: above the cheapest plan of the model within that peak, at most, as a share of the step")


def print_frontier(f: Frontier, console: Console | None = None) -> None:
    """Prints one row for each plan of a frontier."""
    draw(frontier_view(f), console)


def frontier_to_str(f: Frontier) -> str:
    """Returns what `print_frontier` prints, without colours."""
    return to_str(frontier_view(f))


def best_rival(p: Plan) -> Rival | None:
    """The cheapest preset that the model has within the budget."""
    within = [r for r in p.rivals if r.within]
    key = (lambda r: (r.seconds, r.flops)) if p.minimize == "time" else (lambda r: (r.flops, r.seconds))
    return min(within, key=key, default=None)


def _against(p: Plan) -> str:
    best = best_rival(p)
    if best is None:
        return "No preset is predicted to keep within the budget."
    return (
        f"The best preset predicted within the budget is {printable(best.name)}: {format_flops(best.flops)} and "
        f"{format_seconds(best.seconds)} again at a peak of {format_bytes(best.peak_bytes)}; the plan: "
        f"{format_flops(p.predicted.recompute_flops)} and {format_seconds(p.predicted.remat_seconds)} at "
        f"{format_bytes(p.predicted.corrected_bytes)} (predicted)."
    )


def alike(p: Plan) -> list[list[PlannedBlock]]:
    """Blocks of one kind that are treated alike, in program order."""
    groups: dict[object, list[PlannedBlock]] = {}
    for b in p.blocks:
        groups.setdefault((b.policy, b.kind, b.form, b.values), []).append(b)
    return list(groups.values())


def policy_text(p: Plan) -> str:
    """The plan as `apply` takes it: with ``names_only`` a policy, else a dict of policies by block, as Python text."""
    policies = [(block, str(policy)) for block, policy in p.items()]
    if p.names_only:
        return policies[0][1] if policies else "none"
    return "\n".join(["{", *(f"    {block!r}: {policy!r}," for block, policy in policies), "}"])


def paths(blocks: list[PlannedBlock]) -> str:
    """What equal blocks are called in one row."""
    first, last = blocks[0], blocks[-1]
    if len(blocks) == 1:
        return printable(first.path) + (f" x{first.runs}" if first.runs > 1 else "")
    return f"{printable(first.path)} ... {printable(last.path)} ({len(blocks)})"


def treatment(b: PlannedBlock) -> str:
    """What becomes of a block, in a few words."""
    if not b.policy.remat:
        return "no remat"
    if not b.policy.rules:
        return "recompute all"
    counts = {r.action: sum(map(len, (r.selector.value, r.selector.name))) for r in b.policy.rules}
    return ", ".join(f"{a} {n}" for a, n in counts.items())


def _block_figures(blocks: list[PlannedBlock]) -> list[str]:
    kept, host, flops = (sum(getattr(b, k) for b in blocks) for k in ("kept_bytes", "host_bytes", "flops"))
    working = max(b.working_bytes for b in blocks)
    return [format_bytes(kept), format_bytes(host) if host else "", format_bytes(working), format_flops(flops)]
