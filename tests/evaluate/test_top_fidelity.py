"""Distances from the likeliest tokens alone hold the distance of the whole distributions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.errors import ModelError
from quantkit.evaluate.fidelity import distances
from quantkit.evaluate.top_fidelity import TopReading, bounds, top_fidelity
from quantkit.results import FidelityResult
from quantkit.runtime.vllm_engine import TopLogprobs


def logits(rows: int = 64, vocab: int = 300, noise: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    original = 3 * torch.randn(rows, vocab, generator=generator)
    return original, original + noise * torch.randn(rows, vocab, generator=generator)


def top(rows: torch.Tensor, count: int) -> TopLogprobs:
    values, tokens = rows.log_softmax(-1).topk(count)
    return TopLogprobs(tokens=tokens, logprobs=values.double())


def reading(rows: torch.Tensor, count: int) -> TopReading:
    return TopReading(
        path=Path("m"), engine="e", vocab_size=rows.shape[1], windows=(top(rows, count),), texts=[(1, 2), (3, 4)]
    )


@pytest.mark.parametrize("count", [5, 20, 100])
def test_bounds_hold_the_whole_distance_at_every_position(count):
    original, model = logits()
    exact = distances(original, model)
    found = bounds(top(original, count), top(model, count))
    assert bool((found.low <= exact.kl + 1e-6).all())
    assert exact.mean <= float(found.kl.mean())
    assert count < 20 or bool((exact.kl <= found.kl + 1e-6).all())  # of five, one that lost most says little
    assert torch.equal(found.agrees, exact.agrees)


def test_bounds_close_in_with_more_tokens_and_meet_where_all_are_known():
    original, model = logits()
    widths = [
        float((b.kl - b.low).mean()) for b in (bounds(top(original, n), top(model, n)) for n in (5, 20, 100, 300))
    ]
    assert widths == sorted(widths, reverse=True)
    whole = bounds(top(original, 300), top(model, 300))
    torch.testing.assert_close(whole.kl, whole.low, atol=1e-5, rtol=0)
    torch.testing.assert_close(whole.kl.float(), distances(original, model).kl, atol=1e-5, rtol=1e-4)


def test_a_token_that_only_the_original_names_counts_for_what_it_lost_at_least():
    original = torch.tensor([[4.0, 3.9, 0.0, 0.0, 0.0, 0.0]])
    model = torch.tensor([[4.0, -4.0, 0.0, 0.0, 0.0, 0.0]])
    exact = float(distances(original, model).kl)
    found = bounds(top(original, 2), top(model, 2))
    assert float(found.low) <= exact
    assert float(found.kl) > 1.0


def test_the_record_says_both_ends_and_by_what_it_was_computed():
    original, model = logits()
    result = top_fidelity(reading(model, 20), reading(original, 20), data="text", greedy_tokens=2)
    assert result.mean_kl_low < result.mean_kl
    assert (result.engine, result.top, result.num_tokens, result.first_divergence) == ("e", 20, 64, (None, None))
    assert 0 < result.remainder < 1


def test_another_vocabulary_is_refused():
    original, model = logits()
    with pytest.raises(ModelError, match="has a vocabulary of 300 tokens, but the original m has 200 tokens"):
        top_fidelity(reading(model, 20), reading(original[:, :200], 20), data="text")


def test_a_kl_is_known_up_to_what_another_arithmetic_changes():
    known = FidelityResult(data="x", num_tokens=1, mean_kl=9e-4, mean_kl_low=4e-4, p99_kl=0.0, top1_agreement=1.0)
    noise = FidelityResult(data="x", num_tokens=1, mean_kl=1e-4, mean_kl_low=5e-5, p99_kl=0.0, top1_agreement=1.0)
    assert known.within(noise) == pytest.approx((0, 25e-4))
    assert noise.within(known)[0] == 0
    # A file of strangers may say what no model does.
    for wrong in (-1.0, 1e308, float("inf"), float("nan")):
        low, high = replace(known, mean_kl=wrong, mean_kl_low=None).within(replace(noise, mean_kl=wrong))
        assert 0 <= low <= high
    # Where all noise of both points with what was changed, or against it, that is what is left.
    original, changed = logits(noise=0.1)
    for share in (-0.1, 0.1):
        step = share * (changed - original)
        pairs = (original - step, changed + step), (original, changed), (original, original + step)
        served, ours, noise_kl = (distances(*pair).mean for pair in pairs)
        low, high = replace(known, mean_kl=served, mean_kl_low=None).within(replace(noise, mean_kl=1.1 * noise_kl))
        assert low < ours < high
        assert ours < 1.2 * low or ours > 0.8 * high  # near one of the ends
