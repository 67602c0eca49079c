"""Evaluations compared: pairing by item, noise called noise, directions, and what cannot be compared."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from quantkit.errors import ReportError
from quantkit.results import EvaluationResult, PerplexityResult, SampleRecord, TaskResult
from quantkit.results.statistics.comparison import compare_evaluations, compare_perplexity, compare_task


def task(scores, *, name="t", metric="acc", higher=True, lengths=None, hashes=None, stderr=None) -> TaskResult:
    samples = tuple(
        SampleRecord(
            task=name,
            index=i,
            scores={metric: float(score)},
            answer_tokens=lengths[i] if lengths else None,
            item_hash=hashes[i] if hashes else "",
        )
        for i, score in enumerate(scores)
    )
    value = sum(scores) / len(scores)
    return TaskResult(
        task=name,
        metric=metric,
        value=value,
        stderr=stderr,
        num_samples=len(scores),
        samples=samples,
        higher_is_better=higher,
    )


def text(nll, *, tokens=None, through="prefill") -> PerplexityResult:
    tokens = tokens or [100] * len(nll)
    return PerplexityResult(
        data="d", window=100, stride=100, through=through, window_nll=tuple(nll), window_tokens=tuple(tokens)
    )


ORIGINAL = [1] * 700 + [0] * 300


def flipped(lost: int, won: int) -> list[int]:
    return [0] * lost + [1] * (700 - lost) + [1] * won + [0] * (300 - won)


def test_a_loss_beyond_noise_is_worse():
    result = compare_task(task(flipped(40, 10)), task(ORIGINAL), task(flipped(2, 3)))
    assert result.verdict == "worse"
    assert (result.baseline, result.value, result.difference) == (0.7, 0.67, pytest.approx(-0.03))
    assert result.recovery == pytest.approx(100 * 0.67 / 0.7)
    assert result.recovery_low < result.recovery < result.recovery_high < 100
    assert result.noise_floor == pytest.approx(1.96 * math.sqrt(5) / 1000, rel=1e-3)


def test_101_per_cent_is_noise_when_arithmetic_alone_does_as_much():
    result = compare_task(task(flipped(20, 27)), task(ORIGINAL), task(flipped(12, 10)))
    assert result.recovery == pytest.approx(101)
    assert result.verdict == "noise"


def test_what_cannot_be_told_is_said_so():
    assert compare_task(task(flipped(20, 27)), task(ORIGINAL)).verdict == "no difference seen"
    equal = compare_task(task(ORIGINAL), task(ORIGINAL), task(ORIGINAL))
    assert (equal.verdict, equal.p_value, equal.noise_floor) == ("no difference seen", 1.0, 0.0)


def test_a_shift_of_the_original_itself_widens_its_floor():
    assert compare_task(task(ORIGINAL), task(ORIGINAL), task(flipped(50, 0))).noise_floor == pytest.approx(0.05)


def test_noise_of_a_quarter_of_the_items_is_scaled_to_all():
    """By chance alone, four times the items change the mean half as much; a quarter with equal flips is a quarter."""
    again = task(flipped(20, 8))
    quarter = dataclasses.replace(again, samples=again.samples[::4])
    flips = sum(a.scores != b.scores for a, b in zip(quarter.samples, task(ORIGINAL).samples[::4], strict=True))
    floor = compare_task(task(ORIGINAL), task(ORIGINAL), quarter).noise_floor
    assert floor == pytest.approx(1.96 * math.sqrt(flips / 250 / 1000), rel=1e-3)


def test_noise_of_the_first_windows_is_scaled_to_all():
    rng = random.Random(2)
    before = [200 + rng.gauss(0, 30) for _ in range(400)]
    again = [b + rng.gauss(0, 0.5) for b in before]
    whole = compare_perplexity(text(before), text(before), text(again)).noise_floor
    part = compare_perplexity(text(before), text(before), text(again[:100])).noise_floor
    assert part == pytest.approx(whole, rel=0.3)


def test_items_are_paired_by_index_and_only_those_both_answered_count():
    longer = task(ORIGINAL)
    shorter = dataclasses.replace(longer, samples=longer.samples[100:500][::-1])
    result = compare_task(shorter, longer)
    assert (result.num_samples, result.difference) == (400, 0.0)


def test_other_items_under_the_same_index_are_refused():
    with pytest.raises(ReportError, match=r"task t: item 1 differs .*same data, seed and limit"):
        compare_task(task([1, 0], hashes=["a", "b"]), task([1, 0], hashes=["a", "c"]))


def test_other_metrics_are_refused():
    with pytest.raises(ReportError, match="metric 'f1' cannot be compared with 'acc'"):
        compare_task(task([1, 0], metric="f1"), task([1, 0]))


def test_without_samples_the_standard_errors_are_used_unpaired():
    def bare(value, stderr):
        return TaskResult(task="t", metric="acc", value=value, stderr=stderr, num_samples=100)

    result = compare_task(bare(0.5, 0.03), bare(0.7, 0.04))
    assert (result.low, result.high) == (pytest.approx(-0.298, abs=1e-3), pytest.approx(-0.102, abs=1e-3))
    assert result.verdict == "worse"
    assert "unpaired" in result.method
    unknown = compare_task(bare(0.5, None), bare(0.7, None))
    assert (unknown.low, unknown.p_value, unknown.verdict) == (None, None, "unknown")


def test_where_lower_is_better_recovery_and_verdict_turn_round():
    rng = random.Random(0)
    before = [rng.uniform(1, 2) for _ in range(200)]
    result = compare_task(
        task([b * 1.1 for b in before], higher=False, metric="loss"), task(before, higher=False, metric="loss")
    )
    assert result.verdict == "worse"
    assert result.recovery == pytest.approx(100 / 1.1)
    assert result.recovery_low < result.recovery < result.recovery_high


def test_perplexities_are_compared_by_window():
    rng = random.Random(1)
    before = [200 + rng.gauss(0, 30) for _ in range(50)]
    after = [b + 2 + rng.gauss(0, 1) for b in before]
    result = compare_perplexity(text(after), text(before), text([b + rng.gauss(0, 0.05) for b in before]))
    assert result.verdict == "worse"
    assert result.low < result.difference < result.high
    assert result.recovery == pytest.approx(100 * result.baseline / result.value)
    assert 0 < result.noise_floor < 0.01


def test_one_window_does_not_make_every_difference_noise():
    before, after, again = (text([nll]) for nll in (200.0, 220.0, 201.0))
    result = compare_perplexity(after, before, again)
    assert 0 < result.noise_floor == pytest.approx(again.perplexity - before.perplexity)
    assert (result.verdict, result.p_value, result.low) == ("unknown", None, None)


def test_the_interval_of_a_perplexity_covers_95_per_cent():
    rng = random.Random(2)
    covered = 0
    for _ in range(2000):
        tokens = [rng.choice((50, 100)) for _ in range(30)]
        before = [2 * n + rng.gauss(0, 10) for n in tokens]
        after = [b + n * (0.01 + rng.gauss(0, 0.02)) for b, n in zip(before, tokens, strict=True)]
        result = compare_perplexity(text(after, tokens=tokens), text(before, tokens=tokens))
        covered += result.low <= result.baseline * math.expm1(0.01) <= result.high
    assert abs(covered / 2000 - 0.95) <= 0.02


def test_one_window_has_no_interval_and_no_verdict():
    result = compare_perplexity(text([220.0]), text([200.0]))
    assert (result.low, result.high, result.p_value, result.verdict) == (None, None, None, "unknown")


def test_other_windows_are_refused():
    with pytest.raises(ReportError, match="have different numbers of tokens"):
        compare_perplexity(text([1.0], tokens=[10]), text([1.0], tokens=[11]))


def test_a_model_without_hope_has_an_infinite_perplexity_and_no_crash():
    result = compare_perplexity(text([90000.0, 90001.0]), text([200.0, 210.0]))
    assert math.isinf(result.value)
    assert result.recovery == pytest.approx(0)


def test_everything_shared_is_compared_the_mean_first_and_lengths_last():
    def evaluation(scores, lengths, nll):
        tasks = (
            task(scores, name="a"),
            task(scores[::-1], name="b", lengths=lengths),
            task([1, 2], name="l", higher=False),
        )
        return EvaluationResult(model="m", tasks=tasks, perplexity=(text(nll), text(nll, through="decode")))

    value = evaluation(flipped(10, 2), [24] * 1000, [210.0, 190.0])
    baseline = evaluation(ORIGINAL, [20] * 1000, [200.0, 180.0])
    only_here = dataclasses.replace(value, tasks=(*value.tasks, task([1], name="new")))
    compared = compare_evaluations(only_here, baseline, baseline)
    subjects = ["all tasks", "a", "b", "l", "perplexity: d", "perplexity: d (decode)", "answer length: b"]
    assert [c.subject for c in compared] == subjects
    assert compared[0].num_samples == 2000  # the task where lower is better is no part of the mean
    assert compared[0].value == pytest.approx((compared[1].value + compared[2].value) / 2)
    assert compared[-1].recovery == pytest.approx(120)
