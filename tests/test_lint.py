"""rk.lint: the mutation table of its pages, programs made well and badly, settings, comments, printing."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_kit as rk
from remat_kit._verify.rules import RULES

OPTIMIZED = True  # what the compiler merges is looked at

REMAT3 = jax.config.jax_remat3
OLD_REMAT3 = REMAT3 and jax.__version_info__ < (0, 11)
PAGES = Path(__file__).parent.parent / "docs" / "lint"


# The pages: for each code a program that has the fault, and the nearest one that has not ------------------------------


def blocks(code: str) -> tuple[str, str, str]:
    """The two programs of a page, and what the first one prints."""
    found = re.findall(r"^## (.+?)$|^```(\w+)\n(.*?)^```$", (PAGES / f"{code}.md").read_text(), re.M | re.S)
    heading, by_place = "", {}
    for title, fence, text in found:
        heading = title or heading
        if fence:
            by_place[heading, fence] = text
    return by_place["Found", "python"], by_place["Not found", "python"], by_place["Found", "text"]


def run(program: str) -> tuple[rk.Findings, str]:
    """What a program of a page finds, and what it prints."""
    namespace: dict[str, Any] = {"__name__": "model"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "model.py", "exec"), namespace)
    return namespace["found"], out.getvalue()


# What a page says is otherwise under jax_remat3: code -> what its two programs give there.
OTHERWISE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
if REMAT3:
    OTHERWISE["RK010"] = ("RK010",), ("RK009", "RK010", "RK024")
if OLD_REMAT3:
    OTHERWISE["RK012"] = (), ()
    OTHERWISE["RK014"] = (), ()
    OTHERWISE["RK010"] = ("RK010",), ("RK009", "RK010")
    OTHERWISE["RK016"] = ("RK016",), ("RK016",)  # it ignores the policy of the second program
    OTHERWISE["RK023"] = ("RK008",), ()
COMPILED = {"RK013", "RK014", "RK026"}  # figures of the compiler's, which differ by version


PAGES_OF_RULES = pytest.mark.parametrize(
    "code", [pytest.param(c, marks=pytest.mark.tpu if 'target="tpu' in "".join(blocks(c)[:2]) else ()) for c in RULES]
)


@PAGES_OF_RULES
def test_the_first_program_of_a_page_is_found(code):
    found, printed = run(blocks(code)[0])
    if code in OTHERWISE:
        assert found.codes == OTHERWISE[code][0]
        return
    assert code in found.codes
    assert all(f.change and f.why and f.what for f in found)
    if not REMAT3 and jax.__version_info__ >= (0, 12):  # others keep and repeat other values, so figures differ
        text = blocks(code)[2]
        figures = r"[\d.]+( [KMG]?i?B| [kMG]?FLOP)?" if code in COMPILED else r"$^"
        assert re.sub(figures, "0", printed).split() == re.sub(figures, "0", text).split()


@PAGES_OF_RULES
def test_the_second_program_of_a_page_is_not(code):
    assert run(blocks(code)[1])[0].codes == OTHERWISE.get(code, ((), ()))[1]


def test_every_rule_has_a_page_and_every_page_a_rule():
    assert {p.stem for p in PAGES.glob("*.md")} == set(RULES)
    overview = (PAGES.parent / "lint.md").read_text()
    for code, rule in RULES.items():
        page = (PAGES / f"{code}.md").read_text()
        assert page.startswith(f"# {code}: {rule.title}\n")
        assert re.findall(r"^## (.+)$", page, re.M) == ["Found", "Not found", "What to change", "Thresholds"]
        assert f"| [{code}](lint/{code}.md) | {rule.title} |" in overview


# Programs ------------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 1024, 4
X = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)
WEIGHTS = [{"up": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)} for _ in range(LAYERS)]
STACKED = {"up": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)}
KEY = jax.eval_shape(lambda: jax.random.key(0))


def layer(w, h):
    return h + jnp.sin(jnp.sin(h @ w["up"]))


def unrolled(wrap, weights, x):
    """All layers wrapped but the last."""
    for w in weights[:-1]:
        x = wrap(layer)(w, x)
    return jnp.mean(layer(weights[-1], x))


def scanned(wrap, weights, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (wrap(layer)(w, h), None), x, weights)[0])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(WIDTH)(h))


class Model(nn.Module):
    wrap: Any = lambda cls: cls

    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = (self.wrap if i < LAYERS - 1 else lambda cls: cls)(Block)(name=f"layer_{i}")(x)
        return jnp.mean(nn.Dense(8, name="head")(x) ** 2)


class Scanned(nn.Module):
    wrap: Any = lambda cls: cls

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            self.wrap(Block), {"params": 0}, split_rngs={"params": True, "dropout": True}, length=LAYERS, methods=None
        )
        return jnp.mean(_carried(stack)(x) ** 2)


def _carried(stack):
    class Carry(nn.Module):
        @nn.compact
        def __call__(self, x):
            return stack(name="layers")(x)

    return Carry()


def linen(wrap):
    model = Model(wrap)
    rngs = {"params": KEY, "dropout": KEY}
    variables = jax.eval_shape(model.init, rngs, X)
    return (lambda v, x, key: model.apply(v, x, rngs={"dropout": key})), variables, X, KEY


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm(x)))))


class NnxModel(nnx.Module):
    def __init__(self, wrap, rngs):
        self.layers = nnx.List([(wrap if i < LAYERS - 1 else lambda c: c)(NnxBlock)(rngs) for i in range(LAYERS)])

    def __call__(self, x):
        for block in self.layers:
            x = block(x)
        return jnp.mean(x**2)


def nnx_model(wrap):
    model = nnx.eval_shape(lambda: NnxModel(wrap, nnx.Rngs(0)))
    return (lambda model, x: model(x)), model, X


FIRST = {f"layer_{LAYERS - 1}": "none", f"layers/{LAYERS - 1}": "none"}
dots = jax.checkpoint_policies.dots_saveable
WELL_MADE = {
    "no remat": lambda: (functools.partial(unrolled, lambda f: f), WEIGHTS, X),
    "no remat, scanned": lambda: (functools.partial(scanned, lambda f: f), STACKED, X),
    "jax.checkpoint": lambda: (functools.partial(unrolled, jax.checkpoint), WEIGHTS, X),
    "jax.checkpoint, dots": lambda: (functools.partial(unrolled, lambda f: jax.checkpoint(f, policy=dots)), WEIGHTS, X),
    "jax.checkpoint in a scan": lambda: (
        functools.partial(scanned, lambda f: jax.checkpoint(f, prevent_cse=False)),
        STACKED,
        X,
    ),
    "rk.remat": lambda: (functools.partial(unrolled, rk.remat), WEIGHTS, X),
    "rk.remat in a scan": lambda: (functools.partial(scanned, rk.remat), STACKED, X),
    "rk.remat in jit in a scan": lambda: (functools.partial(scanned, lambda f: jax.jit(rk.remat(f))), STACKED, X),
    "under jit": lambda: (jax.jit(functools.partial(unrolled, rk.remat)), WEIGHTS, X),
    "under vmap": lambda: (
        lambda ws, xs: jnp.mean(jax.vmap(functools.partial(unrolled, jax.checkpoint), (None, 0))(ws, xs)),
        WEIGHTS,
        jax.ShapeDtypeStruct((2, *X.shape), X.dtype),
    ),
    "rk.scan": lambda: (
        lambda ws, x: jnp.mean(rk.scan(lambda h, w: (layer(w, h), None), x, ws)[0]),
        STACKED,
        X,
    ),
    "rk.scan, segments": lambda: (
        lambda ws, x: jnp.mean(rk.scan(lambda h, w: (layer(w, h), None), x, ws, segments=2)[0]),
        STACKED,
        X,
    ),
    "rk.scan, binomial": lambda: (
        lambda ws, x: jnp.mean(rk.scan(lambda h, w: (layer(w, h), None), x, ws, segments="binomial", checkpoints=2)[0]),
        STACKED,
        X,
    ),
    "rk.sequential": lambda: (
        lambda ws, x: jnp.mean(rk.sequential([functools.partial(layer, w) for w in ws], x, segments=2)),
        WEIGHTS,
        X,
    ),
    "rk.sequential, dots": lambda: (
        lambda ws, x: jnp.mean(rk.sequential([functools.partial(layer, w) for w in ws], x, segments=2, policy="dots")),
        WEIGHTS,
        X,
    ),
    "segments by hand": lambda: (by_segments, [WEIGHTS] * 4, X),
    "a scan inside each layer": lambda: (layers_with_scans, [STACKED] * 4, X),
    "encoder and decoder": lambda: (encoder_and_decoder, (WEIGHTS, WEIGHTS), X),
    "linen": lambda: linen(lambda c: c),
    "nn.remat": lambda: linen(nn.remat),
    "rk.linen.remat": lambda: linen(rk.linen.remat("full")),
    "rk.linen.remat, dots": lambda: linen(rk.linen.remat("dots")),
    "nnx": lambda: nnx_model(lambda c: c),
    "rk.nnx.remat": lambda: nnx_model(rk.nnx.remat("full")),
    "rk.nnx.remat, dots": lambda: nnx_model(rk.nnx.remat("dots")),
}


def by_segments(stacks, x):
    """Segments of layers, each a region, and so is each layer in it."""
    for weights in stacks[:-1]:
        x = jax.checkpoint(lambda ws, x: functools.reduce(lambda h, w: jax.checkpoint(layer)(w, h), ws, x))(weights, x)
    return jnp.mean(functools.reduce(lambda h, w: jax.checkpoint(layer)(w, h), stacks[-1][:-1], x))


def layers_with_scans(stacks, x):
    """Layers, each a region, that loop inside, as one over chunks of a sequence does."""
    inside = lambda w, x: jax.lax.scan(lambda h, w: (layer(w, h), None), x, w)[0]  # noqa: E731
    for w in stacks[:-1]:
        x = jax.checkpoint(inside)(w, x)
    return jnp.mean(inside(stacks[-1], x))


def encoder_and_decoder(weights, x):
    """Two kinds of layers that use the same name, each region having it once."""

    def encode(w, h):
        return rk.checkpoint_name(layer(w, h), "layer_out")

    def decode(w, h):
        return jnp.cos(rk.checkpoint_name(layer(w, h), "layer_out"))

    for one, ws in ((encode, weights[0]), (decode, weights[1][:-1])):
        for w in ws:
            x = jax.checkpoint(one)(w, x)
    return jnp.mean(decode(weights[1][-1], x))


@pytest.mark.parametrize("name", WELL_MADE)
def test_nothing_is_found_in_a_program_that_is_made_well(name):
    fun, *args = WELL_MADE[name]()
    found = rk.lint(fun, *args)
    assert not found.codes, str(found)
    assert not found.notes


@pytest.mark.parametrize("policy", ["full", "dots", "dots_no_batch"])
@pytest.mark.parametrize("name", ["no remat", "no remat, scanned", "linen", "nnx"])
def test_nothing_is_found_where_a_policy_is_applied_to_all_blocks_but_the_last(name, policy):
    fun, *args = WELL_MADE[name]()
    last = {p: "none" for p in (f"layer_{LAYERS - 1}", f"layers/{LAYERS - 1}", "segment_3") if p in paths(fun, args)}
    assert not rk.lint(fun, *args, policy={**last, "**": policy}).codes


def paths(fun, args):
    return {b.path for b in rk.trace(fun, *args).default_blocks}


def test_a_plan_is_found_to_be_in_order():
    fun = functools.partial(scanned, lambda f: f)
    plan = rk.plan(fun, STACKED, X, budget="20MiB", target=None)
    assert not rk.lint(fun, STACKED, X, policy=plan).codes


# Variants of the faults ----------------------------------------------------------------------------------------------


def typo(f):
    return jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("mlp-up"), prevent_cse=False)


def named(w, h):
    return jnp.sin(rk.checkpoint_name(h @ w["up"], "mlp_up"))


def in_jit(w, h):
    return jax.jit(typo(jax.jit(named)))(w, h)


def in_cond(w, h):
    return jax.lax.cond(h[0, 0] > 0, typo(named), lambda w, h: h, w, h)


def in_vmap(w, h):
    return jax.vmap(typo(lambda h, w: named(w, h)), (0, None))(h, w)


class Method:
    def __init__(self, w):
        self.w = w

    @typo
    def call(w, h):  # noqa: N805
        return named(w, h)


def in_class(w, h):
    return vars(Method)["call"](w, h)


NO_VMAP = pytest.mark.skipif(OLD_REMAT3, reason="this remat implementation cannot vmap over names")


@pytest.mark.parametrize("one", [in_jit, in_cond, pytest.param(in_vmap, marks=NO_VMAP), in_class])
def test_a_misspelt_name_is_found_wherever_the_region_stands(one):
    found = rk.lint(lambda ws, x: jnp.mean(functools.reduce(lambda h, w: one(w, h), ws, x)), WEIGHTS, X)
    (finding,) = [f for f in found if f.code == "RK001"]
    assert "mlp-up" in finding.what
    assert "Did you mean 'mlp_up'" in finding.what
    assert finding.where.file == __file__


@pytest.mark.parametrize(
    ("policy", "missing"),
    [
        (jax.checkpoint_policies.save_only_these_names("x", "mlp_up"), "'x'"),
        (jax.checkpoint_policies.save_any_names_but_these("x"), "'x'"),
        (
            jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=["mlp_up"],
                names_which_can_be_offloaded=["x"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            "'x'",
        ),
        (jax.checkpoint_policies.save_only_these_names("mlp_up"), None),
        (jax.checkpoint_policies.dots_saveable, None),
        (jax.checkpoint_policies.everything_saveable, None),
        (jax.checkpoint_policies.nothing_saveable, None),
    ],
)
def test_names_in_policies_of_every_constructor(policy, missing):
    found = rk.lint(
        functools.partial(scanned, lambda f: jax.checkpoint(named, policy=policy, prevent_cse=False)),
        STACKED,
        X,
        select=["RK001"],
    )
    assert [f.what.split(".")[0] for f in found] == ([f"no value is named {missing}"] if missing else [])


def test_jaxs_policy_that_ignores_its_names_is_ignored_by_remat3_too():
    policy = jax.checkpoint_policies.save_anything_except_these_names("mlp_up")
    fun = functools.partial(scanned, lambda f: jax.checkpoint(named, policy=policy, prevent_cse=False))
    assert "RK008" in rk.lint(fun, STACKED, X).codes


def helper(h, w):
    """A jitted function in a region, of which the region's own equations show nothing but its call."""
    return jax.jit(lambda h: jax.lax.top_k(h @ w["up"], WIDTH)[0])(h)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, lambda f: lambda h, w: _twice(f, h, w)])
