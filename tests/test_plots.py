"""Pictures: what is drawn is read back from the artists and held against the results' figures, summed up here anew."""

import dataclasses
import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import remat_kit as rk
from remat_kit._errors import RematError
from remat_kit._show.plots import axes as plot_axes
from remat_kit._target import comparison as comparing
from remat_kit._trace.report import Kind, Residual, Residuals
from remat_kit._units import format_bytes, format_seconds

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.colors import to_rgba  # noqa: E402

OPTIMIZED = True
GPT = dict(layers=3, batch=2, length=32, width=32, heads=2, vocab=64, dtype="float32", abstract=True)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@functools.cache
def measured(policy):
    fn, args = rk.zoo.gpt(**GPT)
    return rk.measure(fn, *args, policy=policy, target="cpu")


@functools.cache
def planned(budget=None, **options):
    """A plan, or the frontier where there is no budget; predicted, so that nothing is compiled."""
    fn, args = rk.zoo.gpt(**GPT)
    if budget is None:
        return rk.frontier(fn, *args, target=None, points=6, **options)
    return rk.plan(fn, *args, budget=budget, target=None, **options)


def residual(action=Kind.SAVED, names=(), op="tanh", shape=(8, 16), **more):
    size = more.pop("bytes", 4 * math.prod(shape))
    return Residual(action, names, op, shape, "float32", size, size, recompute_flops=more.pop("flops", 100), **more)


REPORT = Residuals(
    (
        *(residual(block=f"layers_{i}", path=f"layers_{i}/mlp", shape=(8, 64)) for i in range(4)),
        *(residual(Kind.OFFLOADED, ("wide",), block=f"layers_{i}", path=f"layers_{i}/mlp") for i in range(4)),
        residual(op="exp", path="head", shape=(512,)),
        residual(op="sin"),
        residual(op="reshape", path="head", alias_of="exp", shape=(512,)),
        residual(Kind.ARGUMENT, op="input", shape=(100,)),
    ),
    policy="some policy",
)


def bars(ax):
    """Widths of the bars by the name of their row and what they stand for."""
    found = {}
    names = [t.get_text() for t in ax.get_yticklabels()]
    for container in ax.containers:
        for name, patch in zip(names, container.patches, strict=True):
            if patch.get_width():
                found[name, container.get_label()] = patch.get_width()
    return found


def drawn(ax):
    """Draws for real, so that what only fails when it is drawn fails here."""
    ax.figure.canvas.draw()
    return ax


# Residuals ------------------------------------------------------------------------------------------


def test_bars_of_residuals_are_their_bytes():
    found = bars(drawn(REPORT.plot(by="block")))
    assert found == {
        ("layers_* (x4)", "saved"): 4 * 8 * 64 * 4,
        ("layers_* (x4)", "offloaded"): 4 * 8 * 16 * 4,
        ("(no block)", "saved"): 512 * 4 + 8 * 16 * 4,
    }
    assert sum(found.values()) == sum(REPORT.by("block").values())


@pytest.mark.parametrize("key", ["name", "op", "source", "dtype", "action"])
def test_bars_by_every_key(key):
    found = bars(drawn(REPORT.plot(by=key)))
    sums = {}
    for (name, _), width in found.items():
        sums[name] = sums.get(name, 0) + width
    assert sums == REPORT.by(key)


def test_many_bars_share_the_last_one():
    report = Residuals(tuple(residual(op=f"op_{'x' * i}", shape=(100 - i,)) for i in range(30)))
    found = bars(drawn(report.plot(by="op")))
    assert len(found) == 21 and found["10 more", "saved"] == sum(4 * (100 - i) for i in range(20, 30))
    assert sum(found.values()) == report.total_bytes


def test_boxes_of_modules_are_as_high_as_their_bytes():
    ax = drawn(REPORT.plot())
    values = [p for p in ax.patches if p.get_label() == "_value"]
    assert sum(p.get_height() for p in values) == REPORT.total_bytes + REPORT.host_bytes
    assert {(p.get_height(), p.get_facecolor()) for p in values} == {
        (4 * 8 * 64 * 4, to_rgba("#0072b2")),
        (4 * 8 * 16 * 4, to_rgba("#e69f00")),  # offloaded
        (512 * 4, to_rgba("#0072b2")),
        (8 * 16 * 4, to_rgba("#0072b2")),
    }
    tops = {}
    for e in REPORT.to_dict()["entries"]:
        if e["action"] in ("saved", "offloaded") and not e["alias_of"]:
            top = "layers" if e["path"].startswith("layers") else e["path"]
            tops[top] = tops.get(top, 0) + e["bytes"]
    first = [p.get_height() for p in ax.patches if p.get_x() == 0 and p.get_label() == "_module"]
    assert sorted(first) == sorted(tops.values())
    assert any("layers_{0-3} x4" in t.get_text() for t in ax.texts)


