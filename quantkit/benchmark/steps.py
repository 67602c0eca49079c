"""From timestamps back to the engine's steps, and the two fits: ITL = a + b context, TTFT against prompt length.

Sequences that decode in one step share its timestamp, so the batch of every step can be read off the raw timings. Steps
during which somebody's prompt was computed, or waited to be, are left out: they are slower, and by how much depends on
the prompt.
"""

import statistics
from collections import Counter
from dataclasses import dataclass

from quantkit.results import BenchmarkResult, BenchmarkRun
from quantkit.results.statistics.summary import PolynomialFit, fit_polynomial


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """A step in which every sequence got its next token and nothing else happened.

    Args:
        batch: sequences in it.
        context: tokens before the step, of all sequences together.
        seconds: from the step before to this one.
    """

    batch: int
    context: int
    seconds: float


def decode_steps(run: BenchmarkRun) -> list[DecodeStep]:
    """The steps of a run that only decoded, in order of time."""
    starts = [(t.arrived_s, t.token_s[0]) for t in run.requests if t.token_s]
    contexts_by_span: dict[tuple[float, float], list[int]] = {}
    for timing in run.requests:
        for index in range(1, len(timing.token_s)):
            before, after = timing.token_s[index - 1], timing.token_s[index]
            if after > before:  # equal times are one speculative burst
                contexts_by_span.setdefault((before, after), []).append(timing.prompt_tokens + index)
    return [
        DecodeStep(batch=len(contexts), context=sum(contexts), seconds=after - before)
        for (before, after), contexts in sorted(contexts_by_span.items())
        # A prompt under way: between its arrival and its first token, which may come in this very step.
        if not any(arrived < after and before < first for arrived, first in starts)
    ]


def typical_step(run: BenchmarkRun) -> DecodeStep | None:
    """The median step of the largest batch that came up often: at least in a tenth of the steps; None without steps."""
    steps = decode_steps(run)
    counts = Counter(step.batch for step in steps)
    # The beginning and the end of a run have smaller batches, and a rare larger one is a median of few.
    often = [batch for batch, count in counts.items() if 10 * count >= len(steps)]
    if not often:
        return None
    chosen = [step for step in steps if step.batch == max(often)]
    return DecodeStep(
        batch=max(often),
        context=round(statistics.fmean(step.context for step in chosen)),
        seconds=statistics.median(step.seconds for step in chosen),
    )


def fit_itl(result: BenchmarkResult) -> PolynomialFit | None:
    """ITL = a + b context, seconds and tokens, over all steps of a single sequence; None with too few."""
    steps = [step for run in result.runs for step in decode_steps(run) if step.batch == 1]
    return fit_polynomial([(step.context, step.seconds) for step in steps])


def fit_ttft(result: BenchmarkResult) -> PolynomialFit | None:
    """TTFT = a + b prompt + c prompt^2, seconds and tokens, over requests that had the engine to themselves.

    A straight line where there are too few lengths for a curve; None where there are too few for that.
    """
    # Requests of a batch wait for each other, which bends the curve.
    alone = [timing for run in result.runs if run.workload.concurrency == 1 for timing in run.requests]
    points = [(timing.prompt_tokens, timing.ttft_s) for timing in alone if timing.ttft_s is not None]
    return fit_polynomial(points, degree=2 if len({length for length, _ in points}) >= 4 else 1)