def test_what_is_computed_again_is_seen_inside_calls_and_loops(around):
    def loss(weights, x):
        for w in weights[:-1]:
            x = jax.checkpoint(around(lambda h, w: jnp.sin(helper(h, w))))(x, w)
        return jnp.sum(layer(weights[-1], x))

    assert "RK016" in rk.lint(loss, WEIGHTS, X, select=["RK016"]).codes


def _twice(f, h, w):
    return jax.lax.scan(lambda h, _: (f(h, w), None), h, None, 2)[0]


def test_regions_in_shard_map_are_looked_at():
    mesh = jax.make_mesh((1,), ("model",))
    spec = jax.sharding.PartitionSpec()

    def loss(weights, x):
        for w in weights:
            x = jax.checkpoint(lambda w, x: jnp.sin(jax.lax.psum(layer(w, x), "model")))(w, x)
        return jnp.sum(x)

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    assert {"RK007", "RK017"} <= set(rk.lint(sharded, WEIGHTS, X).codes)


def test_the_last_block_is_named_as_apply_takes_it():
    fun, *args = linen(lambda c: c)
    (finding,) = rk.lint(fun, *args, policy="full")
    assert finding.code == "RK007"
    assert f'rk.apply(loss, {{"layer_{LAYERS - 1}": "none", "**": policy}})' in finding.change
    fun, *args = nnx_model(lambda c: c)
    (finding,) = rk.lint(fun, *args, policy="full")
    assert f'"layers/{LAYERS - 1}": "none"' in finding.change


