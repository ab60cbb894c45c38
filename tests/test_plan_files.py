"""Plans in files: what is read again, for which program, and what is refused."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat_kit as rk
from tests.plans import (
    MODELS,
    assert_same,
    between,
    fresh,
    gradients,
    model,
    plan,
    stack,
)


def test_a_plan_survives_its_file(tmp_path):
    names, whole = between("stack", 0.4, names_only=True), between("vit", 0.5)
    for p, name in ((plan(), "stack"), (names, "stack"), (whole, "vit")):
        p.save(tmp_path / "plan.json")
        again = rk.Plan.load(tmp_path / "plan.json")
        assert again == p and hash(again) == hash(p) and str(again) == str(p) and again.explain() == p.explain()
        assert rk.Plan.from_dict(json.loads(json.dumps(p.to_dict()))) == p
        fn, args = model(name)
        rk.residuals(fn, *args, policy=again)


def test_a_changed_program_is_refused_unless_asked(tmp_path):
    plan().save(tmp_path / "plan.json")
    fn, args = stack(batch=24)
    strict, loose = rk.Plan.load(tmp_path / "plan.json"), rk.Plan.load(tmp_path / "plan.json", strict=False)
    with pytest.raises(rk.RematError, match=r"float32\[24,16\], and was float32\[16,16\].*strict=False"):
        rk.apply(fn, strict)(*args)
    assert_same(gradients(fn, args), gradients(rk.apply(fn, loose), args))
    for p in (strict, loose):
        vit, args = model("vit")
        with pytest.raises(rk.RematError, match="layers"):
            jax.eval_shape(rk.apply(vit, p), *args)


# A block more lies in what was the rest behind the blocks; with strict=False it must be noticed all the same.
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_blocks_is_refused(strict, layers):
    p = rk.Plan.from_dict(between("vit", 0.3).to_dict(), strict=strict)
    other = rk.zoo.build("vit", **{**MODELS["vit"], "layers": layers}, abstract=True)
    with pytest.raises(rk.RematError):
        jax.eval_shape(rk.apply(other[0], p), *other[1])


def paths(data, at=()):
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items)[:3] if isinstance(data, list) else items:
        yield from paths(value, (*at, key))


def replaced(data, at, value):
    if not at:
        return value
    data = copy.deepcopy(data)
    inner = data
    for key in at[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return data


DEEP = functools.reduce(lambda x, _: [x], range(10_000), [])
HOSTILE = [
    None,
    True,
    -1,
    10**400,
    2**63,
    float("nan"),
    float("inf"),
    -0.5,
    "",
    "x",
    "\ud800",
    [],
    [[]],
    {},
    {"a": 1},
    DEEP,
]


@functools.cache
def saved():
    return between("vit", 0.3).to_dict()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_files_of_strangers_are_plans_or_clear_errors(data):
    at = data.draw(st.sampled_from(list(paths(saved()))))
    value = data.draw(st.sampled_from([*HOSTILE, *[KeyError] * bool(at)]))
    broken = replaced(saved(), at, value)
    try:
        p = rk.Plan.from_dict(broken)
    except rk.RematError as error:
        assert len(str(error)) < 2000
        return
    str(p), p.explain(), p.to_dict(), p.gap, p.cost  # what is taken can be shown


# Whole numbers beyond the floats once ended in an OverflowError.
@pytest.mark.parametrize("at", [("bound",), ("predicted", "seconds"), ("blocks", 0, "seconds")])
def test_numbers_beyond_floats_are_refused(at):
    with pytest.raises(rk.RematError):
        rk.Plan.from_dict(replaced(saved(), at, 10**400))


@pytest.mark.parametrize("at", [("minimize",), ("blocks", 0, "kind"), ("actions", 0)])
def test_words_that_mean_nothing_are_refused(at):
    with pytest.raises(rk.RematError):
        rk.Plan.from_dict(replaced(saved(), at, "banana"))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"schema": "other"}', "NaN", "\x00", '"' + "9" * 5000, "9" * 5000]
)
def test_files_that_are_no_plans(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(rk.RematError):
        rk.Plan.load(tmp_path / "plan.json")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**33)
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary", tmp_path / "huge", None, "a\x00b"):
        with pytest.raises(rk.RematError):
            rk.Plan.load(path)
    with pytest.raises(rk.RematError):
        plan().save(tmp_path / "no" / "folder")


def test_the_same_plan_in_another_process():
    code = f"""
import json, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_plan
print(json.dumps(test_plan.fresh({plan().budget_bytes}).to_dict()))
"""
    env = {**os.environ, "JAX_REMAT3": str(int(bool(jax.config.jax_remat3))), "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    assert rk.Plan.from_dict(json.loads(out)) == plan() == fresh(plan().budget_bytes)


# --- other programs ---------------------------------------------------------------------------------------------------


def test_another_number_of_iterations_is_refused():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, m: (jnp.tanh(h @ m), None), x, w)[0] ** 2)

    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    p = rk.plan(loss, jax.ShapeDtypeStruct((4, 8, 8), jnp.float32), x, budget=1, target=None)
    with pytest.raises(rk.RematError, match="scan of 6 iterations, and was one of 4"):
        rk.residuals(loss, jax.ShapeDtypeStruct((6, 8, 8), jnp.float32), x, policy=p)


def test_the_same_operations_wired_otherwise_are_another_program():
    def first(w, x):
        return jnp.sum(jax.lax.scan(lambda h, m: (jnp.tanh(jnp.sin(h @ m) * h + h), None), x, w)[0])

    def second(w, x):
        def body(h, m):
            s = jnp.sin(h @ m)
            return jnp.tanh(h * s + s), None

        return jnp.sum(jax.lax.scan(body, x, w)[0])

    args = (jax.ShapeDtypeStruct((4, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32))
    p = rk.plan(first, *args, budget=1, target=None)
    rk.residuals(first, *args, policy=p)
    with pytest.raises(rk.RematError, match="computes something else"):
        rk.residuals(second, *args, policy=p)
