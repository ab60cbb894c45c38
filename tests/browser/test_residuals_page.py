"""The residual report in a browser: sort, filter, fold, group, the picture, keys, figures, large programs, names."""

import re
import time

import pytest

from remat_kit import _units as units
from tests.reports import FULL, HOSTILE_REPORT, many, report, residual

pytestmark = pytest.mark.browser
KEPT = FULL.total_bytes + FULL.host_bytes


def column(page, key):
    return [text.strip() for text in page.locator(f".report table.values tbody td[data-key={key}]").all_inner_texts()]


def sizes(page):
    rows = page.locator(".report table.values tbody tr")
    return rows.evaluate_all("rows => rows.map((r) => Number(r.dataset.bytes))")


def shown(page):
    return int(page.locator(".status").get_attribute("data-bytes"))


def show_all(page):
    while (off := page.locator(".chip[aria-pressed=false]")).count():
        off.first.click()


def box(page, path):
    return page.locator(f'[role=treeitem][data-path="{path}"]')


def test_figures_are_those_of_to_dict(opened):
    page, data = opened(FULL), FULL.to_dict()
    totals = {c.get_attribute("data-kind"): int(c.get_attribute("data-bytes")) for c in page.locator(".chip").all()}
    assert totals == {
        "saved": data["total_bytes"],
        "offloaded": data["host_bytes"],
        "alias": data["alias_bytes"],
        "argument": data["argument_bytes"],
        "constant": data["constant_bytes"],
    }
    assert sum(sizes(page)) == shown(page) == data["total_bytes"] + data["host_bytes"]
    show_all(page)
    page.get_by_label("fold identical layers").uncheck()
    assert sorted(sizes(page)) == sorted(e["bytes"] for e in data["entries"])
    top = page.locator("[aria-level='1'], .rest[data-level='1']").all()
    assert sum(int(b.get_attribute("data-bytes")) for b in top) == shown(page)


def test_the_cells_are_those_of_the_text(opened):
    page, text = opened(FULL), str(FULL)
    for cell in (*column(page, "bytes"), *column(page, "what"), *column(page, "shape"), *column(page, "worth")):
        assert cell in text


def test_sort_by_any_column(opened):
    page = opened(FULL)
    head = page.locator("th[data-key=bytes]")
    assert head.get_attribute("aria-sort") == "descending" and sizes(page) == sorted(sizes(page), reverse=True)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending" and sizes(page) == sorted(sizes(page))
    page.locator("th[data-key=what]").get_by_role("button").press("Enter")
    assert column(page, "what") == sorted(column(page, "what"))
    assert head.get_attribute("aria-sort") == "none"
    for th in page.locator("th[data-key]:has(button)").all():
        th.get_by_role("button").click()
        assert th.get_attribute("aria-sort") in ("ascending", "descending")


def test_filter_by_text_and_what_is_read_out(opened):
    page = opened(FULL)
    page.get_by_label("Filter").fill("MLP tanh")
    status = page.locator(".status[aria-live=polite]")
    status.get_by_text("1 row, 8.00 KiB", exact=True).wait_for()
    assert column(page, "what") == ["tanh"] and page.locator("[role=treeitem].leaf").count() == 1
    page.get_by_label("Filter").fill("nothing like it")
    status.get_by_text("0 rows, 0 B", exact=True).wait_for()
    assert page.locator("[role=treeitem]").count() == 0


def test_kinds_are_switched_on_and_off(opened):
    page = opened(FULL)
    page.locator(".chip.saved").click()
    assert column(page, "what") == ["mlp_up"] and page.locator(".chip.saved").get_attribute("aria-pressed") == "false"
    page.locator(".chip.argument").press("Space")
    assert sorted(column(page, "what")) == ["input", "mlp_up"]


def test_fold_and_unfold_identical_layers(opened):
    page = opened(FULL)
    rows = page.locator(".report table.values tbody tr")
    folded = rows.count()
    page.locator("button.times", has_text="x12").click()
    assert rows.count() == folded + 12 and page.locator("tr.inner").count() == 12
    assert page.locator("button.times").get_attribute("aria-expanded") == "true"
    page.locator("button.times").click()
    assert rows.count() == folded
    assert box(page, "layers_{0-11}").get_attribute("aria-label").startswith("layers_{0-11} x12, 1.50 KiB")
    page.get_by_label("fold identical layers").uncheck()
    assert rows.count() == folded + 11 and shown(page) == KEPT


@pytest.mark.parametrize(("by", "key"), [("block", "block"), ("name", "name"), ("op", "op"), ("source line", "source")])
def test_groups_have_the_sums_of_by(opened, by, key):
    page = opened(FULL)
    page.get_by_label("Group by").select_option(label=by)
    rows = page.locator("tr.group")
    found = {r.get_attribute("data-group"): int(r.get_attribute("data-bytes")) for r in rows.all()}
    expected = {"(no source)" if k == "(unknown)" else k: n for k, n in FULL.by(key).items()}
    assert found == expected and list(found.values()) == list(FULL.by(key).values())
    rows.first.get_by_role("button").click()
    assert page.locator("tr.inner").count() >= 1
    inner = sum(int(r.get_attribute("data-bytes")) for r in page.locator("tr.inner").all())
    assert inner == int(rows.first.get_attribute("data-bytes"))


