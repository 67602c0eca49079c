"""Compare the evaluations of a model and its original item by item: what changed, whether the change is significant,
and how much another dtype alone would change the results.

The noise floor of a number says how much the original's number changes when the original computes in another dtype. It
is the larger of two changes: the observed change, and the change that as many changed items would cause by chance if
gains and losses were equally likely. If only a share of the items was evaluated in the other dtype, both changes are
multiplied by the square root of that share, because the mean of more items varies less by chance. A difference that
does not exceed the noise floor is called noise, whatever its p-value. This holds for gains as well as losses, so a
recovery of 101 % may be noise.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, replace

from quantkit.errors import ReportError
from quantkit.results import Comparison, EvaluationResult, PerplexityResult, SampleRecord, TaskResult, Verdict
from quantkit.results.statistics.paired import (
    CONFIDENCE,
    NORMAL,
    PairedResult,
    Pairs,
    compare_pairs,
    student_cdf,
    student_quantile,
)

ALL_TASKS = "all tasks"
ANSWER_LENGTH = "answer length"
BEHAVIOUR = "behaviour"
ACCEPTANCE = "accepted drafts"
LENGTH_BAND = (0.90, 1.10)  # allowed ratio of mean answer length to the original's; limits as in MLPerf Inference
SIGNIFICANCE = 1 - CONFIDENCE


def compare_evaluations(
    value: EvaluationResult, baseline: EvaluationResult, noise: EvaluationResult | None = None
) -> tuple[Comparison, ...]:
    """Compare every number that both evaluations have; the mean over tasks comes first.

    Args:
        value: evaluation of the model.
        baseline: evaluation of the original.
        noise: evaluation of the original in another dtype (float32 for a bfloat16 model), which gives the noise floor;
            None = not measured.
    Raises:
        ReportError: in a task, samples with the same index are different items.
    """
    shared = [
        (task, other, None if noise is None else noise.find_task(task.task))
        for task in value.tasks
        if (other := baseline.find_task(task.task)) is not None
    ]
    tasks = [compare_task(*triple) for triple in shared]
    behaviour = _compare_behaviour(value, baseline, noise)
    lengths = [compare_lengths(task, other) for task, other, _ in shared]
    texts = [
        compare_perplexity(text, original, None if noise is None else _find_text(noise, text))
        for text in value.perplexity
        if (original := _find_text(baseline, text)) is not None
    ]
    # The mean needs samples of both models. It leaves out tasks in which lower is better: a loss would count as a gain.
    mean = _compare_mean([triple for triple in shared if triple[0].higher_is_better and _paired(*triple[:2])])
    return (*([mean] if mean else []), *tasks, *texts, *behaviour, *(length for length in lengths if length))


def _compare_behaviour(
    value: EvaluationResult, baseline: EvaluationResult, noise: EvaluationResult | None
) -> list[Comparison]:
    """Compare rates of sampled behaviour, which are not part of the mean over tasks, and the lengths of the answers."""
    before, again = ({rate.task: rate for rate in each.behaviour} if each else {} for each in (baseline, noise))
    pairs = [(rate, before[rate.task]) for rate in value.behaviour if rate.task in before]
    rates = [compare_task(rate, other, again.get(rate.task)) for rate, other in pairs]
    lengths = filter(None, (compare_lengths(*pair) for pair in pairs))
    return [
        *(replace(rate, subject=f"{BEHAVIOUR}: {rate.subject}") for rate in rates),
        *(replace(length, subject=f"{ANSWER_LENGTH}: {BEHAVIOUR}") for length in lengths),
    ]


def compare_task(value: TaskResult, baseline: TaskResult, noise: TaskResult | None = None) -> Comparison:
    """Compare the results of both models in one task: item by item if both results hold samples, otherwise by their
    standard errors.
    """
    if value.metric != baseline.metric:
        raise ReportError(
            f"task {value.task}: metric {value.metric!r} cannot be compared with {baseline.metric!r}; evaluate both "
            "models with the same version of the task"
        )
    pairs = _paired(value, baseline)
    floor = None if noise is None or pairs is None else _noise_floor([_changes(noise, baseline, len(pairs[0]))])
    result = _unpaired(value, baseline) if pairs is None else compare_pairs([pairs])
    if not value.higher_is_better:
        # The inverse of the upper end of an interval is the lower end of the inverse interval.
        low, high = _inverse(result.ratio_high), _inverse(result.ratio_low)
        result = replace(result, ratio=_inverse(result.ratio), ratio_low=low, ratio_high=high)
    return _comparison(result, value.task, value.metric, floor, higher_is_better=value.higher_is_better)


def compare_lengths(value: TaskResult, baseline: TaskResult) -> Comparison | None:
    """Compare the lengths of generated answers; None if the task generates none."""
    lengths = [
        (float(before.answer_tokens), float(after.answer_tokens))
        for before, after in _common_samples(value, baseline)
        if before.answer_tokens is not None and after.answer_tokens is not None
    ]
    if not lengths:
        return None
    result = compare_pairs([([b for b, _ in lengths], [v for _, v in lengths])])
    return _comparison(result, f"{ANSWER_LENGTH}: {value.task}", "tokens")


def compare_perplexity(
    value: PerplexityResult, baseline: PerplexityResult, noise: PerplexityResult | None = None
) -> Comparison:
    """Compare the perplexity of one text, window by window: Student's t on the logarithm of the ratio."""
    # The test uses the logarithm of perplexity, which is a mean over tokens and nearly normal; perplexity is skewed.
    mean, reach, p_value = _log_ratio(value, baseline)
    before, after = baseline.perplexity, value.perplexity
    floor = None
    if noise is not None:
        count, share = len(noise.window_nll), len(noise.window_nll) / len(baseline.window_nll)
        same = replace(baseline, window_nll=baseline.window_nll[:count], window_tokens=baseline.window_tokens[:count])
        shift, spread, _ = (math.sqrt(share) * (each or 0.0) for each in _log_ratio(noise, same))
        # Convert the log-ratio to a difference of perplexities, the unit of the floor. A single window has no spread.
        floor = before * math.expm1(abs(shift) if math.isinf(spread) else max(abs(shift), spread))
    known = not math.isinf(reach)
    result = PairedResult(
        baseline=before,
        value=after,
        difference=after - before,
        low=before * _expm1(mean - reach) if known else None,
        high=before * _expm1(mean + reach) if known else None,
        p_value=p_value,
        # The recovery is the original's perplexity divided by the model's, hence the sign.
        ratio=math.exp(-mean),
        ratio_low=math.exp(-(mean + reach)) if known else None,
        ratio_high=math.exp(-(mean - reach)) if known else None,
        num_samples=len(value.window_nll),
        method="Student's t on the log-ratio of windows",
    )
    subject = f"perplexity: {value.data}" + (" (decode)" if value.through == "decode" else "")
    return _comparison(result, subject, f"perplexity ({value.through})", floor, higher_is_better=False)