def test_faults_of_layers_that_are_alike_are_one_finding():
    def loss(weights, x):
        return unrolled(lambda f: jax.checkpoint(f, prevent_cse=False), weights, x)

    if OLD_REMAT3:
        assert not rk.lint(loss, WEIGHTS, X).codes  # prevent_cse is ignored there
        return
    (finding,) = rk.lint(loss, WEIGHTS, X)
    assert finding.code == "RK012"
    assert finding.figures["places"] == LAYERS - 1
    assert finding.figures["in_the_region_flops"] == (LAYERS - 1) * rk.trace(layer, WEIGHTS[0], X).flops


def test_attention_under_dots_no_batch_is_what_that_policy_is_for():
    def attend(w, h):
        q = (h @ w["up"]).reshape(32, 8, -1).swapaxes(0, 1)
        scores = jax.nn.softmax(q @ q.swapaxes(1, 2))
        return h + (scores @ q).swapaxes(0, 1).reshape(h.shape)

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    long = jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32)

    def chunked(weights, x):
        one = jax.checkpoint(jax.vmap(attend, (None, 0)), policy=policy, prevent_cse=False)
        return jnp.mean(jax.lax.scan(lambda h, w: (one(w, h), None), x.reshape(-1, 32, WIDTH), weights)[0])

    assert "RK011" not in rk.lint(chunked, STACKED, long).codes


