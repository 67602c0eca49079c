"""Drafts from the model's own MTP head; see `models.mtp`.

The head reads, at each position, the model's hidden state and the token that follows. `observe` keeps both, after every
step of the model, for all positions whose following token is now certain. The head reads them before it drafts, or when
a page of the KV cache is full, because other sequences may share the page from then on. So while drafts are switched
off, the head takes one step per page instead of one per token. And the head's layer of the KV cache covers the same
full pages as the model's layers: chunks of prompts, shared prefixes and preemption need no code here. If two sequences
share a page, the head's keys at its last position depend on the next token of the sequence that computed the page. For
the other sequence, this can only lower acceptance, because the model verifies all drafts.

`propose` drafts one token from the head's last hidden state. For further drafts, the head reads its own hidden state
and its last draft, at the next position. The head later overwrites the keys and values of these positions.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from quantkit.runtime.engine.batch_builder import ScheduledChunk
from quantkit.runtime.engine.runner import Runner
from quantkit.runtime.engine.speculation import Proposer, num_useful
from quantkit.runtime.model.model import NativeModel
from quantkit.runtime.sampling import sample, select_rows
from quantkit.runtime.sequence import PageHolder, Sequence


@dataclass(slots=True)
class _Unread:
    """Positions of a sequence that the head has not read.

    Args:
        start: first of these positions.
        following: tokens that follow the positions.
        hidden: hidden states of the model at the positions, in parts (rows, H).
    """

    start: int
    following: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


class MTPProposer(Proposer):
    """Proposes tokens with the model's MTP head.

    Args:
        model: model with an MTP head.
        page_size: tokens per page of the KV cache.
    """

    def __init__(self, model: NativeModel, page_size: int) -> None:
        self._model, self._page_size = model, page_size
        self._unread: dict[int, _Unread] = {}
        # The head's hidden state (H,) at the last position of each sequence that it has read.
        self._states: dict[int, Tensor] = {}

    def connect(self, runner: Runner, reserve: Callable[[Iterable[tuple[Sequence, int]]], bool]) -> None:
        self._runner, self._reserve = runner, reserve

    def observe(self, chunks: Many[ScheduledChunk], following: Many[list[int]]) -> None:
        hidden = self._runner.hidden
        assert hidden is not None, "the runner keeps hidden states for a model with an MTP head"
        hidden = hidden.clone()  # the next step may overwrite them
        row, full = 0, []
        for (holder, tokens, start, _), ids in zip(chunks, following, strict=True):
            unread = self._unread.setdefault(holder.id, _Unread(start))
            unread.following += ids
            unread.hidden.append(hidden[row : row + len(ids)])  # without the rows of rejected drafts
            row += len(tokens)
            if (start + len(ids)) // self._page_size > start // self._page_size:
                full.append(holder)
        self._read(full)

    def _read(self, holders: Many[PageHolder]) -> None:
        """Let the head read all positions of these sequences that it has not read."""
        unread = [(holder, self._unread.pop(holder.id)) for holder in holders if holder.id in self._unread]
        if not unread:
            return
        hidden = torch.cat([part for _, each in unread for part in each.hidden])
        states = self._compute(hidden, [ScheduledChunk(holder, e.following, e.start, 0) for holder, e in unread])
        ends = accumulate(len(each.following) for _, each in unread)
        self._states.update({holder.id: states[end - 1] for (holder, _), end in zip(unread, ends, strict=True)})

    def propose(self, sequences: Many[Sequence], count: int) -> None:
        ready = [(sequence, num_useful(sequence, count)) for sequence in sequences]
        ready = [(sequence, most) for sequence, most in ready if most > 0]
        if not ready:
            return
        # Only drafts after the first need pages. No sequence is preempted for them.
        if not self._reserve((sequence, sequence.num_computed + most - 1) for sequence, most in ready):
            ready = [(sequence, 1) for sequence, _ in ready]
        self._read([sequence for sequence, _ in ready])
        states = torch.stack([self._states[sequence.id] for sequence, _ in ready])
        while True:
            # With the sequence's random keys, as the model draws: the two then agree more often.
            rows = [(sequence, len(sequence.drafts)) for sequence, _ in ready]
            for (sequence, _), token in zip(ready, sample(self._model.draft_logits(states), rows), strict=True):
                sequence.drafts.append(token)
            kept = [row for row, (sequence, most) in enumerate(ready) if len(sequence.drafts) < most]
            if not kept:
                return
            states = states if len(kept) == len(ready) else select_rows(states, kept)
            ready = [ready[row] for row in kept]
            states = self._compute(states, [_next_chunk(sequence) for sequence, _ in ready])

    def _compute(self, hidden: Tensor, chunks: Many[ScheduledChunk]) -> Tensor:
        cache = self._runner.cache
        assert cache is not None, "a paged model needs a KV cache"
        return self._model.draft_states(hidden, self._runner.builder.build(chunks), cache)

    def forget(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)
        self._unread.pop(sequence_id, None)

    def check_integrity(self, alive: set[int]) -> None:
        kept = self._states.keys() | self._unread.keys()
        assert kept <= alive, f"hidden states of ended requests: {kept - alive}"


def _next_chunk(sequence: Sequence) -> ScheduledChunk:
    """Return the chunk in which the head reads a sequence's last draft, after the head's previous position."""
    return ScheduledChunk(sequence, sequence.drafts[-1:], sequence.num_computed + len(sequence.drafts) - 1, 0)
