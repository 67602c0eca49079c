"""Speculative decoding: propose draft tokens, verify them in one forward pass, keep those that the model itself
chooses.

Acceptance is exact, for greedy decoding and for sampling. At every position, the target model's token is chosen as it
would be without drafts (see `sampling`: the draw depends only on seed and position). Drafts are kept as long as they
equal these tokens. So speculation never changes the output, even if measured times switch it on and off. This is
speculative sampling (Leviathan et al. 2023) with common random numbers for draft and target instead of independent
ones. A draft drawn with the same variates is accepted with probability at least (1 - d) / (1 + d), where d is the total
variation distance (Daliri et al. 2025, Coupling without Communication and Drafter-Invariant Speculative Decoding).

Exactness needs logits that do not depend on how many tokens a step computes. The C kernels give the same bits either
way. With other kernels, rounding may decide a near tie differently. With a quantized KV cache the output may differ
anywhere, because tokens of one step see each other unquantized.

`SpeculationController` uses measured step times to choose the number of drafts. Verifying k drafts takes no extra time
while a step is bound by reading weights. It takes extra time once the step is bound by arithmetic: with large batches,
low-bit weights, or on CPUs. So the controller measures tokens and time of steps with and without drafts for each batch
size, and uses the number of drafts (or 0) that gives the most tokens per second.
"""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.models.kv_sizes import MAX_ROLLBACK
from quantkit.runtime.engine.batch_builder import ScheduledChunk
from quantkit.runtime.engine.runner import Runner
from quantkit.runtime.model.model import NativeModel
from quantkit.runtime.sampling import sample, select_rows
from quantkit.runtime.sequence import PageHolder, Sequence

_MEMORY = 15  # how many of the most recent steps of each kind count
_MIN_PLAIN, _MIN_DRAFTED = 3, 4  # steps before the first decision
# Steps after which the other choice is tried again. Where drafts lose, trials take as many steps as a decision needs,
# and become rarer up to the second number.
_PERIOD, _LONGEST_PERIOD = 64, 256


