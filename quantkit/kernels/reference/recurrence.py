"""Recurrent layers token by token, in float32 on any device; faster versions must agree with this.

Shapes: B sequences with T new tokens each; W width of the convolution, C its channels; G heads of queries and keys with
N channels each; H heads of values with P channels each. H is a multiple of G, and H / G neighbouring heads of values
share a query and a key.
Source: Yang et al. 2025, Gated Delta Networks; Dao and Gu 2024, Transformers are SSMs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
        rate: (B, T, H) float32: new = rate * (value - key S), the gated delta rule; None: new = value.
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
