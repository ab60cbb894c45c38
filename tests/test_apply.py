"""apply: the same function made of jax.checkpoint calls, whatever the model and wherever its layers stand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import remat_kit as rk
from tests.helpers import assert_same_gradients, residual_bytes

TINY = dict(layers=3, batch=2, length=8, width=16, heads=2, vocab=32, dtype="float32", abstract=False)


def count(text, fun, *args):
    return str(jax.make_jaxpr(fun)(*args)).count(text)


def remat_calls(fun, *args):
    return count("remat2[", fun, *args) + count("RematTraced", fun, *args)


@pytest.fixture(scope="module")
def gpt():
    return rk.zoo.gpt(**TINY)


@pytest.fixture(scope="module")
def mlp():
    """A plain function without layers that anything could find."""
    ws = [jnp.eye(8) * (0.5 + i / 10) for i in range(9)]

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    return loss, (ws, jnp.linspace(-1, 1, 32).reshape(4, 8))


def test_scanned_layers_become_one_block_inside_the_scan(gpt):
    loss, args = gpt
    full = rk.apply(loss, "full")
    assert remat_calls(full, *args) == 1
    assert_same_gradients(loss, full, *args)
    assert residual_bytes(full, *args) < residual_bytes(rk.apply(loss, "dots"), *args) < residual_bytes(loss, *args)


def test_inside_a_scan_no_barrier_is_put_in(gpt):
    loss, args = gpt
    text = str(jax.make_jaxpr(rk.apply(loss, "full"))(*args))
    if "remat2[" in text or jax.__version_info__ >= (0, 11):  # jax_remat3 of 0.10.2 has no prevent_cse
        assert "prevent_cse=False" in text and "prevent_cse=True" not in text


def test_unrolled_layers_become_a_block_each():
    loss, args = rk.zoo.vit(
        layers=3, batch=2, image=8, patch=4, width=16, heads=2, classes=4, dtype="float32", abstract=False
    )
    full = rk.apply(loss, "full")
    assert remat_calls(full, *args) == 3
    assert rk.residuals(loss, *args, policy="full").blocks == ("layers_0", "layers_1", "layers_2")
    assert_same_gradients(loss, full, *args)


def test_identical_layers_share_one_traced_body():
    """As many different bodies as in jax.checkpoint of one layer function: JAX's caches must hit."""
    loss, args = rk.zoo.vit(
        layers=4, batch=2, image=8, patch=4, width=16, heads=2, classes=4, dtype="float32", abstract=False
    )
    traced = jax.make_jaxpr(rk.apply(loss, "full"))(*args)
    bodies = [
        e.params["jaxpr"] if "jaxpr" in e.params else e.params["_prim"].jaxpr
        for e in traced.jaxpr.eqns
        if e.primitive.name in ("remat2", "checkpoint") or "_prim" in e.params and hasattr(e.params["_prim"], "policy")
    ]
    assert len(bodies) == 4
    if not jax.config.jax_remat3:
        assert len({id(b) for b in bodies}) == 1


def test_first_matching_glob_decides_and_none_leaves_a_block_alone():
    loss, args = rk.zoo.vit(
        layers=3, batch=2, image=8, patch=4, width=16, heads=2, classes=4, dtype="float32", abstract=False
    )
    some = rk.apply(loss, {"layers_0": "none", "layers_*": "full"})
    assert remat_calls(some, *args) == 2
    assert_same_gradients(loss, some, *args)
    inner = rk.apply(loss, {"layers_*/attention": "full"})
    assert remat_calls(inner, *args) == 3
    assert_same_gradients(loss, inner, *args)


def test_a_star_stops_at_a_slash():
    loss, args = rk.zoo.vit(layers=2, batch=2, image=8, patch=4, width=16, heads=2, classes=4)
    with pytest.raises(rk.RematError, match="no block"):
        rk.residuals(loss, *args, policy={"*/nothing": "full"})
    deep = rk.residuals(loss, *args, policy={"**/attention": "full"})
    assert deep.blocks == ("layers_0/attention", "layers_1/attention")


def test_unknown_block_is_an_error_with_near_matches(gpt):
    loss, args = gpt
    with pytest.raises(rk.RematError, match="layer.*'layers'"):
        rk.apply(loss, {"layer": "full"})(*args)


def test_a_function_without_layers_is_cut_into_segments(mlp):
    loss, args = mlp
    report = rk.residuals(loss, *args, policy="full")
    assert report.blocks == tuple(f"segment_{i}" for i in range(4))
    full = rk.apply(loss, "full")
    assert remat_calls(full, *args) == 4
    assert residual_bytes(full, *args) < residual_bytes(loss, *args)
    assert_same_gradients(loss, full, *args)


