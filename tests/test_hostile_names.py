"""Names of strangers (of values, paths, blocks, files, policies) stay text: in terminals, in HTML, in messages."""

from __future__ import annotations

import contextlib
import dataclasses
import html.parser
import io
import json
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import remat_kit as rk
from remat_kit import _cli, _globs, _presets, _progress
from remat_kit._show import plan as plan_view
from remat_kit._show import presets as presets_view
from remat_kit._show import program as program_view
from remat_kit._show import text as text_view

HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "[bold red]b[/bold red]",
    "[link=https://x.example]l[/link]",
    "\x1b[31mred\x1b]8;;https://x.example\x07",
    "a\r\nb\tc\x00\x7f\x9b",
    "\u202egnp\u2028\ufeff",
    "{{ 7 * 7 }}{% raw %}&lt;b&gt;&amp;",
    "</td></table></div>",
)
PLAIN = [name for name in HOSTILE if name.isprintable()]


def made_in(file: str):
    """A function whose source file has a name of our choosing."""
    scope = {"jnp": jnp}
    exec(compile("def act(x):\n    return jnp.tanh(x)\n", file, "exec"), scope)  # noqa: S102
    return scope["act"]


def program(name: str):
    """A loss with the name as checkpoint name, scope, block and source file."""
    act = made_in(f"{name}.py".replace("\x00", ""))

    def layer(x):
        return rk.checkpoint_name(act(jnp.sin(x)), name) * jnp.cos(x)

    def loss(w):
        with jax.named_scope(name):
            w = jnp.sin(w)
        return jnp.sum(rk.remat("none", block=name)(layer)(w))

    return loss, jnp.ones((4, 4))


def check_text(out: str) -> None:
    """Nothing in the text moves a cursor, breaks a row or cannot be encoded."""
    bad = {c for c in out if not c.isprintable() and c != "\n"}
    assert not bad, (sorted(map(ascii, bad)), out)
    out.encode()


class Markup(html.parser.HTMLParser):
    """The tags of a page with the names of their attributes, and its words."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(" ".join([tag, *(key for key, _ in attrs)]))

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")

    def handle_data(self, data):
        self.words += data


def check_html(out: str, plain: str, name: str) -> None:
    """The markup is that of the same result with a harmless name, and shows the name."""
    found = Markup(out)
    assert found.tags == Markup(plain).tags
    if name.isprintable():
        assert name in found.words
    check_text(out)


def shown(view) -> list[str]:
    """What a view prints: on a wide terminal with colours, where only its own sequences may be, and without."""
    out = []
    for colours in (False, True):
        file = io.StringIO()
        view(Console(file=file, width=400, force_terminal=colours, color_system="standard" if colours else None))
        text = _without_styles(file.getvalue()) if colours else file.getvalue()
        out.append("\n".join(line.rstrip() for line in text.splitlines()))
        check_text(out[-1])
    assert out[0] == out[1]
    return out


def _without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("name", HOSTILE)
def test_reports(name):
    loss, w = program(name)
    harmless, _ = program("harmless")
    policy = rk.save(op="tanh") | rk.recompute(name=_globs.literal(name) if name in PLAIN else "*")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rk.RematWarning)
        for how in (None, policy):
            report = rk.residuals(loss, w, policy=how)
            (text, _) = shown(report.print)
            if how is None:
                check_html(report._repr_html_(), rk.residuals(harmless, w)._repr_html_(), name)
            check_text(str(report))
            assert not name.isprintable() or name in text
            for key in ("block", "name", "path", "source"):
                sums = report.by(key)
                shown(lambda console, k=key, sums=sums: text_view.print_sums(k, sums, console))
            json.loads(json.dumps(report.to_dict()))
        shown(lambda console: text_view.print_diff(rk.residuals(loss, w, policy="full").diff(report), console))
        shown(lambda console: text_view.print_comparison({name: report}, console))
    traced = rk.trace(loss, w)
    shown(lambda console: program_view.print_program(traced, console))
    check_text(str(traced))
    check_html(traced._repr_html_(), rk.trace(harmless, w)._repr_html_(), name)


@pytest.mark.parametrize("name", HOSTILE)
def test_plans_and_measurements(name):
    loss, w = program(name)
    made = rk.plan(loss, w, target=None, budget="1KiB")
    loaded = rk.Plan.from_dict(_filled(made.to_dict(), name))
    for p in (made, loaded):
        shown(p.print)
        shown(lambda console, p=p: plan_view.print_explanation(p, console))
        for text in (str(p), p.explain(), p.title):
            check_text(text)
    measured = rk.measure(loss, w, against="none")
    hostile = dataclasses.replace(measured, policy=name, target=name, notes=(name,), differences=(name,))
    check_text(str(measured))
    check_text(str(hostile))
    harmless = _filled(made.to_dict(), "harmless")
    check_html(loaded._repr_html_(), rk.Plan.from_dict(harmless)._repr_html_(), name)
    plain = dataclasses.replace(measured, policy="p", target="t", notes=("n",), differences=("d",))
    check_html(hostile._repr_html_(), plain._repr_html_(), name)
    check_text(str(rk.compare(loss, w, policies={name: "full", "none": "none"})))


def _filled(data, name: str):
    """A plan of a stranger's: every text that may be any text is the name."""
    fixed = ("schema", "minimize", "actions", "kind", "action", "policy")
    if isinstance(data, dict):
        return {k: v if k in fixed else _filled(v, name) for k, v in data.items()}
    if isinstance(data, list):
        return [_filled(v, name) for v in data]
    return name if isinstance(data, str) else data