def test_a_box_covers_no_other_one_of_its_column():
    ax = measured("none").residuals.plot()
    by_column = {}
    for p in ax.patches:
        by_column.setdefault(p.get_x(), []).append((p.get_y(), p.get_y() + p.get_height()))
    for spans in by_column.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_an_empty_report_and_names_that_look_like_mathematics():
    drawn(Residuals(()).plot())
    drawn(Residuals(()).plot(by="op"))
    hostile = residual(names=("$\\frac{", "\x1b[31m\n"), op="$", path="$\\undefined$/_%^", block="$", source="$$")
    for key in ("path", "name", "op", "block", "source"):
        drawn(Residuals((hostile,), policy="$\\bad$").plot(by=key))


def test_an_unknown_key_is_refused():
    with pytest.raises(RematError, match="colour.*Use one of block, name"):
        REPORT.plot(by="colour")


# Memory over time -----------------------------------------------------------------------------------


def heights(ax):
    """Of each stacked part its height between one step and the next, found where vertical lines cut its outline."""
    found = {}
    for collection in ax.collections:
        vertices = collection.get_paths()[0].vertices
        count = int(vertices[:, 0].max())
        cuts = [[] for _ in range(count)]
        for (x0, y0), (x1, y1) in zip(vertices[:-1], vertices[1:], strict=True):
            assert x0 == x1 or y0 == y1  # steps: nothing is drawn between two figures
            for n in range(int(min(x0, x1)), int(max(x0, x1))):
                cuts[n].append(y0)
        found[collection.get_label().removeprefix("_")] = [max(c) - min(c) for c in cuts]
    return found


@pytest.mark.parametrize("by", ["class", "module"])
def test_stacked_parts_are_the_bytes_of_the_timeline(by):
    m = measured("full")
    data = m.timeline.to_dict()
    ax = drawn(m.plot(by=by))
    parts = {k: v[:-1] for k, v in data[f"by_{by}"].items() if any(v)}
    found = heights(ax)
    small = [parts.pop(k) for k in tuple(parts) if k not in found]  # they share one colour
    if small:
        parts[f"{len(small)} more"] = [sum(step) for step in zip(*small, strict=True)]
    assert found == parts and len(found) >= 5
    line = next(line for line in ax.lines if line.get_label() == "_full")
    assert list(line.get_ydata()) == data["total"]
    assert [sum(step) for step in zip(*data[f"by_{by}"].values(), strict=True)] == data["total"]


def test_the_peak_is_marked_with_its_largest_buffers():
    m = measured("none")
    ax = drawn(m.plot())
    (mark,) = (line for line in ax.lines if line.get_label() == "_peak")
    total = m.timeline.to_dict()["total"]
    assert list(mark.get_ydata()) == [max(total)] and list(mark.get_xdata()) == [total.index(max(total))]
    said = next(t.get_text() for t in ax.texts if t.get_text().startswith("peak"))
    assert len(said.splitlines()) == 6 and m.held[0].op in said


def test_another_measurement_over_it():
    none, full = measured("none"), measured("full")
    ax = drawn(none.plot(against=full))
    over = next(line for line in ax.lines if line.get_label().startswith("full: "))
    assert list(over.get_ydata()) == list(full.timeline.total)
    x, turn = over.get_xdata(), full.timeline.turn
    assert x[turn] == 1 and x[-1] == 2 and np.all(np.diff(x) > 0)  # as wide as the passes of the other
    with pytest.raises(RematError, match="against= is a Measurement"):
        none.plot(against=3)


def test_memory_is_a_line_where_it_is_near_and_a_remark_where_it_is_not():
    m = measured("full")
    near = dataclasses.replace(m, memory_bytes=2 * m.peak_bytes)
    lines = [line for line in drawn(near.plot()).lines if line.get_label().startswith("memory")]
    assert [list(line.get_ydata()) for line in lines] == [[2 * m.peak_bytes] * 2]
    far = drawn(dataclasses.replace(m, memory_bytes=1000 * m.peak_bytes).plot())
    assert far.get_ylim()[1] < 2 * m.peak_bytes
    assert any(t.get_text().endswith("(above)") for t in far.get_legend().get_texts())


