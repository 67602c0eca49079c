"""Tokens that sequences give up when they are over their budget, after the attention of a step. When, says `KVBudget`.

A sequence's page list loses whole pages, and those after them move up: physical length and position part, so kernels,
which read pages in the order of the list, need not know. Keys were rotated by their position when they were stored, and
new ones are rotated by theirs in the text. Which tokens go, each head of each layer chooses; what it keeps of the pages
that go is moved first, see `compaction`.

A page that others hold too, or may find in the prefix cache, is never written: the sequence goes on with a copy. What
it gives up does not depend on who else runs. Only pages before anything can be evicted are shared through the prefix
cache, since keys and values of what comes later depend on what was evicted. A sequence that is computed again gives up
the tokens that it gave up before, at the same points: chosen anew they might be others, where rounding differs.
"""

import sys
from collections.abc import Callable, Iterable

from quantkit.models.kv_budget import SINK_TOKENS, KVBudget
from quantkit.runtime.cache.kv_cache import Array, KVCache, lowest
from quantkit.runtime.cache.pages import PagePool
from quantkit.runtime.cache.policies import Policy
from quantkit.runtime.sequence import Sequence

NEVER = sys.maxsize


class Evictor:
    """Takes tokens of sequences out of the cache. *Mutable*: counts.

    Args:
        budget: of each sequence.
        policy: chooses the tokens.
        pool: takes pages back.
        cache: holds the keys that the policy reads.
    """

    def __init__(self, budget: KVBudget, policy: Policy, pool: PagePool, cache: KVCache | None) -> None:
        self.budget, self.policy = budget, policy
        self.num_evicted_pages = 0
        self._pool, self._cache = pool, cache

    def until_due(self, sequence: Sequence) -> int:
        """Tokens of a sequence to compute until some are evicted next."""
        budget, kept = self.budget, sequence.num_kept
        return budget.until_due(sequence.num_computed, kept, sequence.num_prompt, self._chunk(sequence))

    def promised(self, sequence: Sequence) -> int:
        """Tokens that its pages must hold before it can go on after what is known."""
        return min(sequence.num_needed - sequence.num_evicted, self.budget.peak)

    def grows(self, sequence: Sequence) -> bool:
        """Whether it will have more pages when it draws than it has now."""
        return min(sequence.limit, self.budget.tokens) > len(sequence.pages) * self.budget.page_size

    def evict(self, sequences: Iterable[Sequence], preempt: Callable[[], None], oldest: int) -> None:
        """Evict what is due of sequences that have just been computed.

        Args:
            sequences: they, but for those that have ended.
            preempt: takes the pages of the youngest sequence that runs, for copies of pages.
            oldest: number of the request that came first of those alive. Nobody takes its pages, so of what it gave up
                earlier nothing is kept.
        """
        for sequence in sequences:
            # One that lost its pages meanwhile keeps nothing, and is not due.
            while self._is_due(sequence) and not self._has_own_pages(sequence):
                preempt()
            if self._is_due(sequence):
                self._evict(sequence)
                if sequence.id == oldest:
                    sequence.forget_evictions()

    def _is_due(self, sequence: Sequence) -> bool:
        computed, kept = sequence.num_computed, sequence.num_kept
        return self.budget.is_due(computed, kept, sequence.num_prompt, self._chunk(sequence))

    def _chunk(self, sequence: Sequence) -> int:
        scoring = sequence.params.scoring
        asked = None if scoring is None else scoring.chunk_size
        return self.budget.chunk if asked is None else min(asked, self.budget.chunk)

    def _candidates(self, sequence: Sequence) -> range:
        """Slots of the tokens that the policy judges: no sinks unless it asks, no newest ones, none in an open page."""
        kept, size = sequence.num_kept, self.budget.page_size
        first = 0 if self.policy.judges_sinks else SINK_TOKENS
        return range(first, min(kept - self.budget.recent, kept // size * size))

    def _given_up(self, sequence: Sequence) -> range:
        """Return the pages of its list that go, whatever the policy: the first ones behind the sinks."""
        first, count = self.budget.first_candidate, self.budget.surplus(sequence.num_kept)
        return range(first, first + count)

    def _has_own_pages(self, sequence: Sequence) -> bool:
        """Give it copies of pages that are about to be written and others may read; False = no page is free."""
        if not self.policy.reads_keys:
            return True
        assert self._cache is not None, "a policy reads the cache"
        slots, size, given_up = self._candidates(sequence), self.budget.page_size, self._given_up(sequence)
        for index in range(slots.start // size, -(-slots.stop // size)):
            page = sequence.pages[index]
            if index in given_up or self._pool.is_private(page):
                continue
            if self._pool.num_free:
                (copy,) = self._pool.allocate(1)
                self._cache.copy_page(page, copy)
                self._pool.release([page])
                sequence.pages[index] = copy
            elif not self._pool.withdraw(page):
                return False
        return True

    def _evict(self, sequence: Sequence) -> None:
        given_up, computed, size = self._given_up(sequence), sequence.num_computed, self.budget.page_size
        assert given_up.stop * size <= sequence.num_kept - self.budget.recent, f"{given_up} are more than may go"
        if self.policy.reads_keys:
            assert self._cache is not None, "a policy reads the cache"
            if computed not in sequence.evictions:
                sequence.evictions[computed] = self._choose(sequence, len(given_up) * size)
            pages = sequence.pages[: sequence.num_kept // size]
            slots = range(given_up.start * size, given_up.stop * size)
            self._cache.compact(pages, slots, sequence.evictions[computed])
        self._remove(sequence, given_up)

    def _choose(self, sequence: Sequence, count: int) -> dict[int, Array]:
        """Slots of the tokens that go, by number of the layer and by head."""
        assert self._cache is not None, "a policy reads the cache"
        layers = self._cache.keys_of(sequence.pages[: sequence.num_kept // self.budget.page_size])
        candidates = self._candidates(sequence)
        return {number: lowest(self.policy.scores(keys), candidates, count) for number, keys in layers}

    def _remove(self, sequence: Sequence, given_up: range) -> None:
        self._pool.release(sequence.pages[given_up.start : given_up.stop])
        del sequence.pages[given_up.start : given_up.stop]
        sequence.num_table_entries = 0  # its row of the page table is written anew
        count = len(given_up) * self.budget.page_size
        sequence.num_evicted += count
        self.num_evicted_pages += len(given_up)
        if self._cache is not None:
            self._cache.move_up(sequence.row, count)
