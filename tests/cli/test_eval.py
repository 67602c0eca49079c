"""`quantkit eval` as its users see it: tables, JSON, exit codes, help."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.demo import DEMO_MODEL
from quantkit.results import EvaluationResult
from tests import fake_vllm
from tests.helpers import make_model


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    runner = CliRunner()
    return lambda *args: runner.invoke(main, ["eval", "--threads", "1", *map(str, args)])


ASKED = ("--tasks", "demo_facts", "--limit", "6")


def test_a_table_for_people(run):
    answer = run(*ASKED, "--dtype", "fp32")
    assert answer.exit_code == 0, answer.stderr
    assert "demo_facts" in answer.stdout
    assert "1.0000" in answer.stdout
    assert "KV cache auto" in answer.stdout
    assert "the demo model: reading the items of 1 task" in answer.stderr


def test_json_is_the_record_and_nothing_else(run, text_file):
    windows = ("--text", text_file, "--window", 16, "--stride", 9, "--through", "decode")
    answer = run(*ASKED, "--json", "--batch", 3, *windows)
    assert answer.exit_code == 0, answer.stderr
    assert answer.stderr == ""
    result = EvaluationResult.from_dict(json.loads(answer.stdout)["evaluation"])
    assert result.find_task("demo_facts").num_samples == 6
    (text,) = result.perplexity
    assert (text.window, text.stride, text.through) == (16, 9, "decode")


def test_a_text_that_is_read_in_part_is_said(run, text_file):
    answer = run("--text", text_file, "--window", 16, "--text-tokens", 20)
    assert answer.exit_code == 0, answer.stderr
    assert f"Perplexity of {text_file} covers only the first 30 of " in " ".join(answer.stdout.split())
    assert "covers only the first" not in run("--text", text_file, "--text-tokens", "all").stdout


def test_the_baseline_keeps_its_cache(run):
    answer = run("--baseline", DEMO_MODEL, "--kv-cache", "int4", *ASKED, "--json")
    document = json.loads(answer.stdout)
    assert document["evaluation"]["settings"]["KV cache"] == "int4"
    assert document["baseline"]["settings"]["KV cache"] == "auto"


def test_two_models_are_compared_item_by_item(run, tmp_path):
    other = shutil.copytree(DEMO_MODEL, tmp_path / "copy")
    answer = run(other, "--baseline", DEMO_MODEL, *ASKED, "--noise", "--json")
    assert answer.exit_code == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert document["evaluation"]["model"] == str(other)
    assert document["baseline"]["model"] == str(DEMO_MODEL)
    subjects = {item["subject"]: item for item in document["comparisons"]}
    facts = subjects["demo_facts"]
    assert (facts["difference"], facts["recovery"], facts["num_samples"]) == (0, 100.0, 6)
    assert facts["low"] < 0 < facts["high"]
    assert facts["noise_floor"] is not None
    table = run(other, "--baseline", DEMO_MODEL, *ASKED, "--quiet")
    assert table.stderr == ""
    assert "no difference seen" in table.stdout


BAD = [
    (("--suite", "quik"), 4, "unknown suite 'quik' (did you mean 'quick'?)"),
    (
        ("--tasks", "local_piqa"),
        4,
        "task 'local_piqa' reads piqa/validation.jsonl, but no --data folder was given; pass --data DIR",
    ),
    (("--tasks", "demo_facts", "--data", "nowhere"), 4, "nowhere is not a directory"),
    (("--text", "nothing.txt"), 4, "text 'nothing.txt' is neither a file nor in a --data folder"),
    (("nowhere/model", "--tasks", "demo_facts"), 4, "nowhere/model"),
    (("--noise",), 2, "--noise needs a baseline"),
    (("--limit", "0"), 2, "--limit"),
    (("--through", "sideways"), 2, "--through"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD)
def test_bad_input_is_one_line_and_a_code(run, arguments, code, message):
    answer = run(*arguments, "--quiet")
    assert answer.exit_code == code
    assert message in answer.stderr
    assert answer.stdout == ""
    if code == 4:
        assert answer.stderr.count("\n") == 1


def test_a_baseline_of_another_vocabulary(run, tmp_path):
    answer = run("--baseline", make_model(tmp_path / "other"), *ASKED)
    assert answer.exit_code == 4
    assert "have different vocabularies (" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_help_names_every_option_and_ends_with_examples(run):
    answer = run("--help")
    for option in ("--suite", "--tasks", "--include-path", "--data", "--limit", "--baseline", "--batch", "--kv-cache"):
        assert option in answer.stdout
    assert answer.stdout.rstrip().endswith("--text book.txt")


def test_vllm_computes_where_it_is_asked_to(run, monkeypatch, tmp_path, text_file):
    fake_vllm.install(monkeypatch)
    other = shutil.copytree(DEMO_MODEL, tmp_path / "copy")
    asked = ("--text", text_file, "--window", 16, "--json", "--engine", "vllm")
    runner = CliRunner()
    options = ("--engine-option", "kv_cache_dtype=fp8", "--engine-option", "pipeline-parallel-size=2")
    answer = runner.invoke(main, ["eval", str(other), "--baseline", str(DEMO_MODEL), *map(str, asked), *options])
    assert answer.exit_code == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert "left out" not in document["evaluation"]["settings"]
    assert document["evaluation"]["settings"]["engine"] == document["baseline"]["settings"]["engine"] == "vLLM 0.0"
    first, second = fake_vllm.LOADED
    assert (first["kv_cache_dtype"], first["pipeline_parallel_size"], first["closed"]) == ("fp8", 2, True)
    assert (second.get("kv_cache_dtype"), second["pipeline_parallel_size"]) == (None, 2)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--engine-option", "a=1"), 2, "--engine-option works only with --engine vllm"),
        (("--engine", "vllm", "--engine-option", "a"), 2, "--engine-option 'a' is not NAME=VALUE"),
        (("--engine", "vllm", "--engine-option", "a={"), 4, "--engine-option a"),
        (("--engine", "vllm"), 4, "vLLM does not support threads"),
    ],
)
def test_options_that_the_engine_does_not_have_are_one_line(run, monkeypatch, args, code, message):
    fake_vllm.install(monkeypatch)
    answer = run("--text", "demo", *args)
    assert (answer.exit_code, message in answer.stderr) == (code, True), answer.stderr
