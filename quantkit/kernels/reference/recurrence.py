"""Recurrent layers in float32, on any device.

`recur` defines the computation, token by token. `scan` computes the same with matrix products, one chunk of tokens at a
time; only the state passes between chunks. Within a chunk, let c_i be the summed log-decay up to token i: token j
affects token i by the factor exp(c_i - c_j). The corrections of the delta rule form a triangular system.

Shapes: B sequences with T new tokens each; W width of the convolution, C its channels; G heads of queries and keys with
N channels each; H heads of values with P channels each. H is a multiple of G, and H / G neighbouring heads of values
share a query and a key. In chunks: R value heads that share a query and a key, L tokens.
Source: Yang et al. 2025, Gated Delta Networks; Dao and Gu 2024, Transformers are SSMs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own filter over the last W tokens, and apply SiLU.

    Args:
        x: (B, T, C), any float dtype; not modified.
        weight: (W, C); the last row applies to the newest token.
        bias: (C,), or None.
        past: (B, W - 1, C) float32, the inputs of the tokens before `x`.
    Returns:
        The outputs (B, T, C) float32, and the `past` for the next call.
    """
    tokens, count = torch.cat([past, x.float()], dim=1), x.shape[1]
    mixed = sum(
        (tokens[:, i : i + count] * row for i, row in enumerate(weight)), start=torch.zeros((), device=x.device)
    )
    return F.silu(mixed if bias is None else mixed + bias), tokens[:, count:]


def recur(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Update the state with each token and read it: S = exp(decay) S + key x new; out = query S.

    Args:
        query, key: (B, T, G, N) float32.
        value: (B, T, H, P) float32.
        decay: (B, T, H) float32, logarithm of the decay, at most zero.
        rate: (B, T, H) float32, step size of the gated delta rule, new = rate * (value - key S); None = new is value.
        state: (B, H, N, P) float32; not modified.
    Returns:
        (B, T, H, P) float32, and the new state.
    """
    repeats = value.shape[2] // key.shape[2]
    outputs = []
    for token in range(value.shape[1]):
        q, k = (x[:, token].repeat_interleave(repeats, dim=1).unsqueeze(-1) for x in (query, key))  # (B, H, N, 1)
        state = state * decay[:, token, :, None, None].exp()
        new = value[:, token].unsqueeze(-2)  # (B, H, 1, P)
        if rate is not None:
            new = rate[:, token, :, None, None] * (new - (k * state).sum(-2, keepdim=True))
        state = state + k * new
        outputs.append((q * state).sum(-2))
    return torch.stack(outputs, dim=1), state


def scan(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the same as `recur`: several tokens with matrix products, a single token with `recur` itself."""
    if value.shape[1] == 1:
        return recur(query, key, value, decay, rate, state)
    groups, repeats = key.shape[2], value.shape[2] // key.shape[2]
    q, k = (x.transpose(1, 2).unsqueeze(2) for x in (query, key))  # (B, G, 1, T, N)
    v = value.view(*value.shape[:2], groups, repeats, -1).permute(0, 2, 3, 1, 4)  # (B, G, R, T, P)
    by_head = [x.view(*x.shape[:2], groups, repeats).permute(0, 2, 3, 1) for x in (decay, rate) if x is not None]
    running = state.view(len(state), groups, repeats, *state.shape[2:])  # (B, G, R, N, P)
    outputs = []
    for start in range(0, value.shape[1], _CHUNK):
        tokens = slice(start, start + _CHUNK)
        output, running = _chunk(
            *(x[..., tokens, :] for x in (q, k, v)), *(x[..., tokens, None] for x in by_head), state=running
        )
        outputs.append(output)
    return torch.cat(outputs, dim=3).permute(0, 3, 1, 2, 4).flatten(2, 3), running.flatten(1, 2)


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None = None, *, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs (B, G, R, L, P) and the state after a chunk; decay and rate are (B, G, R, L, 1)."""
    total = decay.cumsum(-2)
    later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)
    between = (total - total.mT).masked_fill(later, -torch.inf).exp()  # (B, G, R, L, L)
    new = value
    if rate is not None:
        weighed = key * rate
        # Each token's correction depends on those of the tokens before it; the diagonal is one.
        sides = torch.cat([value * rate, weighed * total.exp()], dim=-1)
        solved = torch.linalg.solve_triangular(weighed @ key.mT * between, sides, upper=False, unitriangular=True)
        from_values, from_state = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
        new = from_values - from_state @ state
    output = (query * total.exp()) @ state + (query @ key.mT * between) @ new
    last = total[..., -1:, :]
    return output, state * last.exp() + (key * (last - total).exp()).mT @ new
