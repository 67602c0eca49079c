"""Drafts by the model's own MTP head, see `models.mtp`.

The head reads, at each position, the model's hidden state and the token that follows. After every step of the model,
`observe` therefore runs the head over all positions whose following token is now certain. So the head's layer of the KV
cache covers the same positions as the model's layers: chunks of prompts, shared prefixes and preemption need no code
here. A page that two sequences share has, at its last position, the keys of the head for the token that followed in the
sequence which computed the page. Only acceptance can suffer from this, because the model verifies all drafts.

`propose` drafts one token from the head's last hidden state. For further drafts, the head reads its own hidden state
and its last draft, at the next position. The next `observe` overwrites the keys and values of these positions.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from itertools import accumulate

import torch
from torch import Tensor

from quantkit.kernels.transfer import send
from quantkit.runtime.engine.batch_builder import ScheduledChunk
from quantkit.runtime.engine.runner import Runner
from quantkit.runtime.engine.speculation import Proposer, num_useful
from quantkit.runtime.model.model import NativeModel
from quantkit.runtime.sampling import sample
from quantkit.runtime.sequence import Sequence


class MTPProposer(Proposer):
    """Proposes tokens with the model's MTP head.

    Args:
        model: model with an MTP head.
    """

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        # The head's hidden state (H,) at the last position that each sequence has computed.
        self._states: dict[int, Tensor] = {}

    def connect(self, runner: Runner, reserve: Callable[[Iterable[tuple[Sequence, int]]], bool]) -> None:
        self._runner, self._reserve = runner, reserve

    def observe(self, chunks: Many[ScheduledChunk], following: Many[list[int]]) -> None:
        hidden = self._runner.hidden
        assert hidden is not None, "the runner keeps hidden states for a model with an MTP head"
        read = [ScheduledChunk(chunk.holder, ids, chunk.start, 0) for chunk, ids in zip(chunks, following, strict=True)]
        counts = [len(chunk.tokens) for chunk in chunks]
        if sum(map(len, following)) < sum(counts):  # without the rows of rejected drafts
            pairs = zip(accumulate(counts, initial=0), following, strict=False)
            hidden = self._rows(hidden, [start + row for start, ids in pairs for row in range(len(ids))])
        states = self._compute(hidden, read)
        last = self._rows(states, [end - 1 for end in accumulate(map(len, following))])
        self._states.update(zip((chunk.holder.id for chunk in chunks), last, strict=True))

    def propose(self, sequences: Many[Sequence], count: int) -> None:
        ready = [(sequence, num_useful(sequence, count)) for sequence in sequences]
        ready = [(sequence, most) for sequence, most in ready if most > 0]
        if not ready:
            return
        # Only drafts after the first need pages. Nobody is preempted for them.
        if not self._reserve((sequence, sequence.num_computed + most - 1) for sequence, most in ready):
            ready = [(sequence, 1) for sequence, _ in ready]
        states = torch.stack([self._states[sequence.id] for sequence, _ in ready])
        while True:
            # With the sequence's random keys, as the model draws: the two then agree more often.
            rows = [(sequence, len(sequence.drafts)) for sequence, _ in ready]
            for (sequence, _), token in zip(ready, sample(self._model.draft_logits(states), rows), strict=True):
                sequence.drafts.append(token)
            kept = [row for row, (sequence, most) in enumerate(ready) if len(sequence.drafts) < most]
            if not kept:
                return
            states = states if len(kept) == len(ready) else self._rows(states, kept)
            ready = [ready[row] for row in kept]
            states = self._compute(states, [_next_chunk(sequence) for sequence, _ in ready])

    def _compute(self, hidden: Tensor, chunks: Many[ScheduledChunk]) -> Tensor:
        cache = self._runner.cache
        assert cache is not None, "a paged model needs a KV cache"
        return self._model.draft_states(hidden, self._runner.builder.build(chunks), cache)

    def _rows(self, values: Tensor, rows: list[int]) -> Tensor:
        (index,) = send(self._model.device, torch.tensor(rows).numpy())
        return values[index]

    def forget(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)

    def check_integrity(self, alive: set[int]) -> None:
        assert self._states.keys() <= alive, f"hidden states of ended requests: {self._states.keys() - alive}"


def _next_chunk(sequence: Sequence) -> ScheduledChunk:
    """Return the chunk in which the head reads a sequence's last draft, after the head's previous position."""
    return ScheduledChunk(sequence, sequence.drafts[-1:], sequence.num_computed + len(sequence.drafts) - 1, 0)
