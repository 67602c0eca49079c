"""Whether speculation pays, and with how many drafts: decided by the step times measured here, not by a rule of thumb.

Verification of k drafts is free where a step is bound by reading weights and is not where it is bound by arithmetic:
large batches, low-bit weights, CPUs. What a step yields and costs is therefore measured with and without drafts for
each size of batch, and the number of drafts with the most tokens per second is used, 0 included.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from quantkit.errors import RequestError
from quantkit.models.cache import MAX_ROLLBACK

_MEMORY = 15  # steps of each kind that count
_MIN_PLAIN, _MIN_DRAFTED = 3, 4  # steps before the first decision
_PERIOD = 64  # steps after which the other choice is tried again, for as many steps as a decision needs


@dataclass(slots=True)
class _Record:
    """What is known about batches of about one size."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    # Seconds, share of the sequences that had drafts, and drafts per sequence that had any.
    drafted: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    turn: int = 0


class SpeculationController:
    """Chooses the number of drafts of each step. *Mutable*: learns from every step.

    Args:
        max_drafts: at most so many.
        force: always draft that many, whatever it costs.
    Raises:
        RequestError: more drafts than the KV cache can take back.
    """

    def __init__(self, max_drafts: int = 4, *, force: bool = False) -> None:
        if not 1 <= max_drafts <= MAX_ROLLBACK:
            raise RequestError(f"max_drafts is {max_drafts}; use 1 to {MAX_ROLLBACK}, which a KV cache can take back")
        self.num_drafted = 0
        self.num_accepted = 0
        self._num_stopped = 0  # runs of drafts that ended with a rejected one
        self._max_drafts = max_drafts
        self._force = force
        self._records: dict[int, _Record] = {}

    @property
    def acceptance(self) -> float | None:
        """Share of all drafts that were accepted; None before the first."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def chance(self) -> float:
        """Share of drafts accepted among those whose predecessors were; 0 before the first."""
        return self.num_accepted / max(1, self.num_accepted + self._num_stopped)

    def choose(self, num_sequences: int) -> int:
        """Drafts for each sequence of the next step."""
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
        """Learn how the drafts of one sequence fared."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._num_stopped += num_accepted < num_drafted

    def timed(self, num_sequences: int, seconds: float, drafts: list[int]) -> None:
        """Learn what a step took; only for steps without prompt tokens.

        Args:
            num_sequences: in the step.
            seconds: of the step, drafting included.
            drafts: numbers of drafts, one per sequence that had any.
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
        """Tokens per second relative to no drafts, and the number of drafts that gives it.

        With acceptance a of each draft, k drafts yield 1 + a + ... + a^k tokens; time grows evenly with k.
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
