"""Memory over the schedule: against XLA's figures, short texts counted by hand, and files against their formats."""

import functools
import json
import math
import pickle

import jax
import jax.numpy as jnp
import pytest

import remat_kit as rk
from remat_kit._errors import RematError
from remat_kit._target import lives
from remat_kit._target.measurement import Measurement
from remat_kit._target.timeline import CLASSES, Schedule, modules

OPTIMIZED = True
REMAT3 = jax.config.jax_remat3  # loses scopes in loops
OLD_REMAT3 = jax.__version_info__ < (0, 11) and REMAT3  # ignores offloading
WIDTH, ROWS, LAYERS = 64, 512, 6
W = {"a": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32)}
W["b"] = jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def scanned(w, x):
    def layer(x, w):
        with jax.named_scope("layer"):
            return x + jnp.sin(jnp.tanh(x @ w["a"]) @ w["b"]), None

    return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)


PROGRAMS = {
    "scanned": lambda: (scanned, (W, X)),
    "gpt": lambda: rk.zoo.gpt(layers=3, batch=2, length=64, width=64, heads=2, vocab=256, abstract=True),
    "vit": lambda: rk.zoo.vit(layers=2, batch=2, width=96, heads=3, abstract=True),
    "rnn": lambda: rk.zoo.rnn(batch=8, length=16, width=64, vocab=128, abstract=True),
}


@functools.cache
def measured(name, policy):
    fn, args = PROGRAMS[name]()
    return rk.measure(fn, *args, policy=policy, target="cpu")


# Against XLA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "full", "dots"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_agrees_with_the_figures_of_the_measurement(name, policy):
    m = measured(name, policy)
    t = m.timeline
    assert t.peak_bytes == pytest.approx(m.peak_bytes, rel=0.05)  # XLA's has the gaps in its heap
    by_class = t.by("class")
    assert set(by_class) <= set(CLASSES) and all(min(v) >= 0 for v in by_class.values())
    assert set(by_class["arguments"]) == {m.argument_bytes}
    assert by_class["outputs"][-1] == pytest.approx(m.output_bytes, abs=512)  # XLA counts pointers to them, too
    for split in (by_class, t.by("module")):
        assert [sum(step) for step in zip(*split.values(), strict=True)] == list(t.total)
    for step in (0, t.turn, t.peak, len(t.steps) - 1):
        assert sum(h.bytes for h in t.at(step)) == t.total[step]
    assert max(t.host) == 0