def test_without_a_schedule_there_is_no_picture():
    m = dataclasses.replace(measured("full"), schedule=None, temp_bytes=None)
    assert m.timeline is None
    with pytest.raises(RematError, match="no room for the program.*policy that fits"):
        m.plot()


# Policies, frontiers, plans -------------------------------------------------------------------------


def compared(peaks, budget=None, refused=()):
    base = measured("none")
    rows = tuple(
        comparing.ComparisonRow(
            name,
            dataclasses.replace(base, peak_bytes=peak, temp_bytes=None if name in refused else 1, roofline_seconds=s),
            overhead,
            budget is None or peak <= budget,
        )
        for name, (peak, overhead, s) in peaks.items()
    )
    return comparing.Comparison("cpu", rows, budget, next(iter(peaks)))


def scattered(ax):
    """Points as x, y and whether they are filled."""
    return sorted(
        (x, y, len(c.get_facecolors()) > 0)
        for c in ax.collections
        for x, y in np.asarray(c.get_offsets())
        if "frontier" not in str(c.get_label())
    )


POLICIES = {"full": (2000, 0.3, 2e-3), "dots": (4000, 0.1, 1.5e-3), "none": (9000, 0.0, 1e-3)}


def test_policies_are_points_of_memory_and_cost():
    c = compared(POLICIES, budget=5000, refused=("none",))
    rows = c.to_dict()["rows"]
    ax = drawn(c.plot())
    expected = sorted((r["peak_bytes"], r["overhead"], r["temp_bytes"] is not None) for r in rows)
    assert scattered(ax) == expected
    assert {t.get_text() for t in ax.texts} >= set(POLICIES)
    lines = {line.get_label().split()[0]: line.get_xdata() for line in ax.lines}
    assert list(lines["budget"]) == [5000, 5000]
    words = {t.get_text() for t in ax.get_legend().get_texts()}
    assert {"fits, compiled", "does not fit, refused by the compiler"} <= words
    ax = drawn(c.plot(cost="time"))
    assert scattered(ax) == sorted((r["peak_bytes"], r["seconds"], r["temp_bytes"] is not None) for r in rows)


def test_policies_without_a_time_are_named():
    c = compared({**POLICIES, "odd": (3000, 0.2, None)})
    ax = drawn(c.plot(cost="time"))
    assert len(scattered(ax)) == 3 and any("without a time: odd" in t.get_text() for t in ax.texts)
    with pytest.raises(RematError, match="no policy has a time"):
        compared({"odd": (3000, 0.2, None)}).plot(cost="time")
    with pytest.raises(RematError, match="'flops' or 'time'"):
        c.plot(cost="money")


def test_labels_of_policies_that_lie_close_do_not_overlap():
    names = ["full", "dots", "dots_no_batch", "minimal", "save_qkv_proj", "save_out_proj", "save_mlp", "offload_dots"]
    crowd = {name: (4000 + 3 * n, 0.1 + 0.001 * (n % 3), 1e-3) for n, name in enumerate(names)}
    ax = drawn(compared({**crowd, "none": (9000, 0.0, 1e-3)}).plot())
    boxes = [t.get_window_extent() for t in ax.texts if t.get_text() in crowd]
    assert len(boxes) == len(names)
    for n, a in enumerate(boxes):
        for b in boxes[n + 1 :]:
            assert not a.overlaps(b)


def test_a_frontier_is_a_line_and_presets_are_points_beside_it():
    f = planned()
    ax = drawn(f.plot(budget="1MiB"))
    rows = f.rows()
    line = next(line for line in ax.lines if line.get_label() == "frontier")
    assert list(line.get_xdata()) == [r["peak_bytes"] for r in rows]
    assert list(line.get_ydata()) == [r["cost"] for r in rows]
    points = scattered(ax)
    assert all(
        (r["peak_bytes"], r["cost"], True) in points for r in rows
    )  # over the line, so filled with the background
    rivals = {r["name"]: (r["peak_bytes"], r["seconds"]) for r in f.to_dict()["plans"][-1]["rivals"]}
    shown = {t.get_text() for t in ax.texts} & set(rivals)
    assert all((*rivals[name], False) in points for name in shown)
    assert shown and len(points) == len(rows) + len(shown)
    told = " ".join(ax.get_xlabel().split())
    for name in set(rivals) - shown:  # those that are too far off
        assert f"{name} ({format_bytes(rivals[name][0])}, {format_seconds(rivals[name][1])})" in told
    bound = next(line for line in ax.lines if str(line.get_label()).startswith("budget"))
    assert set(bound.get_xdata()) <= {2**20} or "beyond" in bound.get_label()


