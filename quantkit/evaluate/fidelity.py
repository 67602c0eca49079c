"""Measure the distance of a model's next-token distributions from the original's, on fixed text.

The distance is KL(original || model) in nats, at every position of every window. It needs no labels and uses every
token, so it detects smaller differences than accuracy does, but it does not show whether a difference matters.
Both models also generate texts greedily. These are compared up to the first token that differs, because the texts are
unrelated after it.

This module needs whole distributions, which quantkit's engine gives. Module `top_fidelity` is for serving engines that
give only the likeliest tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.distributed import share_out
from quantkit.errors import DataError, ModelError
from quantkit.evaluate.loading import UNQUANTIZED, Evaluated
from quantkit.evaluate.perplexity import leading_bos, token_ids
from quantkit.evaluate.work_sharing import Meter, Say, forget
from quantkit.results import FidelityResult
from quantkit.results.statistics.summary import percentile
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams

if TYPE_CHECKING:
    from quantkit.evaluate.top_fidelity import TopReading

WINDOW, MAX_TOKENS = 256, 8192
GREEDY_PROMPTS, GREEDY_CONTEXT, GREEDY_TOKENS = 16, 32, 64
_BLOCK_BYTES = 32 << 20  # maximum for the logits compared at once; a comparison holds four arrays of this size
_DECODED = 16  # windows decoded at once; with fewer, the weights would be read more often
_BATCH_BYTES = 128 << 20  # maximum for one model's logits of a batch of windows; a single window may need more

Windows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distances:
    """Distances between two sets of next-token distributions.

    Args:
        kl: KL at each position, nats; (T,) float32.
        agrees: whether both distributions have the same likeliest token, at each position; (T,) bool.
    """

    kl: Tensor
    agrees: Tensor

    @property
    def mean(self) -> float:
        """Mean KL per position."""
        # In float64: a float32 sum over thousands of tiny values loses digits of the mean.
        return float(self.kl.double().mean())

    @property
    def top1(self) -> float:
        """Share of positions where both distributions have the same likeliest token."""
        return float(self.agrees.double().mean())

    @property
    def p99(self) -> float:
        """99th percentile of KL."""
        return percentile(self.kl.tolist(), 99)


def fixed_windows(
    llm: Evaluated, text: str | Sequence[int], *, window: int = WINDOW, max_tokens: int = MAX_TOKENS
) -> Windows:
    """Split a text into windows that do not overlap. Each window begins with BOS if the tokenizer adds BOS to texts.

    Args:
        llm: model that provides the tokenizer and the maximum context.
        text: a text, or token ids, to which no BOS is added.
        window: tokens per window including BOS; at most the model's context.
        max_tokens: number of tokens to use from the beginning of the text, rounded up to whole windows.
    Raises:
        DataError: there is no tokenizer, or the text is too short for one window of two tokens.
    """
    window = min(window, llm.capacity)
    bos = leading_bos(llm) if isinstance(text, str) else ()
    ids, num_text = token_ids(llm, text), window - len(bos)
    starts = range(0, min(len(ids), max_tokens), max(1, num_text))
    windows = tuple((*bos, *ids[start : start + num_text]) for start in starts)
    windows = tuple(each for each in windows if len(each) > 1)
    if not windows or num_text < 1:
        raise DataError(f"the text has only {len(ids)} tokens; give a longer text for comparing distributions")
    return windows


def fidelity(
    llm: LLM,
    original: LLM,
    windows: Windows,
    *,
    data: str = "text",
    greedy_tokens: int = GREEDY_TOKENS,
    say: Say | None = None,
) -> FidelityResult:
    """Compare a model's distributions and greedy texts with those of its original.

    Args:
        llm: the model.
        original: the original, with the same vocabulary.
        windows: windows of token ids, see `fixed_windows`.
        data: name of the text, for the record.
        greedy_tokens: number of tokens to generate greedily after the beginning of each of the first windows; 0 = do
            not generate.
        say: callback for progress.
    Raises:
        ModelError: the vocabularies differ.
        RequestError: a window exceeds the context of one of the models.
    """
    check_vocabulary(llm, original)

    groups = list(paired_batches(original, llm, windows, windows))
    meter = Meter(say, "groups of windows", [len(group) for group in groups])

    def compare(number: int) -> list[Distances]:
        group = groups[number]
        parts: list[list[Distances]] = [[] for _ in group]
        for index, reference, value in paired_logits(original, llm, group, group, list(map(len, group))):
            parts[index].append(distances(reference, value))
            del reference, value  # otherwise their memory would be kept while the next rows are computed
        meter.reach(number + 1)
        return list(map(join_distances, parts))

    return summarize(
        list(chain.from_iterable(share_out(range(len(groups)), compare))),
        data=data,
        first_divergence=_divergences(llm, original, windows, greedy_tokens),
        engine=llm.engine_name,
        greedy_tokens=greedy_tokens,
    )


def summarize(parts: Sequence[Distances], **known: Any) -> FidelityResult:
    """Build a `FidelityResult` from the distances of each window; `known` are its other fields."""
    every = join_distances(parts)
    return FidelityResult(
        num_tokens=len(every.kl),
        mean_kl=every.mean,
        p99_kl=every.p99,
        max_kl=float(every.kl.max()),
        top1_agreement=every.top1,
        window_kl=tuple(part.mean for part in parts),
        **known,
    )


def check_vocabulary(llm: LLM | TopReading, original: LLM | TopReading) -> None:
    """Check that two models, or the readings of two models, have the same vocabulary size.

    Raises:
        ModelError: the sizes differ.
    """
    if llm.vocab_size != original.vocab_size:
        raise ModelError(
            f"{llm.path} has a vocabulary of {llm.vocab_size} tokens, but the original {original.path} has "
            f"{original.vocab_size} tokens; give the model that the checkpoint was made from"
        )


def batches(llm: LLM, windows: Windows) -> Iterator[Windows]:
    """Yield the windows in batches as large as a step and `_BATCH_BYTES` allow, but with at least one window."""
    tokens = min(llm.engine.config.token_budget, _BATCH_BYTES // (4 * llm.vocab_size))
    count = max(1, tokens // max(map(len, windows)))
    for start in range(0, len(windows), count):
        yield windows[start : start + count]


def paired_batches(original: LLM, llm: LLM, theirs: Windows, ours: Windows) -> Iterator[Windows]:
    """Yield batches of the original's windows for `paired_logits`.

    A batch has as many windows as both models should compute at once, but at least one.

    Args:
        original, llm: the models.
        theirs, ours: windows of the original and of the model; windows with the same index form a pair.
    """
    if _chunk_size(llm, ours) > 1:
        yield from batches(original, theirs)  # one model's logits of a whole batch are in memory
        return
    longest = max(map(len, (*theirs, *ours)), default=1)
    count = min(_DECODED, *(fitting_texts(each, longest) for each in (original, llm)))
    for start in range(0, len(theirs), count):
        yield theirs[start : start + count]


def fitting_texts(llm: LLM, tokens: int) -> int:
    """Return how many texts of `tokens` tokens fit a model's KV cache at the same time.

    Two compared models must both read the smaller of their two numbers of texts at a time. Otherwise the logits of one
    model would fill the memory while they wait for the other model's.
    """
    cache = llm.engine.runner.cache
    if cache is None:  # transformers runs the model, one text at a time
        return 1
    return max(1, cache.num_pages // -(-(tokens + 1) // cache.page_size))


def window_logits(llm: LLM, windows: Windows) -> list[Tensor]:
    """Return the logits after every token of each window, (T, V) float32 per window; the windows form one batch."""
    forget(llm)  # otherwise each batch would needlessly fill more pages of the cache
    return llm.score(windows, chunk_size=_chunk_size(llm, windows))


def paired_logits(
    original: LLM, llm: LLM, theirs: Windows, ours: Windows, counts: Sequence[int], *, chunk_size: int | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the logits of two models at the same positions, part by part, so that few of them are in memory at once.

    Args:
        original, llm: the models.
        theirs, ours: one batch of windows for each model. Windows with the same index form a pair.
        counts: for each pair, the number of positions to compare; these are the last positions of both windows.
        chunk_size: number of tokens of a window that one step computes; None = as the model's cache requires. If the
            cache requires 1, the original also reads token by token, so that both models' logits arrive row by row.
    Yields:
        Index of the pair, and the next rows of logits of the original and of the model, (t, V) float32 each.
    """
    if chunk_size is None and _chunk_size(llm, ours) == 1:
        chunk_size = 1
    waiting: list[deque[Tensor]] = [deque() for _ in theirs]  # rows of the original for which the model has no pair yet
    references = _last_rows(original, theirs, counts, chunk_size)
    for index, value in _last_rows(llm, ours, counts, chunk_size):
        while len(value):
            while not waiting[index]:
                other, rows = next(references)
                waiting[other].append(rows)
            reference = waiting[index].popleft()
            if len(reference) > len(value):
                waiting[index].appendleft(reference[len(value) :])
            yield index, reference[: len(value)], value[: len(reference)]
            value = value[len(reference) :]
            del reference
        del value  # otherwise its memory would be kept while the next rows are computed


