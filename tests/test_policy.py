"""Policies as data: text, JSON and pickle forms, selection and combination."""

import json
import os
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_kit import _globs
from remat_kit._bytes import format_bytes, parse_bytes
from remat_kit._errors import RematError
from remat_kit._policy import Action, Policy, Rule, Selector, ValueFacts, offload, policy, recompute, save

cp = jax.checkpoint_policies

# --- round trips ------------------------------------------------------------------------------------------------------

_chars = st.characters(exclude_categories=("Cc", "Cs"))
_literals = st.text(_chars, min_size=1, max_size=6).map(_globs.literal)
_wild = st.sampled_from(
    ["*", "?", "**", "[ab]", "[!a-c]", "[;|x]".replace("|", "\\|"), "\\[", "\\\\", "\\;", "\\ ", "]"]
)
_glob_lists = st.lists(st.lists(_literals | _wild, min_size=1, max_size=4).map("".join), min_size=1, max_size=3)
_sizes = st.integers(0, 2**62) | st.sampled_from([1024, 2**20, 10**9, 3 * 2**30])


@st.composite
def selectors(draw):
    criteria = {}
    for key in draw(st.sets(st.sampled_from(["name", "op", "path", "source", "dtype"]))):
        criteria[key] = tuple(draw(_glob_lists))
    if draw(st.booleans()):
        criteria["larger_than"] = draw(_sizes)
    if draw(st.booleans()):
        criteria["smaller_than"] = criteria.get("larger_than", 0) + 2 + draw(_sizes)
    if draw(st.booleans()) or not criteria:
        criteria["batch_dims"] = draw(st.booleans())
    return Selector(**criteria)


@st.composite
def policies(draw):
    if draw(st.integers(0, 20)) == 0:
        return Policy(remat=False)
    rules = []
    for _ in range(draw(st.integers(0, 3))):
        rule = Rule(draw(st.sampled_from(Action)), draw(selectors()))
        if not any(earlier.selector.covers(rule.selector) for earlier in rules):
            rules.append(rule)
    return Policy(tuple(rules), draw(st.sampled_from(Action)))


@settings(deadline=None)
@given(policies())
def test_every_form_reads_back_as_an_equal_policy(p):
    assert Policy.parse(str(p)) == policy(str(p)) == p
    assert Policy.from_json(p.to_json()) == p
    assert Policy.from_dict(json.loads(json.dumps(p.to_dict()))) == p
    copy = pickle.loads(pickle.dumps(p))
    assert copy == p and hash(copy) == hash(p)


@settings(deadline=None)
@given(st.text(max_size=40) | st.text("saveoffloadrecomputerestname=|;*[]\\ <>1MiB\n", max_size=40))
def test_any_text_is_a_policy_or_a_clear_error(text):
    try:
        assert isinstance(policy(text), Policy)
    except RematError as error:
        assert str(error)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["save", "recompute"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["action", "name", "op", "x"]), inner),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["schema", "version", "remat", "rules", "rest", "more"]), _json) | _json)
def test_any_json_is_a_policy_or_a_clear_error(data):
    if isinstance(data, dict):
        data = {"schema": "remat_kit.policy", "version": 1} | data
    try:
        assert isinstance(Policy.from_dict(data), Policy)
        assert isinstance(Policy.from_json(json.dumps(data)), Policy)
    except RematError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other"}, "schema"),
        ({"version": 2}, "version 2"),
        ({"version": True}, "version True"),
        ({"remat": 1}, "remat"),
        ({"rest": "keep"}, "'keep'"),
        ({"rest": 0}, "rest"),
        ({"rules": {}}, "rules"),
        ({"rules": [{"action": "save"}]}, "rule 1"),
        ({"rules": [{"name": ["a"]}]}, "action"),
        ({"rules": [{"action": "save", "name": "a"}]}, "list of globs"),
        ({"rules": [{"action": "save", "nme": ["a"]}]}, "Did you mean 'name'"),
        ({"rules": [{"action": "save", "larger_than": True}]}, "whole number"),
        ({"rules": [{"action": "save", "larger_than": -1}]}, "between"),
        ({"rules": [{"action": "save", "name": ["\x1b[2J"]}]}, "control"),
        ({"rules": [{"action": "save", "name": ["a"]}] * 2}, "never applies"),
        ({"remat": False, "rest": "save"}, "remat=False"),
        ({"extra": 1}, "extra"),
    ],
)
def test_json_of_strangers_is_checked(change, message):
    with pytest.raises(RematError, match=message):
        Policy.from_dict(Policy().to_dict() | change)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": 1, "a": 2}', "9" * 5000, b"\xff", 3])
def test_json_that_is_none(text):
    with pytest.raises(RematError):
        Policy.from_json(text)