@dataclass(slots=True)
class _Record:
    """Times of steps with and without drafts, for batches of similar size."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    # Seconds, share of the sequences that had drafts, and drafts per sequence that had any.
    drafted: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    turn: int = 0
    without: int = 0  # steps since the last trial of drafts ended
    period: int = _PERIOD


class SpeculationController:
    """Chooses the number of drafts of each step. *Mutable*: learns from every step.

    Args:
        max_drafts: maximum number of drafts per sequence and step.
        force: always use `max_drafts` drafts, whatever they cost.
    Raises:
        RequestError: `max_drafts` is below 1, or exceeds the number of last tokens that the KV cache can discard.
    """

    def __init__(self, max_drafts: int = 4, *, force: bool = False) -> None:
        if not 1 <= max_drafts <= MAX_ROLLBACK:
            raise RequestError(
                f"max_drafts is {max_drafts}; give 1 to {MAX_ROLLBACK}, because the KV cache can discard at most "
                f"{MAX_ROLLBACK} rejected drafts"
            )
        # For the first, second, ... draft of a sequence in a step: how many there were, and how many were accepted.
        self.drafted_at = [0] * max_drafts
        self.accepted_at = [0] * max_drafts
        self._num_stopped = 0  # runs of drafts that ended with a rejected one
        self._max_drafts = max_drafts
        self._force = force
        self._records: dict[int, _Record] = {}

    @property
    def num_drafted(self) -> int:
        """Number of drafts."""
        return sum(self.drafted_at)

    @property
    def num_accepted(self) -> int:
        """Number of accepted drafts."""
        return sum(self.accepted_at)

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Acceptance rate by position: of the first draft of a sequence in a step, of the second draft, and so on."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return tuple(accepted / drafted for accepted, drafted in pairs if drafted)

    @property
    def acceptance(self) -> float | None:
        """Share of all drafts that were accepted; None before the first draft."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def chance(self) -> float:
        """Acceptance rate of draft tokens whose predecessors were all accepted; 0 before the first draft."""
        return self.num_accepted / max(1, self.num_accepted + self._num_stopped)

    def choose(self, num_sequences: int) -> int:
        """Return the number of drafts for each sequence of the next step."""
        if self._force:
            return self._max_drafts
        record = self._record(num_sequences)
        record.turn += 1
        if len(record.plain) < _MIN_PLAIN:
            return 0
        if len(record.drafted) < _MIN_DRAFTED:
            return self._max_drafts
        gain, best = self._best(record)
        # The choice that loses is still tried now and then: texts, and with them acceptance, change.
        if gain > 1:
            record.without, record.period = 0, _PERIOD
            return 0 if record.turn % _PERIOD == 0 else best
        record.without += 1
        if record.without > record.period:
            record.without, record.period = 1 - _MIN_DRAFTED, min(2 * record.period, _LONGEST_PERIOD)
        return best if record.without <= 0 else 0

    def accepted(self, num_drafted: int, num_accepted: int) -> None:
        """Record how many of one sequence's drafts in a step were accepted."""
        for number in range(num_drafted):
            self.drafted_at[number] += 1
            self.accepted_at[number] += number < num_accepted
        self._num_stopped += num_accepted < num_drafted

    def timed(self, num_sequences: int, seconds: float, drafts: list[int]) -> None:
        """Record the time of a step; call only for steps without prompt tokens.

        Args:
            num_sequences: number of sequences in the step.
            seconds: duration of the step, including drafting.
            drafts: number of drafts of each sequence that had any.
        """
        record = self._record(num_sequences)
        if drafts:
            share, length = len(drafts) / num_sequences, sum(drafts) / len(drafts)
            record.drafted.append((seconds, share, length))
        else:
            record.plain.append(seconds)

    def _record(self, num_sequences: int) -> _Record:
        # Batches within a factor of two share a record, or each size would have to be measured anew.
        return self._records.setdefault(num_sequences.bit_length(), _Record())

    def _best(self, record: _Record) -> tuple[float, int]:
        """Return the gain of the best number of drafts, and this number.

        The gain is the number of tokens per second, relative to steps without drafts.

        If each draft is accepted with probability a, k drafts yield 1 + a + ... + a^k tokens; time grows linearly with
        k.
        """
        # Medians: one step in which the machine was busy with something else must not decide.
        plain = median(record.plain)
        seconds, share, length = (median(values) for values in zip(*record.drafted, strict=True))
        chance = self.chance
        best = (0.0, 1)
        tokens, power = 1.0, 1.0
        for count in range(1, self._max_drafts + 1):
            power *= chance
            tokens += power
            cost = plain + (seconds - plain) * count / length
            # A drafted step that measures faster than a plain one is noise; a step is never free.
            gain = (1 + share * (tokens - 1)) * plain / max(cost, plain)
            best = max(best, (gain, count))
        return best


class Proposer(ABC):
    """Proposes draft tokens for sequences."""

    def connect(  # noqa: B027 - most proposers need nothing from the engine
        self, runner: Runner, reserve: Callable[[Iterable[tuple[Sequence, int]]], bool]
    ) -> None:
        """Receive the engine's runner, and `Scheduler.reserve`, before the first step."""

    def observe(  # noqa: B027 - most proposers read only tokens
        self, chunks: Many[ScheduledChunk], following: Many[list[int]]
    ) -> None:
        """Read the runner's hidden states of a step, before the next step and before any sequence loses its pages.

        Args:
            chunks: chunks of the step.
            following: for each chunk, the tokens that follow the chunk's tokens. Rejected drafts, which come last in a
                chunk, have none.
        """

    @abstractmethod
    def propose(self, sequences: Many[Sequence], count: int) -> None:
        """Set `drafts` of each sequence to at most `count` tokens within the sequence's limit, or to none."""

    @abstractmethod
    def forget(self, sequence_id: int) -> None:
        """Drop what the proposer stores for a sequence; do nothing if the id is unknown."""

    @abstractmethod
    def check_integrity(self, alive: set[int]) -> None:
        """Raise AssertionError if data of a sequence is lost, or is stored for a sequence that is not in `alive`."""


