"""Reports in a notebook that was executed and exported: several in one page, its style, its theme, its keys."""

import re
from pathlib import Path

import pytest

from tests.reports import FULL, RESULTS, frontier, results

pytestmark = pytest.mark.browser

CELLS = (
    "from tests.reports import FULL, HOSTILE_REPORT, frontier, results\nfrom IPython.display import display",
    "FULL",
    "display(HOSTILE_REPORT, FULL)",
    "frontier()",
    "display(*results().values())",
    "display(*results().values())",
)
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(22, 24, 29)"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The page that nbconvert makes of the notebook, less what it fetches itself (fonts and formulas)."""
    import nbclient
    import nbconvert
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    root = {"metadata": {"path": str(Path(__file__).parents[2])}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=root).execute()
    page, _ = nbconvert.HTMLExporter(template_name="lab").from_notebook_node(notebook)
    page = re.sub(r'<script[^>]* src="https://.*?</script>', "", page, flags=re.DOTALL)
    page = re.sub(r'<script type="module">.*?</script>', "", page, flags=re.DOTALL)
    path = tmp_path_factory.mktemp("notebook") / "notebook.html"
    path.write_text(page, encoding="utf-8")
    return path


def ground(page, color):
    """Waits until the first report has a background."""
    at = "document.querySelector('.remat-kit')"
    page.wait_for_function(f"color => getComputedStyle({at}).backgroundColor === color", arg=color, timeout=5000)


def test_reports_of_one_notebook_do_not_meet(opened, exported):
    page = opened(exported)
    hosts = page.locator(".remat-kit")
    assert hosts.count() == 4 + 2 * len(results())
    assert all(hosts.nth(i).evaluate("e => !!e.shadowRoot") for i in range(hosts.count()))
    assert page.locator(".remat-kit [id]").count() == 0  # nothing of one report can be taken for another's
    first, third = hosts.nth(0), hosts.nth(2)
    before = third.locator(".status").inner_text()
    first.get_by_label("Filter").fill("tanh")
    first.get_by_text("1 row, 8.00 KiB", exact=True).wait_for()
    assert third.locator(".status").inner_text() == before
    explorers = page.locator(".remat-kit:has(input[type=range])")
    assert explorers.count() == 3
    others = [explorers.nth(i).locator("svg").get_attribute("data-plan") for i in (1, 2)]
    explorers.first.get_by_role("slider").press("Home")
    explorers.first.get_by_role("slider").press("End")
    assert explorers.first.locator("svg").get_attribute("data-plan") == str(len(frontier()) - 1)
    assert [explorers.nth(i).locator("svg").get_attribute("data-plan") for i in (1, 2)] == others
    for again, name in enumerate(results()):
        pair = [hosts.nth(4 + again + n * len(results())) for n in (0, 1)]
        texts = [p.locator(".report").inner_text() for p in pair]
        assert texts[0] == texts[1] and texts[0], name
    assert page.locator("img, iframe").count() == 0


def test_a_report_in_a_notebook_has_the_figures_and_works(opened, exported):
    host = opened(exported).locator(".remat-kit").first
    rows = host.locator(".report table.values tbody tr")
    sizes = lambda: rows.evaluate_all("rows => rows.map((r) => Number(r.dataset.bytes))")  # noqa: E731
    data = FULL.to_dict()
    assert sum(sizes()) == data["total_bytes"] + data["host_bytes"]
    assert sizes() == sorted(sizes(), reverse=True)
    host.locator("th[data-key=bytes]").get_by_role("button").click()
    assert sizes() == sorted(sizes())
    folded = rows.count()
    host.locator("button.times", has_text="x12").click()
    assert rows.count() == folded + 12
    host.locator("[role=treeitem][data-path=decoder]").click()
    assert sum(sizes()) == sum(e["bytes"] for e in data["entries"] if e["path"].startswith("decoder/"))


def test_the_notebooks_style_and_theme(opened, exported):
    page = opened(exported, color_scheme="dark")
    assert page.locator("body").get_attribute("data-jp-theme-light") == "true"
    ground(page, LIGHT)  # the notebook is light, whatever the reader's own setting is
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    ground(page, DARK)
    cell = page.locator(".remat-kit").first.locator(".report table.values td.what").first
    assert cell.evaluate("e => getComputedStyle(e).textAlign") == "left"  # notebooks align tables to the right


def test_keys_typed_into_a_report_are_not_the_notebooks(opened, exported):
    page = opened(exported)
    page.evaluate("window.heard = []; document.addEventListener('keydown', (e) => heard.push(e.key))")
    page.locator(".remat-kit").first.get_by_label("Filter").press_sequentially("dd")
    assert page.evaluate("heard") == []
    assert page.locator(".remat-kit").first.get_attribute("data-lm-suppress-shortcuts") == "true"


@pytest.mark.parametrize("theme", ["vscode-dark", "vscode-light", "vscode-high-contrast"])
def test_the_theme_of_vscode(opened, theme):
    page = opened(results()["residuals"], color_scheme="dark" if theme == "vscode-light" else "light")
    page.evaluate("theme => document.body.classList.add(theme)", theme)
    ground(page, LIGHT if theme == "vscode-light" else DARK)


def test_the_theme_of_colab(opened):
    page = opened(results()["residuals"], color_scheme="light")
    page.evaluate("document.documentElement.setAttribute('theme', 'dark')")
    ground(page, DARK)


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in ("residuals", "frontier")])
def test_other_results_say_the_same_with_and_without_scripts(opened, name):
    own = opened(results()[name]).locator(".report").inner_text()
    still = opened(results()[name], scripts=False).locator("main").inner_text()
    assert own.split() == still.split() and own.strip()
