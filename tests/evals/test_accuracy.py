"""The accuracy table: the score's protocol, its intervals, and the page that the committed figures give."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "evals" / "accuracy"))

import score  # noqa: E402

DEMO = REPOSITORY / "quantkit" / "demo" / "model"
TEXT = (REPOSITORY / "evals" / "tasks" / "demo" / "demo_text.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def original():
    return score.load(DEMO)


def test_windows_are_the_protocols(original):
    ids = original.tokenizer(TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    windows = score.read_windows(original, TEXT, window=64, max_windows=7)
    assert len(windows) == 7
    assert all(len(window) == 64 and window[0] == original.tokenizer.bos_token_id for window in windows)
    assert [token for window in windows for token in window[1:]] == ids[: 7 * 63]


def test_windows_make_equal_blocks(original):
    assert len(score.read_windows(original, TEXT, window=32, max_windows=250)) == 200


def test_the_original_is_at_no_distance_from_itself_and_its_perplexity_is_transformers(original):
    transformers = pytest.importorskip("transformers")
    windows = score.read_windows(original, TEXT, window=64, max_windows=4)
    (found,) = score.score([original], original, windows)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    ids = torch.tensor(windows)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    assert found.perplexity == pytest.approx(math.exp(float(nll)), rel=1e-4)
    assert found.tokens == 4 * 63
    assert found.kl == (0.0,) * 4
    assert found.top1 == 1.0


def test_kept_predictions_give_the_same_score(original):
    windows = score.read_windows(original, TEXT, window=64, max_windows=4)
    kept = list(score.log_probabilities(original, windows))
    assert score.score([original], original, windows, kept) == score.score([original], original, windows)


def test_kl_is_from_the_original_to_the_model(original, monkeypatch):
    windows = ((0, 1, 2),) * 2
    before = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    after = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log()
    monkeypatch.setattr(score, "log_probabilities", lambda llm, windows: iter([after, after]))
    (found,) = score.score([original], original, windows, [before, before])
    assert found.mean_kl == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert found.perplexity == pytest.approx(math.exp(-(math.log(0.5) + math.log(0.25)) / 2))
    assert found.top1 == 0


def test_intervals_are_students():
    found = score.interval([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.high - found.mean == pytest.approx(4.30265 / math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize(("shift", "sign"), [(0.5, 1), (-0.5, -1), (0.0, 0)])
def test_paired_differences_see_what_the_blocks_share(shift, sign):
    noise = [0.1, -0.1, 0.05, -0.05]
    other = [1.0, 5.0, 9.0, 2.0]
    value = [x + shift + e for x, e in zip(other, noise, strict=True)]
    assert score.difference(value, other).sign == sign
