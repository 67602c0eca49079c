"""Recurrent layers in torch: single tokens by the recurrence itself, several tokens by matrix products.

The products handle one chunk of tokens at a time; only the state passes between chunks. Within a chunk, let c_i be the
summed log-decay up to token i: token j affects token i by the factor exp(c_i - c_j). The corrections of the delta rule
form a triangular system. Shapes as in `reference.recurrence`; R value heads share a query and a key; chunks of L
tokens.
"""

import torch
from torch import Tensor

from quantkit.kernels.reference.recurrence import causal_conv as causal_conv
from quantkit.kernels.reference.recurrence import recur

_CHUNK = 64


def scan(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.recurrence.recur`."""
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