@pytest.mark.parametrize("policy", ["full", "dots"])
@pytest.mark.parametrize("model", ["gpt", "llama", "gpt_nnx", "vit", "rnn", "moe"])
def test_models_of_the_zoo(model, policy):
    """Under presets they have no faults but the ones that are known of them."""
    sizes = {"layers": 3} if model != "rnn" else {}
    fun, args = getattr(rk.zoo, model)(**sizes, abstract=True)
    found = rk.lint(fun, *args, policy=policy)
    known = {"RK007", "RK023", "RK024"} | ({"RK016"} if model == "moe" else set())  # the last layer; attention's output
    assert set(found.codes) <= known, str(found)


# Functions that cannot be looked at ----------------------------------------------------------------------------------


def test_what_cannot_be_differentiated_is_said():
    def loss(w, x):
        x = jax.checkpoint(typo(named))(w, x)
        return jnp.sum(jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + 1, x))

    found = rk.lint(loss, WEIGHTS[0], X)
    assert "RK001" in found.codes  # for which the program need not be differentiated
    assert any("Reverse-mode differentiation does not work for lax.while_loop" in n for n in found.notes)
    assert "note: reverse mode cannot differentiate the function" in str(found)


@pytest.mark.skipif(OLD_REMAT3, reason="this remat implementation lets the callback through")
def test_notes_name_no_addresses_of_objects():
    def loss(w, x):
        def one(w, x):
            jax.experimental.io_callback(print, None, 1)
            return named(w, x)

        return jnp.sum(jax.checkpoint(one)(w, x))

    found = rk.lint(loss, WEIGHTS[0], X)
    assert "RK019" in found.codes
    assert found.notes
    assert "0x" not in str(found)


