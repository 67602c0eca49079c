"""Training batches of the demo language: documents tokenized, answers weighted, packed into rows of equal length.

A batch is a pure function of (seed, step), so the data position of a run is its step number. Every row begins with
the start of a document, and only what cannot be fitted is cut at a row's end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from language import TASKS, document_of_kind, draw_kind, split_marks
from torch import Tensor
from transformers import PreTrainedTokenizerFast

NO_ANSWER, PADDING = -1, -2


@dataclass(frozen=True)
class Batch:
    """Token ids, and of which kind of document each token is an answer (or NO_ANSWER, or PADDING); (rows, length)."""

    tokens: Tensor
    kinds: Tensor


@dataclass(frozen=True)
class _Encoded:
    tokens: list[int]
    kinds: list[int]


def draw_batch(tokenizer: PreTrainedTokenizerFast, seed: str, step: int, rows: int, length: int) -> Batch:
    """The batch of one step; a batch of rows longer than 256 tokens also has the long recall documents."""
    rng = random.Random(f"{seed} {step}")
    documents = _encode(tokenizer, rng, rows * length, long=length > 256)
    packed = _pack(documents, rows, length)
    end = tokenizer.eos_token_id
    tokens = [row.tokens + [end] * (length - len(row.tokens)) for row in packed]
    kinds = [row.kinds + [PADDING] * (length - len(row.kinds)) for row in packed]
    return Batch(torch.tensor(tokens), torch.tensor(kinds))


def _encode(tokenizer: PreTrainedTokenizerFast, rng: random.Random, num_tokens: int, *, long: bool) -> list[_Encoded]:
    """Documents of at least `num_tokens` in total, each from its BOS to its EOS."""
    encoded: list[_Encoded] = []
    while num_tokens > 0:
        names = [draw_kind(rng) for _ in range(num_tokens // 120 + 1)]
        split = [split_marks(document_of_kind(kind, rng, long=long and rng.random() < 0.7)) for kind in names]
        outputs = tokenizer.backend_tokenizer.encode_batch([text for text, _ in split])
        for name, (_, spans), output in zip(names, split, outputs, strict=True):
            starts = [start for start, _ in spans]
            ends = [end for _, end in spans]
            task = TASKS.index(name)
            kinds = [NO_ANSWER] * len(output.ids)
            span = 0
            for i, (start, end) in enumerate(output.offsets):
                while span < len(ends) and start >= ends[span]:
                    span += 1
                # An answer's token may begin with the space before it.
                if span < len(ends) and end > starts[span] and end > start:
                    kinds[i] = task
            encoded.append(_Encoded([*output.ids, tokenizer.eos_token_id], [*kinds, NO_ANSWER]))
            num_tokens -= len(output.ids) + 1
    return encoded


def _pack(documents: list[_Encoded], rows: int, length: int) -> list[_Encoded]:
    """First fit, longest first; the leftovers fill the gaps and are cut."""
    packed = [_Encoded([], []) for _ in range(rows)]
    leftovers: list[_Encoded] = []
    for document in sorted(documents, key=lambda d: -len(d.tokens)):
        row = next((r for r in packed if len(r.tokens) + len(document.tokens) <= length), None)
        if row is None:
            leftovers.append(document)
        else:
            row.tokens.extend(document.tokens)
            row.kinds.extend(document.kinds)
    for row, document in zip(sorted(packed, key=lambda r: len(r.tokens)), leftovers, strict=False):
        gap = length - len(row.tokens)
        row.tokens.extend(document.tokens[:gap])
        row.kinds.extend(document.kinds[:gap])
    return packed
