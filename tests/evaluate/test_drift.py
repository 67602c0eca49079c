"""Drift: the record on numbers worked out by hand, the measurement against whole logits, refusals in one line."""

from __future__ import annotations

import pytest
import torch

from quantkit.cli import main
from quantkit.errors import RequestError
from quantkit.evaluate.drift import drift_result, measure_drift
from quantkit.evaluate.fidelity import Distances, distances, fixed_windows
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.verify import options
from quantkit.runtime.types import SamplingParams
from tests.helpers import TEXT, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def llm(folder):
    return load_llm(str(folder), dtype="float32", device="cpu", threads=1)


def run(*words):
    """Exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def test_the_record_of_known_distances():
    position = torch.arange(400.0)
    agrees = torch.ones(400, dtype=torch.bool)
    agrees[7] = agrees[300] = False
    rising = Distances(kl=0.1 + position / 1000, agrees=agrees)
    flat = Distances(kl=torch.full((400,), 0.1), agrees=torch.ones(400, dtype=torch.bool))
    drift = drift_result([rising, flat], 400)
    assert drift.slope == pytest.approx(0.5)  # the mean of 1 and 0 nats per 1,000 tokens
    # Two values have a standard error of half their distance; Student's t with one degree of freedom is 12.7.
    assert drift.slope_high - drift.slope == pytest.approx(12.706 * 0.5, rel=1e-3)
    assert drift.slope_low == pytest.approx(2 * drift.slope - drift.slope_high)
    assert drift.ends == (100, 200, 300, 400)
    assert drift.part_kl == pytest.approx([0.1 + (49.5 + 100 * part) / 2000 for part in range(4)])
    assert drift.text_kl == pytest.approx([0.1 + 199.5 / 1000, 0.1])
    assert drift.first_difference == (7, None)
    assert drift_result([rising], 400).slope_low is None


def test_equal_models_do_not_drift(llm):
    drift = measure_drift(llm, llm, fixed_windows(llm, TEXT, window=48), tokens=64)
    assert drift.slope == 0 and set(drift.text_kl) == {0}
    assert drift.first_difference == (None,) * drift.num_texts


def test_distances_are_those_of_decoding_through_the_cache(llm, folder):
    other = load_llm(str(folder), dtype="float32", device="cpu", threads=1, kv_cache="int4")
    windows = fixed_windows(llm, TEXT, window=48)[:3]
    drift = measure_drift(other, llm, windows, tokens=80, seed=5)
    assert drift.num_texts == 3 and drift.ends == (20, 40, 60, 80)
    for number, window in enumerate(windows):
        params = SamplingParams(max_tokens=80, temperature=1.0, seed=5 + number, ignore_eos=True)
        (written,) = llm.generate([list(window[:32])], params)
        trace = (*window[:32], *written.token_ids[:-1])
        ours, theirs = (each.score([trace], chunk_size=1)[0][-80:] for each in (other, llm))
        expected = distances(theirs, ours)
        assert expected.mean > 0
        assert drift.text_kl[number] == pytest.approx(expected.mean, rel=1e-3)


@pytest.mark.parametrize("tokens", [10, 100_000])
def test_a_number_of_tokens_that_shows_nothing_or_does_not_fit(llm, tokens):
    with pytest.raises(RequestError, match=rf"drift over {tokens} tokens cannot be measured: give at least 64, and"):
        measure_drift(llm, llm, fixed_windows(llm, TEXT, window=48), tokens=tokens)


def test_verify_measures_drift_and_checks_its_gate(folder, tmp_path, capsys):
    assert run("quantize", folder, "--recipe", "rtn-int4", "--set", "weights.group_size=32", "-o", tmp_path / "q") == 0
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    asked = ("--text", text, "--suite", "none", "--no-bench", "--no-sensitivity")
    capsys.readouterr()
    assert run("verify", tmp_path / "q", "--drift", "64", "--gate", "drift<=9", *asked) == 0
    assert "tokens 49 to 64" in capsys.readouterr().out
    assert run("verify", tmp_path / "q", "--gate", "drift<=0.1", *asked) == 3
    assert "Suggested change: add `--drift TOKENS` to `quantkit verify`" in capsys.readouterr().err


def test_vllm_cannot_measure_drift(monkeypatch):
    monkeypatch.setattr(options, "import_vllm", lambda: None)
    with pytest.raises(RequestError, match="only quantkit's engine can measure drift; leave out --drift or --engine"):
        options.check_options(options.VerifyOptions(evaluation=EvaluationOptions(), vllm={}, drift=64))


def test_too_few_tokens_are_refused_before_a_model_is_loaded(tmp_path, capsys):
    assert run("verify", tmp_path, "--drift", "10", "--no-bench") == 4
    assert "drift over 10 tokens cannot be measured: give --drift at least 64 tokens" in capsys.readouterr().err
