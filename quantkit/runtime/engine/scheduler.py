"""Which sequences get how many tokens in the next step. No tensors, no clock.

There are no phases: a step has one budget of tokens; running decodes take one each (and their drafts), the rest goes
to prompts in chunks, the oldest first but never all of it to one while others wait.

Memory: sequences run in order of arrival, so those that run are always older than those that wait. When pages run
out, the youngest gives its pages back and is computed again later (its full pages stay known to the prefix cache as
long as nobody needs them). The oldest can always take what it needs, so somebody always gets on; whoever is short of
pages and has nobody younger to take from waits a step with what it holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from quantkit.runtime.cache.pages import PagePool
from quantkit.runtime.cache.prefix_cache import PrefixCache
from quantkit.runtime.types import Sequence

Work = list[tuple[Sequence, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """Limits of one step.

    Args:
        page_size: tokens per page.
        max_sequences: that run at the same time.
        token_budget: new tokens per step, all sequences together.
        chunk_size: prompt tokens of one sequence per step at most; None = what the budget gives.
        chunked: False computes every prompt in one piece, beyond the budget if it must.
        batching: "static" admits nobody until the whole batch has finished; only there to be compared with.
    """

    page_size: int
    max_sequences: int
    token_budget: int
    chunk_size: int | None = None
    chunked: bool = True
    batching: Literal["continuous", "static"] = "continuous"


class Scheduler:
    """Queues, and the choice of each step's work.

    Args:
        pool: pages to give out.
        prefix: to look prompts up in.
        options: limits.
        on_preempt: told about each sequence that lost its pages.
    """

    def __init__(
        self, pool: PagePool, prefix: PrefixCache, options: SchedulerOptions, on_preempt: Callable[[Sequence], None]
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self._pool = pool
        self._prefix = prefix
        self._options = options
        self._on_preempt = on_preempt
        self._rows = list(range(options.max_sequences - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or not; its pages are free at once."""
        if sequence.row < 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._free(sequence)

    def reserve(self, lengths: Iterable[tuple[Sequence, int]]) -> bool:
        """Get pages for running sequences to hold so many tokens each; for all from what is free, or for none.

        Args:
            lengths: sequences and their numbers of tokens.
        """
        missing = [(sequence, self._missing(sequence, length)) for sequence, length in lengths]
        if sum(max(0, count) for _, count in missing) > self._pool.num_free:
            return False
        for sequence, count in missing:
            if count > 0:
                sequence.pages.extend(self._pool.allocate(count))
        return True

    def schedule(self) -> Work:
        """The next step: sequences and their numbers of new tokens, drafts included.

        Pages for them are allocated, waiting sequences admitted, the youngest preempted where it must be.
        """
        preempted = self.num_preemptions
        was_idle = not self.running
        work, prefills, budget = self._decodes()
        if self.waiting and (was_idle or self._options.batching == "continuous"):
            prefills.extend(self._admitted(prefills, budget))
        if prefills:
            self._prefill(work, prefills, budget)
        if preempted != self.num_preemptions:  # an older prompt may have taken a younger decode's pages
            work = [(sequence, count) for sequence, count in work if sequence.row >= 0]
        return work

    def _decodes(self) -> tuple[Work, list[Sequence], int]:
        """Work of the sequences with one token to feed, the sequences with more, and what is left of the budget."""
        work: Work = []
        prefills: list[Sequence] = []
        spare = self._options.token_budget - len(self.running)
        for sequence in tuple(self.running):
            if sequence.row < 0:
                continue  # preempted by an older one just now
            if len(sequence.ids) - sequence.num_computed > 1:
                prefills.append(sequence)
                sequence.drafts = []
            elif self._take_pages(sequence, sequence.num_computed + 1):
                spare -= self._keep_drafts(sequence, spare)
                work.append((sequence, 1 + len(sequence.drafts)))
            else:  # it waits for pages; the next step's drafts are not to be added to these
                sequence.drafts = []
        # Every running sequence was charged one token above; prompts are not decodes.
        return work, [s for s in prefills if s.row >= 0], spare + len(self.running) - len(work)

    def _keep_drafts(self, sequence: Sequence, spare: int) -> int:
        """Cut the drafts to what budget and free pages allow; how many are left. Nobody is preempted for drafts."""
        if sequence.drafts:
            del sequence.drafts[max(0, spare) :]
            wanted = self._missing(sequence, sequence.num_computed + 1 + len(sequence.drafts))
            if wanted > self._pool.num_free:
                sequence.drafts = []
            elif wanted > 0:
                sequence.pages.extend(self._pool.allocate(wanted))
        return len(sequence.drafts)

    def _admitted(self, prefills: list[Sequence], budget: int) -> Iterator[Sequence]:
        """Admit waiting sequences while there are rows, pages and tokens for them."""
        options = self._options
        demand = sum(self._first_chunk(sequence) for sequence in prefills)
        promised = sum(max(0, self._missing(s, len(s.ids) + 1)) for s in prefills)
        while self.waiting and self._rows and (demand < budget or options.batching == "static"):
            sequence = self.waiting[0]
            hits = self._prefix.match(sequence)
            needed = self._num_pages(len(sequence.ids) + 1) - len(hits)
            # Hits that nobody references are on the free list, but using them takes them off it.
            available = self._pool.num_free - sum(map(self._pool.is_free, hits)) - promised
            # Room for the others to grow, or the newcomer would soon be preempted again.
            reserve = (len(self.running) + 3) // 4
            if needed + reserve > available:
                return
            self.waiting.popleft()
            self._prefix.take(sequence, hits)
            sequence.row, sequence.tabled = self._rows.pop(), 0
            self.running.append(sequence)
            demand += self._first_chunk(sequence)
            promised += needed
            yield sequence

    def _first_chunk(self, sequence: Sequence) -> int:
        left = len(sequence.ids) - sequence.num_computed
        return min(left, self._options.page_size) if self._options.chunked else left

    def _prefill(self, work: Work, prefills: list[Sequence], budget: int) -> None:
        """Add a chunk for each sequence, as far as the budget and the pages go."""
        for sequence, count in zip(prefills, self._shares(prefills, budget), strict=True):
            if count <= 0 or sequence.row < 0:
                continue
            if not self._take_pages(sequence, sequence.num_computed + count):
                fitting = (len(sequence.pages) + self._pool.num_free) * self._options.page_size
                count = min(count, fitting - sequence.num_computed)
                if count <= 0 or not self._options.chunked:
                    continue
                self._take_pages(sequence, sequence.num_computed + count)
            work.append((sequence, count))

    def _shares(self, prefills: list[Sequence], budget: int) -> list[int]:
        """Tokens for each prompt.

        While others wait, one gets at most half of what is left (a page at least) and ends at a page border; what
        nobody took is handed out again from the oldest on, borders or not, so the budget is never left under-filled.
        """
        needs = [len(sequence.ids) - sequence.num_computed for sequence in prefills]
        if not self._options.chunked:
            return _whole(needs, budget)
        if self._options.chunk_size is not None:
            needs = [min(need, self._options.chunk_size) for need in needs]
        size, left, shares = self._options.page_size, budget, []
        for index, (sequence, need) in enumerate(zip(prefills, needs, strict=True)):
            half = left if index == len(needs) - 1 else max(left // 2, size)
            take = min(need, half, left)
            if take < need:
                border = (sequence.num_computed + take) // size * size
                take = max(border - sequence.num_computed, 0) or take
            shares.append(take)
            left -= take
        for index, need in enumerate(needs):
            extra = min(need - shares[index], left)
            shares[index] += extra
            left -= extra
        return shares

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._options.page_size)

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that a sequence lacks to hold so many tokens; not positive when it has enough."""
        return self._num_pages(num_tokens) - len(sequence.pages)

    def _take_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for so many tokens, from younger sequences if need be; whether there are enough."""
        missing = self._missing(sequence, num_tokens)
        if missing <= 0:
            return True
        while missing > self._pool.num_free:
            youngest = self.running[-1]
            if youngest is sequence:
                return False
            self._preempt(youngest)
        sequence.pages.extend(self._pool.allocate(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self._on_preempt(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._pool.release(sequence.pages)
        self._rows.append(sequence.row)
        sequence.row = -1
        sequence.pages = []
        sequence.drafts = []
        sequence.num_computed = sequence.num_published = 0

    def check_integrity(self) -> None:
        """Compare queues, rows and pages.

        Raises:
            AssertionError: something is lost, doubled or out of order.
        """
        running, options = self.running, self._options
        self._pool.check_integrity(sequence.pages for sequence in running)
        ids = [sequence.id for sequence in (*running, *self.waiting)]
        assert ids == sorted(set(ids)), f"not in order of arrival: {ids}"
        rows = [sequence.row for sequence in running]
        assert sorted([*rows, *self._rows]) == list(range(options.max_sequences)), f"rows lost or doubled: {rows}"
        for sequence in running:
            room = len(sequence.pages) * options.page_size
            assert sequence.num_computed <= room, f"request {sequence.id}: {sequence.num_computed} tokens in {room}"
            assert sequence.num_computed < len(sequence.ids) <= sequence.limit, f"request {sequence.id}: lengths"
        for sequence in self.waiting:
            assert sequence.row < 0, f"request {sequence.id} waits and runs"
            assert not sequence.pages, f"request {sequence.id} waits with pages"


def _whole(needs: list[int], budget: int) -> list[int]:
    """Whole prompts while the budget lasts; the first one in any case."""
    shares: list[int] = []
    for need in needs:
        fits = not any(shares) or sum(shares) + need <= budget
        shares.append(need if fits else 0)
    return shares
