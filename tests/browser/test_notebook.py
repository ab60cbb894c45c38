"""Reports in a notebook that was executed and exported: several in one page, its style, its theme, its keys."""

import re

import pytest

from tests.reports import RESULTS, frontier, results

pytestmark = pytest.mark.browser

CELLS = (
    "from tests.reports import FULL, HOSTILE_REPORT, frontier, results\nfrom IPython.display import display",
    "FULL",
    "display(HOSTILE_REPORT, FULL)",
    "frontier()",
    "display(*results().values())",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The page that nbconvert makes of the notebook, less what it fetches itself (fonts and formulas)."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    nbconvert = pytest.importorskip("nbconvert")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    client.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    page, _ = nbconvert.HTMLExporter(template_name="lab").from_notebook_node(notebook)
    page = re.sub(r'<script[^>]* src="https://.*?</script>', "", page, flags=re.DOTALL)
    page = re.sub(r'<script type="module">.*?</script>', "", page, flags=re.DOTALL)
    path = tmp_path_factory.mktemp("notebook") / "notebook.html"
    path.write_text(page, encoding="utf-8")
    return path


def test_reports_of_one_notebook_do_not_meet(opened, exported):
    page = opened(exported)
    hosts = page.locator(".remat-kit")
    assert hosts.count() == 4 + len(results())
    assert all(hosts.nth(i).evaluate("e => !!e.shadowRoot") for i in range(hosts.count()))
    first, third = hosts.nth(0), hosts.nth(2)
    before = third.locator(".status").inner_text()
    first.get_by_label("Filter").fill("tanh")
    first.get_by_text("1 row, 8.00 KiB", exact=True).wait_for()
    assert third.locator(".status").inner_text() == before
    explorer = page.locator(".remat-kit:has(input[type=range])").first
    explorer.get_by_role("slider").press("End")
    assert explorer.locator("svg").get_attribute("data-plan") == str(len(frontier()) - 1)
    assert page.locator("img, iframe").count() == 0


def test_the_notebooks_style_and_theme(opened, exported):
    page = opened(exported, color_scheme="dark")
    host = page.locator(".remat-kit").first
    ground = lambda: host.evaluate("e => getComputedStyle(e).backgroundColor")  # noqa: E731
    assert page.locator("body").get_attribute("data-jp-theme-light") == "true"
    assert ground() == "rgb(255, 255, 255)"  # the notebook is light, whatever the reader's own setting is
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    page.wait_for_timeout(50)
    assert ground() == "rgb(22, 24, 29)"
    cell = host.locator(".report table.values td.what").first
    assert cell.evaluate("e => getComputedStyle(e).textAlign") == "left"  # notebooks align tables to the right


def test_keys_typed_into_a_report_are_not_the_notebooks(opened, exported):
    page = opened(exported)
    page.evaluate("window.heard = []; document.addEventListener('keydown', (e) => heard.push(e.key))")
    page.locator(".remat-kit").first.get_by_label("Filter").press_sequentially("dd")
    assert page.evaluate("heard") == []
    assert page.locator(".remat-kit").first.get_attribute("data-lm-suppress-shortcuts") == "true"


@pytest.mark.parametrize("theme", ["vscode-dark", "vscode-light", "vscode-high-contrast"])
def test_the_theme_of_vscode(opened, tmp_path, theme):
    page = opened(results()["residuals"], color_scheme="dark" if theme == "vscode-light" else "light")
    page.evaluate("theme => document.body.classList.add(theme)", theme)
    page.wait_for_timeout(50)
    ground = page.locator(".remat-kit").evaluate("e => getComputedStyle(e).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if theme == "vscode-light" else "rgb(22, 24, 29)")


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in ("residuals", "frontier")])
def test_other_results_say_the_same_with_and_without_scripts(opened, name):
    own = opened(results()[name]).locator(".report").inner_text()
    still = opened(results()[name], scripts=False).locator("main").inner_text()
    assert own.split() == still.split() and own.strip()
