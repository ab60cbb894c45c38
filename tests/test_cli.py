"""The command line: what it prints, where, and its exit status."""

import json
import os
import re
import subprocess
import sys
import warnings

import pytest

import remat_kit
from remat_kit import _cli, _load
from remat_kit._errors import RematError, RematWarning
from remat_kit._trace.report import Kind, Residual, Residuals
from tests.helpers import run

TINY = [f"--set={s}" for s in ("layers=2", "batch=2", "length=8", "width=16", "heads=2")]

PROGRAM = """
import jax, jax.numpy as jnp

calls = []
text = "not a factory"

def loss(w, x, scale=1.0):
    return jnp.sum(jnp.tanh(x @ w) * scale)

def factory(width=4):
    calls.append(width)
    return loss, (jax.ShapeDtypeStruct((width, width), jnp.float32), jax.ShapeDtypeStruct((2, width), jnp.float32))

def with_kwargs():
    return (*factory(), {"scale": 2.0})

def breaks():
    raise ValueError("no [red]data[/red]")

def returns_array():
    return jnp.zeros(3)

def single_argument():
    return loss, jnp.zeros(3)

def not_a_function():
    return 3, ()

def bad_kwargs():
    return loss, (), 3

def loss_breaks():
    def fn(w):
        raise KeyError("missing [weight]")
    return fn, (jnp.zeros(3),)

class Models:
    small = staticmethod(factory)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with a module in it, that is importable in the test only."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_program.py").write_text(PROGRAM)
    (tmp_path / "my_broken.py").write_text("import no_such_dependency\n")
    (tmp_path / "my_typo.py").write_text("def f(:\n")
    yield tmp_path
    for name in ("my_program", "my_broken", "my_typo"):
        sys.modules.pop(name, None)


def error(capsys, *argv):
    """Returns the message of a command that must fail as wrong use."""
    status, out, err = run(capsys, *argv)
    assert status == 2 and not out, (status, out, err)
    return err


def shapes_kept(out):
    return {tuple(e["shape"]) for e in json.loads(out)["entries"] if e["action"] == "saved"}


# residuals ---------------------------------------------------------------------------------------------------------


def test_residuals_of_a_zoo_model(capsys):
    status, out, err = run(capsys, "residuals", "zoo:gpt", "--policy", "dots", *TINY)
    assert status == 0 and not err
    assert "dot_general" in out and "predicted" in out and "kept on device" in out


def test_json_is_the_report(capsys):
    status, out, _ = run(capsys, "residuals", "zoo:gpt", "--policy", "dots", "--json", *TINY)
    fn, args = remat_kit.zoo.build("gpt", layers=2, batch=2, length=8, width=16, heads=2, abstract=True)
    report = remat_kit.residuals(fn, *args, policy="dots")
    assert status == 0 and json.loads(out)["total_bytes"] == report.total_bytes > 0
    assert len(json.loads(out)["entries"]) == len(report.entries)


def test_settings_reach_the_model(capsys):
    totals = []
    for layers in (1, 3):
        _, out, _ = run(capsys, "residuals", "zoo:gpt", "--json", *TINY[1:], f"--set=layers={layers}")
        totals.append(json.loads(out)["total_bytes"])
    assert totals[0] < totals[1]


def test_top_limits_the_rows(capsys):
    _, every, _ = run(capsys, "residuals", "zoo:gpt", *TINY)
    _, three, _ = run(capsys, "residuals", "zoo:gpt", "--top", "3", *TINY)
    assert "more (" in three and "more (" not in every
    assert len(three.splitlines()) < len(every.splitlines())


@pytest.mark.parametrize("key", ["op", "path", "dtype", "action"])
def test_by_sums_the_bytes(capsys, key):
    status, out, _ = run(capsys, "residuals", "zoo:gpt", "--by", key, "--json", *TINY)
    data = json.loads(out)
    assert status == 0 and data["by"] == key
    _, whole, _ = run(capsys, "residuals", "zoo:gpt", "--json", *TINY)
    whole = json.loads(whole)
    expected = whole["total_bytes"] + whole["host_bytes"]
    if key == "action":
        expected += whole["argument_bytes"] + whole["constant_bytes"]
    assert sum(data["bytes"].values()) == expected
    status, out, _ = run(capsys, "residuals", "zoo:gpt", "--by", key, *TINY)
    assert status == 0 and key in out


def test_diff_of_two_policies(capsys):
    argv = ("residuals", "zoo:gpt", "--policy", "none", "--diff", "full", *TINY)
    status, out, _ = run(capsys, *argv)
    assert status == 0 and "No longer kept" in out
    _, out, _ = run(capsys, *argv, "--json")
    data = json.loads(out)
    assert data["bytes"] < 0 and data["gone"]


def test_blocks_may_have_policies_of_their_own(capsys, monkeypatch):
    asked = []

    def residuals(fn, *args, policy=None, **more):
        asked.append(policy)
        return Residuals(())

    monkeypatch.setattr(remat_kit, "residuals", residuals)
    text = "save name=attn_*; recompute rest"
    run(capsys, "residuals", "zoo:gpt", "--block", f"layers_0={text}", "--block", "layers_*=none", *TINY)
    run(capsys, "residuals", "zoo:gpt", "--block", "a=none", "--policy", "dots", *TINY)
    run(capsys, "residuals", "zoo:gpt", "--policy", "dots", *TINY)
    run(capsys, "residuals", "zoo:gpt", *TINY)
    assert asked == [{"layers_0": text, "layers_*": "none"}, {"a": "none", "**": "dots"}, "dots", None]
    assert list(asked[0]) == ["layers_0", "layers_*"]  # the first match wins


def test_a_factory_in_the_current_folder(capsys, here):
    status, out, err = run(capsys, "residuals", "my_program:factory", "--json")
    assert status == 0 and not err
    assert shapes_kept(out) == {(2, 4)}  # of tanh
    _, out, _ = run(capsys, "residuals", "my_program:factory", "--set", "width=8", "--json")
    assert shapes_kept(out) == {(2, 8)}
    assert run(capsys, "residuals", "my_program:Models.small")[0] == 0
    assert run(capsys, "residuals", "my_program:with_kwargs")[0] == 0
    assert run(capsys, "residuals", "my_program:factory", "--argnums", "0,1")[0] == 0


# wrong use -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("zoo:gtp", ["gtp", "'gpt'"]),
        ("gpt", ["zoo:gpt"]),
        ("zoo:", ["zoo:NAME"]),
        ("my_program:factry", ["my_program", "factry", "'factory'"]),
        ("my_program:Models.smal", ["my_program.Models", "'small'"]),
        ("my_program:text", ["text", "str", "factory"]),
        ("no_such_module:f", ["no_such_module", "installed"]),
        ("my_broken:f", ["my_broken", "no_such_dependency"]),
        ("my_typo:f", ["my_typo", "SyntaxError"]),
        ("my_program:breaks", ["my_program:breaks", "ValueError", "no [red]data[/red]", "my_program.py:"]),
        ("my_program:returns_array", ["(fn, args)"]),
        ("my_program:single_argument", ["(fn, (arg,))"]),
        ("my_program:not_a_function", ["int", "called"]),
        ("my_program:bad_kwargs", ["kwargs", "dict"]),
        ("my_program:loss_breaks", ["my_program:loss_breaks", "KeyError", "missing [weight]"]),
    ],
)
def test_programs_that_cannot_be_made(capsys, here, program, words):
    message = error(capsys, "residuals", program)
    assert message.startswith("remat-kit: error: ")
    for word in words:
        assert word in message


def test_traceback_on_request(here, capsys):
    assert _cli.main(["residuals", "my_program:breaks", "--traceback"]) == 2
    assert "in breaks" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["layrs=2", "layers", "=3", "a-b=3"])
def test_settings_that_are_none(capsys, setting):
    message = error(capsys, "residuals", "zoo:gpt", "--set", setting)
    assert ("'layers'" if setting == "layrs=2" else "KEY=VALUE") in message


def test_settings_of_a_factory(capsys, here):
    assert "'width'" in error(capsys, "residuals", "my_program:factory", "--set", "widht=8")
    assert "twice" in error(capsys, "residuals", "my_program:factory", "--set", "width=8", "--set", "width=9")


def test_values_of_settings():
    items = ["a=3", "b=bfloat16", "c=true", "d=[1, 2]", 'e="3"', "f=a=b", "g=False", "h="]
    expected = {"a": 3, "b": "bfloat16", "c": True, "d": [1, 2], "e": "3", "f": "a=b", "g": False, "h": ""}
    assert _load.parse_settings(items) == expected


def test_unknown_policies(capsys):
    assert "dots" in error(capsys, "residuals", "zoo:gpt", "--policy", "dotz", *TINY)
    assert "GLOB=POLICY" in error(capsys, "residuals", "zoo:gpt", "--block", "layers", *TINY)
    assert "twice" in error(capsys, "residuals", "zoo:gpt", "--block", "a=dots", "--block", "a=none", *TINY)


@pytest.mark.parametrize(
    "argv",
    [
        ["residuals"],
        ["no_such_command"],
        ["residuals", "zoo:gpt", "--top", "-1"],
        ["residuals", "zoo:gpt", "--by", "colour"],
        ["residuals", "zoo:gpt", "--argnums", "x"],
        ["residuals", "zoo:gpt", "--by", "op", "--diff", "full"],
        [],
    ],
)
def test_wrong_options(capsys, argv):
    assert "usage: remat-kit" in error(capsys, *argv)


def test_warnings_take_one_line(capsys, monkeypatch):
    def residuals(fn, *args, **more):
        warnings.warn("name 'a' is not in the program", RematWarning, stacklevel=2)
        return Residuals(())

    monkeypatch.setattr(remat_kit, "residuals", residuals)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        status, _, err = run(capsys, "residuals", "zoo:gpt", *TINY)
    assert status == 0 and err == "remat-kit: warning: name 'a' is not in the program\n"


# the other commands --------------------------------------------------------------------------------------------------


def test_policies_lists_every_preset_with_its_doc(capsys):
    status, out, _ = run(capsys, "policies")
    assert status == 0
    for name in remat_kit.presets:
        assert name in out
    _, out, _ = run(capsys, "policies", "--json")
    listed = json.loads(out)["policies"]
    assert [p["name"] for p in listed] == list(remat_kit.presets)
    assert all(p["doc"] and p["policy"] for p in listed)


def test_policies_of_some_names_are_shown_whole(capsys):
    _, out, _ = run(capsys, "policies", "minimal", "dots")
    assert str(remat_kit.presets["minimal"])[-40:] in "".join(line.strip() for line in out.splitlines())
    assert "save_out_proj" not in out
    assert "'dots'" in error(capsys, "policies", "dotz")


def test_doctor_tells_versions_and_the_implementation_in_force(capsys):
    import jax

    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert jax.__version__ in out and remat_kit.__version__ in out and "cpu" in out
    _, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert facts["packages"]["jax"] == jax.__version__ and not facts["problems"]
    assert facts["remat"] == ("jax_remat3" if jax.config.jax_remat3 else "classic")
    assert facts["limits"]["classic"] == []
    assert len(facts["limits"]["jax_remat3"]) == (3 if jax.__version__ == "0.10.2" else 0)


def test_doctor_tells_what_is_missing_and_how_to_install_it(capsys, monkeypatch):
    from remat_kit import _doctor

    monkeypatch.setattr(_doctor, "_EXTRAS", {"plot": (("no-such-thing",), "plots", 'pip install "remat-kit[plot]"')})
    _, out, _ = run(capsys, "doctor")
    assert "no-such-thing" in out and 'pip install "remat-kit[plot]"' in out


def test_doctor_finds_a_jax_without_devices(capsys, monkeypatch):
    import jax

    def devices():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "devices", devices)
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "Unable to initialize backend 'tpu'" in out


def test_demo_compares_presets(capsys, monkeypatch):
    small = {"layers": 2, "batch": 2, "length": 8, "width": 16, "heads": 2}
    load = _load.load
    monkeypatch.setattr(_load, "load", lambda spec, settings: load(spec, small))
    status, out, _ = run(capsys, "demo")
    assert status == 0
    for name in ("none", "dots", "dots_no_batch", "minimal", "full"):
        assert name in out
    assert "B/FLOP" in out
    _, out, _ = run(capsys, "demo", "--json")
    reports = json.loads(out)["reports"]
    assert reports["full"]["total_bytes"] < reports["dots"]["total_bytes"] < reports["none"]["total_bytes"]


def test_demo_writes_a_page_and_a_picture_and_says_where(capsys, monkeypatch, tmp_path):
    small = {"layers": 2, "batch": 2, "length": 8, "width": 16, "heads": 2}
    load = _load.load
    monkeypatch.setattr(_load, "load", lambda spec, settings: load(spec, small))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    _, out, _ = run(capsys, "demo")
    page, picture = sorted(tmp_path.glob("*/residuals.*"))
    for path, title in ((page, "As a page:"), (picture, "As a picture:")):
        assert path.stat().st_size > 1000 and re.search(f"{title} +{re.escape(str(path))}", out)


# files ---------------------------------------------------------------------------------------------------------------


def test_commands_write_the_files_that_are_asked_for_and_say_so(capsys, tmp_path):
    page, picture, trace = (tmp_path / name for name in ("r.html", "r.svg", "r.json"))
    asked = [f"--html={page}", f"--plot={picture}"]
    status, _, err = run(capsys, "residuals", "zoo:gpt", *TINY, *asked)
    assert status == 0 and f"wrote {page}" in err and f"wrote {picture}" in err
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>") and "<svg" in picture.read_text()
    page.unlink()
    status, _, err = run(capsys, "residuals", "zoo:gpt", *TINY, "--by=op", f"--html={page}")
    assert status == 0 and page.exists()
    status, _, err = run(capsys, "measure", "zoo:gpt", *TINY, "--target=cpu", *asked, f"--timeline={trace}")
    assert status == 0 and f"wrote {trace}" in err and json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html={}"], "name a file"),
        (["--html={}/"], "name a file"),
        (["--plot={}"], "name a file"),
        (["--plot={}/missing/r.png"], "there is no folder"),
        (["--plot={}/r.xyz"], "the ending says the format"),
        (["--plot={}/r"], "the ending says the format"),
        (["--html={}/r.png", "--plot={}/r.png"], "asked for twice"),
        (["--diff=full", "--plot={}/r.png"], "no picture of a --diff"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_work(capsys, tmp_path, options, message):
    status, out, err = run(capsys, "residuals", "zoo:no_such_model", *(o.format(tmp_path) for o in options))
    assert status == 2 and message in err and not out and "no_such_model" not in err
    assert not list(tmp_path.iterdir())


def test_a_timeline_is_json(capsys, tmp_path):
    status, _, err = run(capsys, "measure", "zoo:no_such_model", f"--timeline={tmp_path}/t.png")
    assert status == 2 and "step.json" in err


def test_demo_tells_which_presets_are_refused(capsys, monkeypatch):
    def residuals(fn, *args, policy=None, **more):
        if policy == "minimal_offloaded":
            raise RematError("offload [host] is not possible")
        return Residuals(())

    monkeypatch.setattr(remat_kit, "residuals", residuals)
    status, out, _ = run(capsys, "demo")
    assert status == 0 and "minimal_offloaded is refused here: offload [host] is not possible" in out


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"remat-kit {remat_kit.__version__}\n", "")


# processes -----------------------------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "remat_kit", "policies", "--json"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        # JAX's CUDA plugin, where installed, says that it found no driver
        assert b"Error" not in process.stderr.read()
        assert process.wait() == 141


def test_interrupt(capsys, monkeypatch):
    def residuals(fn, *args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(remat_kit, "residuals", residuals)
    assert run(capsys, "residuals", "zoo:gpt", *TINY)[0] == 130


def test_names_of_strangers_are_printed_as_they_are(capsys, monkeypatch):
    entry = Residual(Kind.SAVED, ("[bold]x[/nope]",), "sin", (2,), "float32", 8, 8, recompute_flops=1)
    monkeypatch.setattr(remat_kit, "residuals", lambda *args, **more: Residuals((entry,)))
    status, out, _ = run(capsys, "residuals", "zoo:gpt", *TINY)
    assert status == 0 and "[bold]x[/nope]" in out


def test_errors_of_the_package_are_kept_as_they_are(capsys, monkeypatch):
    def residuals(fn, *args, **more):
        raise RematError("fn returns f32[3]: a scalar is needed")

    monkeypatch.setattr(remat_kit, "residuals", residuals)
    message = error(capsys, "residuals", "zoo:gpt", *TINY)
    assert message == "remat-kit: error: fn returns f32[3]: a scalar is needed\n"
