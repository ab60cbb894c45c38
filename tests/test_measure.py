"""measure: XLA's own figures, for programs of every kind, on the CPU and on chips that are not here."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import remat_kit as rk
from remat_kit._target.effect import effect, offload_findings
from remat_kit._trace.report import Kind
from tests import by_hand

OPTIMIZED = True
OLD_CPU = jax.__version_info__ < (0, 11)  # its CPU compiler merges recomputation outside loops with the forward pass

W = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)
X = jax.ShapeDtypeStruct((256, 64), jnp.float32)


def scanned(w, x):
    def body(x, w):
        return jnp.tanh(jnp.sin(x @ w)) + x, None

    return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)


def unrolled(w, x):
    for i in range(len(w)):
        x = rk.remat(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w) @ w + x, policy="none", block="layer")(x, w[i])
    return jnp.sum(x**2)


def peak(stats):
    """The peak on the CPU, whose own figure leaves temporaries out."""
    return (
        stats.temp_size_in_bytes + stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    )


# On the CPU, against jax.jit(...).lower(...).compile() -----------------------------------------------


@pytest.mark.parametrize("policy", ["none", "full", "dots"])
def test_the_figures_are_those_of_a_compile_by_hand(policy):
    body = {"none": lambda f: f}.get(
        policy, lambda f: jax.checkpoint(f, policy=by_hand.POLICIES[policy], prevent_cse=False)
    )

    def loss(w, x):
        return jnp.sum(jax.lax.scan(body(lambda x, w: (jnp.tanh(jnp.sin(x @ w)) + x, None)), x, w)[0] ** 2)

    compiled = jax.jit(jax.value_and_grad(loss)).lower(W, X).compile()
    stats = compiled.memory_analysis()
    m = rk.measure(scanned, W, X, policy=policy, target="cpu")
    assert m.peak_bytes == peak(stats)
    assert (m.temp_bytes, m.argument_bytes, m.output_bytes) == (
        stats.temp_size_in_bytes,
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
    )
    assert m.xla_flops == compiled.cost_analysis()["flops"]


def test_policies_change_what_is_compiled():
    none, full = (rk.measure(scanned, W, X, policy=p, target="cpu") for p in ("none", "full"))
    assert full.temp_bytes < none.temp_bytes and full.matmul_flops > none.matmul_flops
    assert full.predicted_bytes < none.predicted_bytes


def test_flops_are_counted_with_trip_counts():
    m = rk.measure(scanned, W, X, policy="none", target="cpu")
    products = 3 * 2 * 6 * 256 * 64 * 64  # forward, and two in the backward pass of each
    assert m.matmul_flops == products and m.flops >= products and m.flops_exact
    assert m.xla_flops < products  # XLA counts a loop's body once


def test_aux_and_argnums_and_keywords():
    def loss(w, x, *, scale):
        value = scanned(w, x) * scale
        return value, {"value": value}

    m = rk.measure(loss, W, X, argnums=(0, 1), has_aux=True, target="cpu", scale=2.0)
    assert m.output_bytes >= 4 * (6 * 64 * 64 + 256 * 64)


def test_modules_as_arguments():
    model = nnx.Sequential(nnx.Linear(16, 64, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(64, 16, rngs=nnx.Rngs(0)))

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    m = rk.measure(loss, model, jnp.ones((8, 16)), target="cpu")
    assert m.matmul_flops > 0 and m.peak_bytes > m.argument_bytes > 4 * 2 * 16 * 64


def test_complex_arguments_of_a_real_loss():
    z = jax.ShapeDtypeStruct((8, 8), jnp.complex64)
    assert rk.measure(lambda z: jnp.sum(jnp.abs(z @ z)), z, target="cpu").peak_bytes > 0
    assert rk.measure(lambda z: jnp.sum(z @ z), z, target="cpu").peak_bytes > 0  # holomorphic


def test_a_step_under_nnx_jit():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    assert rk.measure(step, model, optimizer, jnp.ones((4, 16)), grad=False, target="cpu").matmul_flops > 0


def test_a_moved_program_is_told_of():
    first = rk.measure(lambda x: jnp.sum(jnp.sin(x) ** 2), X, target="cpu")
    with jax.named_scope("elsewhere"):
        again = rk.measure(lambda x: jnp.sum(jnp.sin(x) ** 2), X, target="cpu")
    assert again.cached and again.peak_bytes == first.peak_bytes
    assert any("earlier compile" in note for note in again.notes)


def test_real_and_abstract_arguments_measure_alike():
    real = [np.zeros(a.shape, a.dtype) for a in (W, X)]
    assert rk.measure(scanned, *real, target="cpu").peak_bytes == rk.measure(scanned, W, X, target="cpu").peak_bytes


def test_notebooks_and_programs_see_the_same_text():
    m = rk.measure(scanned, W, X, policy="full", target="cpu")
    text = str(m)
    for word in ("cpu", "full", "compiled", "predicted", "counted", "temporary", "dot_general"):
        assert word in text
    data = json.loads(json.dumps(m.to_dict()))
    assert data["schema"] == 1 and data["peak_bytes"] == m.peak_bytes and data["residuals"]["policy"] == "full"


# Whole steps -----------------------------------------------------------------------------------------


def sgd(loss):
    optimizer = optax.adam(1e-3)

    def step(w, state, x):
        grads = jax.grad(loss)(w, x)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    return step, jax.eval_shape(optimizer.init, W)


def test_a_step_with_donation():
    step, state = sgd(scanned)
    kept = rk.measure(jax.jit(step), W, state, X, grad=False, target="cpu")
    donated = rk.measure(jax.jit(step, donate_argnums=(0, 1)), W, state, X, grad=False, target="cpu")
    assert kept.alias_bytes == 0 and donated.alias_bytes == 3 * 4 * 6 * 64 * 64 + 4
    assert donated.peak_bytes < kept.peak_bytes and kept.residuals is None


def test_a_step_takes_policies_for_its_marked_blocks():
    step, state = sgd(unrolled)
    none, full = (
        rk.measure(step, W, state, X, grad=False, policy={"layer": p}, target="cpu", keep_barriers=True)
        for p in ("none", "full")
    )
    assert full.matmul_flops > none.matmul_flops and full.policy == "layer: full"


def test_a_step_refuses_other_policies():
    step, state = sgd(scanned)
    with pytest.raises(rk.RematError, match="its own gradient"):
        rk.measure(step, W, state, X, grad=False, policy="full", target="cpu")
    with pytest.raises(rk.RematError, match="scalar"):
        rk.measure(step, W, state, X, target="cpu")


def test_a_jitted_step_refuses_a_policy_that_would_undo_its_jit():
    step, state = sgd(scanned)
    with pytest.raises(rk.RematError, match="marked blocks"):
        rk.measure(jax.jit(step, donate_argnums=0), W, state, X, grad=False, policy="full", target="cpu")


def test_static_arguments_of_a_jitted_step():
    @functools.partial(jax.jit, static_argnames=("n", "name"))
    def step(x, n, name):
        return x * n if name == "times" else x

    m = rk.measure(step, X, n=3, name="times", grad=False, target="cpu")
    assert m.output_bytes == 4 * 256 * 64


# What policies do ------------------------------------------------------------------------------------


def test_the_cpu_compiler_that_merges_recomputation():
    m = rk.measure(unrolled, W, X, policy="full", against="none", target="cpu")
    kept = rk.measure(unrolled, W, X, policy="full", against="none", target="cpu", keep_barriers=True)
    assert m.effect.counted_flops == kept.effect.counted_flops == 2 * 2 * 6 * 256 * 64 * 64
    assert kept.effect.flops > 0 and not any("merged" in f for f in kept.effect.findings)
    if OLD_CPU and jax.config.jax_remat3:
        pytest.skip("it schedules what it recomputes before the backward pass")
    assert kept.effect.peak_bytes > 0.3 * kept.effect.predicted_bytes
    assert not any("No effect" in f for f in kept.effect.findings)
    said = [any(word in f for f in m.effect.findings) for word in ("merged", "No effect", "keep_barriers=True")]
    assert said == [OLD_CPU] * 3 and ("merged" in str(m)) == OLD_CPU
    if OLD_CPU:
        assert kept.temp_bytes < m.temp_bytes


def test_offload_cannot_be_seen_on_the_cpu():
    if jax.config.jax_remat3 and OLD_CPU:
        pytest.skip("jax_remat3 of JAX 0.10.2 does not offload")
    m = rk.measure(scanned, W, X, policy="offload op=dot_general", target="cpu")
    assert m.residuals.host_bytes > 0 and any("cannot be seen" in n for n in m.notes)


def test_timing():
    m = rk.measure(scanned, W, X, policy="full", target="cpu", time=True)
    assert 0 < m.timing.low <= m.timing.median <= m.timing.high and m.timing.steps >= 5
    assert m.seconds == m.timing.median and "timed" in str(m)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_timing_with_keys_and_small_numbers(impl):
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    small = jax.ShapeDtypeStruct((8,), jnp.int8 if OLD_CPU else jnp.int4)  # JAX 0.10.2 confuses layouts of int4

    def loss(x, key, small):
        return jnp.sum(x * jax.random.normal(key, x.shape) * small.astype(jnp.float32)[0])

    m = rk.measure(loss, X, key, small, target="cpu", time=True)
    assert m.timing is not None, m.notes


def test_timing_that_fails_leaves_the_rest():
    def loss(x):
        return jnp.sum(jnp.sin(jax.pure_callback(fails, jax.ShapeDtypeStruct((), jnp.float32), 1.0) * x))

    def fails(x):
        raise ValueError("not today")

    m = rk.measure(loss, X, target="cpu", time=True)
    assert m.timing is None and m.peak_bytes > 0 and any("not timed" in note for note in m.notes)


def test_timing_a_step_that_takes_its_arguments_memory():
    step, state = sgd(scanned)
    m = rk.measure(jax.jit(step, donate_argnums=(0, 1)), W, state, X, grad=False, target="cpu", time=True)
    assert m.timing.steps >= 5


# Bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"target": "tpu:v9"}, "unknown target"),
        ({"policy": "dotz"}, "dots"),
        ({"policy": {"nowhere": "dots"}}, "no block"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "long"}, "timeout"),
        ({"compiler_options": 5}, "compiler_options"),
        ({"argnums": 7}, "argnums"),
        ({"grad": False, "argnums": 1}, "nothing is"),
        ({"grad": False, "has_aux": True}, "nothing is"),
        ({"compiler_options": {"xla_no_such_option": True}}, "xla_no_such_option"),
        ({"compiler_options": {"xla_dump_to": object()}}, "texts, bools or numbers"),
    ],
)
def test_bad_input(change, words):
    with pytest.raises(rk.RematError, match=words):
        rk.measure(scanned, W, X, **{"target": "cpu", **change})


# Chips that are not here -----------------------------------------------------------------------------


def compiled_by_hand(program, target, *policies):
    script = Path(by_hand.__file__)
    done = subprocess.run(
        [sys.executable, str(script), program, target, *policies], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


TPU = pytest.param("tpu:v5e", marks=pytest.mark.tpu)
CUDA = pytest.param("cuda:h200", marks=pytest.mark.cuda)


@pytest.mark.parametrize("target", [TPU, CUDA])
def test_a_chip_that_is_not_here(target, capfd):
    policies = ["none", "dots_no_batch"]
    by = compiled_by_hand("gpt", target, *policies)
    fn, args = rk.zoo.gpt(**by_hand.SMALL, abstract=True)
    for policy in policies:
        m = rk.measure(fn, *args, policy=policy, target=target)
        assert m.peak_bytes == pytest.approx(by[policy]["peak_memory_in_bytes"], rel=0.02)
        assert m.temp_bytes == pytest.approx(by[policy]["temp_size_in_bytes"], rel=0.02)
        assert m.argument_bytes == by[policy]["argument_size_in_bytes"] and m.fits
        assert m.roofline_seconds > 0 and m.matmul_flops > 0
        assert any(h.path.startswith("layers/") for h in m.held)
        assert any(h.source.partition(":")[0].endswith(".py") for h in m.held)
        assert any(h.name.startswith("params[") for h in m.held)
    assert "E0000" not in (err := capfd.readouterr().err) and "lockfile" not in err


@pytest.mark.parametrize(
    "target",
    [pytest.param("tpu:v5e:2x4", marks=pytest.mark.tpu), pytest.param("cuda:h100:8", marks=pytest.mark.cuda)],
)
def test_a_sharded_program(target):
    by = compiled_by_hand("layers", target, "full")["full"]
    step, args = by_hand.layers("full", rk.target(target).mesh(("data", "model"), (4, 2)))
    m = rk.measure(step, *args, grad=False, target=target)
    assert m.devices == 8
    assert m.peak_bytes == pytest.approx(by["peak_memory_in_bytes"], rel=0.02)
    assert m.argument_bytes == by["argument_size_in_bytes"]
    assert m.argument_bytes < sum(a.size * 2 for a in jax.tree.leaves(args)) / 4


@pytest.mark.parametrize("target", [TPU, CUDA])
def test_offload_shows_as_host_memory(target):
    if jax.config.jax_remat3 and OLD_CPU:
        pytest.skip("jax_remat3 of JAX 0.10.2 does not offload")
    m = rk.measure(scanned, W, X, policy="offload op=dot_general", target=target)
    assert m.host_bytes >= m.residuals.host_bytes == 6 * 256 * 64 * 4
    assert not any("ropped" in n for n in m.notes)


@pytest.mark.parametrize("target", [TPU, CUDA])
def test_arguments_in_host_memory_are_counted_apart(target):
    mesh = rk.target(target).mesh(("one",), (1,))
    on_host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=on_host)
    m = rk.measure(lambda x: jnp.sum(jnp.sin(jax.device_put(x, jax.memory.Space.Device))), x, grad=False, target=target)
    assert m.host_argument_bytes == 4 * 1024**2 and m.argument_bytes == 0
    assert 4 * 1024**2 <= m.peak_bytes < 8 * 1024**2  # its copy on the device


@pytest.mark.tpu
def test_a_program_that_does_not_fit():
    big = jax.ShapeDtypeStruct((40_000, 40_000), jnp.float32)
    m = rk.measure(lambda w: jnp.sum(jnp.tanh(w @ w)), big, target="tpu:v5e")
    assert m.fits is False and m.memory_bytes == int(15.75 * 2**30) < m.peak_bytes
    assert m.headroom_bytes < 0 and m.temp_bytes is None and "exceeds available HBM" in str(m)


@pytest.mark.cuda
def test_a_program_that_does_not_fit_a_gpu():
    big = jax.ShapeDtypeStruct((90_000, 90_000), jnp.float32)
    m = rk.measure(lambda w: jnp.sum(jnp.tanh(w)), big, target="cuda:h100")
    assert m.peak_bytes >= 2 * 4 * 90_000**2 > m.memory_bytes == int(0.75 * 84942979072)
    assert m.fits is False and m.headroom_bytes < 0


@pytest.mark.tpu
@pytest.mark.large
def test_a_llama_of_7_billion_parameters_on_256_chips():
    target = rk.target("tpu:v5e:16x16")
    mesh = target.mesh(("fsdp",), (256,))
    sizes = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocab": 32000, "length": 4096}
    loss, args = rk.zoo.llama(**sizes, batch=256, dtype="bfloat16", mesh=mesh, abstract=True)
    m = rk.measure(loss, *args, policy="full", target=target)
    assert m.devices == 256 and m.fits and m.peak_bytes < 8 * 2**30
    assert m.argument_bytes == pytest.approx(4 * 6_738_415_616 / 256, rel=0.01)


@pytest.mark.tpu
def test_more_devices_than_the_target_has():
    mesh = rk.target("tpu:v5e:2x4").mesh(("data", "model"), (4, 2))
    step, args = by_hand.layers("full", mesh)
    with pytest.raises(rk.RematError, match="8 devices"):
        rk.measure(step, *args, grad=False, target="tpu:v5e:2x2")
    with pytest.raises(rk.RematError, match="mesh of"):
        rk.measure(step, *args, grad=False, target="cpu")


@pytest.mark.tpu
def test_a_program_for_more_chips_than_asked_for():
    mesh = rk.target("tpu:v5e:2x2").mesh(("a",), (4,))

    def loss(w):
        return jnp.sum(jax.lax.with_sharding_constraint(jnp.sin(w), NamedSharding(mesh, PartitionSpec("a"))) ** 2)

    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert rk.measure(loss, w, target="tpu:v5e:2x2").devices == 4
    with pytest.raises(rk.RematError, match="4 devices, the target has 1"):  # what is cached is for four
        rk.measure(loss, w, target="tpu:v5e")


@pytest.mark.tpu
def test_asking_again_is_answered_from_the_cache(monkeypatch):
    from remat_kit._target import remote

    first = rk.measure(scanned, W, X, policy="full", target="tpu:v6e")
    monkeypatch.setattr(remote, "compile_remotely", None)
    again = rk.measure(scanned, W, X, policy="full", target="tpu:v6e")
    assert again.cached and again.peak_bytes == first.peak_bytes and again.held == first.held


# What is said of two measurements --------------------------------------------------------------------


def test_a_dropped_offload_is_said():
    found = rk.measure(scanned, W, X, policy="full", target="cpu")
    kept = rk.residuals(scanned, W, X)
    moved = tuple(dataclasses.replace(e, action=Kind.OFFLOADED) for e in kept.entries if e.action is Kind.SAVED)
    report = dataclasses.replace(kept, entries=moved)
    on_gpu = dataclasses.replace(found, platform="cuda", residuals=report, host_bytes=0)
    assert any("Offload dropped" in f for f in offload_findings(on_gpu))
    assert not offload_findings(dataclasses.replace(on_gpu, host_bytes=report.host_bytes))
    assert not offload_findings(dataclasses.replace(on_gpu, residuals=kept))
    some = dataclasses.replace(on_gpu, host_bytes=report.host_bytes // 4)
    assert any("partly dropped" in f for f in offload_findings(some))


def test_an_effect_says_nothing_that_it_cannot_know():
    before, after = (rk.measure(scanned, W, X, policy=p, target="cpu") for p in ("none", "full"))
    same = dataclasses.replace(after, peak_bytes=before.peak_bytes)
    assert any("No effect" in f for f in effect(before, same).findings)
    # Over many devices what is kept is known as a whole only.
    assert not effect(before, dataclasses.replace(same, devices=64)).findings
    # A program without room has no figures to compare.
    full = dataclasses.replace(before, fits=False, peak_bytes=2**40, temp_bytes=None, matmul_flops=None)
    told = effect(full, after)
    assert told.peak_bytes is told.flops is None and told.counted_flops > 0 and not told.findings
    assert told.peak_bytes is effect(after, full).peak_bytes and not effect(after, full).findings
    assert " - " in str(dataclasses.replace(after, effect=told))
    # Of a whole step the residuals are not known.
    whole = [dataclasses.replace(m, residuals=None) for m in (before, same)]
    told = effect(*whole)
    assert told.predicted_bytes is None and any("No effect" in f for f in told.findings)
