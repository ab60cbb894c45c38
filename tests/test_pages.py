"""The documentation runs: every block of code on every page, and what it prints is what the page shows."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pages
import pytest
from matplotlib import pyplot
from pages import ROOT, Page, blocks
from programs import OLD_REMAT3

import remat_kit as rk
from remat_kit import _globs, _names

OPTIMIZED = True  # what is compiled is shown

NEWEST = jax.__version_info__ >= (0, 12) and not jax.config.jax_remat3  # what the pages show
_TINY = "layers=2, batch=2, length=16, width=16, heads=2, vocab=64"
_SET = " ".join(f"--set {size}" for size in _TINY.split(", "))
_GPT = {
    "layers=12, length=1024, width=768, heads=12, vocab=50304": "layers=2, length=16, width=16, heads=2, vocab=64",
    "batch=16": "batch=2",
    '"tpu:v5e"': '"cpu"',
}
# What is made smaller before a page is run: sizes, the number of compiles, and targets that may be missing. What is
# printed then is not compared (see `Page`). Each text has to be there, when those before it are replaced.
SMALLER: dict[str, dict[str, str]] = {
    "README.md": {
        "batch=16, layers=12, length=1024, width=768, heads=12, vocab=50304": _TINY,
        '"tpu:v5e"': '"cpu"',
        'budget="6GiB"': 'budget="6GiB", compiles=1',
    },
    "docs/fit.md": {
        **_GPT,
        '"cuda:h100"': '"cpu"',
        "grad=False, multiple=4)": 'grad=False, multiple=4, budget="256KiB")',
        "jax.ShapeDtypeStruct((n, 1025)": "jax.ShapeDtypeStruct((n, 17)",
        '((1024, 4096), "float32")': '((8, 16), "float32")',
        '((4096, 1024), "float32"))]': '((16, 8), "float32"))]',
        "x = jax.ShapeDtypeStruct((4096, 1024)": "x = jax.ShapeDtypeStruct((4, 8)",
        "layers=4, batch=4, length=128, width=256, heads=4, vocab=1024": _TINY,
        "layers=4, batch=8, width=384, heads=6": "layers=2, batch=2, width=16, heads=2",
    },
    "docs/plan.md": {
        "--set batch=16 --set vocab=50304 --target tpu:v5e": f"{_SET} --target cpu",
        "--budget 6GiB --explain": "--budget 6GiB --compiles 0 --explain",
        "--points 8": "--points 3 --compiles 0",
        **_GPT,
        "points=8, compiles=3": "points=3, compiles=0",
        "layers=4, batch=n, length=256, width=256, heads=4, vocab=1024": _TINY.replace("batch=2", "batch=n"),
        'budget="1GiB", target="cpu", multiple=8': 'budget="256KiB", target="cpu", multiple=32',
        'target="cpu")\nprint(plan)': 'target="cpu", compiles=1)\nprint(plan)',
        'target="cpu"))': 'target="cpu", compiles=1))',
        "names_only=True)\n": "names_only=True, compiles=1)\n",
    },
    "docs/pictures.md": {
        "layers=4, batch=4, length=128, width=128, heads=4, vocab=512": _TINY,
        "points=6, compiles=2": "points=3, compiles=1",
    },
    "docs/see.md": {
        "layers=4, batch=4, length=128, width=128, heads=4, vocab=512": _TINY,
        'target="tpu:v5e")': 'target="cpu", points=3, compiles=0)',
    },
    "docs/index.md": {
        "--target tpu:v5e --budget 12GiB": f"{_SET} --target cpu --budget 12GiB",
        "--target tpu:v5e --budget 6GiB": f"{_SET} --target cpu --compiles 0 --budget 6GiB",
        'budget="14GiB", target="tpu:v5e"': 'budget="14GiB", target="cpu", compiles=0',
        "rk.check(loss, params, batch)": 'rk.check(loss, params, batch, derivatives="reverse")',
        '"tpu:v5e"': '"cpu"',
        '"cuda:h100"': '"cpu"',
    },
    "docs/inspect.md": {"my_package.my_module:factory": "zoo:rnn"},
    "docs/lint.md": {"package.module:factory": "zoo:rnn", 'target="tpu:v5e"': 'target="cpu"'},
    "docs/notebooks/inspect.ipynb": {"layers=4, batch=16, width=128, heads=4": "layers=2, batch=2, width=16, heads=2"},
    "docs/notebooks/plan.ipynb": {
        "layers=8, batch=8, length=128, width=128, heads=4, vocab=512": _TINY,
        'minimize="flops")\nplan': 'minimize="flops", compiles=1)\nplan',
        "points=6, compiles=3": "points=3, compiles=0",
    },
}
QUICK = {f"docs/{name}.md" for name in ("concepts", "examples", "flax", "inspect", "lint", "loops", "policies", "see")}
# Not run here: pages whose blocks have tests of their own, with a program around each, and pages without code.
ELSEWHERE = {
    "docs/migration.md": "test_migration.py",
    "docs/comparison.md": "",
    "docs/inside.md": "",
    "docs/reference.md": "",
    "docs/reference_policies.md": "",
}
PAGES = [p for p in pages.paths() if p not in ELSEWHERE]
# How many outputs of a page are compared, and how many blocks of each kind there are in all.
COMPARED = {
    "README.md": 4,
    "docs/apply.md": 1,
    "docs/check.md": 3,
    "docs/concepts.md": 2,
    "docs/faq.md": 8,
    "docs/loops.md": 1,
    "docs/start.md": 5,
}
KINDS = {
    ("output", ""): 51,
    ("output", "figures vary"): 2,
    ("output", "not compared"): 2,
    ("python", ""): 105,
    ("python", "not run"): 9,
    ("shell", ""): 14,
    ("toml", ""): 1,
}
NOT_RUN = {"docs/examples.md": 4, "docs/fit.md": 3, "docs/loops.md": 1, "docs/plan.md": 1}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory, where modules are found; a width of 100 columns; pictures without windows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")
    for name, module in list(sys.modules.items()):
        if name == "a_page" or str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("path", [pytest.param(p, marks=() if p in QUICK else pytest.mark.slow) for p in PAGES])
@pytest.mark.skipif(OLD_REMAT3, reason="jax_remat3 of JAX 0.10.2 ignores offloading, and remat_kit refuses it")
def test_a_page_runs_and_prints_what_it_shows(path: str, workplace: None) -> None:
    page = Page(path, SMALLER.get(path, {}), compare=NEWEST)
    wrong = list(page.run())
    assert not wrong, "\n\n".join(wrong)
    assert page.compared == (COMPARED.get(path, 0) if NEWEST else 0)


@pytest.mark.parametrize("path", SMALLER)
def test_what_is_made_smaller_is_on_the_page(path: str) -> None:
    made = "".join(b.text for b in blocks(path) if b.kind in ("python", "shell") and b.mark != "not run")
    for old, new in SMALLER[path].items():
        assert old in made, f"{path} has no {old!r}"
        made = made.replace(old, new)
    assert not re.search(r"\b(tpu|cuda):\w", made)


def test_every_block_is_run_or_says_why_not() -> None:
    """The number of blocks of each kind: a block that a mistake in a page hides is missed here."""
    here = {p: blocks(p) for p in PAGES}
    kinds = Counter((b.kind, b.mark) for found in here.values() for b in found)
    assert kinds == KINDS
    reasons = {p: [b.why for b in found if b.mark == "not run"] for p, found in here.items()}
    assert {p: len(why) for p, why in reasons.items() if why} == NOT_RUN
    assert all(b.why for found in here.values() for b in found if b.mark)
    fences = sum((ROOT / p).read_text().count("```") for p in PAGES if p.endswith(".md"))
    assert fences == 2 * sum(len(found) for p, found in here.items() if p.endswith(".md"))


def test_pages_that_are_not_run_have_no_code_or_tests_of_their_own() -> None:
    for path, tests in ELSEWHERE.items():
        if tests:
            assert (ROOT / "tests" / tests).exists()
        else:
            assert not [b for b in blocks(path) if b.kind in ("python", "shell")]


# What the site is made of ---------------------------------------------------------------------------------------------


def test_notebooks_are_committed_without_output() -> None:
    for path in ROOT.glob("docs/notebooks/*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None


def test_every_page_is_in_the_navigation_and_every_picture_on_a_page() -> None:
    docs = ROOT / "docs"
    config = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.(?:md|ipynb))$", config, re.MULTILINE)
    there = [p.relative_to(docs).as_posix() for p in (*docs.rglob("*.md"), *docs.rglob("*.ipynb"))]
    assert sorted(listed) == sorted(there)
    text = "".join((docs / p).read_text() for p in there)
    for picture in docs.glob("images/*.png"):
        assert f"images/{picture.name}" in text
        assert picture.stat().st_size < 200_000


def hooks() -> Any:
    """docs/hooks.py, as mkdocs loads it."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_policies_has_the_registry() -> None:
    made = html.unescape(hooks().on_page_markdown((ROOT / "docs" / "reference_policies.md").read_text()))
    assert "<!--" not in made and "\\|" not in made
    rows = {}
    for line in re.findall(r"^\| `.*$", made, re.MULTILINE):
        name, *cells = re.split(r" ?\|(?= |$) ?", line)[1:-1]
        rows[name.strip("`")] = [re.sub(r"</?code>", "`", cell).strip() for cell in cells]
    for name, preset in rk.presets.items():
        doc, text, in_jax, aliases = rows.pop(name)
        assert doc == preset.doc and policy_of(text, preset) == preset
        if called := re.sub(r"[`(.)]", "", in_jax):
            assert hasattr(jax.checkpoint_policies, called)
            if "(" not in in_jax:
                assert rk.policy(getattr(jax.checkpoint_policies, called)) == preset
        for alias in filter(None, re.split(r"[`, ]+", aliases)):
            assert rk.policy(alias) == preset
    assert rows.keys() == _names.VOCABULARY.keys()
    for name, cells in rows.items():
        assert cells[0] == _names.VOCABULARY[name]
        for shown in re.findall(r"`([^`]+)`", " ".join(cells[1:])):
            assert any(re.fullmatch(shown.replace(".", r"\.").replace("*", ".*"), s) for s in _names.spellings(name))


def policy_of(shown: str, preset: rk.Policy) -> rk.Policy:
    """The policy that a row shows as text, names in all spellings as presets have them."""
    text = shown.strip("`")
    found = rk.policy(text)
    if not preset.exact_names():
        return found
    spelled = lambda m: "name=" + "|".join(_globs.literal(s) for n in m[1].split("|") for s in _names.spellings(n))  # noqa: E731
    return rk.policy(re.sub(r"name=([^ ;]+)", spelled, text))


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    listed = re.findall(r"^ +- (\w+)$", text, re.MULTILINE)
    modules = {"linen", "nnx", "testing", "zoo"}
    # `checkpoint` is `remat`, `presets` has a page of its own
    assert set(listed) | modules | {"checkpoint", "presets", "__version__"} == set(dir(rk))
    assert len(listed) == len(set(listed))
    assert set(re.findall(r"^::: remat_kit\.(\w+)$", text, re.MULTILINE)) == modules
