"""Choice of the sequences of the next step, and of their numbers of tokens. No tensors, no clock.

There are no phases: a step has one budget of tokens; running decodes take one each (and their drafts), the rest goes
to prompts in chunks, the oldest first but never all of it to one while others wait for their first token.

Memory: sequences run in order of arrival, so those that run are older than those that wait. When pages run
out, the youngest gives its pages back and is computed again later (its full pages stay known to the prefix cache as
long as nobody needs them). The oldest can always take what it needs, so somebody always gets on; whoever is short of
pages and has nobody younger to take from waits a step with what it holds.

Requests that only ask about their prompt are scheduled like all others, with two liberties, since nobody waits for
their first token: they take what is left of the budget one after another instead of sharing it, and one whose
beginning is just being computed for another is overtaken until it can be shared.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from quantkit.runtime.cache.eviction import NEVER, Evictor
from quantkit.runtime.cache.pages import PagePool
from quantkit.runtime.cache.prefix_cache import PrefixCache
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.sequence import Sequence

Work = list[tuple[Sequence, int]]

_OVERTAKEN = 8  # times as many requests as run together may be overtaken in search of some that need not wait


class Scheduler:
    """Queues, and the choice of each step's work.

    Args:
        pool: pages to give out.
        prefix: to find the beginnings of prompts in.
        config: limits of a step.
        on_preempt: told about each sequence that lost its pages.
        eviction: tells which pages sequences will give up; None = none, there is no budget.
        fixed_chunks: whether where a step ends changes what is computed, as with a quantized cache: only what a step
            brings is read unrounded. What is scored must not depend on who else is in the batch.
    """

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache,
        config: EngineConfig,
        on_preempt: Callable[[Sequence], None],
        *,
        eviction: Evictor | None = None,
        fixed_chunks: bool = False,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self._pool = pool
        self._prefix = prefix
        self._config, self._page_size = config, config.page_size  # read for each sequence of each step
        self._on_preempt = on_preempt
        self._eviction, self._fixed_chunks = eviction, fixed_chunks
        self._rows = list(range(config.max_sequences - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or not; its pages are free at once."""
        for queue in (self.waiting, self.running):
            if sequence in queue:  # in none where an interrupt came while it changed queues
                queue.remove(sequence)
        if sequence.row >= 0:
            self._free(sequence)

    def reserve(self, lengths: Iterable[tuple[Sequence, int]]) -> bool:
        """Get pages for running sequences to hold so many tokens each; for all from what is free, or for none.

        Args:
            lengths: sequences and their numbers of tokens.
        """
        asked = list(lengths)
        # Checked for all first: pages that some had already taken would lie idle when the step is not launched.
        if sum(max(0, self._missing(*each)) for each in asked) > self._pool.num_free:
            return False
        return all(self._grow(*each) for each in asked)

    def schedule(self) -> Work:
        """The next step: sequences and their numbers of new tokens, drafts included.

        Pages for them are allocated, waiting sequences admitted, the youngest preempted where it must be.
        """
        preempted = self.num_preemptions
        work, prefills, budget = self._decodes()
        if self.waiting:
            prefills += self._admit(prefills, budget)
        if prefills:
            self._prefill(work, prefills, budget)
        if preempted != self.num_preemptions:  # an older prompt may have taken a younger decode's pages
            work = [(sequence, count) for sequence, count in work if sequence.row >= 0]
        return work

    def _decodes(self) -> tuple[Work, list[Sequence], int]:
        """Work of the sequences with one token to feed, the sequences with more, and what is left of the budget."""
        work: Work = []
        prefills: list[Sequence] = []
        # Drafts share what is left when each running sequence has its token, so none waits for another's guesses.
        spare = self._config.token_budget - len(self.running)
        # A copy, as taking pages may preempt and so change the list.
        for sequence in tuple(self.running):
            if sequence.row < 0:
                continue  # preempted by an older one just now
            if not sequence.is_decoding:
                prefills.append(sequence)
                sequence.drafts = []
            elif self._take_pages(sequence, sequence.num_computed + 1):
                if sequence.drafts:
                    self._cut_drafts(sequence, spare)
                spare -= len(sequence.drafts)
                work.append((sequence, 1 + len(sequence.drafts)))
            else:  # it waits for pages; the next step's drafts are not to be added to these
                sequence.drafts = []
        # Every running sequence was charged one token above; prompts are not decodes.
        return work, [s for s in prefills if s.row >= 0], spare + len(self.running) - len(work)

    def _cut_drafts(self, sequence: Sequence, spare: int) -> None:
        """Leave the drafts that budget and free pages allow. Nobody is preempted for drafts."""
        # A draft behind an eviction would see what it must not.
        del sequence.drafts[max(0, min(spare, self.until_due(sequence) - 1)) :]
        if not self._grow(sequence, sequence.num_computed + 1 + len(sequence.drafts)):
            sequence.drafts = []

    def _admit(self, prefills: list[Sequence], budget: int) -> list[Sequence]:
        """Let waiting sequences run while there are rows, pages and tokens for them; those that now do."""
        demand = sum(self._first_chunk(sequence) for sequence in prefills)
        # Pages that prompts get chunk by chunk count as taken now, or too many would be admitted and preempted later.
        promised = sum(max(0, self._promised(sequence) - len(sequence.pages)) for sequence in prefills)
        num_growing = sum(map(self._grows, self.running))
        computing = {key for s in prefills for key in self._scored_keys(s, s.num_published)}
        admitted: list[Sequence] = []
        overtaken: list[Sequence] = []
        # More prompts than a step has tokens for would hold pages without using them.
        while self.waiting and self._rows and demand < budget:
            sequence = self.waiting[0]
            hits = self._prefix.match(sequence)
            keys = self._scored_keys(sequence, len(hits))
            # What it lacks first, or all of it (a key names everything before it too), is being computed.
            if keys and keys[-1 if self._fixed_chunks else 0] in computing:
                overtaken.append(self.waiting.popleft())
                if len(overtaken) == _OVERTAKEN * self._config.max_sequences:
                    break
                continue
            if keys and self._fixed_chunks:
                hits = []  # half a beginning read from the cache is not what computing it alone would read
            needed = self._promised(sequence) - len(hits)
            # Hits that nobody references are on the free list, but using them takes them off it.
            available = self._pool.num_free - sum(map(self._pool.is_free, hits)) - promised
            # Some for the others to grow into, or the newcomer would soon be preempted again.
            # Nor is anybody behind it admitted: overtaken by short prompts, a long one might wait without end.
            if needed + (num_growing + 3) // 4 > available:
                break
            self._start(self.waiting.popleft(), hits)
            admitted.append(sequence)
            computing.update(keys)
            demand += self._first_chunk(sequence)
            promised += needed
            num_growing += self._grows(sequence)
        # Back in front, in order of arrival.
        self.waiting.extendleft(reversed(overtaken))
        return admitted

    def _promised(self, sequence: Sequence) -> int:
        """Pages that a sequence must hold before it can go on after what is known."""
        needed = sequence.num_needed if self._eviction is None else self._eviction.promised(sequence)
        return self._config.pages_for(needed)

    def _grows(self, sequence: Sequence) -> bool:
        """Whether a sequence will want more pages when its prompt is computed."""
        return sequence.draws and (self._eviction is None or self._eviction.grows(sequence))

    def until_due(self, sequence: Sequence) -> int:
        """Tokens that a sequence may compute before some of its pages are evicted."""
        return NEVER if self._eviction is None else self._eviction.until_due(sequence)

    def _start(self, sequence: Sequence, hits: list[int]) -> None:
        self._prefix.take(sequence, hits)
        sequence.row, sequence.num_table_entries = self._rows.pop(), 0
        insort(self.running, sequence, key=attrgetter("id"))  # it may have been overtaken

    def _scored_keys(self, sequence: Sequence, num_known: int) -> list[bytes]:
        """Pages that a sequence computes before what it scores and that others may wait for; see `missing_keys`."""
        return [] if sequence.params.scoring is None else self._prefix.missing_keys(sequence, num_known)

    def _first_chunk(self, sequence: Sequence) -> int:
        # A page is the least that a prompt gets while it shares a step; scored ones take all that they need in turn.
        count, is_whole = self._next_chunk(sequence)
        return count if is_whole or sequence.params.scoring else min(count, self._page_size)

    def _next_chunk(self, sequence: Sequence) -> tuple[int, bool]:
        """Tokens that a prompt would like to have computed in its next step, and whether it is all of them or none.

        With `fixed_chunks` a scored prompt is cut at the last full page before the rows that are scored, where these
        begin, and at as many tokens as a step may have, whoever else is in the batch.
        """
        left, scoring = min(sequence.num_left, self.until_due(sequence)), sequence.params.scoring
        if scoring is None:
            return left, not self._config.chunked
        if not self._fixed_chunks:
            return min(left, scoring.chunk_size or left), False
        first, done = sequence.first_row, sequence.num_computed
        ends = (first - first % self._page_size, first, len(sequence.ids))
        limit = min(left, scoring.chunk_size or left, self._config.token_budget)
        return min(next(end for end in ends if end > done) - done, limit), True

    def _prefill(self, work: Work, prefills: list[Sequence], budget: int) -> None:
        """Add a chunk for each sequence, as far as the budget and the pages go."""
        for sequence, (count, is_whole) in zip(prefills, self._shares(prefills, budget), strict=True):
            # Without a row it has just lost its pages to an older prompt of the same step.
            if count <= 0 or sequence.row < 0:
                continue
            if not self._take_pages(sequence, sequence.num_computed + count):
                # A part of a chunk is better than none: free pages are used for as many tokens as they hold.
                fitting = (len(sequence.pages) + self._pool.num_free) * self._page_size + sequence.num_evicted
                count = min(count, fitting - sequence.num_computed)
                if count <= 0 or is_whole:
                    continue
                self._take_pages(sequence, sequence.num_computed + count)
            work.append((sequence, count))

    def _shares(self, prefills: list[Sequence], budget: int) -> list[tuple[int, bool]]:
        """Tokens for each prompt, and whether it cannot do with fewer.

        While others wait for their first token, one gets at most half of what is left (a page at least) and ends at a
        page border; what nobody took is handed out again from the oldest on, borders or not, so the budget is never
        left under-filled. A chunk that must be whole is beyond the budget if it is the first: it would never fit else.
        """
        chunks = [self._next_chunk(sequence) for sequence in prefills]
        size, left, shares = self._page_size, budget, list[int]()
        num_behind = sum(sequence.draws for sequence in prefills)
        for sequence, (need, is_whole) in zip(prefills, chunks, strict=True):
            num_behind -= sequence.draws
            if is_whole:
                take = need if need <= left or not any(shares) else 0
            else:
                take = min(need, max(left // 2, size) if num_behind else left, left)
                if take < need and sequence.draws:
                    border = (sequence.num_computed + take) // size * size
                    take = max(border - sequence.num_computed, 0) or take
            shares.append(take)
            left = max(0, left - take)
        for index, (need, is_whole) in enumerate(chunks):
            extra = 0 if is_whole else min(need - shares[index], left)
            shares[index] += extra
            left -= extra
        return [(share, is_whole) for share, (_, is_whole) in zip(shares, chunks, strict=True)]

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that a sequence lacks to hold so many tokens; not positive when it has enough."""
        return self._config.pages_for(num_tokens - sequence.num_evicted) - len(sequence.pages)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for so many tokens from what is free; whether there are enough."""
        if num_tokens - sequence.num_evicted <= len(sequence.pages) * self._page_size:  # as in nearly every decode step
            return True
        missing = self._missing(sequence, num_tokens)
        if missing > self._pool.num_free:
            return False
        sequence.pages.extend(self._pool.allocate(missing))
        return True

    def _take_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for so many tokens, from younger sequences if need be; whether there are enough."""
        while not self._grow(sequence, num_tokens):
            if self.running[-1] is sequence:
                return False
            self.preempt_youngest()
        return True

    def preempt_youngest(self) -> None:
        """Take the pages of the sequence that arrived last of those that run; it is computed again later."""
        sequence = self.running.pop()
        self._free(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        # Those that were overtaken may be older.
        self.waiting.insert(sum(other.id < sequence.id for other in self.waiting), sequence)
        self._on_preempt(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._pool.release(sequence.pages)
        self._rows.append(sequence.row)
        sequence.row = -1
        sequence.pages = []
        sequence.drafts = []
        sequence.num_computed = sequence.num_published = sequence.num_evicted = 0

    def check_integrity(self) -> None:
        """Compare queues, rows and pages.

        Raises:
            AssertionError: something is lost, doubled or out of order.
        """
        self._pool.check_integrity(sequence.pages for sequence in self.running)
        for queue in (self.running, self.waiting):
            ids = [sequence.id for sequence in queue]
            assert ids == sorted(set(ids)), f"not in order of arrival: {ids}"
        rows = [sequence.row for sequence in self.running]
        assert sorted([*rows, *self._rows]) == list(range(self._config.max_sequences)), f"rows lost or doubled: {rows}"
        for sequence in self.running:
            held = len(sequence.pages) * self._page_size
            assert 0 <= sequence.num_kept <= held, f"request {sequence.id}: {sequence.num_kept} tokens in {held}"
            assert sequence.num_computed < len(sequence.ids) <= sequence.limit, f"request {sequence.id}: lengths"
        for sequence in self.waiting:
            assert sequence.row < 0, f"request {sequence.id} waits and runs"
            assert not sequence.pages, f"request {sequence.id} waits with pages"
