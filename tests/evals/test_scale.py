"""Figures of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EVALS = Path(__file__).resolve().parents[2] / "evals"


@pytest.fixture
def modules(monkeypatch):
    """`pages` and `scale_page` of evals."""
    for folder in (EVALS, EVALS / "page_sections"):
        monkeypatch.syspath_prepend(str(folder))
    import pages
    import scale_page

    return pages, scale_page


def test_bytes_that_differ_are_told(modules):
    *_, page = modules
    row = {"ranks": {"1": "a", "2": "a"}, "killed": {"1 2": {"bytes": "a"}}, "changes": [], "code": ""}
    assert page._cell(row, "rtn-int4") == "1, 2, 1→2†"
    row["killed"]["1 2"]["bytes"] = row["ranks"]["2"] = "b"
    assert page._cell(row, "rtn-int4") == "1, **2 differs**, **1→2 differs**†"


def test_only_jobs_that_had_others_tell_how_soon_these_ended(modules):
    killed = {"1 2": {"ended_s": 9.0}, "2 1": {"ended_s": 0.3}}
    rows = {"demo rtn-int4": {"killed": killed, "commit": "a"}, "demo mxfp4": {"killed": {}, "commit": "a"}}
    jobs, others, _ = modules[1]._killed(rows).split(". ")
    assert jobs == "We killed 2 jobs, with 1 of the 2 recipes"
    assert others == "In 1 of these jobs, one of two ranks was killed, and the other ended within 0.3 s"


def test_a_measured_row_without_a_digest_is_told_by_its_commit_alone(modules):
    row = {"recipe": "gptq-int4", "changes": ["steps.gptq.true_sequential=false"]}
    assert len(modules[1].row_code(row)) == 10
    assert modules[1].row_code({"work": "gptq"}) == ""


def test_a_report_that_differs_is_told_and_only_times_may(modules, monkeypatch, tmp_path):
    page, taken = modules[1], {"commit": "a", "date": "d", "machine": "m"}
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert page.verify_table() == ""
    one = {"ranks": 1, "wall_s": 30.0, "answering_s": 20.0, "answers": 600, "digest": "x", "taken": taken}
    rows = {"verify 1": one, "verify 2": {**one, "ranks": 2, "wall_s": 20.0, "answering_s": 10.0}}
    (tmp_path / "verify.json").write_text(json.dumps(rows))
    *_, row, _, said = page.verify_table().replace("\u00d7", "x").split("\n")
    assert (row, said[:21]) == ("| 2 | 20.0 | 10.0 | 60 | 30 | 2.00 x | 1.50 x |", "The reports are equal")
    rows["verify 2"]["digest"] = "y"
    (tmp_path / "verify.json").write_text(json.dumps(rows))
    assert "**different**" in page.verify_table()


@pytest.mark.slow
def test_the_committed_page_is_what_the_results_give(modules):
    before, after = modules[0].rewritten("docs/scale.md")
    assert before == after, "python evals/pages.py --write"
