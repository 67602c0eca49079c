"""Documents that quantkit 0.1.0 wrote: `version_1` holds one of each, as its `quantize` and `verify` left them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantkit.demo import DEMO_MODEL
from quantkit.errors import ReportError
from quantkit.inspection import inspect
from quantkit.report.files import read_report, render_markdown
from quantkit.report.page import render_html
from quantkit.results import SCHEMA_VERSION, CompressionResult, Report

OLD = Path(__file__).parent / "version_1"


def old(name: str) -> dict:
    return json.loads((OLD / name).read_text())


def test_the_files_are_of_version_1():
    assert SCHEMA_VERSION == 2
    assert [old(path.name)["schema_version"] for path in sorted(OLD.glob("*.json"))] == [1, 1, 1]


def test_a_report_of_version_1_says_what_it_said_under_the_names_of_now():
    data, report = old("report.json"), read_report(OLD)
    assert report.schema_version == SCHEMA_VERSION
    assert [(r.layer, r.group) for r in report.sensitivity.records] == [
        (r["layer"], r["unit"]) for r in data["damage"]["records"]
    ]
    assert report.sensitivity.proposal.action == "ignore"
    assert report.sensitivity.proposal.groups == ((0, "q/k/v"),)
    assert report.compression.ignored == ("lm_head",)
    assert "layer 0 q/k/v" in render_markdown(report) + render_html(report)
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_how_a_checkpoint_was_made_is_read_whoever_wrote_it():
    made = CompressionResult.from_dict(old("quantkit-run.json"))
    assert (made.ignored, made.schema_version) == (("lm_head",), SCHEMA_VERSION)
    assert made.layers[0].linears[0].name == "self_attn.q_proj"


def test_inspection_shows_the_recipe_and_errors_of_version_1(tmp_path):
    checkpoint = shutil.copytree(DEMO_MODEL, tmp_path / "old")
    shutil.copy(OLD / "quantkit.json", checkpoint)
    summary = inspect(checkpoint)
    assert summary.recipe == "rtn-int4"
    assert [layer.name for layer in summary.layers] == ["model.layers.0"]


@pytest.mark.parametrize(
    ("record", "file", "name"),
    [(Report, "report.json", "damage"), (CompressionResult, "quantkit-run.json", "left_alone")],
)
def test_names_of_version_1_are_refused_in_a_document_of_now(record, file, name):
    with pytest.raises(ReportError, match=f"unknown field '{name}'"):
        record.from_dict({**old(file), "schema_version": SCHEMA_VERSION})
