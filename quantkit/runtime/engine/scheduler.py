"""Choice of the sequences in each step, and of the number of tokens that each computes; uses no tensors and no clock.

Prefill and decode share a step, which has one token budget. Each decoding sequence takes one token plus its drafts. The
remaining budget goes to prompts in chunks, oldest first. While other prompts wait for their first token, no prompt gets
all of it.

Memory: sequences start in order of arrival, so running ones are older than waiting ones. When pages run out, the
scheduler preempts the youngest sequence and recomputes it later (the prefix cache keeps its full pages until they are
needed). The oldest can always get pages, so progress is guaranteed. If a sequence needs more pages and no younger one
can be preempted, it keeps the pages that it has and waits for a later step.

Requests that only score their prompt are scheduled like others, with two exceptions, because no client waits for their
first token. They use the remaining budget one after another instead of sharing it. If a request's prefix is being
computed for another request, the request waits until it can share the prefix, and later requests may overtake it.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from quantkit.runtime.cache.eviction import NEVER, Evictor
from quantkit.runtime.cache.pages import PagePool, PrefixCache
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.sequence import Sequence

Work = list[tuple[Sequence, int]]

_OVERTAKEN = 8  # at most _OVERTAKEN * max_sequences requests are overtaken to find some that need not wait


class Scheduler:
    """Queues of waiting and running sequences, and the choice of each step's work.

    Args:
        pool: pool that provides pages.
        prefix: prefix cache, searched for the beginnings of prompts.
        config: limits of a step.
        on_preempt: called with each sequence that is preempted.
        eviction: tells when sequences evict tokens and how many pages they need; None = no KV budget.
        fixed_chunks: True if results depend on where a prompt is split into steps. With a quantized cache they do: a
            step reads only its own new tokens unrounded. Scored prompts are then split at fixed points, whatever else
            is in the batch.
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
        """Remove a sequence, finished or not, from the queues, and free its pages at once."""
        for queue in (self.waiting, self.running):
            if sequence in queue:  # in neither if an interrupt came while it changed queues
                queue.remove(sequence)
        if sequence.row >= 0:
            self._free(sequence)

    def reserve(self, lengths: Iterable[tuple[Sequence, int]]) -> bool:
        """Give each sequence the pages for a number of tokens; return False and take no page if too few are free.

        Args:
            lengths: running sequences and their numbers of tokens.
        """
        asked = list(lengths)
        # Checked for all first: pages that some had already taken would lie idle when the step is not launched.
        if sum(max(0, self._missing(*each)) for each in asked) > self._pool.num_free:
            return False
        return all(self._grow(*each) for each in asked)

    def schedule(self) -> Work:
        """Return the next step: its sequences and the number of new tokens of each, drafts included.

        This allocates their pages, admits waiting sequences, and preempts the youngest if pages run out.
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
        """Return the work of decoding sequences, the sequences still in prefill, and the remaining token budget."""
        work: Work = []
        prefills: list[Sequence] = []
        # Drafts share the budget left after one token for each running sequence, so none waits for another's drafts.
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
            else:  # it waits for pages; the next step proposes drafts anew
                sequence.drafts = []
        # `spare` was reduced by one token for every running sequence; give back the tokens of those without work here.
        return work, [s for s in prefills if s.row >= 0], spare + len(self.running) - len(work)

    def _cut_drafts(self, sequence: Sequence, spare: int) -> None:
        """Drop the drafts that do not fit the token budget and the free pages. Drafts never preempt a sequence."""
        # A draft after the next eviction would see tokens that are evicted before it.
        del sequence.drafts[max(0, min(spare, self.until_due(sequence) - 1)) :]
        if not self._grow(sequence, sequence.num_computed + 1 + len(sequence.drafts)):
            sequence.drafts = []

    def _admit(self, prefills: list[Sequence], budget: int) -> list[Sequence]:
        """Start waiting sequences while rows, pages and tokens last; return the started sequences."""
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
            # Another sequence computes its first missing page, or all: the last key covers all pages before it too.
            if keys and keys[-1 if self._fixed_chunks else 0] in computing:
                overtaken.append(self.waiting.popleft())
                if len(overtaken) == _OVERTAKEN * self._config.max_sequences:
                    break
                continue
            if keys and self._fixed_chunks:
                hits = []  # with a partial hit, it would read rounded keys that it otherwise reads unrounded
            needed = self._promised(sequence) - len(hits)
            # Hits that nobody references are on the free list, but using them takes them off it.
            available = self._pool.num_free - sum(map(self._pool.is_free, hits)) - promised
            # Leave some pages for the others to grow into, or the newcomer would soon be preempted again. Admit no
            # later sequence either: if short prompts overtook it, a long one might wait without end.
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
        """Return how many pages a sequence needs to compute its known tokens and one new token."""
        needed = sequence.num_needed if self._eviction is None else self._eviction.promised(sequence)
        return self._config.pages_for(needed)

    def _grows(self, sequence: Sequence) -> bool:
        """Whether the sequence generates tokens and may need more pages for them."""
        return sequence.draws and (self._eviction is None or self._eviction.grows(sequence))

    def until_due(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence can compute before its next eviction."""
        return NEVER if self._eviction is None else self._eviction.until_due(sequence)

    def _start(self, sequence: Sequence, hits: list[int]) -> None:
        self._prefix.take(sequence, hits)
        sequence.row, sequence.num_table_entries = self._rows.pop(), 0
        insort(self.running, sequence, key=attrgetter("id"))  # it may have been overtaken

    def _scored_keys(self, sequence: Sequence, num_known: int) -> list[bytes]:
        """Return the keys of pages that a scoring request still computes and that later requests may share.

        See `PrefixCache.missing_keys`; empty for requests that do not score.
        """
        return [] if sequence.params.scoring is None else self._prefix.missing_keys(sequence, num_known)

    def _first_chunk(self, sequence: Sequence) -> int:
        # A prompt that shares a step gets at least a page; scored prompts take all that they need, one after another.
        count, is_whole = self._next_chunk(sequence)
        return count if is_whole or sequence.params.scoring else min(count, self._page_size)

    def _next_chunk(self, sequence: Sequence) -> tuple[int, bool]:
        """Return how many tokens of a prompt its next step may compute, and whether the step must compute all of them.

        With `fixed_chunks`, a scored prompt is split at fixed points: at the last page boundary before the scored rows,
        at the first scored row, and after every `token_budget` tokens. Other sequences in the batch do not matter.
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
        """Add a chunk of each prompt to the work, as far as budget and pages allow."""
        for sequence, (count, is_whole) in zip(prefills, self._shares(prefills, budget), strict=True):
            # A sequence without a row has just lost its pages to an older prompt of the same step.
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
        """Return the number of tokens for each prompt, and whether the prompt needs all of them at once.

        While other prompts wait for their first token, a prompt gets at most half of the remaining budget (at least a
        page) and stops at a page boundary. A second pass gives the remaining budget to the prompts, oldest first, and
        ignores page boundaries, so no budget is wasted. If the first chunk cannot be split, it may exceed the budget,
        because it would otherwise never fit.
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
        """Return how many pages a sequence lacks to hold this many tokens; zero or negative if it has enough."""
        return self._config.pages_for(num_tokens - sequence.num_evicted) - len(sequence.pages)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take free pages to hold this many tokens; return whether there are enough."""
        if num_tokens - sequence.num_evicted <= len(sequence.pages) * self._page_size:  # as in nearly every decode step
            return True
        missing = self._missing(sequence, num_tokens)
        if missing > self._pool.num_free:
            return False
        sequence.pages.extend(self._pool.allocate(missing))
        return True

    def _take_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for this many tokens, preempting younger sequences if needed; return whether there are enough."""
        while not self._grow(sequence, num_tokens):
            if self.running[-1] is sequence:
                return False
            self.preempt_youngest()
        return True

    def preempt_youngest(self) -> None:
        """Preempt the running sequence that arrived last; it is recomputed later."""
        sequence = self.running.pop()
        self._free(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        # Waiting sequences that were overtaken may be older.
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
        """Check that queues, rows and pages agree.

        Raises:
            AssertionError: an item is lost, appears twice or is out of order.
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
