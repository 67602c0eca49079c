"""report.json, its schema, the model card, JUnit XML, and all of them written together."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import threading
from xml.etree import ElementTree

import pytest
import yaml

from quantkit.errors import ReportError
from quantkit.machine.system import folder_lock
from quantkit.report.files import SIGNS, dumps, read_report, render_junit, render_markdown, write_report
from quantkit.results import EngineReading, ModelFacts, Report
from tests.report.make_schema import SCHEMA, schema
from tests.report.synthetic import make_report


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report()


def test_the_schema_in_docs_is_the_one_the_types_make():
    assert json.loads(SCHEMA.read_text()) == json.loads(json.dumps(schema())), "run: python tests/report/make_schema.py"


def shortened(value):
    """The same with a few items of each list: thousands of samples are alike, and to check all takes seconds."""
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in value.items()}
    return [shortened(item) for item in value[:30]] if isinstance(value, list) else value


def test_reports_keep_the_schema(report, broken_report):
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    validator.check_schema(validator.schema)
    for one in (report, broken_report, Report(model=ModelFacts(name="x"))):
        assert list(validator.iter_errors(shortened(json.loads(dumps(one))))) == []
    damaged = shortened(json.loads(dumps(report)))
    damaged["model"]["num_bytes"] = "many"
    assert [list(error.path) for error in validator.iter_errors(damaged)] == [["model", "num_bytes"]]


def test_every_field_of_the_schema_is_described():
    text = schema()
    bare = [
        f"{name}.{field}"
        for name, definition in {**text["$defs"], "Report": text}.items()
        for field, what in definition["properties"].items()
        if "description" not in what and "const" not in what
    ]
    # Self-explaining records that state everything in their first sentence.
    allowed = {"ModuleSummary", "Diagnosis", "CompressionResult"}
    assert [name for name in bare if name.split(".")[0] not in allowed] == []


def test_equal_reports_give_equal_bytes_and_read_back(report, tmp_path):
    assert dumps(report) == dumps(make_report())
    (tmp_path / "report.json").write_text(dumps(report))
    assert read_report(tmp_path) == read_report(tmp_path / "report.json") == report


def test_numbers_that_json_lacks_become_null(report):
    infinite = dataclasses.replace(report.fidelity, max_kl=math.inf)
    text = dumps(dataclasses.replace(report, fidelity=infinite))
    assert json.loads(text)["fidelity"]["max_kl"] is None


UNREADABLE = [
    (None, r"report\.json: no such file; `quantkit verify .*` makes one"),
    ('{"model": ', r"report\.json is not valid JSON \(.*line 1 .*give a report\.json that `quantkit verify` wrote"),
    ("[]", "holds a JSON list, not an object"),
    ('{"schema_version": 7}', "schema version 7"),
    ('{"schema_version": 1}', "field 'model' is missing"),
]


@pytest.mark.parametrize(("text", "message"), UNREADABLE)
def test_what_is_no_report_is_refused_in_one_line(tmp_path, text, message):
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(ReportError, match=message) as caught:
        read_report(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_nothing_is_not_sent_to_verify(tmp_path):
    with pytest.raises(ReportError, match="give a checkpoint's directory or its report"):
        read_report(tmp_path / "nowhere")


def front_matter(text: str) -> dict:
    _, matter, _ = text.split("---\n", 2)
    return yaml.safe_load(matter)


def test_the_card_s_front_matter_is_what_the_hub_reads(report):
    assert front_matter(render_markdown(report)) == {
        "base_model": "acme/tiny-500m",
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantkit", "quantized", "compressed-tensors", "int4"],
    }


def test_a_local_original_is_no_base_model_and_an_unknown_license_is_not_made_up(report):
    unknown = dataclasses.replace(report.baseline_model, hub_id=None, license=None)
    text = render_markdown(
        dataclasses.replace(report, baseline_model=unknown, model=dataclasses.replace(report.model, license=None))
    )
    assert not {"base_model", "license"} & front_matter(text).keys()
    assert "Unknown: the original's license applies" in text


LOADERS = [
    ("compressed-tensors", ("from_pretrained", "vllm serve", "quantkit generate"), ("llama-cli",)),
    ("gguf", ("llama-cli -m", "quantkit generate"), ("from_pretrained", "vllm serve")),
    ("gptq", ("from_pretrained", "gptqmodel", "vllm serve"), ("llama-cli",)),
    ("novel", ("quantkit generate",), ("from_pretrained", "vllm serve", "llama-cli")),
]


@pytest.mark.parametrize(("name", "there", "absent"), LOADERS)
def test_the_card_says_how_to_load_as_the_format_allows(report, name, there, absent):
    text = render_markdown(dataclasses.replace(report, model=dataclasses.replace(report.model, format=name)))
    assert all(word in text for word in there)
    assert not any(word in text for word in absent)


def test_the_card_says_who_reads_it_and_who_ignores_its_cache(report):
    own = "it silently ignores quantkit_kv_cache and keeps 16-bit keys and values"
    vllm = EngineReading(engine="vLLM", release="0.32.0", reads="fast", reason="Marlin kernels", source="x", cache=own)
    other = EngineReading(engine="transformers", release="5.23.0", reads="no", reason="not these experts", source="x")
    text = render_markdown(dataclasses.replace(report, model=dataclasses.replace(report.model, engines=(vllm, other))))
    assert f"| vLLM 0.32.0 | fast | Marlin kernels; {own} |" in text
    assert "| transformers 5.23.0 | no | not these experts |" in text
    assert "vllm serve" in text and "from_pretrained" not in text


def test_the_card_of_a_failed_checkpoint_says_so_and_gives_each_remedy_once(broken_report):
    text = render_markdown(broken_report)
    assert "4 of 6 gates did not hold: recovery>=98.9" in text
    assert text.count("- to do: ignore layer 23 down") == 1
    for line in text.splitlines():
        if line.startswith("| ") and "---" not in line:
            assert line.count("|") >= 3


def test_a_card_without_measurements_says_so():
    text = render_markdown(Report(model=ModelFacts(name="x")))
    assert "Nothing was measured." in text
    assert "No gates were set" in text


def test_junit_has_a_test_per_gate_and_comparison(broken_report):
    root = ElementTree.fromstring(render_junit(broken_report).encode())
    assert (root.get("tests"), root.get("failures")) == (
        str(len(broken_report.gates) + len(broken_report.comparisons)),
        "4",
    )
    gates = root.find("testsuite[@name='gates']")
    failed = [case.get("name") for case in gates if case.find("failure") is not None]
    assert failed == [gate.gate for gate in broken_report.gates if not gate.held]
    assert "ignore layer 23" in gates[0].find("failure").text
    assert "worse than the original" in root.find("testsuite[@name='comparisons']")[0].find("system-out").text


def test_a_second_report_waits_until_the_first_is_whole(report, tmp_path):
    second = threading.Thread(target=write_report, args=(report, tmp_path))
    with folder_lock(tmp_path):
        second.start()
        second.join(0.2)
        assert list(tmp_path.iterdir()) == []
    second.join()
    assert len(list(tmp_path.iterdir())) == len(SIGNS)


def test_all_files_are_written_and_nothing_half(report, tmp_path):
    files, problem = write_report(report, tmp_path / "out")
    assert problem == ""
    assert {kind: path.name for kind, path in files.items()} == {
        "json": "report.json",
        "junit": "junit.xml",
        "card": "README.md",
        "html": "report.html",
    }
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(path.name for path in files.values())


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_everything_but_the_page_is_written(report, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    files, problem = write_report(report, tmp_path)
    assert f"needs {package}, which is not installed; pip install 'quantkit-lm[eval]'" in problem
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "junit.xml", "report.json"]
    assert sorted(files) == ["card", "json", "junit"]


def test_a_card_holds_no_path_of_this_machine_and_no_html_of_others(report):
    hostile = "x\n\n<script>alert(1)</script>\n# title"
    made = dataclasses.replace(report.compression, recipe=hostile, model="/home/me/secret/model", ignored=(hostile,))
    original = dataclasses.replace(report.baseline_model, hub_id=None, name="/home/me/secret/model", license=hostile)
    model = dataclasses.replace(report.model, scheme=hostile, path="/home/me/secret/out", hub_id=None)
    text = render_markdown(dataclasses.replace(report, compression=made, baseline_model=original, model=model))
    body = text.split("---\n", 2)[2]
    assert "<script" not in body
    assert "\n# title" not in body
    assert "/home/me" not in text
