"""The parser of XLA's text form, trip counts, FLOPs and traffic: against XLA's own figures and counts by hand."""

from __future__ import annotations

import functools
import inspect
import os
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_kit._errors import RematError
from remat_kit._target import hlo, hlo_cost, hlo_loops, hlo_shapes, live

OPTIMIZED = True
M, K, N, TRIPS = 32, 48, 80, 5

TPU_LOOP = """HloModule jit_step, is_scheduled=true, num_partitions=2

%cond (p.1: (s32[], f32[16,128], s32[])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, f32[16,128]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %limit.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=2
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.1, %limit.1), direction=LT
}

%body (p.2: (s32[], f32[16,128], s32[])) -> (s32[], f32[16,128], s32[]) {
  %p.2 = (s32[]{:T(128)}, f32[16,128]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %two = s32[]{:T(128)} constant(2)
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %copy.2 = s32[]{:T(128)S(6)} copy(%i.2)
  %next = s32[]{:T(128)} add(%copy.2, %two)
  %x.2 = f32[16,128]{1,0:T(8,128)} get-tuple-element(%p.2), index=1
  %y.2 = f32[16,128]{1,0:T(8,128)S(1)} negate(%x.2), metadata={op_name="jit(step)/jvp(f)/\\'neg\\'" stack_frame_id=2}
  %z.2 = f32[16,128]{1,0:T(8,128)} copy(%y.2)
  %limit.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=2
  ROOT %tuple.2 = (s32[]{:T(128)}, f32[16,128]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%next, %z.2, %limit.2)
}

ENTRY %main (x: f32[16,128]) -> f32[16,128] {
  %x = f32[16,128]{1,0:T(8,128)} parameter(0), sharding={replicated}, metadata={op_name="x"}
  %zero = s32[]{:T(128)} constant(1)
  %start = s32[]{:T(128)} copy(%zero)
  %ten = s32[]{:T(128)} constant(10)
  %tuple = (s32[]{:T(128)}, f32[16,128]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%start, %x, /*index=2*/%ten)
  %while = (s32[]{:T(128)}, f32[16,128]{1,0:T(8,128)}, s32[]{:T(128)}) while(%tuple), condition=%cond, body=%body
  ROOT %out = f32[16,128]{1,0:T(8,128)} get-tuple-element(%while), index=1
}
"""

TABLES = """HloModule jit_f, is_scheduled=true, \
input_output_alias={ {0}: (1, {}, may-alias), {1}: (0, {2}, must-alias) }

FileNames
1 "/home/me/site-packages/flax/linear.py"
2 "/home/me/model \\"a\\".py"

FunctionNames
1 "Dense.__call__"
2 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=20 end_line=20 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=PARENT}
2 {file_location_id=1 parent_frame_id=CHILD}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %old = f32[4]{0} negate(%x), metadata={op_name="jit(f)/neg" source_file="old.py" source_line=7}
  ROOT %new = f32[4]{0} sine(%old), metadata={op_name="jit(f)/sin" stack_frame_id=2}
}
"""


@functools.cache
def scanned() -> tuple[Any, hlo.Module]:
    """A scan of products, compiled for the CPU, and its text as a module."""

    def step(x, w):
        return jnp.tanh(x @ w @ w.T), None

    def f(x, ws):
        return jax.lax.scan(step, x, ws)[0]

    compiled = jax.jit(f).lower(jnp.ones((M, K)), jnp.ones((TRIPS, K, N))).compile()
    return compiled, hlo.parse(compiled.as_text())


