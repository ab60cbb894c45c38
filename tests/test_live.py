"""Memory over the schedule: against XLA's buffer assignment on the CPU, and short texts counted by hand."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_kit as rk
from remat_kit._errors import RematError
from remat_kit._target import hlo, live

OPTIMIZED = True
WIDTH, ROWS, LAYERS = 64, 512, 6


def abstract(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def block(w, x):
    h = jnp.tanh(x @ w["a"])
    return x + jnp.sin(h @ w["b"])


def unrolled(policy: Any = None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    run = block if policy is None else jax.checkpoint(block, policy=policy)

    def loss(ws, x):
        for w in ws:
            x = run(w, x)
        return jnp.sum(x**2)

    weights = {"a": abstract(WIDTH, 4 * WIDTH), "b": abstract(4 * WIDTH, WIDTH)}
    return jax.value_and_grad(loss), ([weights] * LAYERS, abstract(ROWS, WIDTH))


def scanned(policy: Any = None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    run = block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=False)

    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (run(w, x), None), x, ws)[0] ** 2)

    weights = {"a": abstract(LAYERS, WIDTH, 4 * WIDTH), "b": abstract(LAYERS, 4 * WIDTH, WIDTH)}
    return jax.value_and_grad(loss), (weights, abstract(ROWS, WIDTH))


def train_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    grad, args = scanned()

    def step(ws, x):
        loss, grads = grad(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), loss

    return step, args


def branches() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def f(big, x):
        tall = jnp.concatenate([x, x])
        return jax.lax.cond(big, lambda a: jnp.sum(jnp.sin(a @ a.T) @ a), lambda a: jnp.sum(a), tall)

    return f, (abstract(dtype=jnp.bool_), abstract(ROWS // 2, WIDTH))


def loop_in_loop() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def inner(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), x), jnp.sum(x)

    def f(ws, x):
        return jax.lax.scan(inner, x, ws)

    return f, (abstract(LAYERS, WIDTH, WIDTH), abstract(ROWS, WIDTH))


def zoo(name: str, policy: str, **settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    fn, args = getattr(rk.zoo, name)(dtype="float32", abstract=True, **settings)
    return jax.value_and_grad(rk.apply(fn, policy) if policy else fn), args


GPT: dict[str, Any] = dict(layers=3, batch=2, length=64, width=64, heads=2, vocab=256)
PROGRAMS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "unrolled": (unrolled, ()),
    "unrolled, all recomputed": (lambda: unrolled(jax.checkpoint_policies.nothing_saveable), ()),
    "scanned": (scanned, ()),
    "scanned, all recomputed": (lambda: scanned(jax.checkpoint_policies.nothing_saveable), ()),
    "scanned, products kept": (lambda: scanned(jax.checkpoint_policies.dots_saveable), ()),
    "train step with donation": (train_step, (0,)),
    "branches": (branches, ()),
    "loop in a loop": (loop_in_loop, ()),
    "gpt": (lambda: zoo("gpt", "", **GPT), ()),
    "gpt, dots": (lambda: zoo("gpt", "dots", **GPT), ()),
    "rnn": (lambda: zoo("rnn", "", batch=8, length=16, width=64, vocab=128), ()),
}


@functools.cache
def compiled(name: str) -> tuple[Any, hlo.Module]:
    make, donated = PROGRAMS[name]
    fn, args = make()
    program = jax.jit(fn, donate_argnums=donated).lower(*args).compile()
    return program, hlo.parse(program.as_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_peak_of_the_cpu(name):
    """XLA's figure has the gaps in its heap in it; nothing is live beside what it counts."""
    program, module = compiled(name)
    memory = program.memory_analysis()
    fixed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    timeline = live.walk(module)
    assert timeline.peak == pytest.approx(fixed + memory.temp_size_in_bytes, rel=0.05)
    assert sum(b.bytes for b in timeline.buffers) == timeline.peak == timeline.points[timeline.at].bytes
    assert timeline.peak == max(p.bytes for p in timeline.points)
    assert timeline.host_peak == 0


def test_recomputing_lowers_the_peak_and_moves_it_to_the_layers():
    kept, recomputed = (live.walk(compiled(n)[1]) for n in ("scanned", "scanned, all recomputed"))
    stacked = LAYERS * ROWS * 4 * WIDTH * 4
    assert kept.peak - recomputed.peak > stacked
    assert any(b.bytes == stacked and b.phase == "forward" for b in kept.buffers)
    assert not any(b.bytes == stacked for b in recomputed.buffers)


def test_buffers_say_where_they_come_from():
    timeline = live.walk(compiled("scanned")[1])
    stacked = [b for b in timeline.buffers if b.shape == f"f32[{LAYERS},{ROWS},{4 * WIDTH}]"]
    lines, first = inspect.getsourcelines(block)
    assert stacked
    for b in stacked:
        assert b.source is not None
        assert b.source[0] == __file__
        assert first <= b.source[1] < first + len(lines)
    arguments = [b for b in timeline.buffers if b.kind == "argument"]
    assert {b.op_name for b in arguments} == {"ws['a']", "ws['b']", "x"}
    assert [b.phase for b in arguments] == [""] * 3