def _log_ratio(value: PerplexityResult, baseline: PerplexityResult) -> tuple[float, float, float | None]:
    """Return the logarithm of the ratio of the perplexities, half the width of its 95 % interval, and its p-value.

    The logarithm is the difference of the negative log-likelihoods per token. Windows are treated as independent.
    Because they differ in their number of tokens, the error is that of a ratio estimator.
    """
    if value.window_tokens != baseline.window_tokens:
        raise ReportError(
            f"perplexity of {value.data}: the windows of the two models have different numbers of tokens; evaluate "
            "both with the same tokenizer and settings"
        )
    tokens, count = value.num_tokens, len(value.window_tokens)
    mean = (value.nll - baseline.nll) / tokens
    if count < 2:
        return mean, math.inf, None
    rows = zip(value.window_nll, baseline.window_nll, value.window_tokens, strict=True)
    # Residuals around the common rate: windows with more tokens weigh more, as in the mean itself.
    squares = math.fsum((after - before - mean * n) ** 2 for after, before, n in rows)
    error = math.sqrt(squares * count / (count - 1)) / tokens
    tail = student_cdf(-abs(mean) / error, count - 1) if error > 0 else (0.5 if mean == 0 else 0.0)
    return mean, error * student_quantile(0.5 + CONFIDENCE / 2, count - 1), min(1.0, 2 * tail)


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf


def _find_text(evaluation: EvaluationResult, text: PerplexityResult) -> PerplexityResult | None:
    """Return the result for the same text, scored in the same way; None if there is none."""
    same = operator.attrgetter("data", "window", "stride", "through")
    return next((other for other in evaluation.perplexity if same(other) == same(text)), None)


def _common_samples(value: TaskResult, baseline: TaskResult) -> list[tuple[SampleRecord, SampleRecord]]:
    """Return, in order, a pair for each item that both models answered: the original's sample, then the model's."""
    before, after = ({sample.index: sample for sample in result.samples} for result in (baseline, value))
    pairs = [(before[index], after[index]) for index in sorted(before.keys() & after.keys())]
    for one, other in pairs:
        if one.item_hash and other.item_hash and one.item_hash != other.item_hash:
            raise ReportError(
                f"task {value.task}: item {one.index} differs between the two evaluations ({one.item_hash[:12]} and "
                f"{other.item_hash[:12]}); evaluate both with the same data, seed and limit"
            )
    return pairs