def test_existing_regions_take_the_new_policy_and_none_removes_them(mlp):
    _, (ws, x) = mlp
    layer = jax.checkpoint(lambda w, x: jnp.tanh(jnp.sin(x @ w)))

    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return jnp.sum(x)

    plain = rk.apply(loss, "none")
    assert remat_calls(loss, ws, x) == 9 and remat_calls(plain, ws, x) == 0
    dots = rk.residuals(loss, ws, x, policy="dots")
    assert "replaces" in " ".join(dots.notes)
    assert dots.by("op")["dot_general"] == 8 * x.nbytes + x.nbytes
    assert_same_gradients(loss, plain, ws, x)
    assert_same_gradients(loss, rk.apply(loss, "dots"), ws, x)


def test_nested_regions_give_way_and_the_report_names_them(mlp):
    _, (ws, x) = mlp
    inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))

    @rk.remat(block="layer")
    def layer(w, x):
        return inner(jnp.tanh(x @ w))

    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return jnp.sum(x)

    report = rk.residuals(loss, ws, x, policy="dots")
    assert report.blocks[:2] == ("layer", "layer#2")
    assert any("gave way" in n and "checkpoint" in n for n in report.notes)
    applied = rk.apply(loss, "dots")
    assert remat_calls(applied, ws, x) == 9
    assert_same_gradients(loss, applied, ws, x)


def test_non_native_policies_keep_the_named_values_and_nothing_else():
    w, x = jnp.eye(8) * 0.5, jnp.linspace(-1, 1, 32).reshape(4, 8)

    def loss(w, x):
        def body(h, _):
            return jnp.tanh(jnp.sin(h @ w) @ w), None

        return jnp.sum(jax.lax.scan(body, x, None, length=5)[0])

    sin = rk.residuals(loss, w, x, policy="save op=sin")
    assert sin.by("op") == {"sin": 5 * x.nbytes, "carry": 5 * x.nbytes}
    assert_same_gradients(loss, rk.apply(loss, "save op=sin"), w, x)


@pytest.mark.parametrize("op", ["tanh", "exp", "logistic", "sqrt", "rsqrt", "max", "reduce_max"])
def test_saving_a_value_whose_rule_reads_it_saves_the_recomputation(op):
    """The derivative of tanh reads tanh's result before any name: naming alone would recompute the product."""
    functions = {
        "tanh": jnp.tanh,
        "exp": jnp.exp,
        "logistic": jax.nn.sigmoid,
        "sqrt": lambda x: jnp.sqrt(x * x + 1),
        "rsqrt": lambda x: jax.lax.rsqrt(x * x + 1),
        "max": lambda x: jnp.maximum(x, 0.1),
        "reduce_max": lambda x: x - jnp.max(x, axis=-1, keepdims=True),
    }
    f = functions[op]
    w, x = jnp.eye(8) * 0.5 + 0.01, jnp.linspace(-1, 1, 32).reshape(4, 8)
    block = rk.remat(lambda x, w: f(x @ w), policy=f"save op={op}")

    def loss(x, w):
        return jnp.sum(block(x, w) ** 3)

    plain = lambda x, w: jnp.sum(f(x @ w) ** 3)  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(x, w), jax.grad(plain)(x, w), rtol=1e-5)
    hessian = jax.jvp(jax.grad(loss), (x, w), (x, w))[1]
    np.testing.assert_allclose(hessian, jax.jvp(jax.grad(plain), (x, w), (x, w))[1], rtol=1e-4, atol=1e-5)
    if op in ("tanh", "exp", "logistic"):  # their rules read nothing else
        products = count("dot_general[", jax.grad(loss), x, w)
        assert products == 2  # one forward, one for the gradient; a third would be the recomputation


def test_offload_and_save_in_one_policy(gpt):
    loss, args = gpt
    policy = rk.offload(name="out_proj") | rk.save(op="dot_general")
    if jax.config.jax_remat3 and jax.__version_info__ < (0, 11):
        with pytest.raises(rk.RematError, match="offload"):
            rk.residuals(loss, *args, policy=policy)
        return
    report = rk.residuals(loss, *args, policy=policy)
    hosted = [e for e in report.entries if e.action == "offloaded"]
    assert [e.names for e in hosted] == [("out_proj",)]
    assert report.host_bytes == 3 * 2 * 8 * 16 * 4