def test_recomputed_buffers_are_marked():
    timeline = live.walk(compiled("scanned, all recomputed")[1])
    inside = [b for b in timeline.buffers if b.where]
    assert any(b.recomputed for b in inside)
    assert not any(b.recomputed for b in live.walk(compiled("scanned")[1]).buffers)


# --- short programs, counted by hand ---

ARRAY = 4 * 16 * 128  # bytes of f32[16,128]


def timeline(body: str, head: str = "", before: str = "") -> live.Memory:
    """The timeline of an entry computation of one argument `%x`; every array is f32[16,128]."""
    text = f"HloModule m, is_scheduled=true{head}\n\n{before}\nENTRY %main (x: f32[16,128]) -> f32[16,128] {{\n"
    text += f"  %x = A parameter(0)\n{body}\n}}\n"
    return live.walk(
        hlo.parse(text.replace("A ", "f32[16,128]{1,0:T(8,128)} ").replace("A,", "f32[16,128]{1,0:T(8,128)},"))
    )


def arrays(t: live.Memory) -> list[float]:
    """Live arrays at each instruction."""
    return [p.bytes / ARRAY for p in t.points]


def test_values_live_from_definition_to_last_use():
    t = timeline("""
  %a = A sort(%x)
  %b = A custom-call(%a), custom_call_target="f"
  %c = A custom-call(%b), custom_call_target="f"
  ROOT %d = A custom-call(%c, %a), custom_call_target="f" """)
    # the argument and the result are set aside; %b is put into the result, which is not written yet
    assert arrays(t) == [3, 3, 4, 4]
    assert [(b.name, b.kind) for b in t.buffers][-2:] == [("a", "temp"), ("c", "temp")]


def test_elementwise_operations_write_over_a_dead_operand():
    chain = """
  %a = A custom-call(%x), custom_call_target="f"
  %b = A negate(%a)
  %c = A custom-call({}), custom_call_target="f"
  ROOT %d = A custom-call(%c), custom_call_target="f" """
    assert max(arrays(timeline(chain.format("%b")))) == 3
    assert max(arrays(timeline(chain.format("%a, %b")))) == 4  # %a is still needed


def test_views_hold_their_operand():
    t = timeline(
        """
  %a = A custom-call(%x), custom_call_target="f"
  %view = f32[2048]{0} bitcast(%a)
  %pair = (f32[2048]{0}, A) tuple(%view, %x)
  %b = A custom-call(%x), custom_call_target="f"
  %again = f32[2048]{0} get-tuple-element(%pair), index=0
  ROOT %d = A custom-call(%b, %again), custom_call_target="f" """.replace("A)", "f32[16,128]{1,0:T(8,128)})")
    )
    assert max(arrays(t)) == 4
    assert {b.name for b in t.buffers} == {"x", "a", "b", "d"}


def test_updates_in_place_share_and_a_loop_carries_one_buffer():
    before = """%cond (p: (A, s32[])) -> pred[] {
  %p = (A, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=1
  %n = s32[] constant(4)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (q: (A, s32[])) -> (A, s32[]) {
  %q = (A, s32[]) parameter(0)
  %stack = A get-tuple-element(%q), index=0
  %j = s32[] get-tuple-element(%q), index=1
  %one = s32[] constant(1)
  %row = f32[8,128]{1,0:T(8,128)} custom-call(%j), custom_call_target="f"
  %next = A dynamic-update-slice(%stack, %row, %j, %j)
  %k = s32[] add(%j, %one)
  ROOT %r = (A, s32[]) tuple(%next, %k)
}
"""
    t = timeline(
        """
  %zero = s32[] constant(0)
  %start = A custom-call(%zero), custom_call_target="AllocateBuffer"
  %tuple = (A, s32[]) tuple(%start, %zero)
  %while = (A, s32[]) while(%tuple), condition=%cond, body=%body
  %out = A get-tuple-element(%while), index=0
  ROOT %d = A custom-call(%out), custom_call_target="f" """,
        before=before,
    )
    assert t.peak == pytest.approx(3 * ARRAY, abs=64)  # argument, stack, result, which holds %row for a while
    assert {p.where for p in t.points} == {"", "cond", "body"}
    assert [b.where for b in t.buffers if b.bytes == ARRAY] == ["", "", ""]


REDUCES = """%sum (u: f32[], v: f32[]) -> f32[] {
  %u = f32[] parameter(0)
  %v = f32[] parameter(1)
  ROOT %w = f32[] add(%u, %v)
}

%f (p: A, q: A) -> (f32[128], A) {
  %p = A parameter(0)
  %q = A parameter(1)
  %zero = f32[] constant(0)
  %m = A multiply(%p, %READ)
  %r = f32[128]{0} reduce(%m, %zero), dimensions={0}, to_apply=%sum
  %n = A negate(%m)
  ROOT %t = (f32[128]{0}, A) tuple(%r, %n)
}
"""


