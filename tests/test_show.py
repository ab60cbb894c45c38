"""Reports as text, from reports made by hand."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from remat_kit import _units as units
from remat_kit._errors import RematError
from remat_kit._show import layout, rows, text
from remat_kit._trace.report import Kind
from tests.reports import FULL, HOSTILE, report, residual


def drawn(value, width=100, **options):
    out = io.StringIO()
    value.print(Console(file=out, width=width, color_system=None, force_terminal=False), **options)
    return out.getvalue()


def lines_with(output, word):
    return [line for line in output.splitlines() if word in line]


def test_head_says_policy_blocks_and_that_figures_are_predicted():
    output = str(FULL)
    head = output[: output.index("attn_out")]
    assert "dots" in head and "decoder/layers" in head and "predicted" in head


def test_rows_are_sorted_by_bytes_and_identical_layers_are_one_row():
    output = drawn(FULL, width=140)
    table = output[: output.index("Aliases")]
    order = [table.index(word) for word in ("attn_out", "tanh", "exp", "mlp_up")]
    assert order == sorted(order)
    (layers,) = lines_with(table, "exp")
    assert "layers_{0-11}/mlp x12" in layers and "1.50 KiB" in layers


def test_totals_keep_aliases_host_arguments_and_constants_apart():
    output = drawn(FULL)
    totals = dict(re.findall(r"^(\w[\w ]*?)  +(\d\S* \w+)", output, re.MULTILINE))
    assert FULL.total_bytes == 2 * (12 * 8 * 1024 + 4096 + 12 * 64)
    assert totals["kept on device"] == units.format_bytes(FULL.total_bytes)
    assert totals["aliases"] == "192 KiB"
    assert totals["offloaded to host"] == "128 B"
    assert totals["arguments"] == "200 B"
    assert totals["constants"] == "20 B"
    assert "note: something to know" in output


def test_zero_totals_are_left_out():
    output = drawn(report(residual()))
    assert "kept on device" in output
    assert not any(word in output for word in ("aliases", "offloaded", "arguments", "constants"))


def test_aliases_and_offloaded_values_are_flagged():
    output = drawn(FULL, width=140)
    assert "attn_out" in lines_with(output, "reshape")[0]
    assert "host" in lines_with(output, "mlp_up")[0]
    assert "saved" in lines_with(output, "tanh")[0]


def test_global_bytes_are_given_where_they_differ():
    assert "over all devices" not in drawn(report(residual(bytes=1024)))
    assert "8.00 KiB over all devices" in drawn(report(residual(bytes=1024, global_bytes=8192)))


def test_top_shows_the_largest_and_counts_the_rest():
    output = drawn(FULL, top=1)
    table = output[: output.index("Aliases")]
    assert "attn_out" in table and "tanh" not in table
    rest = 2 * (4096 + 12 * 64 + 64)
    assert f"... and 3 more ({units.format_bytes(rest)})" in table


def test_empty_report():
    for output in (str(report()), drawn(report(), width=40), report()._repr_html_()):
        assert "No intermediate value is kept" in output
        assert "as written" in output


@pytest.mark.parametrize("width", [10, 24, 40, 60, 80, 100, 120, 200, 400])
def test_no_line_is_wider_than_the_terminal(width):
    hostile = residual(
        names=(HOSTILE * 3,), op=HOSTILE, path="日本語/" * 20, source="é" * 200, needed_by=(HOSTILE,) * 9
    )
    output = drawn(report(*FULL.entries, hostile, policy=HOSTILE, notes=(HOSTILE,)), width=width)
    assert max(cell_len(line) for line in output.splitlines()) <= width


def test_eighty_columns_show_name_bar_place_shape_and_worth():
    output = drawn(report(*(e for e in FULL.entries if e.action is not Kind.OFFLOADED)), width=80)
    (line,) = lines_with(output[: output.index("Aliases")], "attn_out")
    for word in ("192 KiB", "█", "bf16[12,8,1024]", "layers/attention", "1.97e+03"):
        assert word in line


def test_wide_terminals_show_everything():
    output = drawn(FULL, width=240)
    (line,) = lines_with(output[: output.index("Aliases")], "attn_out")
    for word in (
        "192 KiB",
        "95%",
        "bf16[12,8,1024]",
        "x12",
        "decoder/layers/attention",
        "100 FLOP",
        "dot_general",
        "mul",
    ):
        assert word in line
    assert "models/gpt.py:41 (mlp)" in output


def test_hostile_names_stay_text_in_the_terminal():
    entry = residual(names=(HOSTILE,), path=HOSTILE, source=HOSTILE, op=HOSTILE)
    out = io.StringIO()
    report(entry, policy=HOSTILE, notes=(HOSTILE,), blocks=(HOSTILE,)).print(
        Console(file=out, width=300, force_terminal=True, color_system="standard")
    )
    assert "\x1b[31m\n" not in out.getvalue()
    assert "[bold red]x[/bold red]\\x1b[31m\\n<script>" in out.getvalue()


def test_diff_lists_what_goes_and_what_comes():
    before = report(residual(names=("a",), bytes=4096), residual(names=("b",)), policy="dots")
    after = report(residual(names=("b",)), residual(names=("c",), bytes=1024), residual(Kind.ARGUMENT), policy="full")
    output = str(before.diff(after))
    gone, new = output.index("No longer kept"), output.index("Kept in addition")
    assert gone < output.index(" a ") < new < output.index(" c ")
    assert "-3.00 KiB" in output and "dots" in output and "full" in output
    assert " b " not in output
    assert "Kept in addition: 1 of the function's arguments" in output
    assert "Both keep the same values" in str(before.diff(before))


def test_comparison_has_one_line_for_each_policy():
    out = io.StringIO()
    text.print_comparison({"none": FULL, "full": report(), HOSTILE: report()}, Console(file=out, width=100))
    (none,), (full,) = lines_with(out.getvalue(), "none"), lines_with(out.getvalue(), "full")
    assert units.format_bytes(FULL.total_bytes) in none and "128 B" in none and "attn_out" in none
    assert "0 B" in full
    text.print_comparison({}, Console(file=out, width=30))


def test_sums_by_a_key():
    out = io.StringIO()
    text.print_sums("path", FULL.by("path"), Console(file=out, width=80))
    assert "path" in out.getvalue() and "decoder/layers/attention" in out.getvalue()
    text.print_sums("path", {}, Console(file=out, width=80))
    assert "No intermediate value" in out.getvalue()


def test_plain_ascii_where_the_terminal_has_nothing_else():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(file=out, width=80, color_system=None)
    FULL.print(console)
    text.print_comparison({"none": FULL}, console)
    out.flush()
    assert b"###" in raw.getvalue()


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (1023 * 1024, "1023 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (int(99.99 * 2**20), "100 MiB"),
        (5 * 2**30, "5.00 GiB"),
        (2**70, "1.05e+06 PiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_bytes_in_binary_units(n, expected):
    assert units.format_bytes(n) == expected


@pytest.mark.parametrize(
    ("n", "expected"), [(None, "-"), (0, "0 FLOP"), (999, "999 FLOP"), (999_999, "1.00 MFLOP"), (10**12, "1.00 TFLOP")]
)
def test_flops_in_decimal_units(n, expected):
    assert units.format_flops(n) == expected


def test_worth_of_a_group_is_of_its_sums():
    (row,) = rows.kept(report(*(residual(op="exp", path=f"l_{i}", bytes=30, recompute_flops=10) for i in range(4))))
    assert row.bytes == 120 and row.cells["worth"] == "3" and row.cells["flops"] == "40 FLOP"
    (free,) = rows.kept(report(residual(recompute_flops=0)))
    assert free.cells["worth"] == "free"


@pytest.mark.parametrize("module", [units, layout])
def test_docstring_examples(module):
    import doctest

    failed, tried = doctest.testmod(module)
    assert tried and not failed


@pytest.mark.parametrize("top", ["x", 1.5, True])
def test_a_number_of_rows_that_is_none_is_refused(top):
    with pytest.raises(RematError, match=f"top= is how many rows.*got {top!r}"):
        FULL.print(top=top)
