"""JAX's own policies, both ways: recognized as data, and given back as the same policy."""

import pickle

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from remat_kit._errors import RematError, RematWarning
from remat_kit._policy import Action, ValueFacts, policy

cp = jax.checkpoint_policies
HOST = {"offload_src": "device", "offload_dst": "pinned_host"}

NATIVE = {
    "nothing": (cp.nothing_saveable, "recompute rest"),
    "everything": (cp.everything_saveable, "save rest"),
    "dots": (cp.dots_saveable, "save op=conv_general_dilated|dot_general|scaled_matmul_wrapper; recompute rest"),
    "dots_no_batch": (
        cp.dots_with_no_batch_dims_saveable,
        "save op=dot_general|scaled_matmul_wrapper batch_dims=no; recompute rest",
    ),
    "offload_dots": (cp.offload_dot_with_no_batch_dims(**HOST), "offload op=dot_general batch_dims=no; recompute rest"),
    "only": (cp.save_only_these_names("pre", "act"), "save name=act|pre; recompute rest"),
    "but": (cp.save_any_names_but_these("pre"), "recompute name=pre; save name=*; recompute rest"),
    "any": (cp.save_any_names_but_these(), "save name=*; recompute rest"),
    "offload": (
        cp.save_and_offload_only_these_names(
            names_which_can_be_saved=["pre"], names_which_can_be_offloaded=["act"], **HOST
        ),
        "save name=pre; offload name=act; recompute rest",
    ),
}  # fmt: skip


def mlp(w, x):
    for _ in range(2):
        x = jnp.tanh(checkpoint_name(x @ w, "pre"))
        x = checkpoint_name(jnp.sin(x), "act")
        x = jnp.einsum("bi,bj->bij", x, x).sum(-1)
        x = jnp.einsum("bi,bi->bi", x, x)
    return x.sum()


W, X = jnp.ones((4, 4)), jnp.ones((3, 4))


def kept(jax_policy):
    """Shapes of what the backward pass is given, with the result itself."""
    block = jax.checkpoint(mlp, policy=jax_policy)
    return sorted(aval.shape for aval in jax.make_jaxpr(lambda w, x: jax.vjp(block, w, x))(W, X).out_avals)


@pytest.mark.parametrize("case", NATIVE)
def test_jaxs_policies_become_data_and_go_back_as_the_same_program(case):
    theirs, text = NATIVE[case]
    ours = policy(theirs)
    assert ours.native is None and str(ours) == text and ours == policy(text)
    back = ours.as_jax()
    assert back is policy(text).as_jax()
    assert type(back) is type(theirs) and getattr(back, "__code__", 0) is getattr(theirs, "__code__", 0)
    assert jax.jit(jax.grad(jax.checkpoint(mlp, policy=back))).lower(W, X).as_text() == (
        jax.jit(jax.grad(jax.checkpoint(mlp, policy=theirs))).lower(W, X).as_text()
    )
    assert kept(back) == kept(theirs)


def test_native_policies_keep_what_their_rules_say():
    def count(spec):
        return len(kept(policy(spec).as_jax()))

    assert count("full") < count("save name=pre") < count("save name=pre|act") <= count("names") <= count("everything")
    assert count("recompute name=pre; save name=*") == count("save name=act")
    assert count("dots_no_batch") < count("dots")


def test_equal_policies_give_one_object_and_no_retrace():
    traces = []

    def f(x):
        traces.append(0)
        return jnp.sin(checkpoint_name(jnp.sin(x), "a")).sum()

    for _ in range(2):
        g = jax.checkpoint(f, policy=policy("save name=a").as_jax())
        jax.make_jaxpr(jax.grad(g))(X)
    assert len(traces) == 1
    assert policy("save name=a|b").as_jax() is policy("save name=b; save name=a; recompute name=c").as_jax()


@pytest.mark.parametrize(
    "text",
    ["save name=a*", "save name=a op=add", "save op=dot_general", "save op=dot_general|add", "offload name=*",
     "offload rest", "recompute name=a; save rest", "save name=a; save op=dot_general", "save larger_than=1MiB",
     "offload name=a; save name=*", "offload op=dot_general", "save name=a; offload name=b*"],
)  # fmt: skip
def test_what_jax_has_not_goes_through_names(text):
    assert policy(text).as_jax() is None


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("save name=a; offload name=a|b", NATIVE["offload"][0]),
        ("recompute name=a; save name=a|b", NATIVE["only"][0]),
        ("save op=dot_general; save op=conv_general_dilated|scaled_matmul_wrapper", cp.dots_saveable),
        ("recompute name=a|b; recompute op=add", cp.nothing_saveable),
        ("save name=a; save rest", cp.everything_saveable),
        ("save name=a; save name=*", NATIVE["any"][0]),
        (r"save name=\*", NATIVE["only"][0]),
    ],
)
def test_rules_that_amount_to_one_of_jaxs(text, same):
    found = policy(text).as_jax()
    assert type(found) is type(same) and getattr(found, "__code__", 0) is getattr(same, "__code__", 0)


def test_names_in_jaxs_policies_are_no_globs():
    p = policy(cp.save_only_these_names("a*"))
    assert p.action(ValueFacts(("a*",))) == Action.SAVE and p.action(ValueFacts(("ab",))) == Action.RECOMPUTE
    assert p.exact_names() == {"a*": Action.SAVE} and p.name_globs == (r"a\*",)


def opaque(prim, *_, **__):
    return prim.name == "dot_general"


@pytest.mark.parametrize(
    "callable_",
    [
        opaque,
        cp.save_from_both_policies(cp.dots_saveable, cp.save_only_these_names("x")),
        cp.offload_dot_with_no_batch_dims("device", "unpinned_host"),
        cp.save_only_these_names("line\nbreak"),
        cp.save_only_these_names(""),
    ],
)
def test_other_callables_are_kept_as_they_are(callable_):
    p = policy(callable_)
    assert p.as_jax() is callable_ is p.native and p == policy(callable_) and p != policy(lambda *_, **__: True)
    assert str(p).startswith("<JAX policy ")
    for refused in [p.to_json, lambda: p.action(ValueFacts()), lambda: policy(str(p))]:
        with pytest.raises(RematError):
            refused()


def test_module_level_callables_are_picklable():
    p = policy(opaque)
    assert pickle.loads(pickle.dumps(p)) == p


def test_a_function_that_makes_policies_is_none():
    for factory in [cp.save_only_these_names, cp.save_from_both_policies, cp.offload_dot_with_no_batch_dims]:
        with pytest.raises(RematError, match="makes policies"):
            policy(factory)


def test_names_that_jax_ignores_are_told():
    with pytest.warns(RematWarning, match="keeps every value"):
        p = policy(cp.save_anything_except_these_names("a"))
    assert p.native is not None


def test_none_has_no_jax_policy():
    with pytest.raises(RematError, match="no jax.checkpoint at all"):
        policy("none").as_jax()