def test_a_name_that_the_program_lacks_is_a_finding_and_no_error():
    found = rk.lint(lambda w, x: jnp.sum(named(w, x)), WEIGHTS[0], X, policy="save name=mlp-up|other; save op=sin")
    (finding,) = found
    assert finding.code == "RK001"
    assert finding.figures["missing_names"] == 2
    assert any("looked at the program as written" in n for n in found.notes)


@pytest.mark.parametrize(
    ("fun", "kwargs", "said"),
    [
        (lambda w, x: named(w, x), {}, "must return one scalar"),
        (lambda w, x: jnp.sum(x), {"policy": "no_such"}, "no_such"),
        (lambda w, x: jnp.sum(x), {"policy": {"no_block": "full"}}, "no_block"),
        (lambda w, x: jnp.sum(x), {"target": "tpu:v99"}, "v99"),
        (lambda w, x: jnp.sum(x), {"select": ["RK999"]}, "RK999"),
        (lambda w, x: jnp.sum(x), {"ignore": 3}, "ignore= takes codes"),
        (lambda w, x: jnp.sum(x), {"argnums": 7}, "argnums=7"),
        (3, {}, "expected a function"),
    ],
)
def test_wrong_use_is_refused(fun, kwargs, said):
    with pytest.raises(rk.RematError, match=said):
        rk.lint(fun, WEIGHTS[0], X, **kwargs)