@functools.cache
def gradient() -> tuple[Any, hlo.Module]:
    """An unrolled gradient, compiled for the CPU."""

    def f(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    compiled = jax.jit(jax.grad(f)).lower([jnp.ones((64, 64))] * 3, jnp.ones((128, 64))).compile()
    return compiled, hlo.parse(compiled.as_text())


@pytest.mark.parametrize(
    ("text", "nbytes", "space"),
    [
        ("f32[3,5]{1,0}", 60, 0),
        ("pred[7]{0}", 7, 0),
        ("f32[]{:T(128)}", 512, 0),
        ("bf16[9,100]{1,0:T(8,128)(2,1)}", 16 * 128 * 2, 0),
        ("bf16[9,100]{0,1:T(8,128)(2,1)}", 104 * 128 * 2, 0),  # the first dimension varies fastest
        ("f32[2,9,100]{2,1,0:T(8,128)S(1)}", 2 * 16 * 128 * 4, 1),
        ("bf16[1000]{0:T(1024)(128)(2,1)}", 2048, 0),
        ("s4[16,256]{1,0:T(8,128)E(4)}", 2048, 0),
        ("s4[16,256]{1,0}", 4096, 0),
        ("f8e4m3fn[32]{0:S(5)}", 32, 5),
        ("c64[2]{0}", 16, 0),
        ("f32[<=10,3]{1,0}", 120, 0),
        ("u32[]{:S(2)}", 4, 2),
        ("token[]", 0, 0),
    ],
)
def test_bytes_of_arrays(text, nbytes, space):
    shape = hlo_shapes.parse(text)
    assert (shape.nbytes, shape.space) == (nbytes, space)


def test_bytes_of_tuples():
    shape = hlo_shapes.parse("((f32[2]{0}, s32[]), /*index=1*/bf16[8]{0:S(5)}, token[])")
    assert shape.nbytes == 8 + 4 + 16
    assert [s.nbytes for _, s in shape.arrays if s.space == hlo_shapes.HOST] == [16]
    assert [index for index, _ in shape.arrays] == [(0, 0), (0, 1), (1,), (2,)]
    assert str(shape) == "((f32[2], s32[]), bf16[8], token)"


def test_whole_text_is_read():
    compiled, module = gradient()
    lines = [line for line in compiled.as_text().splitlines() if re.match(r"  .* = ", line)]
    assert sum(len(c.instructions) for c in module.computations.values()) == len(lines)
    for c in module.computations.values():
        assert all(o in c.by_name for i in c.instructions for o in i.operands)
    assert module.is_scheduled
    assert [p.shape.dims for p in module.entry.parameters] == [(64, 64)] * 3 + [(128, 64)]
    assert [part.dims for part in module.entry.root.shape.parts or ()] == [(64, 64)] * 3


def test_whose_line_it_is():
    package = os.path.dirname(os.path.dirname(hlo.__file__))
    frames = [f"/v/site-packages/{p}.py" for p in ("jax/numpy/ufuncs", "flax/linen/linear", "mine/net")]
    frames += [f"{package}/zoo/_gpt.py", f"{package}/_apply.py", "/v/bin/remat-kit", "/home/me/remat_kit/bin/train.py"]

    def source(*numbers):
        stack = tuple(hlo.Frame(frames[n], n) for n in numbers)
        return hlo.Instruction("x", "negate", hlo_shapes.Shape(), frames=stack).source

    assert source(0, 1, 2, 6) == (frames[2], 2)  # a model in an installed package
    assert source(1, 3, 4, 5) == (frames[3], 3)  # a model of the zoo
    assert source(0, 4, 6) == (frames[6], 6)
    assert source(1, 4, 5) == (frames[1], 1) and source() is None


def test_source_lines_of_a_compiled_program():
    def f(x):
        return jnp.sum(jnp.sin(x @ x))  # the line that is looked for

    line = inspect.getsourcelines(f)[1] + 1
    module = hlo.parse(jax.jit(f).lower(jnp.ones((64, 64))).compile().as_text())
    sources = {i.source for i in module.entry.instructions if i.op_name.startswith("jit(f)")}
    assert sources == {(__file__, line)}
    assert module.entry.parameters[0].op_name == "x"


@pytest.mark.parametrize(("parent", "child"), [("1", "2"), ("0", "1")], ids=["shifted", "plain"])
def test_stack_frames(parent, child):
    """Texts print the number of a frame's parent, or one more than it; 0 and 1 stand for none."""
    module = hlo.parse(TABLES.replace("PARENT", parent).replace("CHILD", child))
    x, old, new = module.entry.instructions
    assert new.frames == (
        hlo.Frame("/home/me/site-packages/flax/linear.py", 10, "Dense.__call__"),
        hlo.Frame('/home/me/model "a".py', 20, "loss"),
    )
    assert new.source == ('/home/me/model "a".py', 20)
    assert (old.source, x.source) == (("old.py", 7), None)
    assert x.op_name == "params['w']"


def test_donated_arguments():
    assert hlo.parse(TABLES).input_output_alias == (hlo.Alias((0,), 1), hlo.Alias((1,), 0, (2,)))
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.ones(16)).compile()
    assert hlo.parse(compiled.as_text()).input_output_alias == (hlo.Alias((), 0),)


