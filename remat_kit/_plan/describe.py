"""From a selection to what a `Plan` tells of it: blocks, values with reasons, predicted figures, presets beside it."""

from __future__ import annotations

from remat_kit._globs import literal
from remat_kit._plan.calibrate import Line
from remat_kit._plan.graph import Choice, Graph, makers
from remat_kit._plan.plan import PlannedBlock, PlannedValue, Predicted, Rival
from remat_kit._plan.point import Point
from remat_kit._plan.problem import Problem, Selection
from remat_kit._plan.treatment import Treatment
from remat_kit._policy import Action, Policy, Rule, Selector
from remat_kit._trace.blocks import part_path

_VALUES = 24  # told of one block


def predicted(problem: Problem, selection: Selection, line: Line) -> Predicted:
    """What the model says of a selection."""
    kept = working = most = at = host = 0
    binding = ""
    flops = seconds = 0.0
    for stage, t in zip(problem.stages, selection.treatments, strict=True):
        if t is None or stage.graph is None:
            continue
        runs = stage.trips * stage.around
        kept += t.kept_bytes(stage)
        mine = t.working_bytes(stage)
        if kept + mine > most:
            most, at, working, binding = kept + mine, kept, mine, stage.block.path
        host += t.host_bytes(stage)
        flops += sum(o.flops for o in stage.graph.ops) * runs
        seconds += sum(o.seconds for o in stage.graph.ops) * runs
    again, extra = problem.extra(selection)
    program = problem.program
    return Predicted(
        peak_bytes=selection.peak,
        corrected_bytes=int(line.compiled(selection.peak)),
        argument_bytes=program.argument_bytes,
        output_bytes=program.output_bytes,
        other_bytes=program.other_bytes,
        kept_bytes=at,
        working_bytes=working,
        host_bytes=host,
        flops=int(flops) + again,
        seconds=seconds + extra,
        recompute_flops=again,
        remat_seconds=extra,
        binding=binding,
    )


def blocks(problem: Problem, selection: Selection) -> tuple[PlannedBlock, ...]:
    """The blocks of a selection, with the policy of each; each part of a split scan is one."""
    shared: dict[tuple[int, Point, int], tuple[PlannedValue, ...]] = {}
    out = []
    for stage, t in zip(problem.stages, selection.treatments, strict=True):
        first = 0
        if problem.by_name and stage.block.kind == "rest":
            continue
        for n, p in t.parts if t is not None else ((stage.trips, None),):
            runs = n * stage.around
            part = Treatment(((n, p),)) if p is not None else None
            values: tuple[PlannedValue, ...] = ()
            if stage.graph is not None and p is not None and p.remat:
                key = (id(stage.graph), p, runs)
                if key not in shared:
                    shared[key] = _values(stage.graph, p, runs)
                values = shared[key]
            path = stage.block.path
            out.append(
                PlannedBlock(
                    path=part_path(path, first, first + n) if t is not None and t.is_split else path,
                    kind=stage.block.kind,
                    runs=runs,
                    policy=policy(p, problem.by_name),
                    kept_bytes=0 if part is None else part.kept_bytes(stage),
                    host_bytes=0 if part is None else part.host_bytes(stage),
                    working_bytes=0 if part is None else part.working_bytes(stage),
                    flops=0 if part is None else part.flops(stage),
                    seconds=0.0 if part is None else part.cost(stage, "time"),
                    values=values,
                    form=problem.form(stage),
                )
            )
            first += n
    return tuple(out)


def notes(problem: Problem) -> list[str]:
    """Which blocks are left as they are, and why."""
    return [f"{s.block.path} is left without remat: {s.note}" for s in problem.stages if s.note and s.graph is None]


def policy(p: Point | None, by_name: bool = False) -> Policy:
    """The policy that treats a block as a point says."""
    if p is None or not p.remat:
        return Policy(remat=False)
    key = "name" if by_name else "value"
    rules = [
        Rule(action, Selector(**{key: tuple(map(literal, labels))}))  # pyright: ignore[reportArgumentType]
        for action, labels in ((Action.OFFLOAD, p.offloaded), (Action.SAVE, p.saved))
        if labels
    ]
    return Policy(tuple(rules))


def rivals(problem: Problem, line: Line, budget: int) -> tuple[Rival, ...]:
    """The presets in the same model, applied to the blocks of the default choice."""
    found = []
    for name, selection in problem.presets.items():
        peak = int(line.compiled(selection.peak))
        flops, seconds = problem.extra(selection)
        found.append(Rival(name, peak, flops, seconds, peak <= budget))
    return tuple(found)


def _values(graph: Graph, p: Point, runs: int) -> tuple[PlannedValue, ...]:
    """The values of a block that a plan decides about, the largest first."""
    again = set(p.recomputed)
    read = {v for o in (*again, *range(graph.forward, len(graph.ops))) for v in graph.ops[o].reads}
    kept = {label: "save" for label in p.saved} | {label: "offload" for label in p.offloaded}
    out = []
    for c in graph.choices:
        # A value that nothing reads again, or that is the same memory as another one, is nothing to decide about.
        needed = any(v in read for o in c.ops for v in graph.ops[o].writes)
        if c.label not in kept and (not needed or not any(o in again for o in c.ops) or not c.bytes):
            continue
        flops, seconds = _to_make(graph, c, set(p.saved) | set(p.offloaded))
        action = kept.get(c.label, "recompute")
        if action == "recompute" and not flops and not seconds:
            continue
        out.append((c.bytes, c, action, flops, seconds))
    out.sort(key=lambda x: (x[2] == "recompute", -x[0]))
    return tuple(
        PlannedValue(
            label=c.label,
            action=action,
            op=c.facts.op,
            dtype=c.facts.dtype,
            names=c.facts.names,
            source=c.facts.source,
            bytes=size * runs,
            flops=flops * runs,
            seconds=seconds * runs,
            why=_why(action, flops, size),
        )
        for size, c, action, flops, seconds in out[:_VALUES]
    )


def _why(action: str, flops: int, size: int) -> str:
    each = flops / size if size else 0.0
    dear = f"{each:.3g} FLOP for each byte"
    if action == "recompute":
        return f"making it again takes {dear}" if flops else "making it again takes no FLOPs"
    where = "its transfer hides behind the block's computation" if action == "offload" else f"it saves {dear}"
    return where


def _to_make(graph: Graph, c: Choice, kept: set[str]) -> tuple[int, float]:
    """What making a value takes from what else is kept and the block's inputs."""
    stop = {o for other in graph.choices if other.label in kept and other is not c for o in other.ops}
    read = [r for o in c.ops for r in graph.ops[o].reads]
    seen = makers(graph.values, graph.ops, read, lambda v: graph.values[v].maker in stop)
    return sum(graph.ops[o].again_flops for o in seen), sum(graph.ops[o].again_seconds for o in seen)
