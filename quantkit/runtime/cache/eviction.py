"""Pages that sequences give up when they are over their budget, after the attention of a step. When, says `KVBudget`.

A sequence's page list loses whole pages, and those after them move up: physical length and position part, so kernels,
which read pages in the order of the list, need not know. Keys were rotated by their position when they were stored, and
new ones are rotated by theirs in the text. Nothing is copied but the open page's unquantized keys of INT4.

A page that others hold too only loses a reference, and its bytes stay as they are: what a sequence gives up does not
depend on who else runs. Only pages before anything can be evicted are shared through the prefix cache, since keys and
values of what comes later depend on what was evicted. A sequence that is computed again gives up the pages that it gave
up before, at the same points.
"""

import sys
from collections.abc import Iterable
from functools import cached_property

from quantkit.models.kv_budget import KVBudget
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.cache.pages import PagePool
from quantkit.runtime.cache.policies.base import Policy
from quantkit.runtime.sequence import Sequence

NEVER = sys.maxsize


class Eviction:
    """Evicts pages of sequences. *Mutable*: counts.

    Args:
        budget: of each sequence.
        policy: which pages.
        pool: takes them back.
        cache: what the policy reads.
    """

    def __init__(self, budget: KVBudget, policy: Policy, pool: PagePool, cache: KVCache | None) -> None:
        self.budget, self.policy = budget, policy
        self.num_evicted_pages = 0
        self._pool, self._cache = pool, cache

    @cached_property
    def shared_tokens(self) -> int:
        """Tokens at the beginning of a sequence that may be shared: never computed after an eviction.

        The queries that a policy observes must be those of the sequence itself.
        """
        return self.budget.tokens - self.policy.observed

    def until_due(self, sequence: Sequence) -> int:
        """Tokens of a sequence to compute until pages of it are evicted next."""
        budget, kept = self.budget, sequence.num_kept
        return budget.until_due(sequence.num_computed, kept, sequence.num_prompt, self._chunk(sequence))

    def promised(self, sequence: Sequence) -> int:
        """Tokens that its pages must hold before it can go on after what is known."""
        return min(sequence.num_needed - sequence.num_evicted, self.budget.peak)

    def grows(self, sequence: Sequence) -> bool:
        """Whether it will have more pages when it draws than it has now."""
        return min(sequence.limit, self.budget.tokens) > len(sequence.pages) * self.budget.page_size

    def evict(self, sequences: Iterable[Sequence]) -> None:
        """Evict what is due of sequences that have just been computed."""
        for sequence in sequences:
            computed, kept = sequence.num_computed, sequence.num_kept
            if self.budget.is_due(computed, kept, sequence.num_prompt, self._chunk(sequence)):
                if computed not in sequence.evictions:
                    sequence.evictions[computed] = self._choose(sequence)
                self._remove(sequence, sequence.evictions[computed])

    def _chunk(self, sequence: Sequence) -> int:
        scoring = sequence.params.scoring
        asked = None if scoring is None else scoring.chunk_size
        return self.budget.chunk if asked is None else min(asked, self.budget.chunk)

    def _choose(self, sequence: Sequence) -> tuple[int, ...]:
        """Which pages of its list go, in order."""
        budget, kept = self.budget, sequence.num_kept
        first, end = budget.first_candidate, (kept - budget.recent) // budget.page_size
        count = budget.surplus(kept)
        assert count <= end - first, f"{count} pages to evict of {end - first}"
        if self.policy.scores is None or count == end - first:
            return tuple(range(first, first + count))
        assert self._cache is not None, "a policy reads the cache"
        pages, row, done = sequence.pages[: kept // budget.page_size], sequence.row, sequence.num_computed
        layers = self._cache.keys_of(pages, row, range(done - self.policy.observed, done))
        scores = self.policy.page_scores(layers)[first:end]
        # Stable, so that of equal ones the older go.
        return tuple(sorted(first + index for index in scores.argsort(stable=True)[:count].tolist()))

    def _remove(self, sequence: Sequence, indices: tuple[int, ...]) -> None:
        gone = set(indices)
        self._pool.release([sequence.pages[index] for index in indices])
        sequence.pages = [page for index, page in enumerate(sequence.pages) if index not in gone]
        sequence.num_table_entries = 0  # its row of the page table is written anew
        count = len(indices) * self.budget.page_size
        sequence.num_evicted += count
        self.num_evicted_pages += len(indices)
        if self._cache is not None:
            self._cache.move_up(sequence.row, count)