def test_text_of_the_documentation_is_kept_as_written():
    text = "offload name=attn_*; save op=dot_general larger_than=1MiB; recompute rest"
    p = policy(text)
    assert str(p) == text and repr(p) == f"policy({text!r})"
    assert p == offload(name="attn_*") | save(op="dot_general", larger_than=2**20)
    assert p == policy("offload name=attn_* ;\n save op=dot_general size>1024KiB")


def test_equality_does_not_depend_on_the_order_of_alternatives():
    assert save(name=["b", "a"]) == save(name="a|b") == policy("save name=b|a|b")
    assert len({save(name="a|b"), policy("save name=b|a"), policy(cp.save_only_these_names("b", "a"))}) == 1


def test_text_is_read_in_every_spelling():
    assert policy("save dtype=bf16|f32") == save(dtype=(jnp.bfloat16, jnp.float32)) == save(dtype="bfloat16|float32")
    assert policy(" save batch_dims=true op=dot_general;") == save(op="dot_general", batch_dims=True)
    assert policy(r"save name=a\ b\;c\|d") == save(name=r"a b;c\|d")
    assert policy("none") == Policy(remat=False) and str(policy("none")) == "none"
    assert policy("save size<2GB") == save(smaller_than="2 gb") == save(smaller_than=2_000_000_000)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("save nme=a", 6, "Did you mean 'name'"),
        ("sav name=a", 1, "Did you mean 'save'"),
        ("save", 1, "empty rule"),
        ("save name=a;; save name=b", 13, "empty rule"),
        ("save name=a; full rest", 14, "no action"),
        ("save rest; save name=a", 12, "'rest' last"),
        ("save rest name=a", 11, "stands alone"),
        ("save name=a rest", 13, "stands alone"),
        ("save name= a", 11, "empty"),
        ("save name", 6, "key=value"),
        ("save name=a name=b", 13, "twice"),
        ("save name=[a", 11, "']'"),
        ("save name=a||b", 11, "empty glob"),
        ("save name=a\\", 11, "lone backslash"),
        ("save size>1M", 11, "'1MiB' or '1MB'"),
        ("save size>0.3B", 11, "whole number"),
        ("save size=4", 6, "size>1MiB"),
        ("save name>4", 6, "only sizes"),
        ("save batch_dims=maybe", 17, "yes or no"),
        ("save larger_than=5 smaller_than=6", 6, "no value"),
        ("save name=a; offload name=a", 14, "never applies"),
        ("save name=a*; save op=dot_general; recompute name=ab op=dot_general", 36, "never applies"),
    ],
)
def test_malformed_text_points_at_the_spot(text, column, message):
    with pytest.raises(RematError) as caught:
        policy(text)
    first, shown, mark = str(caught.value).split("\n")
    assert f"column {column}:" in first and message in first
    assert shown.strip() == text and mark.index("^") - 4 == column - 1


@pytest.mark.parametrize("spec", [None, 3, True, {}, ["dots"], int, b"dots", "", "  ", object()])
def test_other_things_are_no_policies(spec):
    with pytest.raises(RematError):
        policy(spec)


def test_none_is_refused_since_it_means_two_things():
    with pytest.raises(RematError, match="'full'.*'none'"):
        policy(None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "criteria",
    [{"nme": "a"}, {"name": 3}, {"name": ["a", 3]}, {"name": ()}, {"name": []}, {"name": ""}, {"name": {"a": 1}},
     {"larger_than": 1.5}, {"larger_than": -1}, {"larger_than": True}, {"smaller_than": 0}, {"batch_dims": 1},
     {"dtype": [None]}, {"dtype": object()}, {"name": None}],
)  # fmt: skip
def test_criteria_of_wrong_types(criteria):
    with pytest.raises(RematError):
        save(**criteria)


def test_policies_of_wrong_parts():
    rule = Rule(Action.SAVE, Selector(name=("a",)))
    for wrong in [
        {"rules": rule}, {"rules": ("save name=a",)}, {"rest": "keep"}, {"remat": 1}, {"native": 3},
        {"rules": (rule,), "remat": False}, {"rules": (rule,), "native": cp.dots_saveable}, {"rules": (rule, rule)},
        {"rules": tuple(Rule(Action.SAVE, Selector(name=(str(i),))) for i in range(1001))},
    ]:  # fmt: skip
        with pytest.raises(RematError):
            Policy(**wrong)
    with pytest.raises(RematError):
        Rule("keep", rule.selector)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RematError):
        Rule(Action.SAVE, "name=a")  # pyright: ignore[reportArgumentType]


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1))
def test_sizes_are_exact(count):
    assert parse_bytes(format_bytes(count)) == count


# --- selection --------------------------------------------------------------------------------------------------------

