"""From logits to tokens: greedy, temperature, top-k, top-p, min-p, log-probabilities; all rows at once.

Order: penalties, temperature, top-k, top-p, min-p (the last two over what the one before left), then the draw. A
token that ties with the last one kept is kept too.

The draw is a race (Gumbel-max): token i wins with probability softmax(x)[i] where x[i] - log(E[i]) is largest and
E[i] are exponential variates. E[i] is a function of (seed, position, i) and of nothing else, so a request gives the
same tokens alone or in a batch, in any chunks, preempted or not, on any device. And because a draft model races with
the same variates, a speculative step accepts a draft exactly when it is the token that would have been drawn anyway:
see `speculative`.
Source: Maddison et al. 2014, A* Sampling; SplitMix64 (Steele et al. 2014) as counter-based generator.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import torch
from torch import Tensor

from quantkit.runtime.penalties import apply_penalties
from quantkit.runtime.types import Sequence, TokenLogprob

# Rows to sample: a sequence, and how many of its drafts come before the token.
Rows = list[tuple[Sequence, int]]

# Below this a logit over the temperature may be infinite, and the likeliest token no longer stands out.
_COLDEST = 1e-30

# Sorting few tokens is enough when top-p or top-k ends among them.
_FEW = 256

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample(logits: Tensor, rows: Rows) -> list[int]:
    """One token for each row.

    Args:
        logits: (R, V) float32; not modified.
        rows: what each row belongs to.
    """
    tokens: list[int] = choose(logits, rows).tolist()
    return tokens


def choose(logits: Tensor, rows: Rows) -> Tensor:
    """One token for each row, where the logits are; the host reads nothing but, for top-k and top-p, a few bounds.

    Args:
        logits: (R, V) float32; not modified.
        rows: what each row belongs to.
    Returns:
        (R,) int64.
    """
    if all(sequence.params.temperature == 0 and sequence.history is None for sequence, _ in rows):
        return _largest(logits)
    logits = apply_penalties(logits, rows)
    drawn = [index for index, (sequence, _) in enumerate(rows) if sequence.params.temperature > 0]
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    tokens = _largest(logits)
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [rows[index] for index in drawn])
    return tokens


def _largest(logits: Tensor) -> Tensor:
    """The token with the largest logit of each row, the first of equals."""
    if logits.device.type == "cpu":  # numpy finds it at memory speed; torch takes seven times as long
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def log_probabilities(logits: Tensor, rows: Rows, tokens: list[int]) -> list[TokenLogprob | None]:
    """Log-probabilities of the rows whose request wants them, by the model itself.

    Args:
        logits: (R, V) float32.
        rows: what each row belongs to.
        tokens: chosen for each row.
    """
    found: list[TokenLogprob | None] = [None] * len(rows)
    wanted = [index for index, (sequence, _) in enumerate(rows) if sequence.params.logprobs is not None]
    if not wanted:
        return found
    table = logits[wanted].log_softmax(-1)  # (W, V)
    most = max(rows[index][0].params.logprobs or 0 for index in wanted)
    values, ids = table.topk(min(most, table.shape[-1]), dim=-1)
    for place, index in enumerate(wanted):
        count = rows[index][0].params.logprobs or 0
        top = zip(ids[place, :count].tolist(), values[place, :count].tolist(), strict=True)
        found[index] = TokenLogprob(token_id=tokens[index], logprob=float(table[place, tokens[index]]), top=tuple(top))
    return found


def candidates(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """The tokens that temperature, top-k, top-p and min-p leave.

    Args:
        logits: (R, V) float32, penalties applied.
        rows: what each row belongs to; temperatures above 0.
    Returns:
        logits over temperature (R, C), -inf where excluded; and the token ids (R, C) they belong to, None = all V.
    """
    params = [sequence.params for sequence, _ in rows]
    scaled = logits / _column([max(p.temperature, _COLDEST) for p in params], logits)
    bound: Tensor | None = None
    if any(p.min_p > 0 for p in params):
        bound = scaled.amax(-1, keepdim=True) + _column([p.min_p for p in params], logits).log()
    limits = [min(p.top_k or scaled.shape[-1], scaled.shape[-1]) for p in params]
    if any(p.top_k is not None or p.top_p < 1 for p in params):
        return _nucleus(scaled, bound, limits, [p.top_p for p in params])
    return scaled if bound is None else scaled.masked_fill(scaled < bound, -torch.inf), None


def _nucleus(scaled: Tensor, least: Tensor | None, top_k: list[int], top_p: list[float]) -> tuple[Tensor, Tensor]:
    """The tokens (R, C) that top-k and then top-p keep, no smaller than `least` (R, 1)."""
    size = scaled.shape[-1]
    total = scaled.logsumexp(-1, keepdim=True)
    counts, shares = torch.tensor(top_k, device=scaled.device).unsqueeze(-1), _column(top_p, scaled)  # (R, 1)
    width = min(size, max([_FEW, *(count + 1 for count in top_k if count < size)]))
    while True:
        values, ids = scaled.topk(width, dim=-1)
        rank = torch.arange(width, device=scaled.device)
        inside = values.masked_fill(rank >= counts, -torch.inf)
        chances = (inside - torch.where(counts < size, inside.logsumexp(-1, keepdim=True), total)).exp()
        # A token stays when those before it do not reach top_p yet; the first always does.
        # Rounded sums may reach 1 before the end, but a share of 1 keeps all.
        reached = (chances.cumsum(-1) - chances >= shares) & (shares < 1)
        kept = (~reached & (rank < counts)) | (rank == 0)
        bound = values.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        # Few tokens will do when the last of them is out in every row: then whoever ties with the bound is in.
        if width == size or bool((values[:, -1:] < bound).all()):
            bound = bound if least is None else torch.maximum(bound, least)
            return values.masked_fill(values < bound, -torch.inf), ids
        width = size


def _draw(logits: Tensor, rows: Rows) -> Tensor:
    keys = [derived_seed(sequence.seed, len(sequence.ids) + ahead) for sequence, ahead in rows]
    values, ids = candidates(logits, rows)
    winner = (values - _log_exponentials(keys, logits.shape[-1], logits.device, ids)).argmax(-1)
    return winner if ids is None else ids.gather(-1, winner.unsqueeze(-1)).squeeze(-1)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(-1)


def derived_seed(seed: int, number: int) -> int:
    """64 random bits, as a signed integer, for the request or position with this number."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, number), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _log_exponentials(keys: list[int], size: int, device: torch.device, ids: Tensor | None) -> Tensor:
    """Logarithms of exponential variates float32, a function of key and token only: of all tokens, or of `ids`."""
    counters = _counters(size, device)
    x = torch.tensor(keys, device=device).unsqueeze(-1) + (counters if ids is None else counters[ids])  # wraps
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= _signed(_MIX_1)
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _signed(_MIX_2)
    x ^= (x >> 31) & ((1 << 33) - 1)
    # 32 bits, scaled to (0, 1). Small values decide the race and are exact; 1 itself would be log(0).
    uniform = (((x >> 32) & 0xFFFFFFFF).to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


@lru_cache(maxsize=8)
def _counters(size: int, device: torch.device) -> Tensor:
    return torch.arange(1, size + 1, device=device) * _signed(_GOLDEN)


def _signed(bits: int) -> int:
    """The same 64 bits as a signed integer, which is what torch has."""
    return bits - (1 << 64) if bits >> 63 else bits