def test_a_module_is_clicked_and_the_way_back(opened):
    page = opened(FULL)
    box(page, "decoder").click()
    inside = sum(e.bytes for e in FULL.entries if e.path.startswith("decoder/"))
    assert shown(page) == sum(sizes(page)) == inside and len(sizes(page)) == 2
    crumbs = page.get_by_role("navigation").get_by_role("button")
    assert crumbs.all_inner_texts() == ["all modules", "decoder"]
    assert crumbs.last.get_attribute("aria-current") == "location"
    box(page, "decoder/mlp").click()
    assert column(page, "what") == ["tanh"]
    crumbs.first.click()
    assert shown(page) == KEPT


def test_the_picture_by_keys(opened):
    page = opened(FULL)
    first = page.locator("[role=treeitem]").first
    first.focus()
    page.keyboard.press("ArrowRight")
    focused = page.locator("[role=treeitem]:focus")
    assert focused.get_attribute("aria-level") == "2"
    assert focused.get_attribute("aria-label") == "layers, 192 KiB, saved 192 KiB"
    page.keyboard.press("ArrowDown")
    assert focused.get_attribute("data-path") == "decoder/mlp"
    page.keyboard.press("ArrowLeft")
    assert focused.get_attribute("data-path") == "decoder"
    assert page.locator("[role=treeitem][tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    assert page.get_by_role("navigation").get_by_role("button").all_inner_texts()[-1] == "decoder"
    assert focused.count() == 1


def test_areas_are_bytes(opened):
    page = opened(FULL)
    whole = page.locator(".icicle").bounding_box()["height"]
    for b in page.locator("[role=treeitem]").all():
        share = int(b.get_attribute("data-bytes")) / KEPT
        assert b.bounding_box()["height"] == pytest.approx(share * whole, abs=0.6)


def test_without_scripts_the_tables_are_there(opened):
    page = opened(FULL, scripts=False)
    text = page.locator("body").inner_text()
    for word in ("attn_out", "layers_{0-11}/mlp x12", "kept on device", "note: something to know"):
        assert word in text
    assert page.get_by_role("button").count() == 0


def test_a_strangers_names_stay_text(opened):
    page = opened(HOSTILE_REPORT)
    show_all(page)
    page.get_by_label("fold identical layers").uncheck()
    page.get_by_label("Group by").select_option(label="name")
    for twist in page.locator("tr.group button").all():
        twist.click()
    page.get_by_label("Filter").fill("<script>")
    page.locator(".status", has_text=re.compile(r"^[1-3] rows?,")).wait_for()
    for item in page.locator("[role=treeitem]").all()[:1]:
        item.click()
    assert page.locator("img, iframe, a, b, i").count() == 0
    assert page.locator("script").count() == 2
    assert page.evaluate("document.title") == "Residuals - remat-kit"


def test_figures_are_written_as_in_python(opened):
    """The page's own figures, of sums and of single values, at the places where rounding is a tie too."""
    amounts = [0, 1, 1023, 1024, 1152, 1408, 1536, 12928, 123_456, 2**20 - 1, 10**9, 5 * 2**30 + 7, 2**45 + 1]
    entries = [
        residual(op=f"o{i}", shape=(n,), bytes=n, recompute_flops=flops)
        for i, n in enumerate((*amounts, *range(1025, 9000, 123)))
        for flops in (0, 3, 7 * n + 1)
    ]
    page = opened(report(*entries))
    page.get_by_label("fold identical layers").uncheck()
    while page.locator(".more button").count():
        page.locator(".more button").click()
    found, whole = sizes(page), sum(e.bytes for e in entries)
    assert sorted(found) == sorted(e.bytes for e in entries)
    assert column(page, "bytes") == [units.format_bytes(size) for size in found]
    assert column(page, "share") == [units.format_share(size, whole) for size in found]
    expected = sorted((units.format_flops(e.recompute_flops), units.format_ratio(e.bytes_per_flop)) for e in entries)
    assert sorted(zip(column(page, "flops"), column(page, "worth"), strict=True)) == expected


def test_ten_thousand_residuals_open_quickly(opened, tmp_path):
    path = many(10_000).to_html(tmp_path / "large.html")
    start = time.perf_counter()
    page = opened(path)
    page.locator(".report table.values tbody tr").first.wait_for()
    took = time.perf_counter() - start
    start = time.perf_counter()
    page.get_by_label("Filter").fill("activation_5")
    page.locator(".status", has_text="rows").wait_for()
    page.wait_for_function(
        "() => document.querySelector('.remat-kit').shadowRoot.querySelector('.status').dataset.rows < 3000"
    )
    filtered = time.perf_counter() - start
    print(f"\n10^4 residuals: {path.stat().st_size / 1e6:.2f} MB, open in {took:.2f} s, filtered in {filtered:.2f} s")
    assert path.stat().st_size < 5_000_000
    assert {"activation_5", "activation_50"} <= set(column(page, "what"))
    assert took < 10  # it does not hang; what it takes is printed
    page.locator(".chip.offloaded").click()
    page.get_by_label("fold identical layers").uncheck()
    assert page.locator(".report table.values tbody tr").count() <= 200