@pytest.mark.parametrize(("read", "peak"), [("q", 3), ("z", 4)])
def test_a_reduction_on_a_gpu_writes_another_result_over_what_it_reads_in_the_same_order(read, peak):
    """As in XLA's FusionCanShareBufferHint: not where a transpose reads in another order."""
    before = REDUCES.replace("%READ", f"%{read}")
    if read == "z":
        turned = "  %y = f32[128,16]{0,1} transpose(%q), dimensions={1,0}\n  %z = A bitcast(%y)\n"
        before = before.replace("  %zero", f"{turned}  %zero").replace("multiply(%p, %z)", "multiply(%z, %z)")
    t = timeline(
        """
  %o = A custom-call(%x), custom_call_target="f"
  %a = A custom-call(%x), custom_call_target="f"
  %pair = (f32[128]{0}, A) fusion(%x, %a), kind=kInput, calls=%f
  %sums = f32[128]{0} get-tuple-element(%pair), index=0
  %b = A get-tuple-element(%pair), index=1
  %e = f32[128]{0} custom-call(%o, %sums), custom_call_target="f"
  ROOT %d = A custom-call(%e, %b), custom_call_target="f" """.replace("A)", "f32[16,128]{1,0:T(8,128)})"),
        before=before,
    )
    # the argument, the result with %o in it meanwhile, %b, and %a unless %b is written over it
    assert t.peak == pytest.approx(peak * ARRAY, abs=2000)


def test_a_donated_argument_is_written_over():
    body = """
  %a = A custom-call(%x), custom_call_target="f"
  ROOT %d = A negate(%a) """
    assert max(arrays(timeline(body))) == 2
    assert max(arrays(timeline(body, head=", input_output_alias={ {}: (0, {}, may-alias) }"))) == 2
    body = body.replace("negate(%a)", 'custom-call(%a), custom_call_target="f"')
    kept, donated = timeline(body), timeline(body, head=", input_output_alias={ {}: (0, {}, may-alias) }")
    assert (max(arrays(kept)), max(arrays(donated))) == (3, 2)


def test_host_memory_is_summed_apart_and_on_chip_memory_left_out():
    t = timeline("""
  %v = f32[16,128]{1,0:T(8,128)S(1)} custom-call(%x), custom_call_target="f"
  %to = (f32[16,128]{1,0:T(8,128)S(5)}, f32[16,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%v)
  %host = f32[16,128]{1,0:T(8,128)S(5)} copy-done(%to)
  %other = A custom-call(%x), custom_call_target="f"
  %from = (A, f32[16,128]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%host)
  %back = A copy-done(%from)
  ROOT %d = A custom-call(%back, %other), custom_call_target="f" """)
    assert t.host_peak == ARRAY
    assert [p.host_bytes // ARRAY for p in t.points] == [0, 1, 1, 1, 1, 1, 0]
    assert t.peak == 4 * ARRAY  # %back is there from the start of the copy


def test_asynchronous_operations_hold_operands_until_they_are_done():
    t = timeline(
        """
  %a = A custom-call(%x), custom_call_target="f"
  %go = ((A, A), A, u32[]{:S(2)}) fusion-start(%a, %x), kind=kCustom, calls=%f
  %b = A custom-call(%x), custom_call_target="f"
  %got = A fusion-done(%go)
  ROOT %d = A custom-call(%got, %b), custom_call_target="f" """.replace("A)", "f32[16,128]{1,0:T(8,128)})")
    )
    # the argument, the result with %a in it, %b, and %go from its start to %d
    assert arrays(t) == [2, 3, 4, 4, 4]


def test_tiles_are_counted():
    t = live.walk(
        hlo.parse("""HloModule m, is_scheduled=true

ENTRY %main (x: bf16[9,100]) -> bf16[9,100] {
  %x = bf16[9,100]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %y = bf16[9,100]{0,1:T(8,128)(2,1)} copy(%x)
}
""")
    )
    assert [(b.name, b.bytes) for b in t.buffers] == [("y", 104 * 128 * 2), ("x", 16 * 128 * 2)]


def test_program_that_hands_back_its_argument():
    assert timeline("").peak == ARRAY


def test_calls_that_multiply_are_an_error():
    """Each computation calls the one before it twice: 2**60 steps."""
    text = [
        "HloModule m, is_scheduled=true\n",
        "%c0 (x: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n  ROOT %y = f32[] sine(%x)\n}\n",
    ]
    for n in range(1, 60):
        text.append(
            f"%c{n} (x: f32[]) -> f32[] {{\n  %x = f32[] parameter(0)\n  %a = f32[] call(%x), to_apply=%c{n - 1}\n"
            f"  ROOT %b = f32[] call(%a), to_apply=%c{n - 1}\n}}\n"
        )
    text.append(
        "ENTRY %main (x: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n  ROOT %y = f32[] call(%x), to_apply=%c59\n}\n"
    )
    with pytest.raises(RematError, match="line up"):
        live.walk(hlo.parse("\n".join(text)))
