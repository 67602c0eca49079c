"""Repetition, presence and frequency penalties: logits changed by the tokens seen so far, all rows at once.

Repetition (Keskar et al. 2019, CTRL) counts prompt and output; presence and frequency count the output only. Each
sequence keeps its distinct tokens in growing arrays, so a step gathers, changes and scatters a few values per row and
never builds a (R, V) table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.transfer import send
from quantkit.runtime.types import Sequence

Array = np.ndarray[Any, Any]


class TokenHistory:
    """Distinct tokens of a sequence and how often each is in its output.

    Args:
        prompt: its token ids.
    """

    def __init__(self, prompt: list[int]) -> None:
        self._place: dict[int, int] = {}
        self._tokens = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)
        for token in prompt:
            self._find(token)

    def add(self, token: int) -> None:
        """Count one more token of the output."""
        self._counts[self._find(token)] += 1

    def seen(self, drafts: list[int]) -> tuple[Array, Array]:
        """Distinct tokens (H,) int64 and their counts in the output (H,) float32, as if the drafts were part of it."""
        size = len(self._place)
        tokens, counts = self._tokens[:size], self._counts[:size]
        if not drafts:
            return tokens, counts
        new = [token for token in dict.fromkeys(drafts) if token not in self._place]
        tokens = np.concatenate([tokens, np.array(new, dtype=np.int64)])
        counts = np.concatenate([counts, np.zeros(len(new), dtype=np.float32)])
        places = {token: size + index for index, token in enumerate(new)}
        for token in drafts:
            counts[self._place.get(token, places.get(token))] += 1
        return tokens, counts

    def _find(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._tokens):
                self._tokens = np.resize(self._tokens, 2 * place)
                self._counts = np.resize(self._counts, 2 * place)
            self._tokens[place], self._counts[place] = token, 0
        return place


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
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= presence * (counts > 0)
    values -= frequency * counts
    return logits.index_put((where, tokens), values)
