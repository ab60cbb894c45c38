"""Results as HTML, without a browser: what is in a page, what is not, and that its figures are the result's own.

`tests/browser` opens these pages.
"""

import ast
import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

import remat_kit as rk
from remat_kit._show import draw, embed, html, palette
from remat_kit._show.parts import Figures, Line, Pairs, Table
from remat_kit._show.plan import policy_text
from remat_kit._units import printable
from tests.reports import (
    FULL,
    HOSTILE,
    HOSTILE_IN_PAGES,
    HOSTILE_REPORT,
    HOSTILES,
    RESULTS,
    arguments,
    frontier,
    hostile_results,
    loss,
    many,
    report,
    residual,
    results,
)

PLAIN = {"div", "table", "tr", "th", "td", "thead", "tbody", "h2", "p", "span", "script"}


class Page(HTMLParser):
    """What a parser makes of a page: its tags, its text, its attributes and its scripts by type."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.attributes, self.scripts, self.inside = [], [], [], {}, None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = dict(attrs).get("type", "code") if tag == "script" else tag if tag == "style" else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside is None:
            self.words.append(data)
        else:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    @property
    def text(self):
        return "".join(self.words)

    @property
    def data(self):
        return json.loads(self.scripts["application/json"])


def entries(data):
    """The entries that a residual report's page holds, as rows."""
    columns = {k: [data["texts"][n] for n in v] if k in data["texted"] else v for k, v in data["entries"].items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_a_fragment_that_fetches_nothing_and_says_what_its_text_says(name):
    result = results()[name]
    page = Page(result._repr_html_())
    assert set(page.tags) <= PLAIN
    assert {k for k, _ in page.attributes} <= {"class", "style", "type", "data-bytes"}
    addresses = set(re.findall(r"\w+://[^\s\"']*", "".join(page.scripts.values())))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name space, not a place
    assert not re.search(r"\bimport\b|fetch\(|XMLHttp|url\(|@import", page.scripts["code"])
    out = io.StringIO()
    shown = html._SHOWN[type(result)]
    parts = [p for p in shown.view(result) if isinstance(p, (Line, Pairs, Figures, Table))]
    draw.draw(parts, Console(file=out, width=4000))
    words = set(re.findall(r"\S+", re.sub("[─-]{3,}", "", out.getvalue())))
    assert words <= set(re.findall(r"\S+", " ".join(page.words))), name


def test_rows_of_values_have_the_cells_of_the_text():
    page = Page(FULL._repr_html_())
    for word in ("predicted", "attn_out", "layers_{0-11}/mlp x12", "offloaded to host", "alias of", "bf16[12,8,1024]"):
        assert word in page.text


@pytest.mark.parametrize("name", HOSTILES)
def test_a_strangers_names_stay_text(name):
    page = Page(hostile_results()[name]._repr_html_())
    assert set(page.tags) <= PLAIN
    assert {k for k, _ in page.attributes} <= {"class", "style", "type", "data-bytes"}
    own = Page(results()[name]._repr_html_())
    assert page.scripts["code"] == own.scripts["code"]
    assert page.tags.count("script") == own.tags.count("script")
    assert "<img src=x onerror=alert(4)>" in page.text and "\x1b" not in page.text and "\u202e" not in page.text


def test_data_in_a_page_cannot_end_its_element():
    text = embed.as_json({name: name for name in HOSTILE_IN_PAGES})
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(text) == {name: name for name in HOSTILE_IN_PAGES}
    with pytest.raises(ValueError):
        embed.as_json(float("inf"))


def test_the_page_of_a_report_holds_its_figures():
    for r in (FULL, HOSTILE_REPORT, results()["residuals"]):
        found, data = Page(r._repr_html_()).data, r.to_dict()
        rows = entries(found)
        for key, own in (("bytes", "bytes"), ("global_bytes", "global_bytes"), ("flops", "recompute_flops")):
            assert [row[key] for row in rows] == [e[own] for e in data["entries"]]
        for key in ("op", "path", "block", "dtype", "source"):
            assert [row[key] for row in rows] == [printable(e[key]) for e in data["entries"]]
        totals = {t["kind"]: t["bytes"] for t in found["totals"]}
        assert totals == {
            "saved": data["total_bytes"],
            "offloaded": data["host_bytes"],
            "alias": data["alias_bytes"],
            "argument": data["argument_bytes"],
            "constant": data["constant_bytes"],
        }


def test_identical_layers_share_a_group():
    found = Page(FULL._repr_html_()).data
    layers = {row["group"] for row in entries(found) if row["op"] == "exp"}
    assert [found["texts"][found["groups"][g]] for g in layers] == ["layers_{0-11}/mlp"]


def test_the_explorer_holds_the_frontiers_figures():
    f = frontier()
    found, data = Page(f._repr_html_()).data, f.to_dict()
    assert len(found["plans"]) == len(data["plans"]) > 1
    for shown, row, own in zip(found["plans"], f.rows(), data["plans"], strict=True):
        for key in ("peak_bytes", "peak_is", "host_bytes", "recompute_flops", "remat_seconds", "cost", "gap"):
            assert shown[key] == row[key]
        assert shown["compiled_bytes"] == (own["measured"] and own["measured"]["peak_bytes"])
        assert sum(b["kept_bytes"] for b in shown["blocks"]) == sum(b["kept_bytes"] for b in own["blocks"])
        assert sum(b["flops"] for b in shown["blocks"]) == sum(b["flops"] for b in own["blocks"])
        labels = {found["values"][i]["label"] for b in shown["blocks"] for i in b["values"]}
        assert labels == {v["label"] for b in own["blocks"] for v in b["values"]}
    assert {p["name"] for p in found["presets"]} == {r.name for r in f[0].rivals}


@pytest.mark.parametrize("names_only", [False, True])
def test_the_policy_to_copy_is_the_plan(names_only):
    args = arguments()
    for p in frontier(names_only):
        text = policy_text(p)
        policy = text if names_only else ast.literal_eval(text)
        kept = rk.residuals(loss, *args, policy=policy)
        assert kept.total_bytes == rk.residuals(loss, *args, policy=p).total_bytes


def test_pages_are_written_whole_and_in_utf8(tmp_path):
    path = tmp_path / "report.html"
    noted = report(residual(path="日本語"), notes=("größer",))
    assert noted.to_html(str(path)) == path
    page = Page(path.read_text(encoding="utf-8"))
    assert ("charset", "utf-8") in page.attributes and ("lang", "en") in page.attributes
    assert "日本語" in page.text and "größer" in page.text and "Residuals - remat-kit" in page.text
    assert any(k == "content" and "default-src 'none'" in v for k, v in page.attributes)


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(rk.RematError, match="cannot write the page.*nowhere"):
        FULL.to_html(tmp_path / "nowhere" / "report.html")
    with pytest.raises(rk.RematError, match="cannot write the page"):
        FULL.to_html(tmp_path)
    with pytest.raises(rk.RematError, match="named by a path; got 1"):
        FULL.to_html(1)


def test_the_same_report_is_the_same_page():
    assert (
        FULL._repr_html_() == report(*FULL.entries, policy="dots", blocks=FULL.blocks, notes=FULL.notes)._repr_html_()
    )


def test_large_reports_stay_small_pages(tmp_path):
    path = many(10_000).to_html(tmp_path / "large.html")
    page = Page(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 5_000_000
    assert page.tags.count("tr") < 200 and "more (" in page.text  # without scripts: the largest, and how many more
    assert len(page.data["entries"]["bytes"]) == 10_000


def test_empty_reports():
    assert "No intermediate value is kept" in Page(report()._repr_html_()).text
    page = Page(report(policy=HOSTILE)._repr_html_())
    assert page.data["entries"]["bytes"] == [] and "{{ 7 * 7 }}" in page.text


def test_colours_are_those_of_the_pictures():
    style = html._asset("report.css")
    for word, colour in (("saved", palette.SAVED), ("offloaded", palette.OFFLOADED), ("recompute", palette.RECOMPUTED)):
        assert f"--{word}: {colour};" in style


def test_scripts_never_turn_text_into_markup():
    for name in ("base.js", "residuals.js", "explorer.js"):
        script = html._asset(name)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", script)
        assert "</" not in script and "<!--" not in script
