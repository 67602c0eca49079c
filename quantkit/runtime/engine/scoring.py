"""Scoring of given tokens: collection of scores from a step's logits, and grouping of texts that share a computation.

Texts that differ only in their last token or in where scoring starts share one computation. Full pages of a common
prefix are also computed only once; see `scheduler`. With a quantized cache, scored tokens read earlier tokens from the
cache, as in generation.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.kernels.transfer import send
from quantkit.runtime.engine.batch_builder import ScheduledChunk
from quantkit.runtime.sequence import Sequence
from quantkit.runtime.types import PromptScores, PromptScoring, SamplingParams, ScoredText

# Number of logits that are scored at once.
_ELEMENTS, _ELEMENTS_ON_GPU = 1 << 21, 1 << 28


@dataclass(slots=True, eq=False)
class ScoringInput:
    """Tokens that are computed once for several texts: each text consists of these tokens and one more.

    Args:
        ids: ids of the common tokens.
        texts: the texts, each with its index in the list of all texts.
    """

    ids: tuple[int, ...]
    texts: list[tuple[int, ScoredText]] = field(default_factory=list)

    def params(self, chunk_size: int | None) -> SamplingParams:
        """Return the parameters of a request that scores every token that any of the texts scores.

        The last token of each text is scored as a continuation.
        """
        scoring = PromptScoring(
            # Less one: the last token of a text is not fed but scored as a continuation.
            num_tokens=max(text.num_scored for _, text in self.texts) - 1,
            continuations=tuple(text.ids[-1] for _, text in self.texts),
            chunk_size=chunk_size,
        )
        return SamplingParams(max_tokens=0, scoring=scoring)

    def split(self, scores: PromptScores) -> Iterable[tuple[int, PromptScores]]:
        """Split the scores of the request by text; yield the index and the scores of each text."""
        num_shared = len(scores.logprobs) - len(self.texts)
        for last, (number, text) in enumerate(self.texts, start=num_shared):
            index = [*range(num_shared - text.num_scored + 1, num_shared), last]
            yield number, PromptScores(logprobs=scores.logprobs[index], greedy=scores.greedy[index])


def scoring_inputs(texts: Many[ScoredText]) -> list[ScoringInput]:
    """Return the inputs to compute: texts that differ only in their last token share one input.

    Inputs with a common prefix are adjacent.

    Raises:
        RequestError: a text has too few or too many tokens to score.
    """
    inputs: dict[tuple[int, ...], ScoringInput] = {}
    for number, text in enumerate(texts):
        if not 1 <= text.num_scored < len(text.ids):
            raise RequestError(
                f"cannot score {text.num_scored} of {len(text.ids)} tokens; score at least 1 and at most "
                f"{len(text.ids) - 1}, because the first token has no context"
            )
        fed = text.ids[:-1]
        inputs.setdefault(fed, ScoringInput(fed)).texts.append((number, text))
    # Adjacent inputs find the pages of their common prefix before the pool reuses these pages.
    return [inputs[fed] for fed in sorted(inputs)]


def empty_scores(scoring: PromptScoring, vocab_size: int) -> PromptScores:
    """Return scores whose tensors are allocated but not filled yet."""
    count, top = scoring.num_tokens + len(scoring.continuations), min(scoring.top, vocab_size)
    return PromptScores(
        logprobs=torch.empty(count, dtype=torch.float32),
        greedy=torch.empty(count, dtype=torch.bool),
        top=(torch.empty(count, top, dtype=torch.int64), torch.empty(count, top)) if top else None,
    )


def _score(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log-probability of one token per row of logits (R, V) and whether it is the likeliest, (R,) each, and
    the `most` largest log-probabilities with their tokens, (R, most) each.
    """
    total = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.topk(most)
    own = logits.gather(-1, tokens.unsqueeze(-1)) - total
    return own.squeeze(-1), logits.max(-1).indices == tokens, values - total, ids


def collect_scores(logits: Tensor, chunks: Iterable[tuple[Sequence, ScheduledChunk]]) -> None:
    """Collect the requested scores from a step's logits, for all sequences at once.

    Args:
        logits: (R, V) float32, rows of the chunks in order.
        chunks: the step's chunks and their sequences; sequences that request scores receive them.
    """
    rows: list[int] = []
    tokens: list[int] = []
    slices: list[tuple[PromptScores, slice]] = []
    at = 0
    for sequence, chunk in chunks:
        scores, scoring, last = sequence.scores, sequence.params.scoring, sequence.num_prompt - 1
        if scores is not None and scoring is not None and chunk.num_logits and chunk.start <= last:
            end = chunk.start + len(chunk.tokens)
            first = end - chunk.num_logits  # position of the chunk's first row
            shift = at - first  # from positions to rows
            end = min(end, last + 1)  # drafts are no part of the prompt
            if scoring.read_logits is not None:
                scoring.read_logits(first, logits[at : end + shift])
            begin = max(first, last - scoring.num_tokens)
            known = range(begin, min(end, last))  # positions whose next token is in the prompt
            following = scoring.continuations if end > last else ()
            rows += [*range(begin + shift, begin + shift + len(known)), *[last + shift] * len(following)]
            tokens += [*(sequence.ids[position + 1] for position in known), *following]
            start = begin - (last - scoring.num_tokens)
            slices.append((scores, slice(start, start + len(known) + len(following))))
        at += chunk.num_logits
    if not tokens:
        return
    row, token = send(logits.device, np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64))
    # One call with the largest number that a request asks for; each request then takes its own number.
    most = max(0 if scores.top is None else scores.top[0].shape[1] for scores, _ in slices)
    # In small parts, so that no copy of all logits is needed, and the parts stay in the cache.
    size = max(1, (_ELEMENTS if logits.device.type == "cpu" else _ELEMENTS_ON_GPU) // logits.shape[1])
    pairs = zip(torch.split(row, size), torch.split(token, size), strict=True)
    parts = [_score(logits[some], own, most) for some, own in pairs]
    logprobs, greedy, values, ids = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    at = 0
    for scores, part in slices:
        own = slice(at, at := at + part.stop - part.start)
        scores.logprobs[part], scores.greedy[part] = logprobs[own], greedy[own]
        if scores.top is not None:
            width = scores.top[0].shape[1]
            scores.top[0][part], scores.top[1][part] = ids[own, :width], values[own, :width]
