"""The plan explorer in a browser: the slider, the figures of each plan, blocks and values, the policy to copy."""

import ast
import re

import pytest

import remat_kit as rk
from remat_kit import _units as units
from remat_kit._show.plan import policy_text
from tests.reports import arguments, frontier, hostile_results, loss

pytestmark = pytest.mark.browser


def plan_at(page):
    return int(page.locator("svg").get_attribute("data-plan"))


def figures(page):
    cards = page.locator(".cards > div").all()
    return {c.get_attribute("data-key"): c.get_attribute("data-value") for c in cards}


def slide(page, n):
    page.get_by_role("slider").fill(str(n))


def choose(page, n):
    while plan_at(page) > n:
        page.get_by_role("button", name="Plan with less memory").click()
    while plan_at(page) < n:
        page.get_by_role("button", name="Plan with more memory").click()


def test_figures_of_every_plan_are_those_of_to_dict(opened):
    f = frontier()
    page, plans = opened(f), f.to_dict()["plans"]
    for n, (p, data) in enumerate(zip(f, plans, strict=True)):
        choose(page, n)
        found = figures(page)
        measured = data["measured"] and data["measured"]["peak_bytes"]
        assert found["compiled_bytes"] == (None if measured is None else str(measured))
        assert int(found["corrected_bytes"]) == data["predicted"]["corrected_bytes"]
        assert int(found["recompute_flops"]) == data["predicted"]["recompute_flops"]
        assert float(found["remat_seconds"]) == data["predicted"]["remat_seconds"]
        assert float(found["gap"]) == p.gap
        kept = sum(int(r.get_attribute("data-kept")) for r in page.locator("tr[data-block]").all())
        assert kept == sum(b["kept_bytes"] for b in data["blocks"])
        assert ("compiled" in page.locator(".status").inner_text()) == (measured is not None)
        assert units.format_seconds(p.cost) in page.locator(".status").inner_text()


def test_the_slider_finds_the_cheapest_plan_within_the_budget(opened):
    f = frontier()
    page = opened(f)
    slider = page.get_by_role("slider")
    low, high = int(slider.get_attribute("min")), int(slider.get_attribute("max"))
    for n in range(20):
        slide(page, low + (high - low) * n // 19)
        budget = int(page.locator("output").get_attribute("data-bytes"))
        expected = f.within(budget)
        assert plan_at(page) == (list(f).index(expected) if expected else 0)
        assert ("No plan keeps within" in page.locator(".status").inner_text()) == (expected is None)
        assert units.format_bytes(budget) in slider.get_attribute("aria-valuetext")


def test_the_slider_by_keys(opened):
    page = opened(frontier())
    slider = page.get_by_role("slider")
    slider.focus()
    page.keyboard.press("End")
    assert plan_at(page) == len(frontier()) - 1
    before = int(slider.input_value())
    page.keyboard.press("ArrowLeft")
    assert int(slider.input_value()) < before
    page.keyboard.press("Home")
    assert page.locator(".status").inner_text().startswith("No plan keeps within")


def test_what_becomes_of_each_value(opened):
    f = frontier()
    page = opened(f)
    n = max(range(len(f)), key=lambda i: len({v.action for b in f[i].blocks for v in b.values}))
    choose(page, n)
    for button in page.locator("tr[data-block] button[aria-expanded=false]").all():
        button.click()
    rows = page.locator("tr.detail tbody tr").all()
    figures = ("data-label", "data-action", "data-bytes")
    shown = {tuple(r.get_attribute(key) for key in figures) for r in rows}
    assert shown == {(v.label, v.action, str(v.bytes)) for b in f[n].blocks for v in b.values}
    assert len({action for _, action, _ in shown}) == 2
    for row in page.locator("tr[data-block]:has(.strip)").all():
        assert row.locator(".strip").get_attribute("aria-label")


def test_what_changed_from_one_plan_to_the_next(opened):
    f = frontier()
    page = opened(f)
    treated = [{v.label: v.action for v in p.blocks[0].values} for p in f]
    n = next(n for n in range(len(f) - 1) if any(treated[n + 1].get(v, a) != a for v, a in treated[n].items()))
    choose(page, n)
    choose(page, n + 1)
    rows = page.locator("tr.detail").first.locator("tbody tr").all()
    said = {r.get_attribute("data-label"): " was " in r.inner_text() for r in rows}
    assert said == {v: treated[n].get(v, action) != action for v, action in treated[n + 1].items()} and any(
        said.values()
    )


def test_the_policy_is_copied_and_is_the_plan(opened):
    f = frontier()
    page = opened(f, permissions=["clipboard-read", "clipboard-write"])
    choose(page, 2)
    page.get_by_role("button", name="Copy").click()
    page.get_by_text("copied", exact=True).wait_for()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text == policy_text(f[2])
    args = arguments()
    kept = rk.residuals(loss, *args, policy=ast.literal_eval(text))
    assert kept.total_bytes == rk.residuals(loss, *args, policy=f[2]).total_bytes


def test_the_policy_is_copied_where_there_is_no_clipboard(opened):
    page = opened(frontier())
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.get_by_role("button", name="Copy").click()
    page.get_by_text("copied", exact=True).wait_for()


def test_the_curve_has_every_plan_and_preset(opened):
    f = frontier()
    page = opened(f)
    points = page.locator("circle.plan").all()
    assert [int(c.get_attribute("data-peak")) for c in points] == [p.peak_bytes for p in f]
    assert [float(c.get_attribute("data-cost")) for c in points] == [p.cost for p in f]
    assert page.locator("circle.compiled").count() == 2
    names = [n for g in page.locator("g.preset").all() for n in g.get_attribute("data-names").split()]
    text = page.locator(".far").inner_text() if page.locator(".far").count() else ""
    assert names and sorted([*names, *re.findall(r"(\w+) \(", text)]) == sorted(r.name for r in f[0].rivals)
    assert page.locator("line.memory").count() == 1
    points[1].click()
    assert plan_at(page) == 1


def test_without_scripts_the_table_of_plans_is_there(opened):
    page = opened(frontier(), scripts=False)
    text = page.locator("body").inner_text()
    assert all(units.format_bytes(p.peak_bytes) in text for p in frontier())


@pytest.mark.parametrize("name", ["frontier", "measurement", "comparison", "plan", "check", "diff"])
def test_a_strangers_names_stay_text(opened, name):
    page = opened(hostile_results()[name])
    while (closed := page.locator("button.twist[aria-expanded=false]")).count():
        closed.first.dispatch_event("click")
    assert page.locator("img, iframe, a, b, i").count() == 0
    assert page.get_by_text("<img src=x onerror=alert(4)>").count() > 0