def test_plans_that_were_compiled_are_filled():
    f = planned()
    some = f.plans[0].predicted
    measured_plan = dataclasses.replace(f.plans[0], measured=rk_measured(some.corrected_bytes))
    ax = drawn(dataclasses.replace(f, plans=(measured_plan, *f.plans[1:])).plot())
    inside = {c.get_label(): c.get_facecolors()[0] for c in ax.collections if "plan" in str(c.get_label())}
    assert tuple(inside["plan, compiled"]) == to_rgba("#0072b2")
    assert tuple(inside["plan, predicted"]) == to_rgba(ax.get_facecolor())


def rk_measured(peak):
    from remat_kit._plan.plan import Measured

    return Measured(peak, None, None, None, 0, 1, None)


def test_compiled_presets_stand_at_their_compiled_peaks():
    f = planned(minimize="flops")
    costs = {r.name: r.flops for r in f.plans[-1].rivals}
    c = compared({name: (n * 100_000 + 1, 0.0, None) for n, name in enumerate(("full", "dots", "none"), 1)})
    points = scattered(drawn(f.plot(presets=c)))
    for n, name in enumerate(("full", "dots", "none"), 1):
        assert (n * 100_000 + 1, costs[name], True) in points
    with pytest.raises(RematError, match="no cost for 'mine'"):
        f.plot(presets=compared({"mine": (1, 0.0, None)}))
    with pytest.raises(RematError, match="Comparison"):
        f.plot(presets="full")


@pytest.mark.parametrize("budget", ["180KiB", "400KiB"])
def test_bars_of_a_plan_are_what_its_blocks_keep(budget):
    p = planned(budget)
    found = bars(drawn(p.plot()))
    blocks = p.to_dict()["blocks"]
    sums = {}
    for (_, word), width in found.items():
        sums[word] = sums.get(word, 0) + width
    again = sum(v["bytes"] for b in blocks for v in b["values"] if v["action"] == "recompute")
    expected = {"saved": sum(b["kept_bytes"] for b in blocks), "recomputed": again}
    assert sums == {k: v for k, v in expected.items() if v}


# For all of them ------------------------------------------------------------------------------------


def results():
    yield REPORT
    yield measured("full")
    yield compared(POLICIES, budget=5000)
    yield planned()
    yield planned("400KiB")


def test_pictures_go_into_the_axes_given_and_change_nothing_else():
    before = dict(matplotlib.rcParams)
    for result in results():
        figure, ax = plt.subplots()
        assert result.plot(ax) is ax and plt.get_fignums() == [figure.number]
        plt.close(figure)
        with pytest.raises(RematError, match="ax= is a matplotlib Axes"):
            result.plot(ax=figure)
        plt.close("all")
    assert dict(matplotlib.rcParams) == before


def test_text_takes_the_colour_of_the_style_in_force():
    with plt.style.context("dark_background"):
        for result in results():
            ax = drawn(result.plot())
            inks = {to_rgba(t.get_color()) for t in ax.texts if t.get_text() and t.get_color() != "black"}
            assert inks <= {to_rgba("white")}


def test_files(tmp_path):
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        path = tmp_path / f"kept.{suffix}"
        plot_axes.write(REPORT.plot, path)
        assert path.read_bytes().startswith(start)
    assert plt.get_fignums() == []
    for bad in (tmp_path / "kept.nothing", tmp_path / "missing" / "kept.png"):
        with pytest.raises(RematError, match="cannot write the picture"):
            plot_axes.write(REPORT.plot, bad)


def test_without_matplotlib_an_error_says_what_to_install(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("remat_kit._show.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("remat_kit._show.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RematError, match=r"pip install 'remat-kit\[plot\]'"):
        REPORT.plot()


def test_the_figures_of_a_whole_model_are_plain_json():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    m = rk.measure(lambda x: jnp.sum(jnp.sin(x @ x)), x, target="cpu")
    data = json.loads(json.dumps(m.timeline.to_dict()))
    assert data["total"] and "schedule" not in m.to_dict()
    drawn(m.plot())
