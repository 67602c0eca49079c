"""Repetition, presence and frequency penalties: logits changed by the tokens seen so far, all rows at once.

Repetition (Keskar et al. 2019, CTRL) counts prompt and output; presence and frequency count the output only. Each
sequence keeps its distinct tokens in growing arrays (`TokenHistory`), so a step gathers, changes and scatters a few
values per row and never builds a (R, V) table.
"""

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.transfer import send
from quantkit.runtime.sequence import Sequence


def apply_penalties(logits: Tensor, rows: list[tuple[Sequence, int]]) -> Tensor:
    """Logits (R, V) after penalties; the same tensor when no row has any.

    Args:
        logits: (R, V) float32; not modified.
        rows: a sequence, and how many of its drafts come before the token.
    """
    chosen = [(row, sequence, ahead) for row, (sequence, ahead) in enumerate(rows) if sequence.history is not None]
    if not chosen:
        return logits
    seen = [sequence.history.seen(sequence.drafts[:ahead]) for _, sequence, ahead in chosen if sequence.history]
    sizes = [len(tokens) for tokens, _ in seen]

    params = [sequence.params for _, sequence, _ in chosen]
    factors = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
    where, tokens, counts, table = send(
        logits.device,
        np.repeat([row for row, _, _ in chosen], sizes),
        np.concatenate([tokens for tokens, _ in seen]),
        np.concatenate([counts for _, counts in seen]),
        np.repeat(np.array(factors, dtype=np.float32), sizes, axis=0),
    )
    repetition, presence, frequency = table.unbind(-1)
    values = logits[where, tokens]
    # Dividing a negative logit by more than one would make its token likelier.
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= presence * (counts > 0)
    values -= frequency * counts
    return logits.index_put((where, tokens), values)
