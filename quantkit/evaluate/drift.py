"""Measure drift: how a model's distance from its original grows along texts that the original wrote.

While a model with a quantized KV cache decodes, every token reads quantized keys and values of earlier tokens. The
errors may add up over thousands of tokens, which short windows do not show. Here the original samples a long text after
each prompt. Then both models read these texts one token per step, as in decoding, and their distributions are compared
at every position. Both read the same text, so an earlier difference never changes what a model reads later.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.distributed import share_out
from quantkit.errors import RequestError
from quantkit.evaluate.fidelity import (
    GREEDY_CONTEXT,
    Distances,
    Windows,
    check_vocabulary,
    distances,
    fitting_texts,
    paired_logits,
)
from quantkit.evaluate.work_sharing import Meter, Say, forget
from quantkit.results import DriftResult
from quantkit.results.statistics.paired import student_quantile
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams

PROMPTS = 8
LEAST_TOKENS = 64
_PARTS = 4  # stretches of equal length whose mean KL is reported
_PER = 1000  # the slope is the growth of KL per this many tokens


def measure_drift(
    llm: LLM, original: LLM, windows: Windows, *, tokens: int, seed: int = 0, say: Say | None = None
) -> DriftResult:
    """Let the original write texts, and measure how the model's KL from the original grows along these texts.

    Args:
        llm, original: the models.
        windows: windows of token ids; the beginning of each is a prompt.
        tokens: number of tokens to write after each prompt.
        seed: seed of the first text; each further text has the next seed.
        say: callback for progress.
    Raises:
        ModelError: the vocabularies differ.
        RequestError: `tokens` is too small to show a drift, or does not fit the context of one of the models.
    """
    check_drift(llm, original, tokens)
    (compared,) = share_out([tokens], lambda count: _compare(llm, original, windows, count, seed, say))
    return drift_result(compared, tokens)


def check_drift(llm: LLM, original: LLM, tokens: int) -> None:
    """Check that `measure_drift` can compare these models over this number of tokens.

    Raises:
        ModelError, RequestError: see `measure_drift`.
    """
    check_vocabulary(llm, original)
    longest = min(llm.capacity, original.capacity) - GREEDY_CONTEXT
    if not LEAST_TOKENS <= tokens <= longest:
        raise RequestError(
            f"drift over {tokens} tokens cannot be measured: give at least {LEAST_TOKENS}, and at most {longest} "
            f"tokens, because the context of both models must also hold a prompt of {GREEDY_CONTEXT} tokens"
        )


def _compare(llm: LLM, original: LLM, windows: Windows, tokens: int, seed: int, say: Say | None) -> list[Distances]:
    """Let the original write texts of `tokens` tokens, and return the distances at these tokens for each text."""
    prompts = [list(ids[:GREEDY_CONTEXT]) for ids in windows[:PROMPTS]]
    params = [
        SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed + number, ignore_eos=True)
        for number in range(len(prompts))
    ]
    if say is not None:
        say(f"the original writes {len(prompts)} texts")
    forget(original)
    texts = [done.token_ids for done in original.generate(prompts, params)]
    # The logits after a token are those of the next one, so nothing is measured after the last token.
    traces = tuple((*prompt, *text[:-1]) for prompt, text in zip(prompts, texts, strict=True))
    meter = Meter(say, "positions", [1] * (tokens * len(traces)))
    # Filled in place: small tensors between freed logits would keep the memory of these logits from being reused.
    kl, agrees = torch.empty(len(traces), tokens), torch.empty(len(traces), tokens, dtype=torch.bool)
    counts = [0] * len(traces)
    at_once = min(fitting_texts(each, len(traces[0])) for each in (llm, original))
    for start in range(0, len(traces), at_once):
        group = traces[start : start + at_once]
        for index, reference, value in paired_logits(original, llm, group, group, [tokens] * len(group), chunk_size=1):
            number, near = start + index, distances(reference, value)
            positions = slice(counts[number], counts[number] + len(value))
            kl[number, positions], agrees[number, positions] = near.kl, near.agrees
            counts[number] = positions.stop
            del reference, value, near  # otherwise their memory would be kept while the next rows are computed
            meter.reach(sum(counts))
    return [Distances(kl=own, agrees=same) for own, same in zip(kl, agrees, strict=True)]


def drift_result(texts: Sequence[Distances], tokens: int) -> DriftResult:
    """Build a `DriftResult` from the distances at the `tokens` positions of each text."""
    kl = torch.stack([text.kl.double() for text in texts])
    ends = tuple(round(tokens * part / _PARTS) for part in range(1, _PARTS + 1))
    slopes = [_slope(each) for each in kl]
    mean, margin = math.fsum(slopes) / len(slopes), math.inf
    if len(slopes) > 1:
        deviation = math.sqrt(math.fsum((slope - mean) ** 2 for slope in slopes) / (len(slopes) - 1))
        margin = student_quantile(0.975, len(slopes) - 1) * deviation / math.sqrt(len(slopes))
    return DriftResult(
        num_texts=len(texts),
        num_tokens=tokens,
        ends=ends,
        part_kl=tuple(float(kl[:, start:end].mean()) for start, end in zip((0, *ends[:-1]), ends, strict=True)),
        text_kl=tuple(kl.mean(1).tolist()),
        slope=mean,
        slope_low=mean - margin if math.isfinite(margin) else None,
        slope_high=mean + margin if math.isfinite(margin) else None,
        first_difference=tuple(_first_difference(text.agrees) for text in texts),
    )


def _slope(kl: Tensor) -> float:
    """Return the least-squares slope of KL (T,) over the position, per `_PER` tokens."""
    position = torch.arange(len(kl), dtype=torch.float64) / _PER
    position -= position.mean()
    return float((position * (kl - kl.mean())).sum() / position.square().sum())


def _first_difference(agrees: Tensor) -> int | None:
    differing = (~agrees).nonzero()
    return int(differing[0, 0]) if len(differing) else None
