"""compare and max_batch: policies side by side, the largest batch; and their command lines."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import remat_kit as rk
from remat_kit._cli import main
from remat_kit._plan.max_batch import _search
from remat_kit._target.compare import _dominating
from tests.by_hand import POLICIES, SMALL
from tests.test_measure import OLD_CPU, W, X, compiled_by_hand, scanned, sgd, unrolled

OPTIMIZED = True


@pytest.fixture(scope="module")
def comparison():
    return rk.compare(scanned, W, X, target="cpu")


def test_a_row_for_each_policy(comparison):
    assert [r.name for r in comparison.rows] == ["none", "full", "dots", "dots_no_batch"]
    for row in comparison.rows:
        alone = rk.measure(scanned, W, X, policy=row.name, target="cpu")
        assert row.measurement.peak_bytes == alone.peak_bytes == comparison[row.name].peak_bytes
        assert row.measurement.predicted_bytes == rk.residuals(scanned, W, X, policy=row.name).total_bytes
    none, full, dots, _ = comparison.rows
    assert none.overhead == 0 < dots.overhead < full.overhead
    assert full.measurement.peak_bytes < dots.measurement.peak_bytes < none.measurement.peak_bytes
    with pytest.raises(KeyError):
        comparison["nothing"]


def test_the_best_within_a_budget(comparison):
    sizes = {r.name: r.measurement.peak_bytes for r in comparison.rows}
    between = (sizes["full"] + sizes["dots"]) // 2
    for budget, within in ((between, ["full"]), (f"{sizes['dots']}", ["full", "dots", "dots_no_batch"]), (1, [])):
        found = rk.compare(scanned, W, X, target="cpu", budget=budget)
        assert [r.name for r in found.rows if r.within] == within
        assert found.best in within if within else found.best == ""
        assert ("No policy keeps within" in str(found)) == (not within)


def test_dominated_policies_are_pointed_out(comparison):
    none, full = comparison["none"], comparison["full"]
    worse = dataclasses.replace(full, peak_bytes=full.peak_bytes + 1)
    found = {"full": full, "again": full, "worse": worse, "none": none}
    assert [_dominating(name, found) for name in found] == ["", "", "full", ""]  # equal ones do not dominate each other
    no_room = dataclasses.replace(full, fits=False, peak_bytes=1)
    assert _dominating("full", {"full": full, "no room": no_room}) == ""


def test_only_a_policy_for_all_blocks_is_without_remat():
    def loss(w, x):
        return scanned(w, x) + scanned(2 * w, x)

    found = rk.compare(loss, W, X, policies={"some": {"scan": "none"}, "full": "full"}, target="cpu")
    assert found["full"].effect is None and found.rows[1].overhead > 0 == found.rows[0].overhead


def test_overhead_is_against_no_remat_even_where_it_is_not_compared():
    both = rk.compare(scanned, W, X, policies=["none", "full"], target="cpu")
    alone = rk.compare(scanned, W, X, policies=["full"], target="cpu")
    assert alone.rows[0].overhead == both.rows[1].overhead > 0


def test_effects_are_told(comparison):
    assert comparison["full"].effect.against == "none" and comparison["full"].effect.peak_bytes > 0
    assert comparison["none"].effect is None


def test_whole_steps():
    step, state = sgd(unrolled)
    policies = {"none": {"layer": "none"}, "full": {"layer": "full"}}
    found = rk.compare(step, W, state, X, grad=False, policies=policies, target="cpu", keep_barriers=True)
    assert found.rows[0].overhead == 0 < found.rows[1].overhead and not found.refused
    assert found["full"].matmul_flops > found["none"].matmul_flops


def test_a_policy_that_is_refused_is_a_line_not_the_end():
    policies = {"fine": "dots", "other": {"nowhere": "dots"}}
    found = rk.compare(scanned, W, X, policies=policies, target="cpu")
    assert [r.name for r in found.rows] == ["fine"] and "nowhere" in found.refused["other"]
    assert "other is refused here" in str(found)
    with pytest.raises(rk.RematError, match="nowhere"):
        rk.compare(scanned, W, X, policies={"other": {"nowhere": "dots"}}, target="cpu")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"policies": ["dotz"]}, "dots"),
        ({"policies": "dots"}, "several"),
        ({"policies": []}, "empty"),
        ({"policies": ["dots", "dots"]}, "twice"),
        ({"policies": 3}, "several"),
        ({"budget": 1.5}, "share"),
        ({"budget": "lots"}, "lots"),
        ({"budget": 0}, "no memory"),
        ({"target": "tpu:v9"}, "unknown target"),
    ],
)
def test_bad_input(change, words):
    with pytest.raises(rk.RematError, match=words):
        rk.compare(scanned, W, X, **{"target": "cpu", **change})


def test_as_data(comparison):
    data = json.loads(json.dumps(comparison.to_dict()))
    assert data["best"] == comparison.best and len(data["rows"]) == 4 and data["rows"][0]["seconds_are"] == "roofline"
    pytest.importorskip("pandas")
    frame = comparison.to_pandas()
    assert list(frame["policy"]) == ["none", "full", "dots", "dots_no_batch"] and (frame["peak_bytes"] > 0).all()


def test_timed():
    found = rk.compare(scanned, W, X, policies=["full"], target="cpu", time=True)
    assert found.rows[0].measurement.timing.median > 0 and "timed" in str(found)


# Chips that are not here -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [pytest.param("tpu:v5e", marks=pytest.mark.tpu), pytest.param("cuda:h200", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("size", ["gpt", pytest.param("gpt_large", marks=pytest.mark.large)])
def test_five_policies_as_compiled_by_hand(target, size):
    policies = [p for p in POLICIES if not (OLD_CPU and jax.config.jax_remat3 and "offload" in p)]
    if size == "gpt_large" and jax.config.jax_remat3:
        pytest.skip("one implementation is enough for the large form")
    from tests import by_hand

    fn, args = rk.zoo.gpt(**(SMALL if size == "gpt" else by_hand.LARGE), abstract=True)
    found = rk.compare(fn, *args, policies=policies, target=target)
    assert not found.refused
    by = compiled_by_hand(size, target, *policies)
    for policy in policies:
        stats = by[policy]
        whole = sum(stats[f"{k}_size_in_bytes"] for k in ("temp", "argument", "output")) - stats["alias_size_in_bytes"]
        peak = stats["peak_memory_in_bytes"]  # with temporaries on the host, XLA counts these too
        peak = min(peak, whole) if stats["host_temp_size_in_bytes"] else peak
        assert found[policy].peak_bytes == pytest.approx(peak, rel=0.03)
        assert found[policy].host_bytes == by[policy]["host_temp_size_in_bytes"]
    if "offload_dots" in policies:
        assert found["offload_dots"].host_bytes > 0 == found["dots"].host_bytes
    assert found["full"].peak_bytes < found["dots"].peak_bytes < found["none"].peak_bytes
    assert found.best and found[found.best].fits


# The largest batch -----------------------------------------------------------------------------------


def make(n):
    return scanned, (W, jax.ShapeDtypeStruct((n, 64), jnp.float32))


def test_the_largest_batch():
    budget = rk.measure(*(lambda f, a: (f, *a))(*make(300)), policy="full", target="cpu").peak_bytes
    found = rk.max_batch(make, target="cpu", policy="full", budget=budget)
    assert found.measurement.peak_bytes <= budget < found.next_measurement.peak_bytes
    assert found.next_batch == found.batch + 1 and 250 < found.batch < 350
    assert len(found.compiled) < 12 and found.predicted > 0
    assert str(found.batch) in str(found) and json.dumps(found.to_dict())
    wider = rk.max_batch(make, target="cpu", policy="full", budget=2 * budget)
    assert wider.batch > found.batch


def test_batches_that_are_multiples():
    budget = rk.measure(*(lambda f, a: (f, *a))(*make(300)), target="cpu").peak_bytes
    found = rk.max_batch(make, target="cpu", budget=budget, multiple=32)
    assert found.batch % 32 == 0 and found.next_batch == found.batch + 32
    assert found.measurement.peak_bytes <= budget < found.next_measurement.peak_bytes


@pytest.mark.parametrize(
    "peak, trials",
    [
        (lambda n: 1000 + 10 * n, 4),  # a line: two to predict, two to confirm
        (lambda n: 1000 + 10 * n + n * 7919 % 13, 12),
        (lambda n: 1000 + 10 * n if n < 50 else 1500 + 6 * (n - 50), 12),  # XLA saves memory by itself
        (lambda n: 1000 + 10 * n if n < 50 else 1500 + 15 * (n - 50), 12),
        (lambda n: 1000 + 80 * -(-n // 8), 16),  # sizes padded to 8
        (lambda n: max(1800, 1000 + 10 * n), 24),  # something else is larger at first
    ],
    ids=["line", "noise", "flatter", "steeper", "padded", "fixed first"],
)
@pytest.mark.parametrize("answer", [1, 2, 3, 40, 333, 5000])
def test_few_trials_find_the_answer(peak, trials, answer):
    allowed, made = peak(answer), []

    def fits(n):
        made.append(n)
        return peak(n) <= allowed

    low, high, _ = _search(fits, peak, 65536, allowed)
    assert high == low + 1 and peak(low) <= allowed < peak(high) and low >= answer
    assert len(made) == len(set(made)) <= trials


def test_no_batch_fits():
    found = rk.max_batch(make, target="cpu", budget=1000)
    assert found.batch == 0 and found.measurement is None and found.next_batch == 1 and "No batch" in str(found)


def test_the_limit_is_reached():
    found = rk.max_batch(make, target="cpu", budget="1TiB", limit=64)
    assert found.batch == 64 and found.next_measurement is None and len(found.compiled) <= 4


@pytest.mark.parametrize(
    "change, words",
    [
        ({"make": 3}, "function"),
        ({"make": lambda n: scanned}, "must return"),
        ({"multiple": 0}, "multiple"),
        ({"limit": "many"}, "limit"),
        ({"limit": 3, "multiple": 4}, "multiple of 4"),
        ({"policy": "dotz"}, "dots"),
    ],
)
def test_bad_input_of_max_batch(change, words):
    options = {"target": "cpu", "budget": "1GiB", **change}
    with pytest.raises(rk.RematError, match=words):
        rk.max_batch(options.pop("make", make), **options)


@pytest.mark.tpu
def test_the_largest_batch_of_a_tpu():
    w = jax.ShapeDtypeStruct((2, 1024, 1024), jnp.bfloat16)

    def make(n):
        return scanned, (w, jax.ShapeDtypeStruct((n, 1024), jnp.bfloat16))

    found = rk.max_batch(make, target="tpu:v5e", policy="full", budget="2GiB", multiple=4096, limit=2**20)
    assert found.measurement.peak_bytes <= 2**31 < found.next_measurement.peak_bytes
    assert found.batch > 4096 and len(found.compiled) < 12


# Commands --------------------------------------------------------------------------------------------

TINY = [a for s in ("layers=2", "width=32", "heads=2", "length=16", "batch=2", "vocab=64") for a in ("--set", s)]


def run(capsys, *argv):
    status = main(argv)
    return status, *capsys.readouterr()


def test_command_measure(capsys):
    status, out, _ = run(
        capsys, "measure", "zoo:gpt", *TINY, "--target", "cpu", "--policy", "full", "--against", "none"
    )
    assert status == 0 and "Against none" in out and "compiled" in out
    status, out, _ = run(capsys, "measure", "zoo:gpt", *TINY, "--target", "cpu", "--json")
    data = json.loads(out)
    assert status == 0 and data["target"] == "cpu" and data["policy"] == "as written" and data["peak_bytes"] > 0


def test_command_compare(capsys):
    argv = ["compare", "zoo:gpt", *TINY, "--target", "cpu", "--policy", "full", "--policy", "dots"]
    status, out, _ = run(capsys, *argv)
    assert status == 0 and "full" in out and "dots" in out and "Best within" in out
    status, out, _ = run(capsys, *argv, "--budget", "1KiB", "--json")
    assert status == 1 and json.loads(out)["best"] == ""


def test_command_targets(capsys):
    status, out, _ = run(capsys, "targets")
    assert status == 0 and "tpu:v5e" in out and "cuda:h200" in out
    status, out, _ = run(capsys, "targets", "--json")
    assert {t["spec"] for t in json.loads(out)["targets"]} == {t.spec for t in rk.targets()}


@pytest.mark.parametrize("command", ["measure", "compare"])
def test_commands_refuse_bad_input(capsys, command):
    status, _, err = run(capsys, command, "zoo:gpt", *TINY, "--target", "tpu:v9")
    assert status == 2 and "unknown target" in err
    status, _, err = run(capsys, command, "zoo:gpt", *TINY, "--target", "cpu", "--policy", "dotz")
    assert status == 2 and "dots" in err
