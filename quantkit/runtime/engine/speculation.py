"""Speculative decoding: propose draft tokens, verify them in one forward pass, keep those that the model chooses
itself.

Acceptance is exact, for greedy decoding and for sampling. At every position, the target model's token is chosen as it
would be without drafts (see `sampling`: the draw depends only on seed and position). Drafts are kept as long as they
equal these tokens. So speculation never changes the output, even if measured times switch it on and off. This is
speculative sampling (Leviathan et al. 2023) with common random numbers for draft and target instead of independent
ones. A draft drawn with the same variates is accepted with probability at least (1 - d) / (1 + d), where d is the total
variation distance (Daliri et al. 2025, Coupling without Communication and Drafter-Invariant Speculative Decoding).

With a quantized KV cache the output may differ: tokens of one step see each other unquantized, so verifying several
drafts in one step rounds differently from computing them one by one.

`SpeculationController` uses measured step times to choose the number of drafts. Verifying k drafts takes no extra time
while a step is bound by reading weights. It takes extra time once the step is bound by arithmetic: with large batches,
low-bit weights, or on CPUs. So the controller measures tokens and time of steps with and without drafts for each batch
size, and uses the number of drafts (or 0) that gives the maximum number of tokens per second.
"""

from collections import defaultdict, deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from quantkit.errors import RequestError
from quantkit.models.kv_sizes import MAX_ROLLBACK
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.cache.pages import PagePool
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.batch_builder import ScheduledChunk
from quantkit.runtime.engine.runner import Runner
from quantkit.runtime.model.model import Model
from quantkit.runtime.sampling import sample
from quantkit.runtime.sequence import PageHolder, Sequence

_MEMORY = 15  # how many of the most recent steps of each kind count
_MIN_PLAIN, _MIN_DRAFTED = 3, 4  # steps before the first decision
_PERIOD = 64  # steps after which the other choice is tried again, for as many steps as a decision needs


@dataclass(slots=True)
class _Record:
    """Measurements of batches of similar size."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    # Seconds, share of the sequences that had drafts, and drafts per sequence that had any.
    drafted: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    turn: int = 0


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
        self.num_drafted = 0
        self.num_accepted = 0
        self._num_stopped = 0  # runs of drafts that ended with a rejected one
        self._max_drafts = max_drafts
        self._force = force
        self._records: dict[int, _Record] = {}

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
        turn = record.turn % _PERIOD
        if gain > 1:
            return 0 if turn == 0 else best
        return best if turn < _MIN_DRAFTED else 0

    def accepted(self, num_drafted: int, num_accepted: int) -> None:
        """Record how many drafts of one sequence were accepted."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
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


class Proposer(Protocol):
    """Proposes draft tokens for sequences."""

    def propose(self, sequences: Many[Sequence], count: int) -> None:
        """Set `drafts` of each sequence to at most `count` tokens within the sequence's limit, or to none."""

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; do nothing if the id is unknown."""

    def check_integrity(self, alive: set[int]) -> None:
        """Raise AssertionError if state is lost, or kept for a sequence that is not alive."""


def _useful(sequence: Sequence, count: int) -> int:
    """Limit the number of drafts to what a sequence can use: the step that verifies them adds one more token."""
    return min(count, sequence.limit - len(sequence.ids) - 1)


def check_draft(vocab_size: int, target: int) -> None:
    """Refuse a draft model with another vocabulary size.

    Raises:
        RequestError: the sizes differ.
    """
    if vocab_size != target:
        raise RequestError(
            f"the draft model's vocabulary has {vocab_size} tokens, but the model's has {target}; use a draft model "
            "with the same vocabulary, such as a compressed copy of the model"
        )


def check_states(target: bool, draft: bool) -> None:
    """Refuse models with a recurrent state, which rejected drafts would change permanently.

    Args:
        target, draft: whether each model keeps such a state.
    Raises:
        RequestError: the model or the draft model keeps a state.
    """
    if target or draft:
        raise RequestError(
            f"the {'model' if target else 'draft model'} keeps a recurrent state, from which rejected drafts cannot be "
            f"removed; {'leave speculate out' if target else 'use another draft model'}"
        )


class NgramProposer:
    """Finds an earlier occurrence of a sequence's last tokens and proposes the tokens after it (prompt lookup).

    Args:
        longest, shortest: maximum and minimum number of last tokens to search for. The longest match is used; of
            several matches of this length, the most recent.
    Source: Saxena 2023, Prompt Lookup Decoding.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._ngrams: defaultdict[int, _Ngrams] = defaultdict(_Ngrams)

    def propose(self, sequences: Many[Sequence], count: int) -> None:
        for sequence in sequences:
            ngrams = self._ngrams[sequence.id]
            ngrams.read(sequence.ids, self._sizes)
            sequence.drafts = ngrams.continuation(sequence.ids, self._sizes, _useful(sequence, count))

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