def _last_rows(
    llm: LLM, windows: Windows, counts: Sequence[int], chunk_size: int | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield logits as `LLM.score_rows` does, but only those of the last positions of each window."""
    forget(llm)  # otherwise each batch would needlessly fill more pages of the cache
    unwanted = [len(window) - count for window, count in zip(windows, counts, strict=True)]
    for index, rows in llm.score_rows(windows, chunk_size=chunk_size or _chunk_size(llm, windows)):
        skipped = min(unwanted[index], len(rows))
        unwanted[index] -= skipped
        if skipped < len(rows):
            yield index, rows[skipped:]
        del rows  # otherwise its memory would be kept while the next rows are computed


def _chunk_size(llm: LLM, windows: Windows) -> int:
    """Return the number of tokens of a window that a step computes.

    With a quantized cache, tokens are computed one by one, as in decoding. A prefill would read its newest keys and
    values unquantized, which would hide the error of the cache.
    """
    return min(max(map(len, windows)), llm.engine.config.token_budget) if llm.kv_type in UNQUANTIZED else 1


def compare_windows(llm: LLM, windows: Windows, reference: Sequence[Tensor]) -> Distances:
    """Measure the distances of a model with a quantized cache from stored logits of the original.

    Up to 16 windows are decoded at once.

    Args:
        llm: the model.
        windows: windows of token ids.
        reference: logits of the original after every token of each window, (T, V) each.
    """
    forget(llm)
    compared: list[list[Distances]] = [[] for _ in windows]
    for start in range(0, len(windows), _DECODED):
        counts = [0] * len(windows)
        for index, rows in llm.score_rows(windows[start : start + _DECODED], chunk_size=1):
            number = start + index
            first = counts[number]
            counts[number] += len(rows)
            compared[number].append(distances(reference[number][first : counts[number]], rows))
    return join_distances([each for parts in compared for each in parts])


@torch.inference_mode()
def distances(reference: Tensor, value: Tensor) -> Distances:
    """Compute, at each position, KL(original || model) and whether both have the same likeliest token.

    Args:
        reference, value: logits of the original and of the model; (T, V) float32.
    """
    kl, agrees = [], []
    rows = max(1, _BLOCK_BYTES // (4 * reference.shape[-1]))
    for start in range(0, len(reference), rows):
        p, q = reference[start : start + rows], value[start : start + rows]
        # log_softmax, not the logarithm of softmax: probabilities that underflow give infinite terms.
        before, after = p.float().log_softmax(-1), q.float().log_softmax(-1)
        # KL is negative only by rounding errors, which would show in a mean of tiny values.
        kl.append((before.exp() * (before - after)).sum(-1).clamp_min(0))
        agrees.append(p.argmax(-1) == q.argmax(-1))
    return Distances(kl=torch.cat(kl), agrees=torch.cat(agrees))


@torch.inference_mode()
def entropies(logits: Tensor) -> list[float]:
    """Return the entropy at each position of logits (T, V) float32, in nats."""
    values: list[float] = []
    for part in torch.split(logits, max(1, _BLOCK_BYTES // (4 * logits.shape[-1]))):
        logs = part.log_softmax(-1)
        values += (-(logs.exp() * logs).nan_to_num().sum(-1)).tolist()
    return values


def join_distances(parts: Sequence[Distances]) -> Distances:
    """Concatenate the positions of several windows."""
    return Distances(kl=torch.cat([part.kl for part in parts]), agrees=torch.cat([part.agrees for part in parts]))


def _divergences(llm: LLM, original: LLM, windows: Windows, count: int) -> tuple[int | None, ...]:
    """Let both models continue the beginnings of the first windows greedily by `count` tokens.

    Return, for each beginning, the number of tokens before the first that differs, or None if all are equal. Return an
    empty tuple if `count` is 0 or does not fit the context.
    """
    longest = min(llm.capacity, original.capacity) - count
    if count < 1 or longest < 1:
        return ()
    return divergences(*share_out([llm, original], lambda side: greedy_texts(side, windows, count, longest)))


Texts = list[tuple[int, ...]]


def greedy_texts(llm: Evaluated, windows: Windows, count: int, longest: int) -> Texts:
    """Generate greedy texts after the beginnings of the first windows.

    Args:
        llm: the model.
        windows: windows of token ids.
        count: number of tokens to generate.
        longest: maximum number of tokens in a beginning.
    """
    prompts = [list(ids[: min(GREEDY_CONTEXT, longest)]) for ids in windows[:GREEDY_PROMPTS]]
    # Past EOS too, so that both texts have the same length and can be compared by position.
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    forget(llm)
    return [done.token_ids for done in llm.generate(prompts, params)]


def divergences(texts: Texts, others: Texts) -> tuple[int | None, ...]:
    """Return, for each pair of texts, the first position where they differ, or None if they are equal."""
    pairs = (list(zip(ours, theirs, strict=True)) for ours, theirs in zip(texts, others, strict=True))
    return tuple(next((at for at, (a, b) in enumerate(pair) if a != b), None) for pair in pairs)