def test_what_is_unknown_is_kept_or_left_out():
    text = TABLES.replace(
        "  ROOT",
        '  %a = f32[4]{0} quantum-leap(%old), knob={a=(1,2), b={}}, groups=[2,4]<=[8], name="x, y={", last=3\n'
        "  %b = what is this\n  ROOT",
    )
    entry = hlo.parse(text).entry
    assert [i.name for i in entry.instructions] == ["x", "old", "a", "new"]
    a = entry.by_name["a"]
    assert (a.opcode, a.operands) == ("quantum-leap", ("old",))
    assert a.attributes == {"knob": "{a=(1,2), b={}}", "groups": "[2,4]<=[8]", "name": '"x, y={"', "last": "3"}


@pytest.mark.parametrize("text", ["", "module @jit_f {", "HloModule f\n", TABLES[: TABLES.index("ROOT")], None])
def test_no_module_is_an_error(text):
    with pytest.raises(RematError, match="HLO module"):
        hlo.parse(text)


def test_computations_that_call_themselves_are_an_error():
    with pytest.raises(RematError, match="damaged"):
        hlo.parse(TPU_LOOP.replace("negate(%x.2)", "fusion(%x.2), calls=%body"))


def test_trip_counts_that_xla_writes_down():
    _, module = scanned()
    assert [t for _, t in loops(module)] == [TRIPS]
    assert hlo_loops.runs(module)[loops(module)[0][0].calls["body"][0]] == TRIPS


@pytest.mark.parametrize(
    ("edit", "trips"),
    [
        ((), 5),  # 1, 3, 5, 7, 9 are less than 10
        (("constant(2)", "constant(3)"), 3),
        (("direction=LT", "direction=LE"), 5),
        (("compare(%i.1, %limit.1), direction=LT", "compare(%limit.1, %i.1), direction=GE"), 5),
        (("constant(10)", "constant(1)"), 0),
        (("constant(2)", "constant(-2)"), None),
        (("copy(%zero)", "sine(%zero)"), None),
        (("constant(10)", "parameter(1)"), None),
        (("add(%copy.2, %two)", "multiply(%copy.2, %two)"), None),
        (("add(%copy.2, %two)", "add(%next, %two)"), None),  # a damaged text: its own operand
    ],
)
def test_trip_counts_from_the_loop(edit, trips):
    module = hlo.parse(TPU_LOOP.replace(*edit) if edit else TPU_LOOP)
    assert [t for _, t in loops(module)] == [trips]
    assert hlo_loops.unknown_loops(module) == (() if trips is not None else ("while",))


def loops(module: hlo.Module) -> list[tuple[hlo.Instruction, int | None]]:
    return [
        (i, hlo_loops.trip_count(module, c, i))
        for c in module.computations.values()
        for i in c.instructions
        if i.opcode == "while"
    ]


