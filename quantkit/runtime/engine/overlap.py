"""Decode steps that are launched before the tokens of the step before have been read.

While a GPU computes a step, the host has nothing to do but wait for its tokens, and while the host then gives them out,
the GPU waits. So the next step is launched first: it takes its tokens from where the last one put them, and where they
are stored is known without them. A sequence that turns out to have ended was computed once too often; that token is
dropped, and its slot lies behind the sequence's end, where nobody reads.

Not every step can be followed like this: not where the batch would change (somebody waits, reaches its limit, has been
cancelled), where pages are short or about to be evicted, or where choosing needs the tokens themselves (penalties,
log-probabilities, drafts).
Then the engine goes on as without it. The tokens are the same either way.
"""

from collections.abc import Container

import torch
from torch import Tensor

from quantkit.runtime.engine.batch_builder import ScheduledChunk
from quantkit.runtime.engine.runner import Runner
from quantkit.runtime.engine.scheduler import Scheduler, Work
from quantkit.runtime.sampling import choose_tokens
from quantkit.runtime.sequence import Sequence


class InFlightStep:
    """A decode step that has been launched and whose tokens have not been read; they are on their way to the host.

    Args:
        sequences: one new token each.
        tokens: (R,) int64, on any device.
    """

    def __init__(self, sequences: list[Sequence], tokens: Tensor) -> None:
        self.sequences, self.tokens = sequences, tokens
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        self._host.copy_(tokens, non_blocking=True)  # the next step may write over them
        self._arrived = None
        if tokens.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[int]:
        """The tokens; waits for them, and for nothing that was launched later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


class Overlap:
    """Launcher of at most one step that the engine has not asked for yet.

    Args:
        runner: runs them.
        scheduler: has the pages.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._in_flight: InFlightStep | None = None
        self.num_followed = 0

    def launch(self, work: Work) -> bool:
        """Launch a scheduled step; whether it was one for this. If not, nothing was done."""
        assert self._in_flight is None, "a step is in flight"
        if not work or not all(sequence.is_decoding and count == 1 for sequence, count in work):
            return False
        for sequence, _ in work:
            params = sequence.params
            asked = (sequence.history, sequence.constraint, params.logprobs, params.scoring)
            if any(item is not None for item in asked):
                return False
        self._in_flight = self._start([sequence for sequence, _ in work], None)
        return True

    def next(self, alive: Container[int]) -> InFlightStep | None:
        """The step in flight, whose tokens are to be read now, after the one that follows it has been launched.

        Args:
            alive: numbers of the requests that have not ended.
        Returns:
            None when nothing is in flight, or nobody there is alive.
        """
        step, self._in_flight = self._in_flight, None
        if step is None or not any(sequence.id in alive for sequence in step.sequences):
            return None
        self._in_flight = self._follow(step, alive)
        return step

    def forget(self) -> None:
        """Nobody wants what is in flight."""
        self._in_flight = None

    def _follow(self, step: InFlightStep, alive: Container[int]) -> InFlightStep | None:
        """Launch the step after one that has not been read; None where that cannot be."""
        for sequence in step.sequences:
            # At the limit the token that has not been read is the last one, and the batch is about to change.
            if sequence.id not in alive or len(sequence.ids) + 1 >= sequence.limit:
                return None
            if self._scheduler.until_due(sequence) == 1:  # pages are evicted before the next token sees them
                return None
        if len(self._scheduler.running) != len(step.sequences) or self._scheduler.waiting:
            return None
        # One token for the step that has not been read, and one for the step behind it.
        if not self._scheduler.reserve((sequence, sequence.num_computed + 2) for sequence in step.sequences):
            return None
        self.num_followed += 1
        return self._start(step.sequences, step.tokens)

    def _start(self, sequences: list[Sequence], tokens: Tensor | None) -> InFlightStep:
        """Run a step: on these tokens of the device, if the host does not know them yet."""
        ahead = 0 if tokens is None else 1  # steps of which nothing has been committed
        chunks = []
        for sequence in sequences:
            start = sequence.num_computed + ahead
            # What the host does not know is read from the device instead.
            chunks.append(ScheduledChunk(sequence, sequence.ids[start : start + 1] or [0], start, 1))
        logits = self._runner.step(chunks, tokens)
        # `ahead` gives each draw the key of its position, although the token before it is not in `ids` yet.
        return InFlightStep(sequences, choose_tokens(logits, [(sequence, ahead) for sequence in sequences]))