@pytest.mark.parametrize("policy", ["none", "full", "dots"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_residuals_are_what_the_forward_pass_leaves_behind(name, policy):
    m = measured(name, policy)
    residuals = m.timeline.by("class")["residuals"]
    assert residuals[m.timeline.turn - 1] == m.held_residual_bytes > 0


def test_classes_tell_remat_from_none():
    none, full = (measured("scanned", p).timeline.by("class") for p in ("none", "full"))
    stacked = LAYERS * ROWS * 4 * WIDTH * 4  # tanh's values of all layers
    assert max(none["residuals"]) - max(full["residuals"]) >= stacked
    assert "recomputed" not in none and max(full["recomputed"]) >= ROWS * 4 * WIDTH * 4


def test_loops_have_their_trip_counts_and_say_what_they_run():
    t = measured("scanned", "full").timeline
    assert [(loop.trips, loop.path) for loop in t.loops] == [
        (LAYERS, "layer"),
        (LAYERS, "" if jax.config.jax_remat3 else "layer"),
    ]
    forward, backward = t.loops
    assert forward.end <= t.turn <= backward.start
    phases = {s.phase for s in t.steps[forward.start : forward.end]}
    assert "backward" not in phases and "recomputed" in {s.phase for s in t.steps[backward.start : backward.end]}


def test_the_peak_is_that_of_the_measurement():
    m = measured("gpt", "none")
    own = [life.what for life in m.timeline.lives if life.inside is None]
    assert m.held[0].bytes == max(m.held, key=lambda h: h.bytes).bytes
    assert m.timeline.at()[0] in m.held and len(own) < len(m.timeline.lives)


def test_modules_are_those_of_the_program():
    assert {"layers", "token_embed", "final_norm"} <= set(measured("gpt", "none").timeline.by("module"))
    unrolled = measured("vit", "none").timeline.by("module")
    assert "layers_*" in unrolled and not any(name.startswith("layers_0") for name in unrolled)


def test_what_all_paths_share_is_left_out_of_their_names():
    name = modules(["net/layers_0/mlp", "net/layers_1", "net/head"])
    assert [name(p) for p in ("net/layers_0/mlp", "net/head", "", "net")] == ["layers_*", "head", *["(no module)"] * 2]
    assert modules(["only"])("only") == "only" and modules([])("") == "(no module)"


def test_a_compile_from_the_cache_has_the_same_timeline():
    fn, args = PROGRAMS["gpt"]()
    first, again = measured("gpt", "dots"), rk.measure(fn, *args, policy="dots", target="cpu")
    assert again.cached and again.timeline.to_dict() == first.timeline.to_dict()


def test_measurements_stay_small_and_can_be_sent():
    m = measured("gpt", "none")
    assert len(pickle.dumps(m.schedule)) < 100_000
    sent = pickle.loads(pickle.dumps(m))
    assert sent == m and sent.timeline == m.timeline
    assert "schedule" not in repr(m)


def test_a_program_without_a_gradient():
    m = rk.measure(lambda x: jnp.sum(jnp.sin(x @ x.T)), X, grad=False, target="cpu")
    assert m.timeline.turn is None and "residuals" not in m.timeline.by("class")


def test_wrong_use():
    t = measured("scanned", "none").timeline
    with pytest.raises(RematError, match="'class' or 'module'"):
        t.by("colour")
    for step in (len(t.steps), "first"):
        with pytest.raises(RematError, match=f"has {len(t.steps)} steps"):
            t.at(step)


@pytest.mark.tpu
@pytest.mark.skipif(OLD_REMAT3, reason="this remat implementation ignores offloading")
def test_on_a_tpu_offloaded_values_are_on_the_host_and_come_back():
    fn, args = rk.zoo.gpt(layers=3, batch=4, length=512, width=256, heads=2, vocab=512, abstract=True)
    m = rk.measure(fn, *args, policy="offload name=mlpwi; recompute rest", target="tpu:v5e")
    t = m.timeline
    one = 4 * 512 * 4 * 256 * 2  # of mlpwi of one layer, in bf16
    assert max(t.host) == m.host_bytes >= 3 * one
    assert t.peak_bytes == pytest.approx(m.peak_bytes, rel=0.1)
    assert t.by("class")["residuals"][t.turn - 1] == m.held_residual_bytes


# Short programs, counted by hand --------------------------------------------------------------------

ARRAY = 4 * 16 * 128


def timeline(body, scheduled=True):
    """The timeline of an entry computation of one argument `%x`; every `A` is f32[16,128]; F and B name the passes."""
    text = f"HloModule m, is_scheduled={str(scheduled).lower()}\n\nENTRY %main (x: f32[16,128]) -> f32[16,128] {{\n"
    text += f"  %x = A parameter(0)\n{body}\n}}\n"
    text = text.replace("A ", "f32[16,128]{1,0} ").replace("A,", "f32[16,128]{1,0},")
    text = text.replace(" #F", ', metadata={op_name="jit(f)/jvp()/m/sin"}')
    text = text.replace(" #B", ', metadata={op_name="jit(f)/transpose(jvp())/m/mul"}')
    text = text.replace(" #R", ', metadata={op_name="jit(f)/transpose(jvp())/rematted_computation/m/sin"}')
    m = Measurement("cpu", "cpu", "some", True, 2**20, 1, 1, True, 0, 0.0, False)
    return lives.timeline(m, Schedule.of(text, ["x"]))


def arrays(series):
    return [n / ARRAY for n in series]


def test_classes_over_time():
    t = timeline("""
  %a = A dot(%x) #F
  %b = A dot(%a) #F
  %c = A dot(%a) #R
  %d = A dot(%c, %b) #B
  ROOT %e = A dot(%d, %a) #B""")
    assert t.turn == 2 and [s.name for s in t.steps] == list("abcde")
    by = {k: arrays(v) for k, v in t.by("class").items()}
    assert by["arguments"] == [1] * 5
    assert by["residuals"] == [1, 2, 2, 2, 1]  # %a and %b
    assert by["recomputed"] == [0, 0, 1, 1, 0]
    assert by["temporary"] == [0, 0, 0, 1, 1]  # %d
    assert by["outputs"][-1] == 1 and min(by["outputs"]) == 0  # while one of the others lies in the result
    assert arrays(t.total) == [sum(step) for step in zip(*by.values(), strict=True)]
    assert t.total == tuple(timeline_total(t))
    assert [s.phase for s in t.steps] == ["forward", "forward", "recomputed", "backward", "backward"]


def test_a_residual_that_is_written_over_is_one_until_then():
    t = timeline("""
  %a = A dot(%x) #F
  %k = A negate(%a) #F
  %g = A dot(%x) #B
  %h = A multiply(%k, %g) #B
  %i = A dot(%h) #B
  ROOT %e = f32[4,128]{1,0} dot(%i, %h) #B""")  # too small to put the others in
    by = {k: arrays(v) for k, v in t.by("class").items()}
    assert t.turn == 2 and by["residuals"] == [0, 1, 1, 0, 0, 0]
    assert by["temporary"] == [1, 0, 1, 2, 2, 2]  # %a; %g; %h and, where it is read last, %g; %h and %i
    assert t.total == tuple(timeline_total(t))


def test_a_residual_in_the_memory_of_a_result_is_one_until_it_is_written_over_or_read_last():
    t = timeline("""
  %a = A dot(%x) #F
  %k = A negate(%a) #F
  %g = A dot(%x) #B
  %h = A multiply(%k, %g) #B
  %i = A dot(%h) #B
  ROOT %e = A dot(%i, %h) #B""")
    by = {k: arrays(v) for k, v in t.by("class").items()}
    assert by["outputs"] == [0, 0, 0, 0, 1, 1]  # %a, then %k over it, lie there meanwhile
    assert by["temporary"] == [1, 0, 1, 1, 2, 2]  # %a; %g, with %h over it, and %i
    assert by["residuals"] == [0, 1, 1, 1, 0, 0]
    assert t.total == tuple(timeline_total(t)) and arrays(t.total) == [2, 2, 3, 3, 4, 4]


def timeline_total(t):
    """Live bytes from the lives alone, step by step."""
    return [
        sum(life.what.bytes for life in t.lives if life.inside is None and life.start <= n <= life.end)
        for n in range(len(t.steps))
    ]


def test_values_fetched_from_the_host():
    host = "f32[16,128]{1,0:S(5)}"
    t = timeline(f"""
  %v = A custom-call(%x), custom_call_target="f" #F
  %to = ({host}, f32[16,128]{{1,0}}, u32[]{{:S(2)}}) copy-start(%v)
  %far = {host} copy-done(%to)
  %o = A custom-call(%x), custom_call_target="f" #B
  %from = (f32[16,128]{{1,0}}, {host}, u32[]{{:S(2)}}) copy-start(%far)
  %back = A copy-done(%from)
  ROOT %d = A custom-call(%back, %o), custom_call_target="f" #B""")
    by = t.by("class")
    assert arrays(by["fetched"]) == [0, 0, 0, 0, 1, 1, 1]
    assert arrays(t.host) == [0, 1, 1, 1, 1, 1, 0]
    assert "residuals" not in by or max(by["residuals"][3:]) == 0


def test_instructions_that_hand_pointers_on_are_no_steps():
    t = timeline("""
  %a = A sort(%x)
  %view = f32[2048]{0} bitcast(%a)
  %pair = (f32[2048]{0}, f32[16,128]{1,0}) tuple(%view, %x)
  %again = f32[2048]{0} get-tuple-element(%pair), index=0
  ROOT %d = A custom-call(%again), custom_call_target="f" """)
    assert [s.name for s in t.steps] == ["a", "d"] and arrays(t.total) == [3, 3]


def test_a_program_that_hands_back_its_argument():
    t = timeline("")
    assert t.peak_bytes == ARRAY and len(t.steps) == 1


def test_a_text_out_of_order_has_no_timeline():
    assert timeline("  ROOT %a = A sort(%x)", scheduled=False) is None


# Files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The timeline of a GPT, as a trace and for speedscope."""
    folder, t = tmp_path_factory.mktemp("traces"), measured("gpt", "full").timeline
    t.save(folder / "t.json")
    t.save(folder / "t.speedscope.json")
    t.save(str(folder / "other"), format="speedscope")
    assert (folder / "other").read_text() == (folder / "t.speedscope.json").read_text()
    return t, json.loads((folder / "t.json").read_text()), json.loads((folder / "other").read_text())


def test_trace_events_have_the_fields_of_their_kind(saved):
    """Trace Event Format: metadata, complete, counter and instant events, times in microseconds."""
    t, trace, _ = saved
    assert isinstance(trace["traceEvents"], list) and trace["displayTimeUnit"] in ("ms", "ns")
    needed = {"M": {"args"}, "X": {"ts", "dur", "cat"}, "C": {"ts", "args"}, "i": {"ts", "s"}}
    kinds = set()
    for e in trace["traceEvents"]:
        kinds.add(e["ph"])
        assert {"name", "ph", "pid", "tid"} | needed[e["ph"]] <= e.keys()
        assert isinstance(e["name"], str) and e["name"] and isinstance(e["pid"], int)
        if "ts" in e:
            assert 0 <= e["ts"] <= e["ts"] + e.get("dur", 0) <= len(t.steps)
        if e["ph"] == "C":
            assert e["args"] and all(isinstance(v, int) for v in e["args"].values())
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name") and isinstance(e["args"]["name"], str)
        if e["ph"] == "i":
            assert e["s"] in ("g", "p", "t") and e["ts"] == t.peak
    assert kinds == set(needed)


def test_counters_of_a_trace_are_the_live_bytes(saved):
    t, trace, _ = saved
    for name, series in (("live bytes", {"total": t.total}), ("live bytes by class", t.by("class"))):
        shown = {e["ts"]: e["args"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == name}
        now = None
        for step in range(len(t.steps)):
            now = shown.get(step, now)  # a counter stays where it is until its next event
            assert now == {k: v[step] for k, v in series.items()}


def test_slices_nest_and_name_passes_loops_modules_and_instructions(saved):
    t, trace, _ = saved
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    open_until = []
    for e in slices:  # outer ones come first: viewers refuse slices that overlap without nesting
        assert e["dur"] > 0
        while open_until and open_until[-1] <= e["ts"]:
            open_until.pop()
        assert not open_until or e["ts"] + e["dur"] <= open_until[-1]
        open_until.append(e["ts"] + e["dur"])
    passes = [(e["name"], e["ts"], e["dur"]) for e in slices if e["cat"] == "pass"]
    assert passes == [("forward", 0, t.turn), ("backward", t.turn, len(t.steps) - t.turn)]
    assert [e["name"] for e in slices if e["cat"] == "loop"] == [
        "layers x3",
        "loop x3" if jax.config.jax_remat3 else "layers x3",
    ]
    assert {"attention", "mlp", "final_norm"} <= {e["name"] for e in slices if e["cat"] == "module"}
    operations = [e for e in slices if e["cat"] == "operation"]
    assert [e["args"]["instruction"] for e in operations] == [s.name for s in t.steps]
    assert [e["args"]["live bytes"] for e in operations] == list(t.total)


def test_speedscope_files_follow_its_specification(saved):
    """The types of speedscope's file-format-spec.ts, and what they say of order and balance."""
    t, _, file = saved
    assert file["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = file["shared"]["frames"]
    for frame in frames:
        assert isinstance(frame["name"], str) and frame["name"] and set(frame) <= {"name", "file", "line", "col"}
        assert isinstance(frame.get("line", 1), int)
    live, schedule = file["profiles"]
    assert (live["type"], live["unit"]) == ("sampled", "bytes")
    assert len(live["samples"]) == len(live["weights"]) > 0 and min(live["weights"]) > 0
    assert all(0 <= n < len(frames) for stack in live["samples"] for n in stack)
    assert live["startValue"] == 0 and live["endValue"] == sum(live["weights"]) == t.peak_bytes
    sums = {}
    for stack, size in zip(live["samples"], live["weights"], strict=True):
        role = frames[stack[0]]["name"]
        sums[role] = sums.get(role, 0) + size
    assert sums == {k: v[t.peak] for k, v in t.by("class").items() if v[t.peak]}
    assert (schedule["type"], schedule["unit"]) == ("evented", "none")
    stack, before = [], 0
    for e in schedule["events"]:
        assert before <= e["at"] <= schedule["endValue"] == len(t.steps)
        before = e["at"]
        if e["type"] == "O":
            stack.append(e["frame"])
        else:
            assert e["type"] == "C" and stack.pop() == e["frame"]
    assert not stack


def test_files_that_cannot_be_written(tmp_path):
    t = measured("scanned", "none").timeline
    with pytest.raises(RematError, match="cannot write the timeline"):
        t.save(tmp_path / "missing" / "t.json")
    with pytest.raises(RematError, match="'trace' or 'speedscope'"):
        t.save(tmp_path / "t.json", format="xml")
    with pytest.raises(RematError, match="named by a path"):
        t.save(1)
    assert not list(tmp_path.iterdir()) and math.isfinite(t.peak_bytes)
