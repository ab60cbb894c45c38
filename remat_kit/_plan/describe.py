"""From a selection to what a `Plan` tells of it: blocks, values with reasons, predicted figures, presets beside it."""

from __future__ import annotations

from remat_kit._globs import literal
from remat_kit._plan.calibrate import Line
from remat_kit._plan.graph import Choice, Graph
from remat_kit._plan.plan import PlannedBlock, PlannedValue, Predicted, Rival
from remat_kit._plan.point import Point
from remat_kit._plan.problem import Problem, Selection, kept_bytes
from remat_kit._policy import Action, Policy, Rule, Selector
from remat_kit._presets import presets
from remat_kit._trace.blocks import is_rest

_VALUES = 24  # told of one block


def predicted(problem: Problem, selection: Selection, line: Line) -> Predicted:
    """What the model says of a selection."""
    kept = working = most = at = 0
    binding = ""
    flops = seconds = 0.0
    extra_flops = extra_seconds = 0.0
    host = 0
    for stage, p in zip(problem.stages, selection.points, strict=True):
        if p is None or stage.graph is None:
            continue
        runs = stage.trips * stage.around
        kept += kept_bytes(stage, p)
        if kept + p.working_bytes > most:
            most, at, working, binding = kept + p.working_bytes, kept, p.working_bytes, stage.block.path
        host += p.host_bytes * runs
        flops += sum(o.flops for o in stage.graph.ops) * runs
        seconds += sum(o.seconds for o in stage.graph.ops) * runs
        extra_flops += p.flops * runs
        extra_seconds += p.cost("time") * runs
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
        flops=int(flops + extra_flops),
        seconds=seconds + extra_seconds,
        recompute_flops=int(extra_flops),
        remat_seconds=extra_seconds,
        binding=binding,
    )


def blocks(problem: Problem, selection: Selection) -> tuple[PlannedBlock, ...]:
    """The blocks of a selection, with the policy of each."""
    shared: dict[tuple[int, Point], tuple[PlannedValue, ...]] = {}
    out = []
    for stage, p in zip(problem.stages, selection.points, strict=True):
        runs = stage.trips * stage.around
        values: tuple[PlannedValue, ...] = ()
        if stage.graph is not None and p is not None and p.remat:
            key = (id(stage.graph), p)
            if key not in shared:
                shared[key] = _values(stage.graph, p, runs)
            values = shared[key]
        out.append(
            PlannedBlock(
                path=stage.block.path,
                kind=stage.block.kind,
                runs=runs,
                policy=policy(p, problem.by_name),
                kept_bytes=0 if p is None else kept_bytes(stage, p),
                host_bytes=0 if p is None else p.host_bytes * runs,
                working_bytes=0 if p is None else p.working_bytes,
                flops=0 if p is None else p.flops * runs,
                seconds=0.0 if p is None else p.cost("time") * runs,
                values=values,
                form=problem.form(stage),
            )
        )
    return tuple(out)


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
    found: dict[Selection | tuple, Rival] = {}
    for name, preset in presets.items():
        if preset.native is not None:
            continue
        if not preset.remat:
            selection = problem.without_remat()
        elif Action.OFFLOAD in preset.actions and not problem.offloads:
            continue
        else:
            selection = problem.by_facts(
                lambda f, preset=preset: preset.action(f).value, lambda s: not is_rest(s.block.path)
            )
        peak = int(line.compiled(selection.peak))
        flops, seconds = problem.extra(selection)
        found.setdefault(selection.points, Rival(name, peak, flops, seconds, peak <= budget))
    return tuple(found.values())


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
    todo = [r for o in c.ops for r in graph.ops[o].reads]
    seen: set[int] = set()
    while todo:
        maker = graph.values[todo.pop()].maker
        if maker >= 0 and maker not in seen and maker not in stop:
            seen.add(maker)
            todo += graph.ops[maker].reads
    return sum(graph.ops[o].again_flops for o in seen), sum(graph.ops[o].again_seconds for o in seen)