@dataclass(kw_only=True, slots=True, eq=False)
class _Shadow(PageHolder):
    """The draft model's copy of a sequence, with pages of its own.

    Args:
        base: number of tokens of the sequence before the drafts.
        fed: drafts that the draft model has computed after these tokens.
    """

    base: int = 0
    fed: list[int] = field(default_factory=list)

    def sync(self, ids: list[int]) -> None:
        """Keep only computed tokens that are part of the sequence: drop the first rejected draft and those after it."""
        right = self.base
        for token in self.fed:
            if right >= len(ids) or ids[right] != token:
                break
            right += 1
        # The last token never counts as computed: it is fed again, because its logits start the next drafts.
        self.num_computed = min(self.num_computed, right if self.fed else self.num_computed, len(ids) - 1)
        self.fed = []


class DraftModelProposer:
    """Proposes tokens with a second, cheaper model of the same vocabulary, which has its own cache and pages.

    Args:
        model: the draft model.
        cache: KV cache of the draft model.
        config: engine settings; the token budget also limits how many prompt tokens the draft model computes per step,
            so long prompts take several steps.
        num_pages: pages in the draft model's cache.
        vocab_size: vocabulary size of the target model.
    Raises:
        RequestError: the vocabularies differ.
    """

    def __init__(
        self, model: Model, cache: KVCache | None, config: EngineConfig, *, num_pages: int, vocab_size: int
    ) -> None:
        check_draft(model.vocab_size, vocab_size)
        self.model = model
        self._config = config
        self._pool = PagePool(num_pages)
        self._rows = list(range(config.max_sequences))
        self._shadows: dict[int, _Shadow] = {}
        self._runner = Runner(model, cache, config, max_pages=num_pages)

    def propose(self, sequences: Many[Sequence], count: int) -> None:
        ready = self._caught_up(sequences, count)
        while ready:
            logits = self._runner.step([chunk for _, _, chunk in ready])
            # With the sequence's random keys: draft and target then draw with the same variates and agree more often.
            tokens = sample(logits, [(sequence, len(sequence.drafts)) for sequence, _, _ in ready])
            step, ready = ready, []
            for (sequence, shadow, chunk), token in zip(step, tokens, strict=True):
                shadow.num_computed = chunk.start + len(chunk.tokens)
                sequence.drafts.append(token)
                if len(sequence.drafts) < _useful(sequence, count):
                    # The last draft is not fed: nobody asks the draft model what would follow it.
                    shadow.fed.append(token)
                    ready.append((sequence, shadow, ScheduledChunk(shadow, [token], shadow.num_computed, 1)))

    def _caught_up(self, sequences: Many[Sequence], count: int) -> list[tuple[Sequence, _Shadow, ScheduledChunk]]:
        """Return the sequences that the draft model can now continue, each with the chunk of tokens it has not read.

        If a sequence has more unread tokens than the token budget allows, compute a part of them now and do not return
        the sequence.
        """
        ready, lagging, budget = [], [], self._config.token_budget
        for sequence in sequences:
            shadow = self._shadow(sequence, len(sequence.ids) + _useful(sequence, count))
            if shadow is None or _useful(sequence, count) < 1 or budget < 1:
                continue
            missing = len(sequence.ids) - shadow.num_computed
            fed = sequence.ids[shadow.num_computed : shadow.num_computed + min(missing, budget)]
            budget -= len(fed)
            if len(fed) == missing:
                shadow.base = len(sequence.ids)
                ready.append((sequence, shadow, ScheduledChunk(shadow, fed, shadow.num_computed, 1)))
            else:
                lagging.append(ScheduledChunk(shadow, fed, shadow.num_computed, 0))
                shadow.num_computed += len(fed)
        if lagging:
            self._runner.step(lagging)
        return ready

    def _shadow(self, sequence: Sequence, num_tokens: int) -> _Shadow | None:
        """Return the sequence's shadow with pages for this many tokens; None if pool or context is too small."""
        shadow = self._shadows.get(sequence.id)
        if shadow is None:
            shadow = self._shadows[sequence.id] = _Shadow(id=sequence.id, row=self._rows.pop())
        shadow.sync(sequence.ids)
        missing = self._config.pages_for(num_tokens) - len(shadow.pages)
        if missing > self._pool.num_free or num_tokens > self.model.max_length:
            # Nobody is preempted for drafts; the sequence goes on without them and may be followed again later.
            self.forget(sequence.id)
            return None
        if missing > 0:
            shadow.pages.extend(self._pool.allocate(missing))
        return shadow

    def forget(self, sequence_id: int) -> None:
        shadow = self._shadows.pop(sequence_id, None)
        if shadow is not None:
            self.model.forget(sequence_id)
            self._pool.release(shadow.pages)
            self._rows.append(shadow.row)

    def check_integrity(self, alive: set[int]) -> None:
        self._pool.check_integrity(shadow.pages for shadow in self._shadows.values())
        assert self._shadows.keys() <= alive, f"draft pages of ended requests: {self._shadows.keys() - alive}"