def test_a_second_call_that_uses_what_the_first_one_leaked():
    kept = []

    def loss(w, x):
        kept.append(jnp.sum(named(w, x)))
        return sum(kept[-2:])

    found = rk.lint(loss, WEIGHTS[0], X)
    assert "RK021" in found.codes or "cannot be traced a second time" in found.notes[0]  # JAX 0.10.2 fails by itself


def test_models_of_flax_leak_nothing():
    fun, *args = linen(rk.linen.remat("full"))
    assert not rk.lint(fun, *args, select=["RK021"]).codes
    fun, *args = nnx_model(rk.nnx.remat("full"))
    assert not rk.lint(fun, *args, select=["RK021"]).codes


def test_abstract_arguments_and_arrays_find_the_same():
    loss = functools.partial(unrolled, lambda f: jax.checkpoint(named))
    small = [{"up": jnp.ones((8, 8))}] * 3, jnp.ones((4, 8))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), small)
    assert rk.lint(loss, *small).to_dict() == rk.lint(loss, *abstract).to_dict()


# Settings and comments -----------------------------------------------------------------------------------------------

SOURCE = """
import jax, jax.numpy as jnp

@jax.checkpoint
def model(w, x):
    return jnp.sin(jnp.sin(x @ w))

def loss(w, x):
    ABOVE
    return jnp.sum(model(w, x))  SAME
"""