def num_useful(sequence: Sequence, count: int) -> int:
    """Limit the number of drafts to what a sequence can use: the step that verifies them adds one more token."""
    return min(count, sequence.limit - len(sequence.ids) - 1)


def check_states(target: bool, draft: bool) -> None:
    """Refuse models with a recurrent state, which rejected drafts would change permanently.

    Args:
        target, draft: whether the model and the draft model keep a recurrent state.
    Raises:
        RequestError: the model or the draft model keeps a state.
    """
    if target or draft:
        raise RequestError(
            f"the {'model' if target else 'draft model'} keeps a recurrent state, from which rejected drafts cannot be "
            f"removed; {'leave speculate out' if target else 'use another draft model'}"
        )


class NgramProposer(Proposer):
    """Finds an earlier occurrence of a sequence's last tokens and proposes the tokens after it (prompt lookup).

    Args:
        longest, shortest: maximum and minimum number of last tokens to search for. The longest match is used; if
            several matches have this length, the most recent one is used.
    Source: Saxena 2023, Prompt Lookup Decoding.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._ngrams: defaultdict[int, _Ngrams] = defaultdict(_Ngrams)

    def propose(self, sequences: Many[Sequence], count: int) -> None:
        for sequence in sequences:
            ngrams = self._ngrams[sequence.id]
            ngrams.read(sequence.ids, self._sizes)
            sequence.drafts = ngrams.continuation(sequence.ids, self._sizes, num_useful(sequence, count))

    def forget(self, sequence_id: int) -> None:
        self._ngrams.pop(sequence_id, None)

    def check_integrity(self, alive: set[int]) -> None:
        assert self._ngrams.keys() <= alive, f"n-grams of ended requests: {self._ngrams.keys() - alive}"


class _Ngrams:
    """End position of the last occurrence of each n-gram of a sequence.

    It is updated as the sequence grows, so that no step searches the whole sequence.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def read(self, ids: list[int], sizes: range) -> None:
        """Add the n-grams that end before the last token; those that end with it are the next search terms."""
        for end in range(self._num_read + 1, len(ids)):
            for size in sizes:
                if size <= end:
                    self._ends[tuple(ids[end - size : end])] = end
        self._num_read = max(self._num_read, len(ids) - 1)

    def continuation(self, ids: list[int], sizes: range, count: int) -> list[int]:
        """Return the `count` tokens after an earlier occurrence of the sequence's last n-gram; empty if there is none.

        If fewer tokens follow this occurrence, they are repeated.
        """
        for size in sizes:
            end = self._ends.get(tuple(ids[-size:])) if size < len(ids) else None
            if end is not None:
                period = len(ids) - end
                return [ids[end + index % period] for index in range(count)]
        return []


@dataclass(slots=True)
class _Unread:
    """Positions of a sequence that the MTP head has not read.

    Args:
        start: first of these positions.
        following: the token after each of these positions.
        hidden: hidden states of the model at these positions, as a list of tensors (rows, H), one per step.
    """

    start: int
    following: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


class MTPProposer(Proposer):
    """Proposes tokens with the model's own MTP head; see `models.mtp`.

    At each position, the head reads the model's hidden state and the token that follows. `observe` keeps both after
    every step of the model, for all positions whose following token is certain. The head reads them later: before it
    drafts, or once a page of the KV cache is full, because other sequences may then share the page. So while drafts are
    switched off, the head runs once per page instead of once per token. The head's layer of the KV cache covers the
    same full pages as the model's layers, so chunked prompts, shared prefixes and preemption need no code here. If two
    sequences share a page, the head's keys at its last position depend on the next token of the sequence that computed
    the page. For the other sequence, this can only lower acceptance, because the model verifies all drafts.

    `propose` drafts one token from the head's last hidden state. For further drafts, the head reads its own hidden
    state and its last draft, at the next position. It later overwrites the keys and values of these positions.

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
    """Return the chunk with which the head reads a sequence's last draft, at the position after its previous one."""
    return ScheduledChunk(sequence, sequence.drafts[-1:], sequence.num_computed + len(sequence.drafts) - 1, 0)
