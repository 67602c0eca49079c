"""Two evaluations, sample by sample: what changed, how surely, and how much of it arithmetic alone would do.

The noise floor of a number is how far the original strays from itself when it computes in another arithmetic: the
change seen, or what as many changed items would add up to if each were as likely won as lost, whichever is larger. A
difference within it is called noise, whatever its p-value, in both directions: 101 % recovery is noise too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.errors import ReportError
from quantkit.results import Comparison, EvaluationResult, PerplexityResult, SampleRecord, TaskResult, Verdict
from quantkit.results.statistics.distributions import NORMAL, student_cdf, student_quantile
from quantkit.results.statistics.paired import CONFIDENCE, PairedResult, Pairs, compare_pairs

ALL_TASKS = "all tasks"
ANSWER_LENGTH = "answer length"
LENGTH_BAND = (0.90, 1.10)  # answers outside it cost or lose something whatever their score, as in MLPerf Inference
SIGNIFICANCE = 1 - CONFIDENCE


def compare_evaluations(
    value: EvaluationResult, baseline: EvaluationResult, noise: EvaluationResult | None = None
) -> tuple[Comparison, ...]:
    """Every number that both evaluations have, the mean over tasks first.

    Args:
        value: of the model.
        baseline: of the original.
        noise: of the original under other arithmetic.
    Raises:
        ReportError: samples of the same index are different items.
    """
    shared = [
        (task, other, None if noise is None else noise.find_task(task.task))
        for task in value.tasks
        if (other := baseline.find_task(task.task)) is not None
    ]
    tasks = [compare_task(*triple) for triple in shared]
    lengths = [compare_lengths(task, other) for task, other, _ in shared]
    texts = [
        compare_perplexity(text, original, None if noise is None else _find_text(noise, text))
        for text in value.perplexity
        if (original := _find_text(baseline, text)) is not None
    ]
    mean = _compare_mean([triple for triple in shared if triple[0].higher_is_better and _paired(*triple[:2])])
    return (*([mean] if mean else []), *tasks, *texts, *(length for length in lengths if length))


def compare_task(value: TaskResult, baseline: TaskResult, noise: TaskResult | None = None) -> Comparison:
    """One task of both models: paired where samples are kept, else by the standard errors."""
    if value.metric != baseline.metric:
        raise ReportError(f"task {value.task}: metric {value.metric!r} cannot be compared with {baseline.metric!r}")
    pairs = _paired(value, baseline)
    if pairs is None:
        return _compare_unpaired(value, baseline)
    floor = None if noise is None else _noise_floor([_paired(noise, baseline)])
    return _comparison(
        compare_pairs([pairs]), value.task, value.metric, floor=floor, higher_is_better=value.higher_is_better
    )


def compare_lengths(value: TaskResult, baseline: TaskResult) -> Comparison | None:
    """Length of generated answers; None where the task generates none."""
    before, after = _by_index(baseline), _by_index(value)
    pairs = [
        (float(before[i].answer_tokens or 0), float(after[i].answer_tokens or 0))
        for i in sorted(before.keys() & after.keys())
        if before[i].answer_tokens is not None and after[i].answer_tokens is not None
    ]
    if not pairs:
        return None
    result = compare_pairs([([b for b, _ in pairs], [v for _, v in pairs])])
    return _comparison(result, f"{ANSWER_LENGTH}: {value.task}", "tokens", floor=None, higher_is_better=True)


def compare_perplexity(
    value: PerplexityResult, baseline: PerplexityResult, noise: PerplexityResult | None = None
) -> Comparison:
    """Perplexity of one text, window by window: Student's t on the log-ratio, carried over to the perplexities."""
    ratio = _log_ratio(value, baseline)
    before, after = baseline.perplexity, value.perplexity
    floor = None
    if noise is not None:
        own = _log_ratio(noise, baseline)
        floor = before * math.expm1(max(abs(own.mean), own.reach))
    low, high = (None, None) if math.isinf(ratio.reach) else (ratio.mean - ratio.reach, ratio.mean + ratio.reach)
    return Comparison(
        subject=f"perplexity: {value.data}" + (" (decode)" if value.through == "decode" else ""),
        metric=f"perplexity ({value.through})",
        baseline=before,
        value=after,
        difference=after - before,
        low=None if low is None else before * _expm1(low),
        high=None if high is None else before * _expm1(high),
        p_value=ratio.p_value,
        num_samples=len(value.window_nll),
        verdict=_verdict(after - before, ratio.p_value, floor, higher_is_better=False),
        recovery=100 * math.exp(-ratio.mean),
        recovery_low=None if high is None else 100 * math.exp(-high),
        recovery_high=None if low is None else 100 * math.exp(-low),
        noise_floor=floor,
        higher_is_better=False,
        method="Student's t on the log-ratio of windows",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _LogRatio:
    mean: float
    reach: float  # half the 95 % interval
    p_value: float | None


def _log_ratio(value: PerplexityResult, baseline: PerplexityResult) -> _LogRatio:
    """Difference of the nll per token, its windows the independent units: a ratio estimator, as tokens vary."""
    if value.window_tokens != baseline.window_tokens:
        raise ReportError(f"perplexity of {value.data}: the two models read different windows")
    tokens, count = value.num_tokens, len(value.window_tokens)
    mean = (value.nll - baseline.nll) / tokens
    if count < 2:
        return _LogRatio(mean=mean, reach=math.inf, p_value=None)
    rows = zip(value.window_nll, baseline.window_nll, value.window_tokens, strict=True)
    squares = math.fsum((after - before - mean * n) ** 2 for after, before, n in rows)
    error = math.sqrt(squares * count / (count - 1)) / tokens
    tail = student_cdf(-abs(mean) / error, count - 1) if error > 0 else (0.5 if mean == 0 else 0.0)
    return _LogRatio(
        mean=mean, reach=error * student_quantile(0.5 + CONFIDENCE / 2, count - 1), p_value=min(1.0, 2 * tail)
    )


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf


def _find_text(evaluation: EvaluationResult, text: PerplexityResult) -> PerplexityResult | None:
    """The same text, read the same way."""
    keys = ("data", "window", "stride", "through")
    wanted = [getattr(text, key) for key in keys]
    return next((p for p in evaluation.perplexity if [getattr(p, key) for key in keys] == wanted), None)


def _by_index(result: TaskResult) -> dict[int, SampleRecord]:
    return {sample.index: sample for sample in result.samples}


def _paired(value: TaskResult, baseline: TaskResult) -> Pairs | None:
    """Scores of the items that both answered, original first; None when samples were not kept."""
    before, after = _by_index(baseline), _by_index(value)
    common = sorted(before.keys() & after.keys())
    for index in common:
        hashes = before[index].item_hash, after[index].item_hash
        if all(hashes) and hashes[0] != hashes[1]:
            raise ReportError(
                f"task {value.task}: item {index} differs between the two evaluations ({hashes[0][:12]} and "
                f"{hashes[1][:12]}); evaluate both with the same data, seed and limit"
            )
    if not common:
        return None
    metric = value.metric
    return [before[i].scores[metric] for i in common], [after[i].scores[metric] for i in common]


def _noise_floor(tasks: Sequence[Pairs | None]) -> float | None:
    """How far the mean strays under other arithmetic; None when any task was not run so."""
    known = [pairs for pairs in tasks if pairs is not None]
    if not known or len(known) < len(tasks):
        return None
    changes = [[v - b for b, v in zip(*pairs, strict=True)] for pairs in known]
    shift = abs(math.fsum(math.fsum(change) / len(change) for change in changes)) / len(changes)
    spread = math.sqrt(math.fsum(math.fsum(c * c for c in change) / len(change) ** 2 for change in changes))
    return max(shift, NORMAL.inv_cdf(0.5 + CONFIDENCE / 2) * spread / len(changes))


def _compare_mean(triples: Sequence[tuple[TaskResult, TaskResult, TaskResult | None]]) -> Comparison | None:
    """The unweighted mean over tasks where higher is better; None without such tasks."""
    if not triples:
        return None
    pairs = [_paired(value, baseline) or ([], []) for value, baseline, _ in triples]
    noise = [None if other is None else _paired(other, baseline) for _, baseline, other in triples]
    metrics = {value.metric for value, _, _ in triples}
    name = metrics.pop() if len(metrics) == 1 else "main metric"
    return _comparison(compare_pairs(pairs), ALL_TASKS, name, floor=_noise_floor(noise), higher_is_better=True)


def _comparison(
    result: PairedResult, subject: str, metric: str, *, floor: float | None, higher_is_better: bool
) -> Comparison:
    ratios = result.ratio, result.ratio_low, result.ratio_high
    if not higher_is_better:
        ratios = _upside_down(result.ratio), _upside_down(result.ratio_high), _upside_down(result.ratio_low)
    shared = {name: getattr(result, name) for name in _SHARED}
    return Comparison(
        subject=subject,
        metric=metric,
        verdict=_verdict(result.difference, result.p_value, floor, higher_is_better=higher_is_better),
        recovery=_percent(ratios[0]),
        recovery_low=_percent(ratios[1]),
        recovery_high=_percent(ratios[2]),
        noise_floor=floor,
        higher_is_better=higher_is_better,
        **shared,
    )


_SHARED = ("baseline", "value", "difference", "low", "high", "p_value", "num_samples", "method")


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * ratio


def _upside_down(ratio: float | None) -> float | None:
    return 1 / ratio if ratio else None


def _compare_unpaired(value: TaskResult, baseline: TaskResult) -> Comparison:
    """Without samples the two are treated as independent, which is less sure than pairing."""
    difference = value.value - baseline.value
    error = None if None in (value.stderr, baseline.stderr) else math.hypot(value.stderr or 0, baseline.stderr or 0)
    reach = None if error is None else error * NORMAL.inv_cdf(0.5 + CONFIDENCE / 2)
    result = PairedResult(
        baseline=baseline.value,
        value=value.value,
        difference=difference,
        low=None if reach is None else difference - reach,
        high=None if reach is None else difference + reach,
        p_value=None if not error else 2 * NORMAL.cdf(-abs(difference) / error),
        ratio=value.value / baseline.value if baseline.value else None,
        ratio_low=None,
        ratio_high=None,
        num_samples=min(value.num_samples, baseline.num_samples),
        method="standard errors, unpaired: samples were not kept",
    )
    return _comparison(result, value.task, value.metric, floor=None, higher_is_better=value.higher_is_better)


def _verdict(difference: float, p_value: float | None, floor: float | None, *, higher_is_better: bool) -> Verdict:
    if floor is not None and abs(difference) <= floor and difference != 0:
        return "noise"
    if p_value is None or p_value >= SIGNIFICANCE:
        return "no difference seen"
    return "better" if (difference > 0) == higher_is_better else "worse"
