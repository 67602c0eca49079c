"""`quantkit verify` and `quantize --verify` as users see them: verdicts, exit codes, names, one line per error."""

from __future__ import annotations

import json
import shutil

import pytest

from quantkit.cli.verify import report_folder
from quantkit.report.files import read_report
from tests import fake_vllm
from tests.helpers import make_model

pytestmark = pytest.mark.usefixtures("quick_ceilings")


def quickly(models):
    return ["--suite", "none", "--text", models / "text.txt", "--no-bench", "--threads", 1, "--device", "cpu"]


def test_gates_that_hold(run, checkpoint, models):
    code, out, err = run("verify", checkpoint, *quickly(models), "--gate", "kl<=9", "--gate", "perplexity_ratio<=2")
    assert code == 0
    assert out.startswith("All 2 gates hold.")
    assert "held: kl<=9" in out
    assert "mean KL" in out
    assert "loading the checkpoint" in err
    assert {"report.json", "junit.xml", "README.md"} <= {path.name for path in checkpoint.iterdir()}
    assert read_report(checkpoint).held
    assert max(map(len, out.splitlines())) <= 80 + len(str(checkpoint))


def test_a_run_log_whose_recipe_has_no_name_is_reported_all_the_same(run, checkpoint, models):
    log = checkpoint / "quantkit-run.json"
    log.write_text(json.dumps({**json.loads(log.read_text()), "recipe": 5}))
    code, _, err = run("verify", checkpoint, *quickly(models), "--gate", "kl<=9")
    assert code == 0, err
    assert {"report.json", "junit.xml", "README.md"} <= {path.name for path in checkpoint.iterdir()}


def test_a_gate_that_fails_is_named_with_a_remedy(run, checkpoint, models, tmp_path):
    code, out, err = run("verify", checkpoint, *quickly(models), "--gate", "kl<=0.0005", "-o", tmp_path / "new")
    assert code == 3
    assert "Most sensitive fused groups, each quantized alone" in out
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: 1 of 1 gate did not hold: kl<=0.0005 (kl is 0.00")
    assert "Suggested change: ignore layer" in last
    assert "--set 'ignore=[" in last
    assert "report.json" not in {path.name for path in checkpoint.iterdir()}
    assert not read_report(tmp_path / "new").held


def test_in_vllm_the_upper_end_of_the_distance_is_judged(run, checkpoint, models, tmp_path, monkeypatch):
    fake_vllm.install(monkeypatch)
    asked = ["--suite", "none", "--text", models / "text.txt", "--no-bench", "--engine", "vllm"]
    code, out, err = run("verify", checkpoint, *asked, "--gate", "kl<=0.0005", "-o", tmp_path / "new")
    assert code == 3, err
    assert "Both models ran in vLLM 0.0, which gives only the 100 likeliest tokens" in " ".join(out.split())
    report = read_report(tmp_path / "new")
    assert report.gates[0].value == report.fidelity.mean_kl > report.fidelity.mean_kl_low


def test_json_is_one_object_whatever_the_verdict(run, checkpoint, models):
    code, out, _ = run("verify", checkpoint, *quickly(models), "--gate", "kl<=0.0005", "--json")
    data = json.loads(out)
    assert (code, data["held"], data["gates"][0]["held"]) == (3, False, False)
    assert data["metrics"]["kl"] > 0.0005
    assert data["proposal"]["overrides"][0].startswith("ignore=[")
    code, out, _ = run("verify", checkpoint, *quickly(models), "--gate", "kl<=9", "--json")
    assert (code, json.loads(out)["held"]) == (0, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{tmp}/gone", "--baseline", "{models}/llama"], "no such model directory"),
        (["{models}/out", "--baseline", "{tmp}/other"], "has a vocabulary of 300 tokens"),
        (["{tmp}/changed"], "changed since the checkpoint was made"),
        (["{models}/out", "--gate", "recovry>=99"], "did you mean 'recovery'"),
        (["{models}/out", "--suite", "quik"], "did you mean 'quick'"),
        (["{models}/out", "--text", "{tmp}/gone.txt"], "gone.txt"),
        (["{models}/out", "--suite", "none", "-o", "{models}/text.txt"], "is a file; give a directory"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_loaded(run, models, tmp_path, monkeypatch, args, message):
    monkeypatch.setattr("quantkit.evaluate.verify.run.load_llm", lambda *_, **__: pytest.fail("loaded"))
    make_model(tmp_path / "other", vocab_size=300)
    changed = shutil.copytree(models / "out", tmp_path / "changed")
    shard = sorted(changed.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    code, out, err = run("verify", *(arg.format(tmp=tmp_path, models=models) for arg in args))
    assert (code, out) == (4, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("error: ")


def compress(run, output, *args):
    return run("quantize", "--recipe", "rtn-int4", "--verify", "--device", "cpu", "-o", output, "--quiet", *args)


def test_a_checkpoint_that_holds_keeps_its_name(run, tmp_path, three_items, monkeypatch):
    monkeypatch.setattr("quantkit.machine.memory.spare_memory", lambda: pytest.fail("measured with less memory"))
    code, out, _ = compress(run, tmp_path / "out", "--gate", "kl<=5")
    assert code == 0
    assert "The gate holds." in out
    assert read_report(tmp_path / "out").gates[0].gate == "kl<=5"
    assert not (tmp_path / "out.failed").exists()


def test_a_checkpoint_that_fails_is_kept_under_another_name(run, tmp_path, three_items):
    code, out, err = compress(run, tmp_path / "out", "--gate", "kl<=0.00001", "--json")
    assert code == 3
    data = json.loads(out)
    assert data["output"] == str(tmp_path / "out.failed")
    assert not (tmp_path / "out").exists()
    report = read_report(tmp_path / "out.failed")
    assert (report.model.name, report.held) == ("out.failed", False)
    assert (tmp_path / "out.failed" / "quantkit.json").is_file()
    assert "Traceback" not in err


def test_what_cannot_be_proven_is_refused_before_compressing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("quantkit.compress.pipeline.quantize", lambda *_, **__: pytest.fail("compressed"))
    code, _, err = compress(run, tmp_path / "out", "--gate", "kl<=nothing")
    assert code == 4
    assert "is not valid; write a metric" in err
    code, _, err = compress(run, tmp_path / "out.gguf", "--format", "gguf")
    assert code == 4
    assert "convert --to gguf" in err
    code, _, err = run("quantize", "--recipe", "rtn-int4", "--gate", "kl<=5", "-o", tmp_path / "out")
    assert code == 2
    assert "no effect without --verify" in err


def test_a_report_goes_into_the_checkpoint_or_beside_a_file(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    assert report_folder(tmp_path) == tmp_path
    assert report_folder(file) == tmp_path / "model-report"