@pytest.mark.parametrize("name", HOSTILE)
def test_messages(name):
    loss, w = program(name)

    def message(call) -> str:
        with pytest.raises(rk.RematError) as caught:
            call()
        check_text(str(caught.value))
        return str(caught.value)

    message(lambda: rk.residuals(loss, w, policy="save name=other"))
    message(lambda: rk.residuals(loss, w, policy={"other": "full"}))
    message(lambda: rk.policy(name))
    message(lambda: rk.policy(f"save name={name}; keep {name}"))
    message(lambda: rk.policy(f"save nme={name}"))
    message(lambda: rk.register(name, "full"))
    message(lambda: rk.target(name))
    message(lambda: rk.zoo.build(name))
    message(lambda: rk.Plan.load(Path("no", name.replace("\x00", ""))))
    stranger = rk.Plan.from_dict(_filled(rk.plan(loss, w, target=None, budget=64).to_dict(), name))
    message(lambda: rk.apply(loss, stranger)(w))
    message(lambda: stranger.policy_for("other"))
    with pytest.warns(rk.RematWarning) as said, rk.override({"other*": "full"}):
        loss(w)
    for warning in said:
        check_text(str(warning.message))


def test_presets_of_strangers():
    rk.register("stranger", "full", doc="".join(HOSTILE))
    try:
        data = [{"name": "stranger", "doc": rk.presets["stranger"].doc, "policy": "save name=[[]b]"}]
        for whole in (False, True):
            shown(lambda console, whole=whole: presets_view.print_presets(data, console, whole=whole))
    finally:
        del _presets._registry["stranger"]


@pytest.mark.parametrize("name", HOSTILE)
def test_commands(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("remat_kit._load.load", lambda spec, settings: (*_program_and_args(name), {}))

    def run(*argv: str) -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with contextlib.suppress(SystemExit):
                _cli.main(list(argv))
        check_text(out.getvalue().replace("\t", ""))
        check_text(err.getvalue())
        return out.getvalue()

    out = run("residuals", "a:b")
    assert "[bold red]" in out or "[bold red]" not in name
    json.loads(run("residuals", "a:b", "--json"))
    run("residuals", "a:b", "--policy", "save name=other")
    run("residuals", "a:b", "--block", f"{name.replace(chr(0), '')}=full")
    run("residuals", name, "--policy", name)
    run("policies", name)
    run("measure", "a:b", "--target", name)
    run("plan", "a:b", "--target", "none", "--budget", "1KiB", "--explain")


def _program_and_args(name: str):
    loss, w = program(name)
    return loss, (w,)


def test_progress(capsys):
    for name in HOSTILE:
        _progress.say(name, True)
        list(_progress.track([name], "compiling", True))
    err = _without_styles(capsys.readouterr().err)
    assert "[bold red]" in err
    check_text(err)
