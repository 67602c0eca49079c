"""Launch of a decode step before the host has read the tokens of the previous step.

Without overlap, the host waits for tokens while the GPU computes, and the GPU waits while the host delivers them. So
the engine launches the next step before it delivers tokens. That step reads its input tokens on the device, and their
cache slots do not depend on which tokens they are. If a sequence turns out to have ended, its extra token is dropped;
the token's slot lies past the sequence's end and is never read.

A step cannot be launched in advance if the batch would change (a request waits, reaches its limit or was cancelled), if
pages are short or about to be evicted, or if sampling needs the tokens on the host (penalties, log-probabilities,
drafts). The engine then runs the step normally. The tokens are the same either way.
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
    """A decode step that has been launched but whose tokens the host has not read yet.

    Args:
        sequences: the sequences, one new token each.
        tokens: new token of each sequence, (R,) int64 on any device.
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
        """Return the tokens; wait for this step only, not for later launches."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


class Overlap:
    """Launches at most one decode step in advance.

    Args:
        runner: runs the steps.
        scheduler: reserves pages.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._in_flight: InFlightStep | None = None
        self.num_followed = 0

    def launch(self, work: Work) -> bool:
        """Launch a scheduled step without reading its tokens, if this is possible; return whether it was launched."""
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
        """Return the step in flight, after launching the step that follows it if possible.

        The engine then reads the tokens of the returned step.

        Args:
            alive: numbers of the unfinished requests.
        Returns:
            The step; None if no step is in flight, or all requests of the step have ended.
        """
        step, self._in_flight = self._in_flight, None
        if step is None or not any(sequence.id in alive for sequence in step.sequences):
            return None
        self._in_flight = self._follow(step, alive)
        return step

    def forget(self) -> None:
        """Drop the step in flight; its tokens are never read."""
        self._in_flight = None

    def _follow(self, step: InFlightStep, alive: Container[int]) -> InFlightStep | None:
        """Launch the step after `step`, whose tokens have not been read; return None if that is impossible."""
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
        """Launch a decode step; `tokens` are its inputs on the device if the host does not know them yet."""
        ahead = 0 if tokens is None else 1  # launched steps whose tokens are not committed
        chunks = []
        for sequence in sequences:
            start = sequence.num_computed + ahead
            # A token that the host does not know yet is read on the device instead.
            chunks.append(ScheduledChunk(sequence, sequence.ids[start : start + 1] or [0], start, 1))
        logits = self._runner.step(chunks, tokens)
        # `ahead` gives each draw the key of its position, although the token before it is not in `ids` yet.
        return InFlightStep(sequences, choose_tokens(logits, [(sequence, ahead) for sequence in sequences]))
