"""Tables of a behaviour test: what they say, and examples cut to where they part."""

from __future__ import annotations

import dataclasses

from quantkit.report.behaviour_tables import behaviour_tables, example_table
from quantkit.results import ExampleRecord, ModelFacts, Report
from tests.report.synthetic import make_report


def test_margins_rates_kl_and_examples():
    margins, rates, kl, examples = behaviour_tables(make_report(broken=True))
    assert margins.cells[0] == ["starts a tool call", "40", "20", "6.00", "3.30", "0.550 (0.52 to 0.58)", "22.5 %"]
    assert margins.cells[-1][5] == "-"  # in three prompts only
    assert "4 prompts left out" in margins.title
    assert "fewer than 8 prompts" in margins.note
    assert {row[0] for row in rates.cells} >= {"do not end", "call tools validly"}
    assert [row[1] for row in kl.cells] == ["0.0700", "0.0800", "0.100", "-"]
    assert examples.cells == [["Tea?", "Yes, ¦with <b>milk</b>.", "Yes, ¦yes, yes", "loop until they are cut off"]]
    assert behaviour_tables(Report(model=ModelFacts(name="m"))) == []


def test_examples_are_cut_to_where_they_part_and_a_file_may_say_anything():
    behaviour = make_report().behaviour
    example = ExampleRecord(prompt="p" * 500, original="a" * 300 + "b" * 300, model="a" * 300 + "c" * 300, parted=300)
    whole, brief = (
        example_table(dataclasses.replace(behaviour, examples=(example,) * 5), brief=brief) for brief in (False, True)
    )
    assert whole.cells[0][1] == f"{'a' * 300}¦{'b' * 300}"
    assert brief.cells[0] == ["p" * 90, f"{'a' * 30}¦{'b' * 90}", f"{'a' * 30}¦{'c' * 90}", ""]
    assert (len(whole.rows), len(brief.rows)) == (5, 3)
    far = dataclasses.replace(example, original="ab", model="", parted=10**9, lost="nothing known")
    assert example_table(dataclasses.replace(behaviour, examples=(far,)), brief=True).cells[0][1:] == ["¦ab", "¦", ""]
