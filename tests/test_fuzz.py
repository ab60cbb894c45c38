"""What strangers write: policies as text, policies and plans as JSON, files of any kind, a cache someone tampered with.

Each is read, or refused with a RematError; nothing in it runs, and neither time nor memory grows without bound.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import sys
import threading

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import remat_kit as rk
from remat_kit import _globs
from remat_kit._target import cache


def quick(examples: int) -> settings:
    """Always the same examples, none of them timed."""
    return settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )


# Text forms ---------------------------------------------------------------------------------------------------------

WORDS = [
    *(
        "save",
        "offload",
        "recompute",
        "rest",
        "none",
        "dots",
        "names",
        "name",
        "op",
        "path",
        "source",
        "dtype",
        "value",
    ),
    *(
        "larger_than",
        "smaller_than",
        "size",
        "batch_dims",
        "yes",
        "no",
        "1MiB",
        "2.5 KB",
        "0",
        "9" * 30,
        "attn_*",
        "**/x",
    ),
    *("=", "<", ">", ";", " ", "\n", "\t", "\\", "|", "*", "?", "[", "]", "[a-z]", "[!x]", "[]", "[z-a]", "-", "^"),
    *("\x00", "\x1b[2J", "\u202e", "\ud800", "é", "\u2028", "\U0001f600", "²", "<JAX policy", "<script>", "'", '"'),
]


def read(text: str) -> rk.Policy | None:
    """A policy that reads back as itself, or None where the text is refused."""
    try:
        found = rk.policy(text)
    except rk.RematError as error:
        said = str(error)
        assert said and len(said) < 5000
        said.encode()
        return None
    assert rk.policy(str(found)) == found
    return found


@quick(400)
@given(st.lists(st.sampled_from(WORDS), max_size=14).map("".join) | st.text(max_size=30))
@example("save name=a; save name=a")
@example("save name=\\")
@example("recompute rest; ")
def test_any_text_is_a_policy_or_an_error(text):
    read(text)


@quick(200)
@given(st.data())
def test_texts_that_were_changed(data):
    text = data.draw(st.sampled_from([str(p) for p in rk.presets.values()]))[:300]
    for _ in range(data.draw(st.integers(1, 4))):
        at, cut = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 3))
        text = text[:at] + data.draw(st.sampled_from(["", *WORDS])) + text[at + cut :]
    read(text)


N = 2**17
LONG = {
    "word": "a" * N,
    "name": "save name=" + "a" * N,
    "names": "save name=" + "a|b" * (N // 3),
    "many names": "save name=" + "|".join(map(str, range(N // 8))) + "; save name=" + "|".join(map(str, range(N // 8))),
    "rules": ";".join(f"save name={i}" for i in range(N // 16)),
    "useless rules": "save name=*;" * (N // 12),
    "semicolons": ";" * N,
    "blanks": "save" + " " * N + "rest",
    "stars": "save name=" + "a*" * (N // 2),
    "sets": "save name=" + "[a-b]" * (N // 5),
    "brackets": "save name=" + "[" * N,
    "escapes": "save name=" + "\\a" * (N // 2),
    "bars": "save name=" + "|" * N,
    "equals": "save " + "=" * N,
    "digits": "save larger_than=" + "9" * N,
    "lines": "save name=a\n" * (N // 12),
    "action": "x" * N + " name=a",
    "key": "save " + "x" * N + "=a",
    "preset in rules": "dots;" * (N // 5),
    "too long": "save name=a" + " " * 2**21,
    "escape codes": "\x1b[31m" * (N // 5),
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_texts(text):
    read(text)


def test_long_globs_take_no_longer_than_their_length():
    glob = "*a" * 500
    for text in ("a" * 400, "b" * 400, "ab" * 200):
        assert _globs.matches(glob, text) is False
    with pytest.raises(rk.RematError, match="characters"):
        _globs.canonical("a" * 10_000)


# JSON -----------------------------------------------------------------------------------------------------------------


@functools.cache
def plan_text() -> str:
    def loss(w):
        for i in range(2):
            w = rk.remat("none", block=f"layers_{i}")(lambda w: rk.checkpoint_name(jnp.sin(w) * jnp.tanh(w), "a"))(w)
        return jnp.sum(w)

    return json.dumps(rk.plan(loss, jnp.ones((8, 8)), target=None, budget="1KiB").to_dict())


POLICY = rk.policy("offload name=attn_*|b; save op=dot_general larger_than=1MiB; recompute dtype=f32").to_json()
PIECES = [
    *(
        "",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        "null",
        "true",
        "NaN",
        "Infinity",
        "-1",
        "1e999",
        "9" * 400,
        "0.5",
        "\\ud800",
    ),
    *('"a"', '{"a":1,"a":2}', "[" * 2000, "\x00", '"remat_kit.plan"', '"version": 2', "__import__('os').system('x')"),
]


def changed(data: st.DataObject, text: str) -> str:
    for _ in range(data.draw(st.integers(1, 3))):
        at, cut = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(st.sampled_from(PIECES)) + text[at + cut :]
    return text


@quick(200)
@given(st.data())
def test_changed_plans(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "changed.json"
    path.write_text(changed(data, plan_text()), encoding="utf-8", errors="replace")
    try:
        p = rk.Plan.load(path)
    except rk.RematError as error:
        assert 0 < len(str(error)) < 5000
        return
    assert str(p) and p.explain() and rk.Plan.from_dict(p.to_dict()) == p


@quick(200)
@given(st.data())
def test_changed_policies(data):
    text = changed(data, POLICY)
    try:
        found = rk.Policy.from_json(text)
    except rk.RematError as error:
        assert 0 < len(str(error)) < 5000
        return
    assert rk.Policy.from_json(found.to_json()) == found


@quick(100)
@given(st.binary(max_size=40))
@example(b"\xff\xfe{\x00}\x00")
@example(b"\x80")
@example(b"\x00" * 9)
def test_bytes(data):
    with pytest.raises(rk.RematError):
        rk.Policy.from_json(data)


def test_policies_with_very_much_in_them():
    data = rk.policy("full").to_dict()
    one = {"action": "save", "name": ["a"]}
    with pytest.raises(rk.RematError, match="rules"):
        rk.Policy.from_dict(data | {"rules": [one] * 10**6})
    many = [{"action": "save", "name": [f"{i}-{k}" for k in range(500)]} for i in range(200)]
    assert len(rk.Policy.from_dict(data | {"rules": many}).rules) == 200  # takes no square of the number of names


def test_nothing_in_a_file_runs(tmp_path):
    """No code is compiled, nothing imported, no process started, whatever texts a plan holds."""
    texts = [
        "__import__('os').system('touch x')",
        "!!python/object:os.system",
        "\x80\x04cos\nsystem\n.",
        "{{7*7}}",
        "$(x)",
    ]
    heard: list[str] = []
    me = threading.get_ident()

    def hook(event, args):
        if listening.is_set() and threading.get_ident() == me and event.split(".")[0] in FORBIDDEN:
            heard.append(event)

    listening = threading.Event()
    sys.addaudithook(hook)

    def load(text: str) -> None:
        (tmp_path / "plan.json").write_text(text)
        try:
            str(rk.Plan.load(tmp_path / "plan.json"))
        except rk.RematError:
            pass

    try:
        for _ in range(2):
            for word in texts:
                load(json.dumps(filled(json.loads(plan_text()), word)))
                load(json.dumps({"schema": word, "version": word}))
            listening.set()  # from the second time on: the package's own modules are imported now
        assert heard == []
        exec("pass")  # it would have been heard
        assert "exec" in heard
    finally:
        listening.clear()


FORBIDDEN = {"compile", "exec", "import", "os", "subprocess", "pickle", "marshal", "ctypes", "socket"}


def filled(data, word):
    if isinstance(data, dict):
        return {
            k: v if k in ("schema", "minimize", "actions", "kind", "policy") else filled(v, word)
            for k, v in data.items()
        }
    if isinstance(data, list):
        return [filled(v, word) for v in data]
    return word if isinstance(data, str) and data not in ("save", "recompute", "offload") else data


# Files ----------------------------------------------------------------------------------------------------------------


def files(folder):
    """Paths that are no plans, of every kind that a system has."""
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "latin").write_text(plan_text().replace("remat_kit.plan", "ré"), encoding="latin-1")
    (folder / "utf16").write_text(plan_text(), encoding="utf-16")
    (folder / "bom").write_text(plan_text(), encoding="utf-8-sig")
    (folder / "zipped").write_bytes(gzip.compress(plan_text().encode()))
    with open(folder / "huge", "wb") as file:
        file.truncate(100 * 2**20)
    with open(folder / "long", "w") as file:
        file.write("[" * 2**20)
    with open(folder / "wide", "w") as file:
        file.write("[" + "0," * 2**18 + "0]")
    os.symlink(folder / "nowhere", folder / "dangling")
    os.symlink(folder / "loop", folder / "loop")
    os.symlink(folder, folder / "to a folder")
    os.mkfifo(folder / "pipe")
    yield from sorted(folder.iterdir())
    yield from (folder, folder / "none", folder / "empty" / "below", "/dev/zero", "/dev/null", folder / ("x" * 300))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a system with pipes")
def test_files_of_every_kind(tmp_path):
    for path in files(tmp_path):
        with pytest.raises(rk.RematError) as caught:
            rk.Plan.load(path)
        assert 0 < len(str(caught.value)) < 2000


def test_a_link_to_a_plan_is_followed(tmp_path):
    (tmp_path / "plan.json").write_text(plan_text())
    os.symlink(tmp_path / "plan.json", tmp_path / "link")
    assert rk.Plan.load(tmp_path / "link") == rk.Plan.from_dict(json.loads(plan_text()))


# The cache of compiles ------------------------------------------------------------------------------------------------


def test_a_cache_that_was_tampered_with_counts_as_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path))
    w = jnp.ones((3, 3))

    def measured():
        return rk.measure(lambda w: jnp.sum(jnp.sin(w) * w), w)

    first = measured()
    (file,) = tmp_path.iterdir()
    good = json.loads(gzip.decompress(file.read_bytes()))
    assert measured().cached
    for broken in (
        *({**good, key: value} for key in good for value in (None, [], "x", -1, {"a": "b"}, float("inf"))),
        *({k: v for k, v in good.items() if k != key} for key in good),
        [good],
        {**good, "memory": {**good["memory"], "temp_size_in_bytes": "x"}},
        {**good, "memory": dict.fromkeys(good["memory"], float("inf"))},
        {**good, "oom": {"required_bytes": "x", "available_bytes": [], "message": None}},
        {**good, "oom": {"more": 1}},
    ):
        file.write_bytes(gzip.compress(json.dumps(broken).encode()))
        again = measured()
        assert (again.peak_bytes, again.temp_bytes, again.fits) == (first.peak_bytes, first.temp_bytes, first.fits)


def test_cache_files_that_do_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_LARGEST", 1000)
    whole = gzip.compress(b'{"schema": 1, "a": 1}')
    for data in (b"", b"x", whole[:-4], whole[:10] + b"\xff" * 10, gzip.compress(b"[" * 900), gzip.compress(b"\xff")):
        (tmp_path / "a.json.gz").write_bytes(data)
        assert cache.load("a") is None
    bomb = gzip.compress(b'{"schema": 1, "a": "' + b"0" * 10**6 + b'"}')
    assert len(bomb) < 2000
    (tmp_path / "a.json.gz").write_bytes(bomb)
    assert cache.load("a") is None
    (tmp_path / "a.json.gz").write_bytes(whole)
    assert cache.load("a") == {"schema": 1, "a": 1}
    (tmp_path / "b.json.gz").mkdir()
    assert cache.load("b") is None
