"""`quantkit bench` as its users see it: tables, JSON, help, and one line for what cannot be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest

from quantkit.results import BenchmarkResult, Diagnosis

SMALL = ["--prompt-tokens", "40", "--new-tokens", "5", "--requests", "2", "--threads", "1"]


pytestmark = pytest.mark.usefixtures("quick_ceilings")


@pytest.fixture
def run(run):
    """Run `quantkit bench ...`; exit code, stdout, stderr."""
    return partial(run, "bench")


def test_the_demo_model_without_an_argument(run):
    code, out, err = run(*SMALL)
    assert code == 0
    for words in (
        "demo model on",
        "closed-1",
        "closed-8",
        "TTFT",
        "ITL",
        "TPOT",
        "p99",
        "tokens/s",
        "MBU",
        "Diagnosis",
    ):
        assert words in out
    assert "weights" in out
    assert "exact" in out
    assert "TTFT: from the arrival of the request to its first token" in out
    assert "loading" in err
    assert "sweep" not in out  # serves the fits only
    assert max(len(line) for line in out.splitlines()) <= 80


def test_json_is_all_there_is_on_stdout(run, tiny_llama):
    code, out, err = run(tiny_llama, *SMALL, "--batch", "1,2", "--json", "--ttft-limit", "5", "--tpot-limit", "5")
    assert (code, err) == (0, "")
    document = json.loads(out)
    result = BenchmarkResult.from_dict(document["benchmark"])
    assert [run.workload.name for run in result.runs] == ["closed-1", "closed-2", "sweep"]
    assert result.runs[0].workload.ttft_limit_s == 5
    summary = document["summary"]["closed-1"]
    assert {"p50", "p90", "p99"} <= summary["ttft_s"].keys() & summary["itl_s"].keys() & summary["tpot_s"].keys()
    assert summary["goodput_per_s"] == summary["requests_per_s"]
    assert summary["itl_s"]["count"] == 2 * 4
    assert set(document["fits"]) == {"ITL", "TTFT"}
    assert Diagnosis.from_dict(document["diagnosis"]).findings
    assert document["ceilings"]["bytes_per_s"] > 0
    assert "ratios" not in document


def test_against_another_model(run, tiny_llama, family_models):
    other = family_models["qwen3"]
    code, out, _ = run(tiny_llama, "--against", other, "--batch", "1", *SMALL, "--rounds", "2", "--quiet")
    assert code == 0
    for words in ("verdict", "noise", "A B B A", tiny_llama.name, other.name):
        assert words in out
    code, out, _ = run(tiny_llama, "--against", other, "--batch", "1", *SMALL, "--json")
    document = json.loads(out)
    assert {ratio["metric"] for ratio in document["ratios"]} == {"TTFT", "ITL", "TPOT", "tokens/s"}
    assert all(ratio["low"] <= ratio["high"] for ratio in document["ratios"])
    assert BenchmarkResult.from_dict(document["against"]["benchmark"]).model == str(other)
    assert document["benchmark"]["runs"][0]["rounds"] == 4  # more rounds by default when there is something to compare


def test_without_the_cache(run, tiny_llama):
    code, out, err = run(tiny_llama, "--no-cache", "--new-tokens", "12", "--threads", "1")
    assert code == 0
    assert "recomputed" in out
    assert "prompt of 16" in out
    assert "token 12 of 12" in err
    code, out, _ = run(tiny_llama, "--no-cache", "--prompt-tokens", "240", "--threads", "1", "--json")
    marks = json.loads(out)["marks"]
    assert [mark["new_tokens"] for mark in marks] == [1, 10, 16]  # as many as fit


def test_static_batches_and_arrivals(run, tiny_llama):
    options = ["--batch", "2", "--rate", "100", "--batching", "static", "--spread", "0.5", "--json"]
    code, out, _ = run(tiny_llama, *SMALL, *options)
    assert code == 0
    assert list(json.loads(out)["summary"]) == ["closed-2", "static-2", "poisson-100"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["no/such/folder"], 4, "no/such/folder"),
        (["--against", "no/such/folder"], 4, "no/such/folder"),
        (["--prompt-tokens", "1000", "--new-tokens", "100"], 4, "is 1024 tokens; --prompt-tokens can be 924 at most"),
        (["--max-length", "64"], 4, "is 64 tokens"),
        (["--no-cache", "--prompt-tokens", "1024"], 4, "is 1024 tokens"),
        (["--batch", "0"], 2, "0 is not in the range x>=1"),
        (["--batch", "1,x"], 2, "'x' is not a valid int"),
        (["--rate", "-1"], 2, "not in the range x>0"),
        (["--rate", "nan"], 2, "'nan' is not a finite number"),
        (["--requests", "0"], 2, "--requests"),
        (["--kv-cache", "int3"], 2, "int3"),
        (["--tpot-limit", "0"], 2, "--tpot-limit"),
        (["--no-cache", "--against", "x"], 2, "leave out --engine and --against"),
        (["--nproc", "2"], 2, "bench measures a model in one process"),
    ],
)
def test_what_cannot_be_measured_is_one_line(run, args, code, message, monkeypatch):
    from quantkit.benchmark import run as benchmark

    def loaded(*_args, **_options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(benchmark, "LLM", loaded)
    exit_code, out, err = run(*args)
    assert exit_code == code
    assert message in err
    assert out == ""
    if code == 4:
        assert len(err.splitlines()) == 1


def test_help_defines_what_is_measured_and_imports_nothing_heavy():
    script = (
        "import sys\nfrom quantkit.cli import main\n"
        "try:\n    main(['bench', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    for words in ("TTFT", "ITL", "TPOT", "MBU", "Examples", "--against", "--no-cache", "--batch", "--kv-cache"):
        assert words in out