def test_flops_of_a_scan():
    _, module = scanned()
    assert hlo_cost.flops(module) == TRIPS * 2 * (2 * M * K * N)


def test_flops_of_a_gradient():
    compiled, module = gradient()
    products = 3 + 3 + 2  # forward, by each weight, by each input but the first
    assert hlo_cost.flops(module) == products * 2 * 128 * 64 * 64
    counted = compiled.cost_analysis()["flops"]  # with the elementwise work
    assert hlo_cost.flops(module) <= counted < 1.05 * hlo_cost.flops(module)


@pytest.mark.parametrize(
    "settings",
    [
        dict(window_strides=(1, 1), padding="SAME"),
        dict(window_strides=(2, 3), padding="VALID"),
        dict(window_strides=(1, 2), padding=((2, 0), (0, 1)), rhs_dilation=(2, 1)),
        dict(window_strides=(1, 1), padding=((2, 2), (2, 2)), lhs_dilation=(2, 3)),
        dict(window_strides=(1, 1), padding="SAME", feature_group_count=4),
    ],
    ids=["same", "strided", "dilated", "transposed", "grouped"],
)
def test_flops_of_convolutions(settings):
    """XLA counts a multiply-add only where the kernel meets the image; so does the parser's count."""
    inputs = 8 // settings.get("feature_group_count", 1)

    def f(x, k):
        return jax.lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings)

    compiled = jax.jit(f).lower(jnp.ones((2, 12, 14, 8)), jnp.ones((3, 3, inputs, 16))).compile()
    assert hlo_cost.flops(hlo.parse(compiled.as_text())) == (compiled.cost_analysis() or {})["flops"]


def test_flops_of_library_calls():
    text = """HloModule m, is_scheduled=true

ENTRY %main (a: f32[8,16], b: f32[32,16]) -> f32[8,32] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  %gemm = (f32[8,32]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %out = f32[8,32]{1,0} get-tuple-element(%gemm), index=0
}
"""
    assert hlo_cost.flops(hlo.parse(text)) == 2 * 8 * 16 * 32


def test_traffic_of_an_unrolled_program():
    compiled, module = gradient()
    assert hlo_cost.traffic(module).device == pytest.approx(compiled.cost_analysis()["bytes accessed"], rel=0.03)
    assert hlo_cost.traffic(module).host == 0


@pytest.mark.parametrize("program", ["gradient", "scanned"])
def test_roofline_is_of_each_instruction_by_itself(program):
    _, module = globals()[program]()
    flops, moved = hlo_cost.flops(module), hlo_cost.traffic(module).device
    endless = float("inf")
    assert hlo_cost.roofline(module, lambda dtype: 1e6, endless) == pytest.approx(flops / 1e6)
    assert hlo_cost.roofline(module, lambda dtype: endless, 1e6) == pytest.approx(moved / 1e6)
    both = hlo_cost.roofline(module, lambda dtype: flops, moved)  # one second each
    assert 1 < both <= 2  # elementwise work is bound by memory, products by arithmetic
    with pytest.raises(KeyError):
        hlo_cost.roofline(module, {"bfloat16": 1.0}.__getitem__, 1.0)  # the products are of float32


def test_roofline_lets_asynchronous_copies_run_beside():
    text = """HloModule m, is_scheduled=true

ENTRY %main (a: f32[64,64], b: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  %b = f32[64,64]{1,0} parameter(1)
  %start = (f32[64,64]{1,0:S(1)}, f32[64,64]{1,0}, u32[]) copy-start(%b)
  %dot = f32[64,64]{1,0:S(1)} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[64,64]{1,0:S(1)} copy-done(%start)
  ROOT %out = f32[64,64]{1,0:S(1)} add(%dot, %done)
}
"""
    module, size, flops = hlo.parse(text), 4 * 64 * 64, 2 * 64**3
    assert hlo_cost.roofline(module, lambda dtype: flops, size) == pytest.approx(3)  # a twice, b beside it
    assert hlo_cost.roofline(module, lambda dtype: flops / 5, size) == pytest.approx(5)