def _paired(value: TaskResult, baseline: TaskResult) -> Pairs | None:
    """Return the original's and the model's scores of the items that both answered; None if a result has no samples."""
    common, metric = _common_samples(value, baseline), value.metric
    return ([b.scores[metric] for b, _ in common], [v.scores[metric] for _, v in common]) if common else None


def _changes(noise: TaskResult, baseline: TaskResult, count: int) -> list[float] | None:
    """Return the changes of the items' scores in another dtype, scaled to a task of `count` items; None if a result has
    no samples.
    """
    pairs = _paired(noise, baseline)
    if pairs is None:
        return None
    scale = math.sqrt(len(pairs[0]) / count)
    return [scale * (after - before) for before, after in zip(*pairs, strict=True)]


def _noise_floor(tasks: Sequence[list[float] | None]) -> float | None:
    """Return the noise floor of the mean over tasks from the changes of their items; None if a task has no changes,
    because it was not evaluated in another dtype.
    """
    known = [changes for changes in tasks if changes is not None]
    if not known or len(known) < len(tasks):
        return None
    shift = abs(math.fsum(math.fsum(change) / len(change) for change in known)) / len(known)
    spread = math.sqrt(math.fsum(math.fsum(c * c for c in change) / len(change) ** 2 for change in known))
    # The shift may be zero by luck while many items flip. The spread is the shift that as many flips cause by chance.
    return max(shift, NORMAL.inv_cdf(0.5 + CONFIDENCE / 2) * spread / len(known))


def _compare_mean(triples: Sequence[tuple[TaskResult, TaskResult, TaskResult | None]]) -> Comparison | None:
    """Compare the unweighted means over all tasks in which higher is better; None if there are no such tasks."""
    if not triples:
        return None
    pairs = [_paired(value, baseline) or ([], []) for value, baseline, _ in triples]
    noise = [
        None if other is None else _changes(other, baseline, len(own[0]))
        for (_, baseline, other), own in zip(triples, pairs, strict=True)
    ]
    metrics = {value.metric for value, _, _ in triples}
    name = metrics.pop() if len(metrics) == 1 else "main metric"
    return _comparison(compare_pairs(pairs), ALL_TASKS, name, _noise_floor(noise))


def _comparison(
    result: PairedResult, subject: str, metric: str, floor: float | None = None, *, higher_is_better: bool = True
) -> Comparison:
    """Convert a paired result to a `Comparison`; the ratio of the result becomes the recovery."""
    numbers = asdict(result)
    recovery, low, high = (numbers.pop(name) for name in ("ratio", "ratio_low", "ratio_high"))
    return Comparison(
        subject=subject,
        metric=metric,
        verdict=_verdict(result.difference, result.p_value, floor, higher_is_better=higher_is_better),
        recovery=_percent(recovery),
        recovery_low=_percent(low),
        recovery_high=_percent(high),
        noise_floor=floor,
        higher_is_better=higher_is_better,
        **numbers,
    )


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * ratio


def _inverse(ratio: float | None) -> float | None:
    return 1 / ratio if ratio else None


def _unpaired(value: TaskResult, baseline: TaskResult) -> PairedResult:
    """Compare two scores without samples as if they were independent, which is less precise than pairing."""
    difference = value.value - baseline.value
    error = None if None in (value.stderr, baseline.stderr) else math.hypot(value.stderr or 0, baseline.stderr or 0)
    reach = None if error is None else error * NORMAL.inv_cdf(0.5 + CONFIDENCE / 2)
    return PairedResult(
        baseline=baseline.value,
        value=value.value,
        difference=difference,
        low=None if reach is None else difference - reach,
        high=None if reach is None else difference + reach,
        p_value=None if not error else 2 * NORMAL.cdf(-abs(difference) / error),
        ratio=value.value / baseline.value if baseline.value else None,
        num_samples=min(value.num_samples, baseline.num_samples),
        method="standard errors, unpaired: no scores of single items",
    )


def _verdict(difference: float, p_value: float | None, floor: float | None, *, higher_is_better: bool) -> Verdict:
    # Checked before the p-value: a change that the dtype alone can cause is not an effect of the compression.
    if floor is not None and abs(difference) <= floor and difference != 0:
        return "noise"
    if p_value is None and difference != 0:
        return "unknown"
    if p_value is None or p_value >= SIGNIFICANCE:
        return "no difference seen"
    return "better" if (difference > 0) == higher_is_better else "worse"
