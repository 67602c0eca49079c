"""Perplexity and mean KL of quantized models on one text, by one fixed protocol, with intervals.

Protocol: the text is tokenized once without special tokens and cut into chunks of (window - 1) ids, a last shorter one
dropped; BOS goes in front of each. Chunks of a model without BOS are whole windows. Weights and arithmetic are float32.
The nll of every token after the first is summed; perplexity = exp(mean). KL is KL(original || quantized) over the whole
vocabulary at the same positions, nats.

Every model goes through quantkit's runtime, which reads dense folders, compressed-tensors, and the GPTQ and AWQ
layouts that other tools write; what is measured is what is on disk, decoded in float32 (W8A8 rounds its activations).

Neighbouring windows share stories, so intervals come from blocks of consecutive windows (at most 100 of equal size):
Student's t on the means of blocks, and on their differences where two models are compared. A difference is called
real when its 95 % interval leaves out zero.
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
_BATCH = 4  # windows per call: more do not make these small models faster

Windows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What one model does on the windows.

    Args:
        windows, tokens: scored in all.
        nll: mean per token of every block, nats.
        kl: mean KL(original || model) of every block, nats; 0 for the original itself.
        top1: share of positions where model and original prefer the same token.
    """

    windows: int
    tokens: int
    nll: tuple[float, ...]
    kl: tuple[float, ...]
    top1: float

    @property
    def perplexity(self) -> float:
        """exp(mean nll): blocks are of equal size."""
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
        """-1 or 1 where the interval leaves out zero, else 0."""
        return (self.low > 0) - (self.high < 0)


def interval(blocks: Sequence[float]) -> Interval:
    """Mean of block means with its 95 % interval by Student's t.

    Args:
        blocks: at least two.
    """
    count = len(blocks)
    mean = math.fsum(blocks) / count
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in blocks) / (count - 1) / count)
    reach = spread * student_quantile(0.975, count - 1)
    return Interval(mean=mean, low=mean - reach, high=mean + reach)


def difference(value: Sequence[float], other: Sequence[float]) -> Interval:
    """Paired: `value` minus `other`, block by block.

    Args:
        value, other: of the same windows.
    """
    return interval([a - b for a, b in zip(value, other, strict=True)])


def read_windows(llm: LLM, text: str, *, window: int = WINDOW, max_windows: int = MAX_WINDOWS) -> Windows:
    """Cut a text as the module says, to as many windows as make equal blocks.

    Args:
        llm: whose tokenizer counts.
        text: to cut.
        window: positions, BOS included.
        max_windows: the rest is not used.
    """
    assert llm.tokenizer is not None, f"{llm.path}: no tokenizer"
    ids = llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = first_ids(llm)
    step = window - len(first)
    count = min(len(ids) // step, max_windows)
    count -= count % min(count, MAX_BLOCKS)
    return tuple((*first, *ids[at * step : (at + 1) * step]) for at in range(count))


def first_ids(llm: LLM) -> tuple[int, ...]:
    """BOS, for models that have one."""
    bos = None if llm.tokenizer is None else llm.tokenizer.bos_token_id
    return () if bos is None else (bos,)


def log_probabilities(llm: LLM, windows: Windows) -> Iterator[Tensor]:
    """(window - 1, V) float32 of every window: the predictions of all tokens after BOS."""
    for start in range(0, len(windows), _BATCH):
        group = windows[start : start + _BATCH]
        for logits in llm.score(group, chunk_size=len(group[0])):
            yield logits[:-1].float().log_softmax(-1)


@torch.inference_mode()
def score(models: Sequence[LLM], original: LLM, windows: Windows, reference: list[Tensor] | None = None) -> list[Score]:
    """Score models on the same windows, reading the original's predictions once.

    Args:
        models: to score; the original itself may be among them.
        original: what KL is measured against.
        windows: see `read_windows`.
        reference: the original's log-probabilities where they are kept from before: list(log_probabilities(...)).
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
    """Means of equally many consecutive values."""
    size = len(values) // min(len(values), MAX_BLOCKS)
    return tuple(math.fsum(values[at : at + size]) / size for at in range(0, len(values), size))


def load(path: str | Path) -> LLM:
    """A model, computing in float32 with one thread."""
    return load_llm(str(path), dtype="float32", threads=1)