VALUE = ValueFacts(
    ("attn_out", "x"), "dot_general", "decoder/layers/mlp", "/home/me/model/attn.py", "bfloat16", 4096, False
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name=attn_*", True), ("name=x", True), ("name=attn", False), ("name=[ab]ttn_?ut", True), ("name=*", True),
        ("op=dot_general", True), ("op=dot", False), ("op=conv*|dot*", True),
        ("path=decoder/layers/mlp", True), ("path=*/mlp", False), ("path=**/mlp", True), ("path=decoder/**", True),
        ("path=decoder/layers/mlp/**", True), ("path=*/*/mlp", True), ("path=decoder", False), ("path=mlp", False),
        ("source=attn.py", True), ("source=model/*.py", True), ("source=me/*.py", False), ("source=/home/**", True),
        ("source=odel/attn.py", False), ("dtype=bf16", True), ("dtype=float*", False),
        ("larger_than=4095", True), ("larger_than=4KiB", False), ("smaller_than=4097", True), ("size<4096", False),
        ("batch_dims=no", True), ("batch_dims=yes", False), ("name=x op=add", False), ("name=x op=dot_general", True),
    ],
)  # fmt: skip
def test_a_selector_matches_what_it_says(text, expected):
    assert (policy(f"save {text}").action(VALUE) == Action.SAVE) is expected


def test_batch_dims_is_only_about_products():
    add = ValueFacts(op="add")
    assert policy("save batch_dims=no").action(add) == policy("save batch_dims=yes").action(add) == Action.RECOMPUTE


def test_the_first_matching_rule_decides():
    p = policy("recompute name=a*; offload name=*; save op=dot_general; recompute rest")
    assert p.action(ValueFacts(("ab",), "dot_general")) == Action.RECOMPUTE
    assert p.action(ValueFacts(("b",), "dot_general")) == Action.OFFLOAD
    assert p.action(ValueFacts((), "dot_general")) == Action.SAVE
    assert p.action(ValueFacts((), "add")) == Action.RECOMPUTE
    assert policy("none").action(ValueFacts()) == Action.SAVE


def test_globs_agree_with_a_regular_expression():
    for glob, regex in [("*a*b?", ".*a.*b."), ("[a-c]*[!a]", "[a-c].*[^a]"), ("a", "a"), ("**", ".*")]:
        for text in ["", "a", "ab", "aab", "aabc", "caxbz", "ba", "abab"]:
            assert _globs.matches(glob, text) == bool(re.fullmatch(regex, text)), (glob, text)


def test_path_globs_agree_with_a_regular_expression():
    for glob, regex in [
        ("**/a/b", "(.*/)?a/b"), ("a/**", "a(/.*)?"), ("a/**/b", "a/(.*/)?b"), ("*/b", "[^/]*/b"), ("**", ".*"),
        ("a**b", "a.*b"), ("**/*", "(.*/)?[^/]*"), ("?/[!a]", "[^/]/[^/a]"), ("**/**/b", "(.*/)?b"),
    ]:  # fmt: skip
        for text in ["", "a", "b", "a/b", "xa/b", "x/a/b", "a/x/b", "a/x/y/b", "ab", "a/", "/b", "x/y/a/b", "a/xb"]:
            assert _globs.matches(glob, text, "/") == bool(re.fullmatch(regex, text)), (glob, text)


def test_hostile_globs_take_linear_time():
    assert not _globs.matches("*a" * 40 + "b", "a" * 4000)  # with backtracking this would never end


# --- combining --------------------------------------------------------------------------------------------------------


def test_combining_puts_the_left_first():
    p = save(name="a") | offload(name="a|b") | recompute()
    assert p.action(ValueFacts(("a",))) == Action.SAVE and p.action(ValueFacts(("b",))) == Action.OFFLOAD
    assert save(name="a") | offload(name="a") == save(name="a")
    assert policy("full") | "save name=a" == "save name=a" | policy("full") == save(name="a")
    assert str(recompute(name="a") | save()) == "recompute name=a; save rest"
    assert (save() | recompute(name="a")).rest == Action.SAVE


@pytest.mark.parametrize("other", ["none", cp.save_from_both_policies(cp.dots_saveable, cp.save_only_these_names("x"))])
def test_what_cannot_be_combined(other):
    with pytest.raises(RematError, match="cannot be combined"):
        save(name="a") | policy(other)
    with pytest.raises(RematError, match="contradict"):
        save() | offload()
    with pytest.raises(TypeError):
        save(name="a") | 3  # pyright: ignore[reportOperatorIssue]


def test_helpers():
    assert policy("full").is_full and policy("recompute name=a").is_full and not policy("none").is_full
    assert policy("save name=a; offload name=b|a").exact_names() == {"a": Action.SAVE, "b": Action.OFFLOAD}
    assert policy("offload name=a; save rest").actions == (Action.OFFLOAD, Action.SAVE)


def test_importing_policies_does_not_import_flax():
    code = (
        "import sys, types; package = types.ModuleType('remat_kit'); package.__path__ = [sys.argv[1]];"
        "sys.modules['remat_kit'] = package; import remat_kit._policy as p; p.policy('minimal');"
        "assert 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, os.path.dirname(_globs.__file__)], check=True)
