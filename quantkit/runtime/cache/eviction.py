"""Eviction of tokens from sequences over their KV budget, after a step's attention. `KVBudget` decides when.

A sequence's page list loses whole pages, and later pages move up. The cached length then differs from the position in
the text. Kernels read pages in list order and need no change: keys are rotated by their text position when stored. Each
head of each layer chooses for itself which tokens to evict. Before a page is removed, each head's remaining tokens in
this page are moved to other pages; see `kv_cache`.

Eviction never writes a page that other sequences can read: the sequence continues with a copy. The choice of tokens
does not depend on other sequences in the batch. The prefix cache shares only pages before the first possible eviction,
because later keys and values depend on which tokens were evicted. A sequence that is recomputed after preemption does
not choose again, because rounding could change the choice. It replays its recorded evictions: the same tokens at the
same points.
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
    """Evicts tokens of sequences from the cache. *Mutable*: counts the evicted pages.

    Args:
        budget: KV budget of each sequence.
        policy: chooses the tokens to evict.
        pool: receives the freed pages.
        cache: holds the keys that the policy reads.
    """

    def __init__(self, budget: KVBudget, policy: Policy, pool: PagePool, cache: KVCache) -> None:
        self.budget, self.policy = budget, policy
        self.num_evicted_pages = 0
        self._pool, self._cache = pool, cache

    def until_due(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence can compute before its next eviction."""
        budget, kept = self.budget, sequence.num_kept
        return budget.until_due(sequence.num_computed, kept, sequence.num_prompt, self._chunk(sequence))

    def promised(self, sequence: Sequence) -> int:
        """Return how many tokens the pages of a sequence must hold to compute its known tokens and one new token."""
        return min(sequence.num_needed - sequence.num_evicted, self.budget.peak)

    def grows(self, sequence: Sequence) -> bool:
        """Whether the sequence may need more pages before it reaches its limit or the KV budget."""
        return min(sequence.limit, self.budget.tokens) > len(sequence.pages) * self.budget.page_size

    def evict(self, sequences: Iterable[Sequence], preempt: Callable[[], None], oldest: int) -> None:
        """After a step, evict tokens of each of its sequences whose next eviction is due.

        Args:
            sequences: sequences of the step that have not ended.
            preempt: frees the pages of the youngest running sequence; called when a page must be copied and none is
                free.
            oldest: number of the oldest unfinished request. This request is never preempted, so the record of its
                earlier evictions is not needed and is deleted.
        """
        for sequence in sequences:
            # A sequence that was preempted meanwhile has no tokens in the cache, so it is not due.
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
        """Return the slots of the cache from which the policy may evict tokens.

        The newest tokens (`KVBudget.recent` of them) and a last page that is not full are excluded. The first tokens
        (attention sinks) are included only if the policy's `judges_sinks` is true.
        """
        kept, size = sequence.num_kept, self.budget.page_size
        first = 0 if self.policy.judges_sinks else SINK_TOKENS
        return range(first, min(kept - self.budget.recent, kept // size * size))

    def _given_up(self, sequence: Sequence) -> range:
        """Return which of the sequence's pages to remove, as indices in its page list.

        These pages are the first pages after the attention sinks, for every policy and every choice of tokens.
        """
        first, count = self.budget.first_candidate, self.budget.surplus(sequence.num_kept)
        return range(first, first + count)

    def _has_own_pages(self, sequence: Sequence) -> bool:
        """Make sure that no other sequence can read the pages that eviction will write; return whether this succeeded.

        A page that is shared or in the prefix cache is replaced by a copy. If no page is free for the copy, the page is
        removed from the prefix cache instead, which fails if another sequence holds the page.
        """
        if not self.policy.reads_keys:
            return True
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
            if computed not in sequence.evictions:
                sequence.evictions[computed] = self._choose(sequence, len(given_up) * size)
            pages = sequence.pages[: sequence.num_kept // size]
            slots = range(given_up.start * size, given_up.stop * size)
            self._cache.compact(pages, slots, sequence.evictions[computed])
        self._remove(sequence, given_up)

    def _choose(self, sequence: Sequence, count: int) -> dict[int, Array]:
        """Return the slots of the tokens to evict, keyed by layer number; each value has shape (heads, count)."""
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
        self._cache.move_up(sequence.row, count)
