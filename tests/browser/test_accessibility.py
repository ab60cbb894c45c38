"""Reports by keyboard and screen reader: names, focus that is seen, and contrast of all text, light and dark."""

import re

import pytest

from tests.reports import FULL, RESULTS, frontier, results

pytestmark = pytest.mark.browser

# Contrast by WCAG 2.2 (1.4.3, relative luminance) of each text on what lies behind it, all colours of a gradient.
CONTRAST = """() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (css) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = css;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data].map((n) => n / 255);
  };
  const over = ([r, g, b, a], back) => [r, g, b].map((n, i) => n * a + back[i] * (1 - a));
  const light = (c) => {
    const [r, g, b] = c.map((n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const up = (e) => e.parentElement || (e.getRootNode().host ?? null);
  const behind = (e) => {
    if (!e) return [rgba("Canvas").slice(0, 3)];
    const style = getComputedStyle(e);
    const stops = style.backgroundImage.match(/(?:rgba?|color)\\([^()]*\\)/g) || [style.backgroundColor];
    if (stops.every((css) => rgba(css)[3] === 1)) return stops.map((css) => rgba(css).slice(0, 3));
    return behind(up(e)).flatMap((back) => stops.map((css) => over(rgba(css), back)));
  };
  const out = [];
  for (const host of document.querySelectorAll(".remat-kit")) {
    const walker = document.createTreeWalker(host.shadowRoot, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const e = node.parentElement;
      if (!node.data.trim() || e.closest("style, title, .unseen") || !e.getClientRects().length) continue;
      let opacity = 1;
      for (let at = e; at; at = up(at)) opacity *= Number(getComputedStyle(at).opacity);
      const style = getComputedStyle(e);
      const ink = rgba(e.closest("svg") ? style.fill : style.color);
      ink[3] *= opacity;
      const ratios = behind(e).map((back) => {
        const [x, y] = [light(over(ink, back)), light(back)].sort((a, b) => b - a);
        return (x + 0.05) / (y + 0.05);
      });
      out.push([node.data.trim().slice(0, 40), Math.min(...ratios)]);
    }
  }
  return out;
}"""


def activate(page):
    """Shows all there is to be read: kinds that are off at first, groups, values of blocks."""
    while (off := page.locator(".chip[aria-pressed=false]")).count():
        off.first.click()
    while (closed := page.locator("button.twist[aria-expanded=false]")).count():
        closed.first.dispatch_event("click")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["full", *RESULTS])
def test_all_text_stands_out_from_what_is_behind_it(opened, name, scheme):
    page = opened(FULL if name == "full" else results()[name], color_scheme=scheme)
    first = page.evaluate(CONTRAST)
    activate(page)
    found = [*first, *page.evaluate(CONTRAST)]
    assert len(found) > 10 and not [(text, round(r, 2)) for text, r in found if r < 4.5]


def test_the_measure_of_contrast_itself(opened):
    page = opened(results()["findings"], color_scheme="light")
    page.locator(".report").evaluate("e => { e.style.background = '#777777'; e.style.color = '#ffffff'; }")
    assert min(r for _, r in page.evaluate(CONTRAST)) < 4.5
    page.locator(".report").evaluate("e => { e.replaceChildren('word'); e.style.background = '#000000'; }")
    assert page.evaluate(CONTRAST) == [["word", pytest.approx(21)]]


FOCUSED = """() => {
  const at = document.querySelector(".remat-kit").shadowRoot.activeElement;
  if (!at) return null;
  const s = getComputedStyle(at);
  return [at.getAttribute("role") || at.localName, s.outlineStyle, parseFloat(s.outlineWidth)];
}"""


@pytest.mark.parametrize("name", ["residuals", "frontier"])
def test_everything_is_reached_by_the_tab_key_and_seen(opened, name):
    page = opened(FULL if name == "residuals" else frontier())
    reached = []
    while True:
        page.keyboard.press("Tab")
        if (at := page.evaluate(FOCUSED)) is None:
            break
        reached.append(at)
        assert len(reached) < 200
    assert {style for _, style, _ in reached} == {"solid"} and min(width for _, _, width in reached) >= 2
    expected = {
        "residuals": {"button", "treeitem", "input", "select", "region"},
        "frontier": {"button", "input", "region"},
    }
    assert expected[name] <= {kind for kind, _, _ in reached}
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(FOCUSED) is not None  # and back


ROLES = {
    "residuals": ("button", "combobox", "searchbox", "checkbox", "tree", "navigation", "treeitem", "table", "status"),
    "frontier": ("button", "slider", "region", "img", "status"),
}


@pytest.mark.parametrize("name", ROLES)
def test_every_control_has_a_name(opened, name):
    page = opened(FULL if name == "residuals" else frontier())
    for role in ROLES[name]:
        named = page.get_by_role(role) if role == "status" else page.get_by_role(role, name=re.compile(r"\S"))
        assert named.count() == page.get_by_role(role).count() > 0, role


def test_the_table_by_keys(opened):
    page = opened(FULL)
    page.locator("th[data-key=what]").get_by_role("button").press("Enter")
    assert page.locator("th[data-key=what]").get_attribute("aria-sort") == "ascending"
    rows = page.locator(".report table.values tbody tr")
    folded = rows.count()
    times = page.locator("button.times", has_text="x12")
    times.press("Space")
    assert rows.count() == folded + 12
    assert page.evaluate(FOCUSED)[0] == "button"  # the focus stays on it
    page.keyboard.press("Space")
    assert rows.count() == folded