@pytest.mark.parametrize(
    ("same", "above", "hidden"),
    [
        ("# remat-kit: ignore[RK004]", "pass", True),
        ("#remat-kit:ignore[ RK003 , RK004 ]", "pass", True),
        ("# remat-kit: ignore", "pass", True),
        ("# noqa  # remat-kit: ignore[RK004] as it is small", "pass", True),
        ("# remat-kit: ignore[RK003]", "pass", False),
        ("# remat-kit: ignore[]", "pass", False),
        ("# ignore[RK004]", "pass", False),
        ("", "# remat-kit: ignore[RK004]", True),
        ("", "# remat-kit: ignore", True),
        ("", "# remat-kit: ignore[RK001]", False),
        ("", "pass  # remat-kit: ignore[RK004]", False),
    ],
)
def test_comments(tmp_path, same, above, hidden):
    path = tmp_path / "model.py"
    path.write_text(SOURCE.replace("ABOVE", above).replace("SAME", same))
    namespace: dict[str, Any] = {"__name__": "model"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    found = rk.lint(namespace["loss"], jnp.ones((8, 8)), jnp.ones((4, 8)))
    assert ([f.code for f in found], [f.code for f in found.suppressed]) == (
        ([], ["RK004"]) if hidden else (["RK004"], [])
    )
    assert ("1 ignored by comments in the source" in str(found)) == hidden


def whole(w, x):
    return jnp.sum(jax.checkpoint(named)(w, x))


@pytest.mark.parametrize(
    ("setting", "codes"),
    [
        ("", ("RK004",)),
        ("[tool.other]\nx = 1", ("RK004",)),
        ('[tool.remat-kit.lint]\nignore = ["RK004"]', ()),
        ('[tool.remat-kit.lint]\nignore = ["RK"]', ()),
        ('[tool.remat-kit.lint]\nselect = ["RK00"]', ("RK004",)),
        ('[tool.remat-kit.lint]\nselect = ["RK01"]', ()),
        ('[tool.remat-kit.lint]\nselect = ["RK00"]\nignore = ["RK004", "RK012"]', ()),
        ('[tool.remat-kit.lint]\nselect = "RK004"', ("RK004",)),
        ("[tool.remat-kit.lint]\nselect = []", ()),
    ],
)
def test_settings(tmp_path, monkeypatch, setting, codes):
    (tmp_path / "pyproject.toml").write_text(setting)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert rk.lint(whole, WEIGHTS[0], X).codes == codes


def test_arguments_win_over_settings(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[tool.remat-kit.lint]\nselect = ["RK001"]\nignore = ["RK004"]')
    monkeypatch.chdir(tmp_path)
    assert rk.lint(whole, WEIGHTS[0], X).codes == ()
    assert rk.lint(whole, WEIGHTS[0], X, select=["RK004"], ignore=[]).codes == ("RK004",)
    assert rk.lint(whole, WEIGHTS[0], X, select=["RK004"]).codes == ()  # the setting still ignores it
    assert rk.lint(whole, WEIGHTS[0], X, ignore=()).codes == ()  # the setting still selects another


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('[tool.remat-kit.lint]\nignore = ["RK04"]', "there is no such code"),
        ('[tool.remat-kit.lint]\nignore = ["rk004"]', "there is no such code.*RK004"),
        ('[tool.remat-kit.lint]\nignore = [""]', "there is no such code"),
        ("[tool.remat-kit.lint]\nignore = 4", "takes codes"),
        ("[tool.remat-kit.lint]\nignore = [4]", "takes codes"),
        ("[tool.remat-kit.lint]\nexclude = []", "takes select and ignore, found exclude"),
        ("[tool.remat-kit]\nlint = 4", "is a table"),
        ("[tool]\nremat-kit = 4", "is a table"),
        ("[tool.remat-kit.lint", "cannot be read"),
    ],
)
def test_settings_that_are_wrong(tmp_path, monkeypatch, setting, said):
    (tmp_path / "pyproject.toml").write_text(setting)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rk.RematError, match=said):
        rk.lint(whole, WEIGHTS[0], X)


# What is handed back -------------------------------------------------------------------------------------------------

HOSTILE = "<script>alert(1)</script>[bold]\x1b[31m\n\u202e"


def test_hostile_names_in_findings():
    policy = jax.checkpoint_policies.save_only_these_names("<b>[bold]x")
    one = jax.checkpoint(
        lambda w, x: jnp.sin(rk.checkpoint_name(x @ w["up"], HOSTILE)), policy=policy, prevent_cse=False
    )
    found = rk.lint(functools.partial(scanned, lambda f: one), STACKED, X)
    assert "RK001" in found.codes
    text = str(found)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold]" in text  # no markup
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_findings_as_data_and_as_text():
    found = rk.lint(whole, WEIGHTS[0], X, policy=None)
    assert len(found) == 1
    assert [*found] == [found[0]]
    data = json.loads(json.dumps(found.to_dict()))
    assert data["schema"] == 1
    assert data["policy"] == "as written"
    assert data["suppressed"] == data["notes"] == []
    (entry,) = data["findings"]
    assert entry["code"] == "RK004"
    assert entry["where"]["file"] == __file__
    assert entry["where"]["line"] == whole.__code__.co_firstlineno + 1
    assert entry["where"]["source"] == f"test_lint.py:{entry['where']['line']} (whole)"
    assert entry["figures"]["kept_without_remat_bytes"] == entry["figures"]["in_the_region_bytes"] == X.size * 4
    text = str(found)
    assert text.startswith("RK004 remat of the whole loss  checkpoint at test_lint.py:")
    assert "kept without remat 128 KiB, in the region 128 KiB, recomputed" in text
    assert text.endswith("1 finding. Policy: as written.")
    assert str(rk.lint(named_sum, WEIGHTS[0], X)) == "Nothing found. Policy: as written."
    assert str(rk.lint(named_sum, WEIGHTS[0], X, policy="none")) == "Nothing found. Policy: none."


def named_sum(w, x):
    return jnp.sum(named(w, x))
