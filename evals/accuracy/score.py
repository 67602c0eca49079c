"""Perplexity and mean KL of quantized models on one text, by one fixed protocol, with intervals.

Protocol: the text is tokenized once without special tokens and cut into chunks of (window - 1) ids. A shorter chunk at
the end is dropped. Each chunk gets BOS in front; for a model without BOS, chunks have (window) ids instead. Weights and
arithmetic are float32. The NLL of every token after the first is summed, and perplexity = exp(mean). KL is
KL(original || quantized) over the whole vocabulary at the same positions, in nats.

quantkit's runtime computes every model. It reads dense folders, compressed-tensors, and the GPTQ and AWQ layouts that
other tools write. So the weights on disk are measured, dequantized to float32 (W8A8 also quantizes its activations).

Neighbouring windows share stories, so intervals are computed over blocks of consecutive windows (at most 100 blocks of
equal size). They use Student's t on the means of blocks; to compare two models, on the differences of these means. A
difference is called real if its 95 % interval does not contain zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.evaluate.fidelity import check_vocabulary
from quantkit.evaluate.loading import load_llm
from quantkit.results.statistics.paired import student_quantile
from quantkit.runtime.llm import LLM

WINDOW, MAX_WINDOWS, MAX_BLOCKS = 256, 1000, 100
_BATCH = 4  # windows per call; more windows do not make these small models faster

Windows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Scores of one model on the windows.

    Args:
        windows, tokens: number of scored windows and tokens.
        nll: mean NLL per token in each block, in nats.
        kl: mean KL(original || model) in each block, in nats; 0 for the original itself.
        top1: share of positions where model and original prefer the same token.
    """

    windows: int
    tokens: int
    nll: tuple[float, ...]
    kl: tuple[float, ...]
    top1: float

    @property
    def perplexity(self) -> float:
        """exp(mean NLL); blocks have equal sizes."""
        return math.exp(math.fsum(self.nll) / len(self.nll))

    @property
    def mean_kl(self) -> float:
        """Mean KL per position."""
        return math.fsum(self.kl) / len(self.kl)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over blocks with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """-1 if the interval is below zero, 1 if it is above zero, 0 if it contains zero."""
        return (self.low > 0) - (self.high < 0)


def interval(blocks: Sequence[float]) -> Interval:
    """Return the mean of block means with its 95 % interval by Student's t.

    Args:
        blocks: means of at least two blocks.
    """
    count = len(blocks)
    mean = math.fsum(blocks) / count
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in blocks) / (count - 1) / count)
    reach = spread * student_quantile(0.975, count - 1)
    return Interval(mean=mean, low=mean - reach, high=mean + reach)


def difference(value: Sequence[float], other: Sequence[float]) -> Interval:
    """Return the paired difference, `value` minus `other` block by block, with its interval.

    Args:
        value, other: means of the same blocks.
    """
    return interval([a - b for a, b in zip(value, other, strict=True)])


def read_windows(llm: LLM, text: str, *, window: int = WINDOW, max_windows: int = MAX_WINDOWS) -> Windows:
    """Cut a text into windows as the module's protocol says, and drop windows at the end until blocks are equal.

    Args:
        llm: model whose tokenizer is used.
        text: the text.
        window: positions of a window, BOS included.
        max_windows: maximum number of windows.
    """
    assert llm.tokenizer is not None, f"{llm.path} has no tokenizer"
    ids = llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = first_ids(llm)
    step = window - len(first)
    count = min(len(ids) // step, max_windows)
    count -= count % min(count, MAX_BLOCKS)
    return tuple((*first, *ids[at * step : (at + 1) * step]) for at in range(count))


def first_ids(llm: LLM) -> tuple[int, ...]:
    """Return BOS; empty for models that do not have it."""
    bos = None if llm.tokenizer is None else llm.tokenizer.bos_token_id
    return () if bos is None else (bos,)


def log_probabilities(llm: LLM, windows: Windows) -> Iterator[Tensor]:
    """Yield log-probabilities (window - 1, V) in float32 for each window: predictions of all tokens after the first."""
    for start in range(0, len(windows), _BATCH):
        group = windows[start : start + _BATCH]
        for logits in llm.score(group, chunk_size=len(group[0])):
            yield logits[:-1].float().log_softmax(-1)


@torch.inference_mode()
def score(models: Sequence[LLM], original: LLM, windows: Windows, reference: list[Tensor] | None = None) -> list[Score]:
    """Score models on the same windows, reading the original's predictions once.

    Args:
        models: models to score; the original itself may be one of them.
        original: model against which KL is measured.
        windows: windows from `read_windows`.
        reference: `list(log_probabilities(original, windows))` from an earlier call; None = compute it.
    """
    for llm in models:
        check_vocabulary(llm, original)
    streams = [log_probabilities(llm, windows) for llm in models]
    known = log_probabilities(original, windows) if reference is None else iter(reference)
    rows: list[list[tuple[float, float, float]]] = [[] for _ in models]
    for ids, before in zip(windows, known, strict=True):
        targets = torch.tensor(ids[1:])[:, None]
        weights, best = before.exp(), before.argmax(-1)
        for found, stream in zip(rows, streams, strict=True):
            after = next(stream)
            nll = -after.gather(1, targets).double().mean()
            kl = (weights * (before - after)).sum(-1).clamp_min(0).double().mean()
            found.append((float(nll), float(kl), float((after.argmax(-1) == best).double().mean())))
    return [_score(found, windows) for found in rows]


def _score(rows: list[tuple[float, float, float]], windows: Windows) -> Score:
    nll, kl, top1 = zip(*rows, strict=True)
    return Score(
        windows=len(windows),
        tokens=len(windows) * (len(windows[0]) - 1),
        nll=_blocks(nll),
        kl=_blocks(kl),
        top1=math.fsum(top1) / len(top1),
    )


def _blocks(values: Sequence[float]) -> tuple[float, ...]:
    """Return the means of blocks of consecutive values."""
    size = len(values) // min(len(values), MAX_BLOCKS)
    return tuple(math.fsum(values[at : at + size]) / size for at in range(0, len(values), size))


def load(path: str | Path) -> LLM:
    """Load a model that computes in float32 with one thread."""
    return load_llm(str(path), dtype="float32", threads=1)
