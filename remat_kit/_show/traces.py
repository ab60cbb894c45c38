"""Timelines as files for trace viewers: the Trace Event Format (Perfetto, chrome://tracing) and speedscope's.

Time is the position in the schedule, one microsecond for each step: a compiled program does not say how long they take.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from remat_kit._errors import RematError
from remat_kit._target.timeline import Timeline
from remat_kit._units import format_bytes, printable

Scope = tuple[str, str, int]  # category, name, and a number that tells two of one name apart
_LARGEST = 10  # buffers told of at the peak


def write(timeline: Timeline, path: str | os.PathLike[str], format: str | None = None) -> None:
    """Writes a timeline to a file; see `Timeline.save`."""
    if not isinstance(path, (str, os.PathLike)):  # a number would be a file that is open already
        raise RematError(f"a timeline is saved to a file, named by a path; got {path!r:.200}")
    if format is None:
        format = "speedscope" if os.fspath(path).endswith(".speedscope.json") else "trace"
    if format not in FORMATS:
        raise RematError(f"format={format!r:.40}: a timeline is written as {' or '.join(map(repr, FORMATS))}.")
    text = json.dumps(FORMATS[format](timeline), separators=(",", ":"))
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except (OSError, ValueError) as error:
        raise RematError(f"cannot write the timeline to {path!r:.200}: {error}") from None


def trace_events(t: Timeline) -> dict[str, Any]:
    """The Trace Event Format: counters, nested slices, and the peak as an instant event."""
    at = {"pid": 1, "tid": 1}
    title = f"{_title(t)}; 1 us is one step of the schedule"
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", **at, "args": {"name": title}},
        {"ph": "M", "name": "thread_name", **at, "args": {"name": "schedule"}},
    ]
    total = t.total
    for (category, name, number), start, end in _slices(t):
        event = {"ph": "X", "cat": category, "name": name, **at, "ts": start, "dur": end - start}
        if category == "operation":
            step = t.steps[number]
            event["args"] = {"instruction": step.name, "module": step.path, "live bytes": total[number]}
        events.append(event)
    events += _counter("live bytes by class", t.by("class"))
    events += _counter("live bytes", {"total": total})
    if any(t.host):
        events += _counter("host bytes", {"total": t.host})
    largest = {f"{n}. {_what(h)}": format_bytes(h.bytes) for n, h in enumerate(t.at()[:_LARGEST], 1)}
    peak = {"ph": "i", "s": "p", "cat": "peak", "name": f"peak: {format_bytes(t.peak_bytes)}", **at, "ts": t.peak}
    events.append({**peak, "args": largest})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"target": t.target, "policy": t.policy, "time": "position in the schedule, not seconds"},
    }


def speedscope(t: Timeline) -> dict[str, Any]:
    """speedscope's format: what is live at the peak as stacks with bytes, and the schedule as open and close events."""
    frames: dict[tuple[str, str], int] = {}

    def frame(name: str, source: str = "") -> int:
        return frames.setdefault((name, source), len(frames))

    samples, weights = [], []
    for n, size in t.held(t.peak).items():
        held = t.lives[n].what
        parts = [p for p in held.path.split("/") if p]
        samples.append([frame(t.lives[n].role), *map(frame, parts), frame(_what(held), held.source)])
        weights.append(size)
    events = []
    for opens, (_, name, _), time in _events(t):
        events.append({"type": "O" if opens else "C", "at": time, "frame": frame(name)})
    live = {"type": "sampled", "name": "live at the peak", "unit": "bytes", "samples": samples, "weights": weights}
    schedule = {"type": "evented", "name": "schedule (steps, not seconds)", "unit": "none", "events": events}
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": "remat_kit",
        "name": _title(t),
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(name, source) for name, source in frames]},
        "profiles": [
            {**live, "startValue": 0, "endValue": sum(weights)},
            {**schedule, "startValue": 0, "endValue": len(t.steps)},
        ],
    }


FORMATS: Mapping[str, Callable[[Timeline], dict[str, Any]]] = {"trace": trace_events, "speedscope": speedscope}


def _title(t: Timeline) -> str:
    policy = t.policy if len(t.policy) <= 80 else t.policy[:76] + " ..."
    return printable(f"{policy} on {t.target}")


def _what(held: Any) -> str:
    times = f" x{held.count}" if held.count > 1 else ""
    path = f"{held.path}/" if held.path and not held.name else ""
    return printable(f"{path}{held.name or held.op} {held.shape}{times}")


def _frame(name: str, source: str) -> dict[str, Any]:
    file, _, line = source.rpartition(":")
    return {"name": name, "file": file, "line": int(line)} if file and line.isdecimal() else {"name": name}


def _counter(name: str, series: Mapping[str, Sequence[int]]) -> Iterator[dict[str, Any]]:
    """An event for each step at which a figure changes."""
    before = None
    for step, values in enumerate(zip(*series.values(), strict=True)):
        if values != before:
            args = dict(zip(series, values, strict=True))
            yield {"ph": "C", "name": name, "pid": 1, "tid": 1, "ts": step, "args": args}
        before = values


def _slices(t: Timeline) -> Iterator[tuple[Scope, int, int]]:
    """Scopes with start and end, outer ones before inner ones."""
    stack: list[tuple[Scope, int]] = []
    found: list[tuple[Scope, int, int, int]] = []
    for opens, scope, time in _events(t):
        if opens:
            stack.append((scope, time))
        else:
            _, start = stack.pop()
            found.append((scope, start, time, len(stack)))
    for scope, start, end, _ in sorted(found, key=lambda s: (s[1], s[3])):
        yield scope, start, end


def _events(t: Timeline) -> Iterator[tuple[bool, Scope, int]]:
    """Opens and closes scopes around the steps: passes, loops, modules, operations; properly nested."""
    before: list[Scope] = []
    for n, now in enumerate([*_scopes(t), []]):
        common = len(os.path.commonprefix([before, now]))
        for scope in reversed(before[common:]):
            yield False, scope, n
        for scope in now[common:]:
            yield True, scope, n
        before = now


def _scopes(t: Timeline) -> Iterator[list[Scope]]:
    around = [[(k, loop) for k, loop in enumerate(t.loops) if loop.start <= n < loop.end] for n in range(len(t.steps))]
    paths = _filled([s.path.split("/") if s.path else [] for s in t.steps], around)
    for n, step in enumerate(t.steps):
        scopes: list[Scope] = []
        if t.turn is not None:
            scopes.append(("pass", "forward" if n < t.turn else "backward", 0))
        shown = 0
        for k, loop in around[n]:
            name = printable(loop.path.rsplit("/", 1)[-1] or "loop")
            scopes.append(("loop", f"{name} x{'?' if loop.trips is None else loop.trips}", k))
            shown = max(shown, len(loop.path.split("/")) if loop.path else 0)
        scopes += [("module", printable(part), depth) for depth, part in enumerate(paths[n][shown:])]
        scopes.append(("operation", printable(step.op), n))
        yield scopes


def _filled(paths: list[list[str]], around: Sequence[object]) -> list[list[str]]:
    """Instructions without a module path stand in what the steps before and after them share, in the same loops."""
    out = list(paths)
    for known, group in itertools.groupby(range(len(paths)), key=lambda n: bool(paths[n])):
        steps = list(group)
        n = steps[-1] + 1
        if not known and steps[0] and n < len(paths):
            for k in steps:
                if around[steps[0] - 1] == around[k] == around[n]:
                    out[k] = list(os.path.commonprefix([paths[steps[0] - 1], paths[n]]))
    return out
