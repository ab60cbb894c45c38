"""Residual reports: every value with where it comes from, what needs it and what it would cost to do without."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_kit as rk


def only(report, **fields):
    """The one entry with these fields."""
    found = [e for e in report.entries if all(getattr(e, k) == v for k, v in fields.items())]
    assert len(found) == 1, (fields, report.entries)
    return found[0]


W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def test_arguments_constants_and_intermediates_are_kept_apart():
    table = np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8)
    constant = jnp.asarray(table)

    def f(params, x):
        return jnp.sum(jnp.sin(x @ params["layer"]["kernel"]) * constant)

    report = rk.residuals(f, {"layer": {"kernel": W}}, X)
    assert only(report, action="argument").path == "x"  # the kernel's gradient needs x, not the kernel
    assert report.argument_bytes == 4 * 8 * 4
    assert report.constant_bytes == constant.nbytes
    assert only(report, action="saved").op == "cos"
    assert report.total_bytes == 4 * 8 * 4

    both = rk.residuals(f, {"layer": {"kernel": W}}, X, argnums=(0, 1))
    assert only(both, path="params['layer']['kernel']").action == "argument"


def test_needed_by_names_the_operation_whose_rule_reads_it():
    report = rk.residuals(lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x @ w)) @ w), W, X)
    assert "sin" in only(report, op="cos").needed_by
    assert "dot_general" in only(report, path="w").needed_by
    tanh = only(report, op="tanh")
    assert "dot_general" in tanh.needed_by
    full = rk.residuals(rk.remat(lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x @ w)) @ w)), W, X)
    assert any(n.startswith("recompute(") for n in only(full, path="x").needed_by)


def test_recompute_flops_are_those_of_the_way_back_to_what_is_kept():
    def f(w, x):
        h = x @ w  # 2 * 4 * 8 * 8 = 512 FLOPs
        return jnp.sum(jnp.sin(checkpoint_name(h, "h")) ** 3)

    plain = rk.residuals(f, W, X)
    cos = only(plain, op="cos")
    # cos needs x @ w again (nothing of it is kept), and one FLOP an element
    assert cos.recompute_flops == 512 + 32
    assert cos.bytes_per_flop == cos.bytes / (512 + 32)
    named = rk.residuals(f, W, X, policy="save name=h")
    assert only(named, names=("h",)).recompute_flops == 512


def test_trip_counts_multiply_bytes_and_flops():
    def f(w, x):
        def body(h, _):
            return jnp.sin(checkpoint_name(h @ w, "h")), None

        return jnp.sum(jax.lax.scan(body, x, None, length=5)[0])

    report = rk.residuals(f, W, X, policy="save name=h")
    h = only(report, names=("h",))
    assert (h.trips, h.shape, h.bytes, h.recompute_flops) == (5, (5, 4, 8), 5 * 128, 5 * 512)
    assert "test_residuals.py" in h.source and "(test_trip" in h.source
    carry = only(report, op="carry")
    assert carry.bytes == 5 * 128 and carry.path == "scan"


def test_loops_in_loops():
    def f(w, x):
        def inner(h, _):
            return jnp.sin(h @ w), None

        def outer(h, _):
            return jax.lax.scan(inner, h, None, length=3)[0], None

        return jnp.sum(jax.lax.scan(outer, x, None, length=4)[0])

    report = rk.residuals(f, W, X)
    cos = only(report, op="cos")
    assert (cos.trips, cos.shape, cos.bytes) == (12, (4, 3, 4, 8), 12 * 128)


def test_views_of_kept_values_are_flagged_and_counted_beside():
    def f(w, x):
        h = jnp.exp(x @ w)  # kept for exp's own rule
        return jnp.sum(jnp.dot(h.T, h) ** 2) + jnp.sum(h.reshape(2, 16) @ jnp.ones((16, 3)) ** 2)

    report = rk.residuals(f, W, X)
    aliases = [e for e in report.entries if e.alias_of]
    assert aliases and report.alias_bytes == sum(e.bytes for e in aliases)
    assert report.total_bytes + report.alias_bytes == sum(e.bytes for e in report.entries if e.action == "saved")
    assert any(e.op == "transpose" for e in aliases)


def test_a_named_product_inside_einsum_keeps_the_name_it_gets_outside():
    def f(w, x):
        h = checkpoint_name(jnp.einsum("ij,jk->ik", x, w), "projection")  # einsum is jitted
        return jnp.sum(jnp.sin(h))

    report = rk.residuals(rk.remat(f, policy="dots"), W, X)
    kept = only(report, op="dot_general")
    assert kept.names == ("projection",) and kept.path == ""


def test_module_paths_for_linen_nnx_and_named_scopes():
    sizes = dict(layers=2, batch=2, length=4, width=8, heads=2, vocab=16)
    linen = rk.residuals(*_flat(rk.zoo.gpt(**sizes)))
    nnx = rk.residuals(*_flat(rk.zoo.gpt_nnx(**sizes)))
    assert {e.path for e in linen.entries} >= {"layers/attention/query", "layers/mlp/wo", "final_norm"}
    assert {e.path for e in nnx.entries} >= {"layers/0/attention_norm", "layers/1/mlp", "final_norm"}
    assert {e.block for e in nnx.entries} >= {"layers/0", "layers/1"}

    def f(w, x):
        with jax.named_scope("encoder"), jax.named_scope("first"):
            return jnp.sum(jnp.sin(x @ w))

    assert only(rk.residuals(f, W, X), op="cos").path == "encoder/first"


def _flat(model):
    return model[0], *model[1]


def test_identical_layers_are_grouped():
    report = rk.residuals(*_flat(rk.zoo.vit(layers=4, batch=2, image=8, patch=4, width=8, heads=2, classes=4)))
    groups = {g.path: g.count for g in report.groups() if g.entry.op == "exp"}
    assert groups["layers_{0-3}/attention"] == 4
    assert "x4" in str(report)


def test_has_aux_keywords_and_integer_inputs():
    table, ids = jax.ShapeDtypeStruct((10, 4), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))

    def f(table, ids, *, keys, scale):
        h = jnp.sin(table[ids] + jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys))
        return jnp.sum(h) * scale, {"h": h}

    report = rk.residuals(f, table, ids, keys=keys, scale=2.0, has_aux=True)
    assert only(report, op="cos").bytes == 3 * 4 * 4
    saved_key = rk.residuals(
        lambda e, k: jnp.sum(
            jnp.sin(e * jax.random.uniform(checkpoint_name(jax.random.split(k, 2)[1], "sub"), e.shape))
        ),
        table,
        jax.eval_shape(lambda: jax.random.key(0)),
        policy="save name=sub",
    )
    if not jax.config.jax_remat3:  # a key is 8 bytes
        assert only(saved_key, names=("sub",)).bytes == 8


def test_results_are_data():
    loss, args = rk.zoo.gpt(layers=2, batch=2, length=4, width=8, heads=2, vocab=16)
    a, b = rk.residuals(loss, *args, policy="dots"), rk.residuals(loss, *args, policy="full")
    data = json.loads(json.dumps(a.to_dict()))
    assert data["policy"] == "dots" and data["figures"] == "predicted" and len(data["entries"]) == len(a.entries)
    assert sum(a.by("op").values()) == a.total_bytes + a.host_bytes
    diff = a.diff(b)
    assert diff.bytes == b.total_bytes - a.total_bytes < 0 and not diff.new and len(diff.gone) > 3
    assert a.diff(a).gone == a.diff(a).new == ()
    with pytest.raises(rk.RematError, match="block, name, op"):
        a.by("colour")
    frame = a.to_pandas()
    assert frame["bytes"].sum() == sum(e.bytes for e in a.entries)
    assert a == rk.residuals(loss, *args, policy="dots")


def test_while_loops_that_are_not_differentiated():
    def f(w, x):
        n = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, jnp.float32(1)))[1]
        return jnp.sum(jnp.sin(x @ w)) * n

    report = rk.residuals(f, W, X)
    assert only(report, op="cos").bytes == 128
    assert any(e.op == "while" for e in report.entries)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rk.residuals(lambda w, x: x @ w, W, X), "one scalar.*float32\\[4,8\\]"),
        (lambda: rk.residuals(lambda w, x: (jnp.sum(x @ w), x), W, X), "has_aux=True"),
        (lambda: rk.residuals(lambda w, x: jnp.sum(x @ w), W, X, has_aux=True), "has_aux=True needs"),
        (lambda: rk.residuals(lambda i: jnp.sum(i * 1.0), jax.ShapeDtypeStruct((3,), jnp.int32)), "int32.*argnums"),
        (lambda: rk.residuals(lambda w, x: jnp.sum(x @ w).astype(int), W, X), "floating"),
        (lambda: rk.residuals(lambda w, x: jnp.sum(x @ w), W, X, argnums=2), "argnums=2"),
        (lambda: rk.residuals(lambda: jnp.float32(1.0)), "argnums=0"),
        (lambda: rk.residuals(lambda p: jnp.float32(1.0), {}), "holds no arrays"),
        (lambda: rk.residuals("loss", W), "function"),
        (lambda: rk.residuals(lambda w, x: jnp.sum(x @ w), W, X, policy="dosts"), "dots"),
        (lambda: rk.residuals(lambda w, x: jnp.sum(x @ w), W, X, policy="save nam=x"), "name"),
        (lambda: rk.trace(3), "function"),
    ],
)
def test_bad_input_is_one_clear_error(call, says):
    with pytest.raises(rk.RematError, match=says) as error:
        call()
    assert "jax._src" not in str(error.value) and "Traced<" not in str(error.value)


def test_a_function_that_keeps_nothing():
    report = rk.residuals(lambda x: jnp.sum(x), X)
    assert report.entries == () and report.total_bytes == 0 and "Residuals" in str(report)
    for policy in ("full", "dots", "none"):
        assert rk.residuals(lambda x: jnp.sum(x), X, policy=policy).total_bytes == 0


def test_trace_gives_blocks_and_values_with_trip_counts():
    loss, args = rk.zoo.gpt(layers=3, batch=2, length=4, width=8, heads=2, vocab=16)
    program = rk.trace(loss, *args)
    blocks = {b.path: b for b in program.blocks}
    assert [b.path for b in program.default_blocks] == ["layers"]
    assert blocks["layers"].trips == 3 and blocks["layers/mlp"].parent == "layers"
    assert blocks["layers"].flops > blocks["layers/mlp"].flops > blocks["layers/mlp/wo"].flops
    wo = [v for v in program.values if v.path == "layers/mlp/wo" and v.op == "dot_general"]
    assert [(v.flops, v.trips) for v in wo] == [(3 * 2 * (2 * 4) * 32 * 8, 3)]
    assert {"query_proj", "mlpwi", "out_proj"} <= set(program.names)
    assert program.exact and json.dumps(program.to_dict())
    unrolled = rk.trace(*_flat(rk.zoo.gpt_nnx(layers=3, batch=2, length=4, width=8, heads=2, vocab=16)))
    heavy = lambda p: sum(v.flops for v in p.values if v.op == "dot_general")  # noqa: E731
    assert heavy(unrolled) == heavy(program)  # the same model, scanned and unrolled


def test_numpy_positions_and_other_argnums():
    def f(w, x):
        return jnp.sum(jnp.sin(x @ w))

    assert rk.residuals(f, W, X, argnums=np.int64(1)) == rk.residuals(f, W, X, argnums=1)
    for wrong in (1.5, None, (), "w", (0, 2)):
        with pytest.raises(rk.RematError, match="argnums"):
            rk.residuals(f, W, X, argnums=wrong)
    with pytest.raises(rk.RematError, match="two reports"):
        rk.residuals(f, W, X).diff("full")


def test_sharded_arguments_that_are_not_read_back_are_said_too():
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=spec)
    report = rk.residuals(lambda x: jnp.sum(jnp.sin(jnp.sin(x))), x)
    assert report.total_bytes == 2 * 64 and any("sharded" in n for n in report.notes)
