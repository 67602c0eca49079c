"""One table, three drawings: the same rows on a terminal, in Markdown and in the page."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from quantkit.report.files import markdown_table
from quantkit.report.page import render_html
from quantkit.report.speed_tables import latency_table, memory_table, report_runs, roofline_table, throughput_table
from quantkit.report.table import Column, Table, facts, terminal_table
from quantkit.report.tables import (
    comparison_table,
    fidelity_table,
    key_figures,
    layer_table,
    making_table,
    worst_groups_table,
)
from quantkit.results import Comparison, ModelFacts, Report
from tests.report.synthetic import make_report

TABLE = Table(
    title="Sizes",
    columns=(Column("name"), Column("bytes", "{:,}".format), Column("share", "{:.0%}".format, detail=True)),
    rows=(("a|b", 1234, 0.5), ("c", None, 1.0)),
    note="Measured.",
)


def drawn(table: Table, width: int = 80) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, highlight=False)
    console.print(terminal_table(table, console))
    return stream.getvalue()


def test_values_are_written_by_their_column_and_unknown_ones_are_a_dash():
    assert TABLE.cells == [["a|b", "1,234", "50%"], ["c", "-", "100%"]]
    assert markdown_table(TABLE) == (
        "Sizes:\n\n| name | bytes | share |\n| --- | ---: | ---: |\n"
        "| a\\|b | 1,234 | 50% |\n| c | - | 100% |\n\nMeasured."
    )


def test_a_terminal_leaves_details_out_where_it_is_narrow():
    wide, narrow = drawn(TABLE, 80), drawn(TABLE, 18)
    assert [line.split() for line in wide.splitlines()[:3]] == [
        ["Sizes"],
        ["name", "bytes", "share"],
        ["a|b", "1,234", "50%"],
    ]
    assert "share" not in narrow
    assert "1,234" in narrow
    assert "Measured." in narrow


def test_a_terminal_shows_the_beginning_of_a_table_of_very_many_rows():
    table = Table(columns=(Column("key"),), rows=tuple((f"key {number}",) for number in range(2_500)), note="Read.")
    text = drawn(table)
    assert "key 1999" in text
    assert "key 2000" not in text
    assert text.endswith("Read.\n500 more rows; --json prints all\n")


def test_facts_have_no_header_and_leave_out_what_is_not_known():
    table = facts([("model", "demo"), ("recipe", None), ("format", "")])
    assert table.cells == [["model", "demo"]]
    assert drawn(table).split() == ["model", "demo"]


def test_layers_stand_below_each_other_and_groups_beside():
    table = layer_table("", {(1, "o"): 0.5, (0, "o"): 0.25, (0, "down"): 0.125}, str)
    assert [column.title for column in table.columns] == ["layer", "o", "down"]
    assert table.cells == [["0", "0.25", "0.125"], ["1", "0.5", "-"]]


REPORT = make_report(broken=True)


def report_tables(report):
    runs = list(report_runs(report))
    yield comparison_table(report.comparisons)
    yield fidelity_table(report.fidelity, report.noise_fidelity)
    yield worst_groups_table(report.sensitivity)
    yield latency_table(runs)
    yield throughput_table(runs)
    yield memory_table(report.benchmark, report.baseline_benchmark)
    yield roofline_table(("model", record) for record in report.benchmark.roofline)
    yield making_table(report)


@pytest.fixture(scope="module")
def page():
    return render_html(REPORT).replace("\u00a0", " ")


@pytest.mark.parametrize("table", report_tables(REPORT), ids=lambda table: table.title)
def test_page_card_and_terminal_show_the_same_cells(page, table):
    card, terminal = markdown_table(table), drawn(table, 200)
    for row in table.cells:
        for cell in row:
            assert cell in card
            assert cell in terminal
            assert cell.replace("<", "&lt;") in page


def test_a_perplexity_of_zero_has_no_ratio():
    found = Comparison(
        subject="perplexity: x",
        metric="perplexity",
        baseline=0.0,
        value=2.0,
        difference=2.0,
        low=None,
        high=None,
        p_value=None,
        num_samples=1,
        verdict="noise",
    )
    report = Report(model=ModelFacts(name="m"), comparisons=(found,))
    assert key_figures(report) == [("Perplexity", "-", "0 before, 2.00 now: noise")]


def test_what_a_terminal_would_obey_is_written_out():
    columns = (Column("name\x1b[2J"), Column("size", str))
    table = Table(title="a\x1b[2J", columns=columns, rows=(("b\x1b]0;title\x07", 3),), note="c\x9b2J \u202e")
    console = Console(file=io.StringIO(), force_terminal=True, width=80, markup=False)
    console.print(terminal_table(table, console))
    drawn = console.file.getvalue()
    assert not any(sign in drawn for sign in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e"))
    assert all(text in drawn for text in (r"a\x1b[2J", r"name\x1b[2J", r"b\x1b]0;title\x07", r"c\x9b2J \u202e"))


def test_runs_say_which_model_speculates():
    def labels(*sides):
        changed = {
            field: dataclasses.replace(getattr(REPORT, field), settings={"speculation": "not used"} if on else {})
            for field, on in zip(("baseline_benchmark", "benchmark"), sides, strict=True)
        }
        return {label.partition(", ")[2] for label, _ in report_runs(dataclasses.replace(REPORT, **changed))}

    assert labels(False, False) == labels(True, True) == {"original", "model"}
    assert labels(False, True) == {"original", "model with drafts"}
    assert labels(True, False) == {"original with drafts", "model"}