def test_under_jit_vmap_and_grad_of_grad(mlp):
    loss, (ws, x) = mlp
    applied = rk.apply(loss, "save op=dot_general")
    np.testing.assert_allclose(jax.jit(applied)(ws, x), loss(ws, x), rtol=1e-6)
    np.testing.assert_allclose(applied(ws, x), loss(ws, x), rtol=1e-6)
    if not (jax.config.jax_remat3 and jax.__version_info__ < (0, 11)):  # no vmap over names there
        xs = jnp.stack([x, 2 * x])
        got = jax.vmap(jax.grad(applied), (None, 0))(ws, xs)
        want = jax.vmap(jax.grad(loss), (None, 0))(ws, xs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    second = lambda f: jax.grad(lambda w0: jnp.sum(jax.grad(f)([w0, *ws[1:]], x)[0]))(ws[0])  # noqa: E731
    np.testing.assert_allclose(second(applied), second(loss), rtol=1e-4, atol=1e-4)


def test_static_leaves_results_and_keywords_pass_through():
    def f(x, mode, *, scale=1.0, extra=None):
        y = jnp.sin(jnp.sin(x)) * scale
        return {"y": y if mode == "keep" else -y, "mode": mode, "extra": extra}

    x = jnp.arange(3.0)
    for mode in ("keep", "flip"):
        out = rk.apply(f, "full")(x, mode, scale=2.0, extra=len)
        want = f(x, mode, scale=2.0, extra=len)
        assert out["mode"] == mode and out["extra"] is len
        np.testing.assert_allclose(out["y"], want["y"])


def test_closed_over_tracers_and_caches():
    def outer(scale, x):
        f = rk.apply(lambda x: jnp.sum(jnp.sin(jnp.sin(x * scale))), "full")
        return f(x) + f(2 * x)

    x = jnp.arange(3.0)
    want = jax.grad(lambda s: jnp.sum(jnp.sin(jnp.sin(x * s))) + jnp.sum(jnp.sin(jnp.sin(2 * x * s))))(1.5)
    np.testing.assert_allclose(jax.jit(jax.grad(outer))(1.5, x), want, rtol=1e-5)

    calls = []

    def f(x):
        calls.append(1)
        return jnp.sum(jnp.sin(x))

    g = rk.apply(f, "full")
    for _ in range(3):
        g(x)
    once = len(calls)
    g(jnp.arange(4.0))
    assert once == 1 and len(calls) == 2


@pytest.mark.skipif(
    jax.config.jax_remat3 and jax.__version_info__ < (0, 11),
    reason="jax_remat3 of JAX 0.10.2 cannot differentiate any jax.checkpoint inside jax.shard_map",
)
def test_shard_map_inside_and_outside_blocks():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")

    @jax.shard_map(mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)
    def sharded(w, x):
        def body(h, _):
            return jnp.tanh(h @ w) + jax.lax.psum(h, "d") * 0.1, None

        return jax.lax.scan(body, x, None, length=4)[0]

    def loss(w, x):
        return jnp.sum(sharded(w, x) ** 2)

    w, x = jnp.eye(4) * 0.5, jnp.linspace(-1, 1, 8).reshape(2, 4)
    for policy in ("full", "dots", "save op=tanh"):
        applied = rk.apply(loss, policy)
        assert_same_gradients(loss, applied, w, x)
        report = rk.residuals(loss, w, x, policy=policy)
        assert report.blocks == ("scan",)
        assert sum(e.bytes for e in report.entries if e.action == "saved") == residual_bytes(applied, w, x)


def test_abstract_sharded_arguments_count_for_one_device():
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("d")))
    report = rk.residuals(lambda w, x: jnp.sum(jnp.sin(x @ w)), w, x)
    assert report.argument_bytes == 16 * 8 * 4 // 4
    assert any("sharded" in n for n in report.notes)  # what is not known is said


def test_names_inside_conditionals_and_jit_are_kept_and_found():
    @jax.jit
    def helper(w, x):
        return jnp.sin(checkpoint_name(x @ w, "product"))

    def loss(w, x):
        def body(h, _):
            h = jax.lax.cond(h[0, 0] > 0, lambda h: helper(w, h), lambda h: jnp.cos(h), h)
            return h, None

        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0])

    w, x = jnp.eye(4) * 0.5, jnp.linspace(0.5, 1, 8).reshape(2, 4)
    report = rk.residuals(loss, w, x, policy="save name=prod*")
    assert report.by("name")["product"] == 3 * x.nbytes
    assert_same_gradients(loss, rk.apply(loss, "save name=prod*"), w, x)


def test_misuse_is_one_clear_error(mlp):
    loss, args = mlp
    with pytest.raises(rk.UnknownPolicyError, match="dots"):
        rk.apply(loss, "dot")
    with pytest.raises(rk.RematError, match="function"):
        rk.apply("dots", loss)
    with pytest.raises(rk.RematError, match="empty mapping"):
        rk.apply(loss, {})
    with pytest.raises(rk.RematError, match="no value of the program is named 'mlp'"):
        rk.apply(loss, "save name=mlp")(*args)


