"""Choice of each request's tokens from logits: biases, penalties, sampling parameters, log-probabilities.

`kernels.reference.sampling` chooses the tokens on any device. This module gives each row its random key, a function of
(seed, position). So a request's random numbers do not depend on the batch, chunks, preemption or device. A draft model
draws with the same random numbers; a draft is accepted if and only if the target model would draw it, see
`engine.speculation`.

The repetition penalty (Keskar et al. 2019, CTRL) counts prompt and output; presence and frequency penalties count the
output only. Each sequence keeps its distinct tokens in growing arrays (`TokenHistory`), so a step changes a few values
per row and never builds a (R, V) table.
"""

import hashlib
import struct

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.reference import sampling as reference
from quantkit.kernels.reference.sampling import Draw
from quantkit.kernels.transfer import send
from quantkit.runtime.sequence import Sequence
from quantkit.runtime.types import TokenLogprob


def apply_penalties(logits: Tensor, rows: list[tuple[Sequence, int]]) -> Tensor:
    """Return logits (R, V) after penalties; the same tensor if no row has penalties.

    Args:
        logits: (R, V) float32; not modified.
        rows: for each row, its sequence, and how many of the sequence's drafts precede the token that the row chooses.
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


def apply_bias(logits: Tensor, rows: list[tuple[Sequence, int]]) -> Tensor:
    """Return logits (R, V) plus each request's `logit_bias`; the same tensor if no request has one.

    Args:
        logits: (R, V) float32; not modified.
        rows: for each row, its sequence, and how many of the sequence's drafts precede the token that the row chooses.
    """
    biases = [(row, bias) for row, (sequence, _) in enumerate(rows) if (bias := sequence.params.logit_bias)]
    if not biases:
        return logits
    where, tokens, values = send(
        logits.device,
        np.repeat([row for row, _ in biases], [len(bias) for _, bias in biases]),
        np.array([token for _, bias in biases for token in bias]),
        np.array([value for _, bias in biases for value in bias.values()], dtype=np.float32),
    )
    return logits.index_put((where, tokens), values, accumulate=True)


# Rows to sample: for each row, its sequence, and how many of the sequence's drafts precede the token to choose.
Rows = list[tuple[Sequence, int]]


def sample(logits: Tensor, rows: Rows) -> list[int]:
    """Choose one token for each row with `choose_tokens`, and return them as a list on the host."""
    tokens: list[int] = choose_tokens(logits, rows).tolist()
    return tokens


def choose_tokens(logits: Tensor, rows: Rows) -> Tensor:
    """Choose one token for each row, on the device of the logits.

    Args:
        logits: (R, V) float32; not modified.
        rows: for each row, its sequence, and how many of the sequence's drafts precede the token that the row chooses.
    Returns:
        (R,) int64; the next step may overwrite them, as it may overwrite the logits.
    """
    if any(sequence.constraint is not None for sequence, _ in rows):
        logits = _constrained(logits, rows)
    logits = apply_penalties(apply_bias(logits, rows), rows)
    return reference.choose(logits, [draw_of(row) if row[0].params.temperature > 0 else None for row in rows])


def _constrained(logits: Tensor, rows: Rows) -> Tensor:
    """Return a copy of the logits that excludes the tokens forbidden by each row's schema or grammar."""
    chosen = [(row, s.constraint.allowed(s.drafts[:ahead])) for row, (s, ahead) in enumerate(rows) if s.constraint]
    index, allowed = send(logits.device, np.array([row for row, _ in chosen]), np.stack([mask for _, mask in chosen]))
    values = logits.clone()
    values[index] = values[index].masked_fill(~allowed, float("-inf"))
    return values


def select_rows(values: Tensor, rows: list[int]) -> Tensor:
    """Return the rows with these indices, of a step's logits or hidden states."""
    (index,) = send(values.device, np.array(rows, dtype=np.int64))
    return values[index]


def draw_of(row: tuple[Sequence, int]) -> Draw:
    """Return the sampling parameters of a row, with a random key that is unique to its request and position."""
    sequence, ahead = row
    params = sequence.params
    key = derived_seed(sequence.seed, len(sequence.ids) + ahead)
    return Draw(key, params.temperature, params.top_k, params.top_p, params.min_p)


def derived_seed(seed: int, number: int) -> int:
    """Return 64 random bits, as a signed integer, for the request or position with this number."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, number), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def log_probabilities(logits: Tensor, rows: Rows, tokens: list[int]) -> list[TokenLogprob | None] | None:
    """Return log-probabilities before biases and penalties, if a request wants them.

    Args:
        logits: (R, V) float32.
        rows: for each row, its sequence, and how many of the sequence's drafts precede the token that the row chooses.
        tokens: token chosen in each row.
    Returns:
        One item per row, None for rows whose request wants none; or None if no request wants any.
    """
    counts = {i: s.params.logprobs for i, (s, _) in enumerate(rows) if s.params.logprobs is not None}
    if not counts:
        return None
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    asked, chosen = send(logits.device, np.array(list(counts)), np.array([[tokens[index]] for index in counts]))
    table = logits[asked].log_softmax(-1)  # (W, V)
    # One call for all rows, with the largest number that a request asks for. Each row then takes as many as it needs.
    values, ids = table.topk(min(max(counts.values()), table.shape[-1]), dim=-1)
    read = zip(table.gather(-1, chosen).tolist(), ids.tolist(), values.tolist(), strict=True)
    for (index, count), ((own,), top_ids, top_values) in zip(counts.items(), read, strict=True):
        top = tuple(zip(top_ids[:count], top_values[:count], strict=True))
        logprobs[index] = TokenLogprob(token_id=tokens[index], logprob=own, top=top)
    return logprobs
