"""A verification as a whole, what it refuses before anything is loaded, and what a repair has to reach."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest

from quantkit.benchmark.options import BenchmarkOptions
from quantkit.errors import CheckpointError, DataError, GateError, ModelError, OutputError, RequestError
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.sensitivity import Goal, repair_goal
from quantkit.evaluate.verify.options import VerifyOptions
from quantkit.evaluate.verify.pair_checks import check_gates, check_pair, set_aside
from quantkit.evaluate.verify.run import verify_pair
from quantkit.kernels import cpu
from quantkit.report.files import read_report, write_report
from quantkit.results import Report
from quantkit.results.gates import evaluate_gates
from tests import fake_vllm
from tests.helpers import make_model
from tests.report.synthetic import make_report

BENCH = BenchmarkOptions(concurrencies=(1,), prompt_tokens=20, new_tokens=4, num_requests=2)
ENGINE = {"threads": 1, "num_pages": 64, "device": "cpu"}


pytestmark = pytest.mark.usefixtures("quick_ceilings")


def options(models, **changes):
    evaluation = EvaluationOptions(texts=(str(models / "text.txt"),), window=64)
    return VerifyOptions(**{"evaluation": evaluation, "bench": None, "engine": ENGINE, **changes})


@pytest.fixture(scope="module")
def report(models, quick_ceilings):
    gates = ("kl<=0.0001", "memory_ratio<=0.9", "itl_ratio<=99")
    return verify_pair(check_pair(models / "out", None, gates), options(models, bench=BENCH))


def test_it_finds_the_original_and_fills_the_report(report, models):
    assert report.baseline_model.path == str(models / "llama")
    assert (report.model.name, report.model.format, report.model.scheme) == ("out", "compressed-tensors", "int4 g32")
    assert report.model.num_bytes < report.baseline_model.num_bytes
    assert report.baseline_model.license == "mit"
    assert report.compression.recipe == "rtn-int4"
    assert [c.subject for c in report.comparisons] == [f"perplexity: {models / 'text.txt'}"]
    assert report.evaluation.arithmetic == report.baseline.arithmetic != report.noise.arithmetic
    assert 0 < report.noise_fidelity.mean_kl < report.fidelity.mean_kl
    ours, original = (
        each.memory_part("weights").observed_bytes for each in (report.benchmark, report.baseline_benchmark)
    )
    assert ours < original or cpu.library() is None  # then torch multiplies with the decoded weights
    assert report.baseline_benchmark.model == str(models / "llama")
    assert report.diagnosis.findings
    assert report.environment.hashes["checkpoint"]
    assert report.environment.versions["quantkit"]


def test_gates_judge_it_and_a_failed_one_has_a_remedy(report):
    held = {gate.metric: gate.held for gate in report.gates}
    assert held == {"kl": False, "memory_ratio": cpu.library() is not None, "itl_ratio": True}
    assert not report.held
    assert report.sensitivity is not None  # because accuracy failed
    assert len(report.sensitivity.records) == 8
    remedy = next(gate.remedy for gate in report.gates if not gate.held)
    assert "ignore" in remedy


def test_models_are_counted_and_a_text_that_is_read_in_part_is_noted(models):
    said: list[str] = []
    evaluation = EvaluationOptions(texts=(str(models / "text.txt"),), window=64, text_tokens=100)
    pair = check_pair(models / "out", None, ("kl<=9",))
    made = verify_pair(pair, options(models, evaluation=evaluation), progress=said.append)
    text = made.evaluation.perplexity[0]
    assert text.part.startswith("the first 12")
    assert f"Perplexity of {text.data} covers only {text.part}." in made.notes
    for name in ("original (1 of 3)", "checkpoint (2 of 3)", "(3 of 3)"):
        assert any(f"{name}: perplexity of" in line for line in said)
    assert sum(line.startswith("distributions on ") and line.endswith(" tokens") for line in said) == 2  # and noise
    assert made.fidelity.num_tokens == 256  # whole windows, so one
    assert made.noise_fidelity.num_tokens == made.fidelity.num_tokens  # a quarter of one window is the window


def test_it_survives_the_file(report, tmp_path):
    files, problem = write_report(report, tmp_path / "new")
    assert set(files) >= {"json", "junit", "card"}
    assert problem == "" or "html" not in files
    assert read_report(tmp_path / "new").to_dict() == report.to_dict()
    assert "how it was made" in files["card"].read_text().lower()


def test_gates_are_the_recipes_unless_given(models):
    assert check_pair(models / "out", None).gates == ("recovery>=97", "perplexity_ratio<=1.1", "kl<=0.1")
    assert check_pair(models / "out", None, ["kl <= 0.5"]).gates == ("kl<=0.5",)
    assert check_pair(models / "out", None, []).gates == ()


def test_sensitivity_and_noise_can_be_asked_for_and_left_out(models):
    pair = check_pair(models / "out", None, ["kl<=0.0000001"])
    quiet = verify_pair(pair, options(models, sensitivity=False, noise=False))
    assert (quiet.sensitivity, quiet.noise, quiet.noise_fidelity, quiet.held) == (None, None, None, False)
    held = verify_pair(check_pair(models / "out", None, ["kl<=50"]), options(models, noise=False))
    assert held.held
    assert held.sensitivity is None
    asked = verify_pair(check_pair(models / "out", None, []), options(models, sensitivity=True, noise=False))
    assert len(asked.sensitivity.records) == 8
    assert asked.sensitivity.proposal is None


def test_an_interrupted_map_loses_nothing_that_was_measured_before(models, monkeypatch):
    kept = []
    monkeypatch.setattr("quantkit.evaluate.sensitivity.sensitivity_map", lambda *_, **__: 1 / 0)
    pair = check_pair(models / "out", None, ["kl<=0.0000001"])
    with pytest.raises(ZeroDivisionError):
        verify_pair(pair, options(models, noise=False), keep=kept.append)
    (report,) = kept
    assert [(gate.metric, gate.held) for gate in report.gates] == [("kl", False)]
    assert report.fidelity is not None
    assert report.environment is not None
    assert "before the sensitivity map" in report.notes[-1]


def test_a_model_that_was_rotated_has_no_part_that_fits_into_the_original(models):
    """Its linears compute with other inputs, so the map of an original with one of them is meaningless."""
    pair = check_pair(models / "out", None, ["kl<=0.0000001"])
    recipe = {**pair.manifest["recipe"], "steps": [{"rotate": {"heads": True, "seed": 0}}]}
    rotated = dataclasses.replace(pair, manifest={**pair.manifest, "recipe": recipe})
    report = verify_pair(rotated, options(models, noise=False))
    assert report.sensitivity is None
    assert "No sensitivity map: step rotate changes the whole model" in report.notes[-1]
    with pytest.raises(ModelError, match="step rotate"):
        verify_pair(rotated, options(models, noise=False, sensitivity=True))
    unknown = dataclasses.replace(pair, manifest={**pair.manifest, "recipe": {**recipe, "steps": ["of-tomorrow"]}})
    assert unknown.moves_scales is None


def test_without_questions_only_distributions_are_compared(models):
    pair = check_pair(models / "out", None, ["kl<=50"])
    evaluation = EvaluationOptions()
    verified = verify_pair(pair, options(models, evaluation=evaluation, text=str(models / "text.txt"), noise=False))
    assert (verified.evaluation, verified.comparisons) == (None, ())
    assert verified.fidelity.num_tokens > 100
    assert verified.held


def test_without_a_text_the_shipped_one_is_used_and_said_so(models):
    verified = verify_pair(
        check_pair(models / "out", None, []), options(models, evaluation=EvaluationOptions(), noise=False)
    )
    assert any("calibration text" in note for note in verified.notes)


def test_a_text_of_a_suite_that_is_not_there_is_replaced_and_said_so(models, tmp_path):
    """As for a real model without a --data folder, which once failed after the distributions."""
    suite = tmp_path / "suite.yaml"
    part = "{perplexity: [{text: nowhere.txt, window: 64, max_windows: 1}]}"
    suite.write_text(f"{{description: x, demo: {part}, others: {part}}}")
    evaluation = EvaluationOptions(suite=str(suite))
    verified = verify_pair(
        check_pair(models / "out", None, []), options(models, evaluation=evaluation, noise=False, sensitivity=False)
    )
    assert [text.data for text in verified.evaluation.perplexity] == ["general.txt (calibration text)"]
    assert "because nowhere.txt is in no --data folder" in verified.evaluation.settings["text"]
    assert any("calibration text" in note for note in verified.notes)


def test_items_that_are_not_there_are_missed_before_anything_is_computed(models, tmp_path):
    suite = tmp_path / "suite.yaml"
    suite.write_text("{description: x, demo: {tasks: [local_piqa]}, others: {tasks: [local_piqa]}}")
    evaluation, said = EvaluationOptions(suite=str(suite)), []
    with pytest.raises(DataError, match="pass --data DIR"):
        verify_pair(check_pair(models / "out", None, []), options(models, evaluation=evaluation), progress=said.append)
    assert not any("distributions" in line for line in said)


def test_a_quantized_cache_belongs_to_the_checkpoint_only(models):
    pair = check_pair(models / "out", None, [])
    plain = verify_pair(pair, options(models, noise=False))
    int8 = verify_pair(pair, options(models, noise=False, engine={**ENGINE, "kv_cache": "int8"}))
    assert int8.baseline.settings["KV cache"] == "auto"
    assert int8.evaluation.settings["KV cache"] == "int8"
    assert int8.baseline.perplexity == plain.baseline.perplexity
    assert int8.fidelity.mean_kl != plain.fidelity.mean_kl


def test_a_missing_checkpoint(tmp_path, models):
    with pytest.raises(ModelError, match="no such model directory"):
        check_pair(tmp_path / "gone", models / "llama")
    with pytest.raises(ModelError, match="no such model directory"):
        check_pair(models / "out", tmp_path / "gone")


def test_a_baseline_of_another_vocabulary(models, tmp_path):
    other = make_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(ModelError, match=r"has a vocabulary of 300 tokens, but .* has 260; give the model"):
        check_pair(models / "out", other)


def test_a_baseline_whose_tokens_mean_something_else(models, tmp_path):
    other = shutil.copytree(models / "llama", tmp_path / "other")
    file = other / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    file.write_text(json.dumps(data))
    with pytest.raises(DataError, match="have different vocabularies"):
        check_pair(models / "out", other)


def shard(checkpoint):
    return sorted(checkpoint.glob("*.safetensors"))[0]


def test_a_shard_that_changed_is_named(checkpoint, models):
    file = shard(checkpoint)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"changed since the checkpoint was made: its SHA-256 is .* copy it again"
    ) as error:
        check_pair(checkpoint, models / "llama")
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_shard_of_another_size_is_named(checkpoint, models):
    manifest = json.loads((checkpoint / "quantkit.json").read_text())
    manifest["files"][shard(checkpoint).name]["bytes"] += 8
    (checkpoint / "quantkit.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"it has \d+ bytes instead of \d+"):
        check_pair(checkpoint, models / "llama")


def test_a_shard_that_was_never_written_is_named(checkpoint, models):
    manifest = json.loads((checkpoint / "quantkit.json").read_text())
    del manifest["files"][shard(checkpoint).name]
    (checkpoint / "quantkit.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"quantkit\.json does not name it"):
        check_pair(checkpoint, models / "llama")


def test_without_hashes_it_says_that_nothing_was_checked(checkpoint, models):
    (checkpoint / "quantkit.json").unlink()
    (checkpoint / "quantkit-run.json").unlink()
    pair = check_pair(checkpoint, models / "llama")
    assert "cannot tell whether its files changed" in pair.notes[0]
    assert pair.gates == ()
    with pytest.raises(ModelError, match="does not name the model it was made from; give that model as --baseline"):
        check_pair(checkpoint, None)


def test_an_original_that_moved_away(checkpoint, tmp_path):
    made = json.loads((checkpoint / "quantkit-run.json").read_text())
    (checkpoint / "quantkit-run.json").write_text(json.dumps({**made, "model": str(tmp_path / "moved")}))
    with pytest.raises(
        ModelError, match=r"was made from .*, which does not exist here; give the original as --baseline"
    ):
        check_pair(checkpoint, None)


def test_a_damaged_manifest_and_a_model_beside_itself(checkpoint, models):
    with pytest.raises(ModelError, match="is its own baseline"):
        check_pair(models / "llama", models / "llama")
    (checkpoint / "quantkit.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        check_pair(checkpoint, models / "llama")


def test_gates_that_cannot_both_hold_or_be_read():
    with pytest.raises(GateError, match="cannot both hold"):
        check_gates(["kl<=0.1", "kl>=0.2"])
    with pytest.raises(GateError, match="did you mean 'recovery'"):
        check_gates(["recovry>=99"])
    assert check_gates(["kl<=0.1", "kl <= 0.1", "recovery[a]>=99"]) == ("kl<=0.1", "recovery[a]>=99")


def test_what_is_timed_must_fit_before_anything_is_loaded(models, monkeypatch):
    monkeypatch.setattr("quantkit.evaluate.verify.run.load_llm", lambda *_, **__: pytest.fail("loaded"))
    long = dataclasses.replace(BENCH, prompt_tokens=5000)
    with pytest.raises(RequestError, match="5000"):
        verify_pair(check_pair(models / "out", None, []), options(models, bench=long))


def test_a_failed_checkpoint_gets_another_name_and_replaces_an_earlier_failure(report, checkpoint):
    moved, target = set_aside(report, checkpoint)
    assert not checkpoint.exists()
    assert target.name == "out.failed"
    assert (moved.model.name, moved.model.path) == ("out.failed", str(target))
    again = shutil.copytree(target, checkpoint)
    set_aside(report, again)
    assert target.is_dir()
    assert not again.exists()


def test_something_else_of_that_name_is_not_deleted(report, checkpoint):
    other = checkpoint.with_name("out.failed")
    other.mkdir()
    (other / "letters.txt").write_text("dear")
    with pytest.raises(
        OutputError, match=r"cannot be renamed to .*out\.failed has no quantkit\.json that quantkit wrote"
    ):
        set_aside(report, checkpoint)
    assert (other / "letters.txt").exists()
    assert checkpoint.exists()


def judged(*gates: str) -> Report:
    report = make_report(broken=True, gates=())
    return dataclasses.replace(report, gates=tuple(evaluate_gates(report, gates)))


def test_what_a_repair_has_to_reach_follows_from_the_gates_that_failed():
    total = judged().fidelity.mean_kl
    assert repair_goal(judged()) is None
    assert repair_goal(judged("kl<=9", "memory_ratio<=0.01")) is None  # held, and not about accuracy
    assert repair_goal(judged("kl<=0.01")) == Goal(kl=0.01)
    assert repair_goal(judged("top1>=0.95", "kl_p99<=0.1")) == Goal(top1=0.95, kl_p99=0.1)
    tasks = next(c for c in judged().comparisons if c.subject == "all tasks")
    limit = 100 - (100 - tasks.recovery) / 4
    assert repair_goal(judged(f"recovery>={limit}")).kl == pytest.approx(total / 4, rel=1e-3)
    ratio = evaluate_gates(judged(), ["perplexity_ratio<=1"])[0].value
    assert repair_goal(judged(f"perplexity_ratio<={math.sqrt(ratio)}")).kl == pytest.approx(total / 2, rel=1e-3)
    both = repair_goal(judged(f"recovery>={limit}", "kl<=0.001"))
    assert both == Goal(kl=0.001)


def test_a_score_and_a_perplexity_count_from_the_original():
    report = judged()
    total = report.fidelity.mean_kl
    task = report.comparisons[1]
    middle = (task.baseline + task.value) / 2
    assert repair_goal(judged(f"score[{task.subject}]>={middle}")).kl == pytest.approx(total / 2, rel=1e-2)
    text = max((c for c in report.comparisons if c.subject.startswith("perplexity: ")), key=lambda c: c.value)
    limit = math.sqrt(text.baseline * text.value)
    assert repair_goal(judged(f"perplexity<={limit}")).kl == pytest.approx(total / 2, rel=1e-2)


@pytest.mark.slow
def test_vllm_computes_everything_where_it_is_asked_to(report, models, monkeypatch):
    fake_vllm.install(monkeypatch)
    asked = options(models, bench=BENCH, engine={}, vllm={"kv_cache_dtype": "auto", "max_model_len": 96}, noise=False)
    pair = check_pair(models / "out", None, ("kl<=0.0001", "itl_ratio<=99"))
    served = verify_pair(pair, asked)
    assert served.fidelity.mean_kl_low <= report.fidelity.mean_kl <= served.fidelity.mean_kl
    assert served.fidelity.engine == served.evaluation.settings["engine"] == "vLLM 0.0"
    assert served.benchmark.settings["engine"] == served.baseline_benchmark.settings["engine"] == "vLLM 0.0"
    assert {gate.metric: gate.held for gate in served.gates} == {"kl": False, "itl_ratio": True}
    assert served.sensitivity is None
    assert any("ran in vLLM 0.0" in note for note in served.notes)
    # One after the other, and each closed before the next: answers of both, then times of both.
    assert [(one["model"].rpartition("/")[2], one["closed"]) for one in fake_vllm.LOADED] == [
        ("llama", True),
        ("out", True),
        ("llama", True),
        ("out", True),
    ]
    assert "kv_cache_dtype" not in fake_vllm.LOADED[0]
    assert Report.from_dict(json.loads(json.dumps(served.to_dict()))) == served


def test_what_vllm_cannot_do_is_refused_before_anything_is_loaded(models, monkeypatch):
    fake_vllm.install(monkeypatch)
    pair = check_pair(models / "out", None, ())
    for changes, said in (({"sensitivity": True}, "can make the sensitivity map"), ({"engine": ENGINE}, "num_pages")):
        with pytest.raises(RequestError, match=said):
            verify_pair(pair, options(models, **{"engine": {}, "vllm": {}, **changes}))
    assert fake_vllm.LOADED == []