def test_a_step_with_its_own_gradient_is_refused(mlp):
    loss, args = mlp
    with pytest.raises(rk.RematError, match="own gradient.*override"):
        rk.apply(lambda ws, x: jax.grad(loss)(ws, x), "full")(*args)


@pytest.mark.filterwarnings("ignore:policy .* keeps values inside a jax.checkpoint region:remat_kit.RematWarning")
def test_regions_inside_a_decorated_function_stay_and_are_reached_by_name():
    """As in JAX: an outer policy reaches into an inner region; the inner one still bounds the replay."""
    inner = jax.checkpoint(lambda w, h: jnp.sin(checkpoint_name(h @ w, "inner") @ w))

    def f(w, x):
        return jnp.sum(jnp.tanh(inner(w, jnp.cos(x))))

    w, x = jnp.eye(8) * 0.5, jnp.linspace(-1, 1, 32).reshape(4, 8)
    ours = rk.remat(f, policy="save name=inne*")  # a glob: goes through the toolkit's own names
    theirs = jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("inner"))
    assert residual_bytes(ours, w, x) == residual_bytes(theirs, w, x)
    if not (jax.config.jax_remat3 and jax.__version_info__ < (0, 11)):  # there it does not reach in, in JAX either
        assert residual_bytes(ours, w, x) > residual_bytes(jax.checkpoint(f), w, x)
    assert remat_calls(jax.grad(ours), w, x) == remat_calls(jax.grad(theirs), w, x)
    assert_same_gradients(f, ours, w, x)


def test_blocks_with_linear_solves_are_no_training_step():
    """Inside, their transposed programs look like those of a gradient."""

    def loss(b):
        return jnp.sum(jnp.linalg.inv(jnp.eye(2) * 2 + jnp.diag(b)) ** 2)

    assert_same_gradients(loss, rk.apply(loss, "full"), jnp.ones(2))


def test_generators_are_refused():
    def numbers(x):
        yield x

    with pytest.raises(rk.RematError, match="generator"):
        rk.apply(numbers, "full")(1.0)


def test_a_loss_with_a_gradient_penalty_is_no_training_step():
    def loss(w, x):
        slope = jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.sin(x @ w))))(x)
        return jnp.sum(slope**2)

    w, x = jnp.eye(4) * 0.5, jnp.linspace(-1, 1, 8).reshape(2, 4)
    assert_same_gradients(loss, rk.apply(loss, "full"), w, x)


def test_segments_can_be_chosen_where_there_are_other_blocks(mlp):
    loss, (ws, x) = mlp

    def with_scan(ws, x):
        return loss(ws, x) + 0.0 * jnp.sum(jax.lax.scan(lambda c, _: (jnp.sin(c), None), x[0, 0], None, length=2)[0])

    assert rk.residuals(with_scan, ws, x, policy={"segment_1": "full"}).blocks == ("segment_1",)


@pytest.mark.parametrize("make", [rk.zoo.gpt, rk.zoo.gpt_nnx], ids=["scanned", "unrolled"])
def test_inputs_of_blocks_go_to_the_host_by_their_name(make):
    """jax issue 23869: a region keeps its inputs, unless they are named inside it."""
    sizes = dict(layers=3, batch=2, length=16, width=32, heads=2, vocab=16, dtype="float32")
    loss, args = make(**sizes)
    if jax.config.jax_remat3 and jax.__version_info__ < (0, 11):
        with pytest.raises(rk.RematError, match="offload"):
            rk.residuals(loss, *args, policy="offload name=block_input")
        return
    full, moved = (rk.residuals(loss, *args, policy=p) for p in ("full", "offload name=block_input"))
    carries = 3 * 2 * 16 * 32 * 4
    assert moved.host_bytes == carries and moved.total_bytes == full.total_bytes - carries
    saved = rk.residuals(loss, *args, policy="save name=block_input")
    assert saved.total_bytes == full.total_bytes
    first, rest = ("layers@0:1", "layers") if make is rk.zoo.gpt else ("layers/0", "layers/[1-2]")
    some = rk.residuals(loss, *args, policy={first: "offload name=block_input", rest: "full"})
    assert some.host_bytes == carries / 3
    loss, args = make(**sizes, abstract=False)
    if not jax.config.jax_remat3:
        assert_same_gradients(loss, rk.apply(loss, "offload name=block_input; save op=dot_general"), *args)
    with pytest.raises(rk.RematError, match="block_input"):
        rk.remat(lambda x: jnp.sin(x), policy="offload name=block_input")(1.0)
