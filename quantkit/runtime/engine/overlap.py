"""Decode steps that are launched before the tokens of the step before have been read.

While a GPU computes a step, the host has nothing to do but wait for its tokens, and while the host then gives them out,
the GPU waits. So the next step is launched first: it takes its tokens from where the last one put them, and where they
are stored is known without them. A sequence that turns out to have ended was computed once too often; that token is
dropped, and its slot lies behind the sequence's end, where nobody looks.

Not every step can be followed like this: not where the batch would change (somebody waits, reaches its limit, has been
cancelled), where pages are short, or where choosing needs the tokens themselves (penalties, log-probabilities, drafts).
Then the engine goes on as without it. The tokens are the same either way.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.runtime.engine.runner import Piece, Reading, Runner
from quantkit.runtime.sampling.sampler import choose
from quantkit.runtime.types import Sequence

if TYPE_CHECKING:
    from quantkit.runtime.engine.scheduler import Scheduler, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """A decode step on its way.

    Args:
        sequences: one new token each.
        pieces: what was fed.
        reading: their tokens.
    """

    sequences: tuple[Sequence, ...]
    pieces: tuple[Piece, ...]
    reading: Reading


class Overlap:
    """At most one step in flight that the engine has not asked for yet.

    Args:
        runner: runs them.
        scheduler: has the pages.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._flight: Flight | None = None
        self.num_followed = 0

    def launch(self, work: Work, pieces: list[Piece]) -> bool:
        """Launch a scheduled step.

        Args:
            work: the step.
            pieces: its tokens.
        Returns:
            whether it was one for this; if not, nothing was done.
        """
        assert self._flight is None, "a step is in flight"
        sequences = tuple(sequence for sequence, _ in work)
        if not sequences or not all(len(piece.tokens) == 1 == piece.num_logits for piece in pieces):
            return False
        if any(sequence.history is not None or sequence.params.logprobs is not None for sequence in sequences):
            return False
        self._flight = self._start(sequences, tuple(pieces), None)
        return True

    def next(self, alive: Container[int]) -> Flight | None:
        """The step in flight, whose tokens are to be read now, after the one that follows it has been launched.

        Args:
            alive: numbers of the requests that have not ended.
        Returns:
            None when nothing is in flight, or nobody there is alive.
        """
        flight, self._flight = self._flight, None
        if flight is None or not any(sequence.id in alive for sequence in flight.sequences):
            return None
        self._flight = self._follow(flight, alive)
        return flight

    def forget(self) -> None:
        """Nobody wants what is in flight."""
        self._flight = None

    def _follow(self, flight: Flight, alive: Container[int]) -> Flight | None:
        """Launch the step after one that has not been read; None where that cannot be."""
        for sequence in flight.sequences:
            if sequence.id not in alive or len(sequence.ids) + 1 >= sequence.limit:
                return None
        starts = [piece.start + 1 for piece in flight.pieces]
        lengths = [(sequence, start + 1) for sequence, start in zip(flight.sequences, starts, strict=True)]
        if len(self._scheduler.running) != len(starts) or self._scheduler.waiting:
            return None
        if not self._scheduler.reserve(lengths):
            return None
        pieces = tuple(Piece(sequence, [0], start, 1) for sequence, start in zip(flight.sequences, starts, strict=True))
        self.num_followed += 1
        return self._start(flight.sequences, pieces, flight.reading)

    def _start(self, sequences: tuple[Sequence, ...], pieces: tuple[Piece, ...], last: Reading | None) -> Flight:
        """Run a step: on the tokens of the last, if those are not known to the host."""
        logits = self._runner.step(pieces, None if last is None else last.tokens)
        ahead = 0 if last is None else 1
        tokens = choose(logits, [(sequence, ahead) for sequence in sequences])
        return Flight(sequences=sequences, pieces=pieces, reading=Reading(tokens))
