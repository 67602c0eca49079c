"""Distances between two models of which only the likeliest tokens of each position are known, as serving engines tell.

Let S be the tokens that both name, p and q the probabilities of the original and of the model, and r what they leave to
all others. Then KL = sum over S of p log(p / q), plus what the others add, which is between two numbers:

    at least   r_p log(r_p / r_q)                       always: joining tokens never adds to a KL
    at most    r_p max(log(r_p / r_q), log of the largest p / q that is seen)    if the others lost no more on average

The upper end supposes something: that tokens which neither knows lost, on average, no more than the one that lost most
among those that are known at that position. A token that only the original names counts with the least that the model
names, which it is below.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import ModelError
from quantkit.evaluate.fidelity import GREEDY_TOKENS, Texts, Windows, divergences, greedy_texts
from quantkit.results import FidelityResult
from quantkit.results.statistics.summary import percentile
from quantkit.runtime.vllm_engine import TopLogprobs, VllmLLM

_NOTHING = 1e-6  # log-probabilities are float32, so their sums say nothing of less


@dataclass(frozen=True, kw_only=True, slots=True)
class TopReading:
    """What one model said of a text.

    Args:
        name, engine: of the model, and what ran it.
        vocab_size: tokens that it predicts.
        windows: after every token of each.
        texts: greedy ones, see `greedy_texts`.
    """

    name: str
    engine: str
    vocab_size: int
    windows: tuple[TopLogprobs, ...]
    texts: Texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Distances of positions.

    Args:
        low, high: (T,) float64, KL in nats is between them.
        agrees: (T,) bool, whether both prefer the same token.
        remainder: (T,) float64, probability that the original leaves to tokens that are not known of both.
    """

    low: Tensor
    high: Tensor
    agrees: Tensor
    remainder: Tensor


def read_top(llm: VllmLLM, windows: Windows, *, greedy_tokens: int = GREEDY_TOKENS) -> TopReading:
    """Ask one model; the other of a pair is asked the same."""
    longest = llm.capacity - greedy_tokens
    return TopReading(
        name=str(llm.path),
        engine=llm.engine_name,
        vocab_size=llm.vocab_size,
        windows=tuple(llm.top_logprobs(windows)),
        texts=greedy_texts(llm, windows, greedy_tokens, longest) if min(greedy_tokens, longest) > 0 else [],
    )


def top_fidelity(
    model: TopReading, original: TopReading, *, data: str, greedy_tokens: int = GREEDY_TOKENS
) -> FidelityResult:
    """Compare two readings of the same windows.

    Raises:
        ModelError: the vocabularies differ.
    """
    if model.vocab_size != original.vocab_size:
        raise ModelError(
            f"{model.name} predicts {model.vocab_size} tokens, the original {original.name} {original.vocab_size}; "
            "give the model that the checkpoint was made from"
        )
    parts = [bounds(p, q) for p, q in zip(original.windows, model.windows, strict=True)]
    low, high = (torch.cat([getattr(part, end) for part in parts]) for end in ("low", "high"))
    agrees, remainder = (torch.cat([getattr(part, name) for part in parts]) for name in ("agrees", "remainder"))
    top = original.windows[0].tokens.shape[1]
    return FidelityResult(
        data=data,
        num_tokens=len(high),
        mean_kl=float(high.mean()),
        p99_kl=percentile(high.tolist(), 99),
        max_kl=float(high.max()),
        top1_agreement=float(agrees.double().mean()),
        window_kl=tuple(float(part.high.mean()) for part in parts),
        first_divergence=divergences(model.texts, original.texts),
        greedy_tokens=greedy_tokens if original.texts else 0,
        engine=model.engine,
        mean_kl_low=float(low.mean()),
        top=top,
        remainder=float(remainder.mean()),
    )


def bounds(original: TopLogprobs, model: TopLogprobs) -> Bounds:
    """KL(original || model) at each position, see the module."""
    same = original.tokens[:, :, None] == model.tokens[:, None, :]  # (T, k, k)
    known = same.any(-1)
    p = original.logprobs
    q = torch.where(known, (same * model.logprobs[:, None, :]).sum(-1), model.logprobs[:, -1:])
    ratio = p - q
    mass_p, mass_q = ((known * row.exp()).sum(-1) for row in (p, q))
    rest_p, rest_q = ((1 - mass).clamp_min(0) for mass in (mass_p, mass_q))
    seen = (known * p.exp() * ratio).sum(-1)
    joined = torch.log(rest_p.clamp_min(_NOTHING) / rest_q.clamp_min(_NOTHING))
    # Tokens that the model does not name are below its last one, so their ratio is at least this.
    worst = torch.maximum(joined, ratio.max(-1).values)
    counts = rest_p > _NOTHING
    return Bounds(
        low=(seen + counts * rest_p * joined).clamp_min(0),
        high=(seen + counts * rest_p * worst).clamp_min(0),
        agrees=original.tokens[:, 0] == model.tokens[:, 0],
        remainder=rest_p,
    )