def test_traffic_of_slices_updates_and_memory_spaces():
    row, array = 4 * 128, 4 * 64 * 128
    text = """HloModule m, is_scheduled=true

%fused (p0: f32[64,128], p1: s32[]) -> f32[1,128] {
  %p0 = f32[64,128]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,128]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,128}
  ROOT %neg = f32[1,128]{1,0} negate(%slice)
}

%update (q0: f32[64,128], q1: f32[1,128], q2: s32[]) -> f32[64,128] {
  %q0 = f32[64,128]{1,0} parameter(0)
  %q1 = f32[1,128]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %dus = f32[64,128]{1,0} dynamic-update-slice(%q0, %q1, %q2, %none)
}

ENTRY %main (a: f32[64,128], i: s32[]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[1,128]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused
  %b = f32[64,128]{1,0} copy(%a)
  %u = f32[64,128]{1,0} fusion(%b, %r, %i), kind=kLoop, calls=%update
  %view = f32[8192]{0} bitcast(%u)
  %vmem = f32[64,128]{1,0:S(1)} copy(%u)
  %c = (f32[64,128]{1,0:S(5)}, f32[64,128]{1,0}, u32[]{:S(2)}) copy-start(%u)
  %host = f32[64,128]{1,0:S(5)} copy-done(%c)
  ROOT %out = f32[64,128]{1,0} negate(%vmem)
}
"""
    moved = hlo_cost.traffic(hlo.parse(text))
    # slice and index; copy; update and index; copy to on-chip memory; copy to the host
    assert moved.read == (row + 4) + array + (row + 4) + array + array
    assert moved.written == row + array + row + array
    assert (moved.to_host, moved.from_host, moved.host) == (array, 0, array)


def test_operands_do_not_go_in_circles():
    text = """HloModule m, is_scheduled=true

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %x = f32[8]{0} copy(%y)
  %y = f32[8]{0} copy(%x)
  %z = f32[8]{0} bitcast(%z)
  %a = f32[8]{0} copy(%y)
  ROOT %out = f32[8]{0} copy(%y)
}
"""
    module = hlo.parse(text)
    assert [i.name for i in module.entry.instructions] == ["a", "x", "y", "z", "out"]
    assert live.walk(module).peak > 0 and hlo_cost.traffic(module).device > 0


@pytest.mark.parametrize("seed", range(8))
def test_damaged_texts_do_no_harm(seed):
    """Cut and changed texts are read as far as they go, or are a RematError; they never hang."""
    rnd = random.Random(seed)
    for original in (str(gradient()[0].as_text()), TPU_LOOP, TABLES):
        for _ in range(12):
            text = original
            for _ in range(rnd.choice((1, 5, 50))):
                a, b = rnd.randrange(len(text)), rnd.randrange(len(text))
                piece = rnd.choice(("", rnd.choice('(){}[]"\\%,= 0129-*x\n'), text[b : b + rnd.choice((3, 30, 300))]))
                text = text[:a] + piece + text[a + rnd.choice((0, 1, 3, 30)) :]
            text = text[: rnd.randrange(len(text))] if rnd.random() < 0.2 else text
            try:
                module = hlo.parse(text)
                live.walk(module)
                hlo_cost.flops(module)
                hlo_cost.traffic(module)
            except RematError:
                pass


def test_long_texts():
    lines = [f'  %v{n + 1} = f32[4]{{0}} negate(%v{n}), metadata={{op_name="a/b"}}' for n in range(20_000)]
    head, tail = TABLES.split("  %old")[0], "\n}\n"
    module = hlo.parse(head.replace("%x =", "%v0 =") + "\n".join(lines) + tail)
    assert len(module.entry.instructions) == 20_001
    assert live.walk(module).peak == 2 * 16  # the argument, and one buffer that is written over again and again
