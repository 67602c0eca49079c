"""Several checkpoints: the front, shared workloads, warnings, the page, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.errors import ReportError
from quantkit.report.compare import checkpoints_table, compare_reports, front, render_comparisons
from quantkit.report.files import dumps
from quantkit.report.plots import grouped_labels
from quantkit.results import Report
from tests.report.synthetic import make_report


def resized(report: Report, num_bytes: int) -> Report:
    return dataclasses.replace(report, model=dataclasses.replace(report.model, num_bytes=num_bytes))


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    small = resized(make_report(broken=True, name="int3"), 270_000_000)
    return [make_report(name="int4"), small, resized(make_report(name="int8"), 540_000_000)]


def test_the_front_is_what_no_other_dominates():
    rng = random.Random(0)
    points = [tuple(rng.randrange(6) for _ in range(3)) for _ in range(60)]
    for point, chosen in zip(points, front(points), strict=True):
        beaten = any(q != point and all(a <= b for a, b in zip(q, point, strict=True)) for q in points)
        assert chosen != beaten
    assert front([(1.0, 1.0), (1.0, 1.0)]) == [True, True]


def test_entries_are_sorted_by_size_with_the_original_once(reports):
    comparison = compare_reports(reports)
    assert [entry.name for entry in comparison.entries] == ["int3", "int4", "int8", "acme/tiny-500m"]
    assert [entry.on_front for entry in comparison.entries] == [True, True, False, False]
    assert [entry.held for entry in comparison.entries] == [False, True, True, None]
    assert (comparison.quality, comparison.workload, comparison.warnings) == ("recovery", "closed-1", ())


def test_the_order_of_reports_does_not_matter(reports):
    tables = {checkpoints_table(compare_reports(list(order))) for order in itertools.permutations(reports)}
    assert len(tables) == 1


def test_what_cannot_be_compared_is_warned_of(reports):
    first, second, _ = reports
    other = dataclasses.replace(
        second,
        baseline_model=dataclasses.replace(second.baseline_model, name="other"),
        comparisons=second.comparisons[:2],
        environment=dataclasses.replace(second.environment, cpu="Z80"),
        benchmark=None,
    )
    comparison = compare_reports([first, other])
    assert [w.split(" ", 3)[2:] for w in comparison.warnings] == [
        ["have", "different originals: acme/tiny-500m, other."],
        ["were", "evaluated on different tasks, so their mean recoveries are not comparable."],
        ["were", "timed on different machines, so their latencies are not comparable."],
    ]
    assert comparison.workload == ""
    assert all(entry.itl_s is None for entry in comparison.entries)


def test_without_tasks_perplexity_ranks_and_less_is_better(reports):
    bare = [
        dataclasses.replace(r, comparisons=tuple(c for c in r.comparisons if c.subject.startswith("perplexity")))
        for r in reports
    ]
    comparison = compare_reports(bare)
    assert (comparison.quality, comparison.higher_is_better) == ("perplexity_ratio", False)
    assert comparison.entries[-1].quality == 1.0
    assert "down and to the left" in render_comparisons({"one": comparison})


def test_equal_names_are_told_apart(reports):
    comparison = compare_reports([reports[0], reports[0]])
    assert [entry.name for entry in comparison.entries][:2] == ["int4 (1)", "int4 (2)"]


def test_one_report_is_no_comparison(reports):
    assert len(compare_reports(reports[:1]).entries) == 2  # beside its original it is one
    with pytest.raises(ReportError, match="at least two reports, or one report that includes its original; found 1"):
        compare_reports([dataclasses.replace(reports[0], baseline_model=None)])


def test_points_on_top_of_each_other_share_a_label():
    points = [(1, "a", 1.0, 1.0, True), (2, "b", 1.01, 1.0, False), (3, "c", 9.0, 5.0, True)]
    assert grouped_labels(points) == [("1, 2", 1.0, 1.0), ("3", 9.0, 5.0)]


def test_the_page_draws_both_fronts_and_is_the_same_each_time(reports):
    comparison = compare_reports(reports)
    page = render_comparisons({"one": comparison})
    assert page == render_comparisons({"one": comparison})
    assert page.count('<svg class="plot"') == 2
    assert "On the Pareto front (2 of 4): int3, int4." in page


@pytest.fixture(scope="module")
def checkpoints(reports, tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("checkpoints")
    for report in reports:
        (root / report.model.name).mkdir()
        (root / report.model.name / "report.json").write_text(dumps(report))
    return [str(root / report.model.name) for report in reports]


def test_the_command_compares(checkpoints, tmp_path):
    page = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["report", *checkpoints, "-o", str(page)])
    assert done.exit_code == 0, done.output
    assert "On the Pareto front (2 of 4): int3, int4." in done.stdout
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_command_answers_in_json(checkpoints):
    data = json.loads(CliRunner().invoke(main, ["report", *checkpoints, "--json"]).stdout)
    assert [entry["name"] for entry in data["entries"]] == ["int3", "int4", "int8", "acme/tiny-500m"]
    one = json.loads(CliRunner().invoke(main, ["report", checkpoints[1], "--json"]).stdout)
    assert (one["model"], one["held"]) == ("int3", False)
    assert one["metrics"]["kl"] == 0.094


def test_the_command_shows_one_report_and_renders_it_again(checkpoints, tmp_path):
    page = tmp_path / "one.html"
    done = CliRunner().invoke(main, ["report", checkpoints[0], "-o", str(page)])
    assert done.stdout.startswith("All 6 gates hold.")
    assert "hellaswag" in done.stdout
    assert "All 6 gates hold." in page.read_text()


def test_a_missing_report_is_one_line_and_bad_input(tmp_path):
    done = CliRunner().invoke(main, ["report", str(tmp_path / "nothing")])
    assert done.exit_code == 4
    assert done.stderr.count("\n") == 1
