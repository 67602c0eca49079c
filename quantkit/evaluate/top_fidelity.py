"""Bound a model's KL from its original, in serving engines that give only the likeliest tokens at each position.

Module `fidelity` computes the KL itself, from whole distributions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.evaluate.fidelity import (
    GREEDY_TOKENS,
    Distances,
    Texts,
    Windows,
    check_vocabulary,
    divergences,
    greedy_texts,
    summarize,
)
from quantkit.results import FidelityResult
from quantkit.runtime.vllm_engine import TopLogprobs, VllmLLM

_NOTHING = 1e-6  # smallest probability that sums of float32 log-probabilities can resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class TopReading:
    """Likeliest next tokens of one model on a text, and the texts that the model generates greedily.

    Args:
        path: directory of the model.
        engine: name of the engine that ran the model.
        vocab_size: size of the model's vocabulary.
        windows: likeliest tokens after every token of each window.
        texts: greedy texts, see `greedy_texts`.
        arithmetic: dtype of the computation.
        notes: remarks of the engine about the run.
    """

    path: Path
    engine: str
    vocab_size: int
    windows: tuple[TopLogprobs, ...]
    texts: Texts
    arithmetic: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds(Distances):
    """Bounds of KL at positions where only the likeliest tokens are known; all in float64.

    Args:
        kl: upper bound of KL, nats; (T,).
        low: lower bound of KL, nats; (T,).
        remainder: probability that the original gives to all tokens except the known ones; (T,). A token is known if it
            is among the likeliest tokens of both models.
    """

    low: Tensor
    remainder: Tensor


def read_top(llm: VllmLLM, windows: Windows, *, greedy_tokens: int = GREEDY_TOKENS) -> TopReading:
    """Compute one model's likeliest next tokens and its greedy texts.

    To compare two models, call this function for both with the same windows and `greedy_tokens`.
    """
    longest = llm.capacity - greedy_tokens
    return TopReading(
        path=llm.path,
        engine=llm.engine_name,
        vocab_size=llm.vocab_size,
        windows=tuple(llm.top_logprobs(windows)),
        texts=greedy_texts(llm, windows, greedy_tokens, longest) if min(greedy_tokens, longest) > 0 else [],
        arithmetic=llm.arithmetic,
        notes=llm.notes,
    )


def top_fidelity(
    model: TopReading, original: TopReading, *, data: str, greedy_tokens: int = GREEDY_TOKENS
) -> FidelityResult:
    """Bound the KL of a model from its original on the same windows, and compare their greedy texts.

    Args:
        model, original: readings with the same windows and `greedy_tokens`, see `read_top`.
        data: name of the text, for the record.
        greedy_tokens: length of the greedy texts.
    Raises:
        ModelError: the vocabularies differ.
    """
    check_vocabulary(model, original)
    parts = [bounds(p, q) for p, q in zip(original.windows, model.windows, strict=True)]
    return summarize(
        parts,
        data=data,
        first_divergence=divergences(model.texts, original.texts),
        greedy_tokens=greedy_tokens if original.texts else 0,
        engine=model.engine,
        mean_kl_low=float(torch.cat([part.low for part in parts]).mean()),
        top=original.windows[0].tokens.shape[1],
        remainder=float(torch.cat([part.remainder for part in parts]).mean()),
    )


def bounds(original: TopLogprobs, model: TopLogprobs) -> Bounds:
    """Bound KL(original || model) at each position.

    Let S be the tokens known for both models, p and q the probabilities that the original and the model give to a
    token, and r_p and r_q the probabilities that they give to all tokens outside S together. Then KL is the sum over S
    of p log(p / q), plus the contribution of the tokens outside S, which is

        at least   r_p log(r_p / r_q), since merging tokens never increases a KL
        at most    r_p max(log(r_p / r_q), log of the largest known p / q)

    The upper bound assumes that the unknown tokens lost, on average, no more than the known token with the largest
    p / q at that position. For a token known only for the original, q is replaced by the smallest probability known
    for the model, which is an upper bound of q.
    """
    same = original.tokens[:, :, None] == model.tokens[:, None, :]  # (T, k, k)
    known = same.any(-1)
    p = original.logprobs
    q = torch.where(known, (same * model.logprobs[:, None, :]).sum(-1), model.logprobs[:, -1:])
    ratio = p - q
    mass_p, mass_q = ((known * row.exp()).sum(-1) for row in (p, q))
    rest_p, rest_q = ((1 - mass).clamp_min(0) for mass in (mass_p, mass_q))
    seen = (known * p.exp() * ratio).sum(-1)
    joined = torch.log(rest_p.clamp_min(_NOTHING) / rest_q.clamp_min(_NOTHING))
    # Tokens outside the model's list are less likely than its last one, so their p / q is at least this.
    worst = torch.maximum(joined, ratio.max(-1).values)
    counts = rest_p > _NOTHING
    return Bounds(
        low=(seen + counts * rest_p * joined).clamp_min(0),
        kl=(seen + counts * rest_p * worst).clamp_min(0),
        agrees=original.tokens[:, 0] == model.tokens[:, 0],
        remainder=rest_p,
    )
