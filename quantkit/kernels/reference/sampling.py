"""Sample tokens from logits in plain torch: greedy, temperature, top-k, top-p, min-p; all rows at once.

Order: temperature, top-k, top-p, min-p, then the draw. Top-p and min-p apply to the tokens that the filters before them
keep. If a token has the same logit as the last kept token, it is kept too.

The draw uses the Gumbel-max trick: if E[i] are exponential variates, token i has the largest x[i] - log(E[i]) with
probability softmax(x)[i]. E[i] depends only on the row's key and on i, so a row gives the same token alone or in a
batch, and on any device. A NaN logit wins, as in `argmax`.

`runtime.sampling` handles seeds and penalties of requests.
Source: Maddison et al. 2014, A* Sampling; SplitMix64 (Steele et al. 2014) as counter-based generator.
Shapes: R rows, V vocabulary, C candidates.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.transfer import send

# At lower temperatures, logit / temperature may be infinite, and the likeliest token no longer stands out.
COLDEST = 1e-30
"""Lowest temperature; lower ones are raised to it."""

# Number of likeliest tokens to sort first; all are sorted only if top-p and top-k may keep more.
_FEW = 256

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64: the increment of the counter, and the two multipliers."""


class Draw(NamedTuple):
    """Sampling parameters of one row.

    Args:
        key: 64 random bits, as a signed integer.
        temperature: above 0.
        top_k: number of likeliest tokens to keep; None = all.
        top_p: keep the likeliest tokens that together reach this probability.
        min_p: keep tokens with at least this share of the likeliest token's probability.
    """

    key: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float


def choose(logits: Tensor, draws: Sequence[Draw | None]) -> Tensor:
    """Choose one token for each row, on the device of the logits.

    Args:
        logits: (R, V) float32; not modified.
        draws: sampling parameters of each row; None = greedy, i.e. the largest logit, where ties go to the first token.
    Returns:
        (R,) int64.
    """
    drawn = [index for index, draw in enumerate(draws) if draw is not None]
    asked = [draw for draw in draws if draw is not None]
    if asked and len(drawn) == len(draws):
        return _draw(logits, asked)
    tokens = largest(logits)
    if not asked:
        return tokens
    (rows,) = send(logits.device, np.array(drawn, dtype=np.int64))
    tokens[rows] = _draw(logits[rows], asked)
    return tokens


def largest(logits: Tensor) -> Tensor:
    """Return the token (R,) int64 with the largest logit in each row (R, V); ties go to the first token."""
    if logits.device.type == "cpu":  # numpy finds it at memory speed; torch takes seven times as long
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def candidates(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor | None]:
    """Return the tokens that temperature, top-k, top-p and min-p leave.

    Args:
        logits: (R, V) float32; not modified.
        draws: sampling parameters of each row.
    Returns:
        Logits (R, C) divided by the temperature, -inf for excluded tokens; and their token ids (R, C), or None if the
        logits are those of all V tokens in order.
    """
    device = logits.device
    scaled = logits / _column(device, [max(draw.temperature, COLDEST) for draw in draws])
    bound: Tensor | None = None
    if any(draw.min_p > 0 for draw in draws):
        bound = scaled.amax(-1, keepdim=True) + _column(device, [draw.min_p for draw in draws]).log()
    if any(draw.top_k is not None or draw.top_p < 1 for draw in draws):
        size = logits.shape[-1]
        limits = [min(draw.top_k or size, size) for draw in draws]
        counts, shares = _column(device, limits, np.int64), _column(device, [draw.top_p for draw in draws])
        # To check whether few tokens are enough, the host would have to wait for a GPU, so a GPU sorts all tokens.
        few = size if not logits.is_cpu else max([_FEW, *(limit + 1 for limit in limits if limit < size)])
        width = min(size, few)
        return _nucleus(scaled, bound, counts, shares, width)
    return scaled if bound is None else scaled.masked_fill(scaled < bound, -torch.inf), None


def _nucleus(scaled: Tensor, least: Tensor | None, counts: Tensor, shares: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return logits and ids (R, C) of the C likeliest tokens of each row.

    C is `width` if the `width` likeliest tokens certainly include all tokens that top-k and top-p keep; otherwise V.

    The logit is -inf for a token that top-k excludes, that top-p excludes from the tokens that top-k keeps, or whose
    logit is below `least` (R, 1).
    """
    size = scaled.shape[-1]
    total = scaled.logsumexp(-1, keepdim=True)
    while True:
        values, ids = scaled.topk(width, dim=-1)
        rank = torch.arange(width, device=scaled.device)
        inside = values.masked_fill(rank >= counts, -torch.inf)
        chances = (inside - torch.where(counts < size, inside.logsumexp(-1, keepdim=True), total)).exp()
        # A token stays if the tokens before it do not reach top_p; the first token always stays.
        # Rounded sums may reach 1 before the end, but a share of 1 keeps all.
        reached = (chances.cumsum(-1) - chances >= shares) & (shares < 1)
        kept = (~reached & (rank < counts)) | (rank == 0)
        bound = values.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        # Few tokens are enough if the last of them is excluded in every row: then they include all ties with the bound.
        if width == size or bool((values[:, -1:] < bound).all()):
            bound = bound if least is None else torch.maximum(bound, least)
            return values.masked_fill(values < bound, -torch.inf), ids
        width = size


def _column(device: torch.device, values: Sequence[float], dtype: Any = np.float32) -> Tensor:
    (column,) = send(device, np.array(values, dtype=dtype))
    return column.unsqueeze(-1)


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    values, ids = candidates(logits, draws)
    noise = log_exponentials([draw.key for draw in draws], logits.shape[-1], logits.device, ids)
    best = (values - noise).argmax(-1)
    return best if ids is None else ids.gather(-1, best.unsqueeze(-1)).squeeze(-1)


def log_exponentials(keys: Sequence[int], size: int, device: torch.device, ids: Tensor | None = None) -> Tensor:
    """Return logarithms of exponential variates, which depend only on key and token.

    Args:
        keys: random keys of the rows.
        size: V.
        device: device of the result.
        ids: (R, C) tokens; None = all V.
    Returns:
        (R, C) or (R, V) float32.
    """
    counters = _counters(size, device)
    (seeds,) = send(device, np.array(keys, dtype=np.int64))
    x = seeds.unsqueeze(-1) + (counters if ids is None else counters[ids])  # wraps
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= _signed(MIX_1)
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _signed(MIX_2)
    x ^= (x >> 31) & ((1 << 33) - 1)
    # 32 bits, scaled to (0, 1). Small values decide the draw and are exact; 1 itself would give log(0).
    uniform = (((x >> 32) & 0xFFFFFFFF).to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


@lru_cache(maxsize=8)
def _counters(size: int, device: torch.device) -> Tensor:
    return torch.arange(1, size + 1, device=device) * _signed(GOLDEN)


def _signed(bits: int) -> int:
    """Reinterpret 64 bits as a signed integer, since torch has no unsigned ones."""
    return bits - (1 << 64) if bits >> 63 else bits
