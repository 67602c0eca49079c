"""Ownership of the KV pool's pages, and the sharing of pages with common prefixes.

This module handles page numbers only: `kv_cache` holds the bytes. A page is free or referenced. A free page keeps its
content key until it is reused. Allocation first takes free pages without a key, then the free pages that were released
longest ago.

The key of a page is a chained hash, so a page of a common prefix is computed once and found by its contents:

    key(page 0) = H(root, its tokens)     key(page i) = H(key(page i - 1), its tokens)     root = H(model, KV format)

A sequence with an adapter has the root H(root, adapter), so the pages of one adapter are never found by another.

H is BLAKE2b with 128 bits. Equal keys therefore mean equal tokens in this page and all pages before it, and a hit needs
no comparison of tokens. Three rules keep results exact. At least one token is left to compute, because its logits are
needed. A page is published only after the step that filled it. A page is published only if all its tokens are final;
unverified drafts are not. With a KV budget, only pages before the first possible eviction are shared; see `eviction`.
Source: the block hash of vLLM (Kwon et al. 2023, PagedAttention), with the KV format in the key.
"""

import hashlib
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from quantkit.runtime.sequence import Sequence

_KEY_BYTES = 16


class PagePool:
    """Counts the references to pages 0 .. num_pages - 1, and finds pages by their content keys.

    Args:
        num_pages: number of pages.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._counts = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))  # free pages without a key; the last is taken first
        self._cached: dict[int, None] = {}  # free pages with a key; the one released longest ago is first
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of pages that can be allocated, including free pages that have a key."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of free pages that have a key, so that `find` can still return them."""
        return len(self._cached)

    def is_free(self, page: int) -> bool:
        """Whether the page has no references."""
        return self._counts[page] == 0

    def allocate(self, count: int) -> list[int]:
        """Take free pages and forget their contents. The caller must check `num_free` first."""
        assert count <= self.num_free, f"{count} pages requested, {self.num_free} free"
        pages = []
        for _ in range(count):
            # Pages with known contents go last: until one is reused, a later prompt may still find it.
            if self._blank:
                page = self._blank.pop()
            else:
                page = next(iter(self._cached))
                del self._cached[page]
                # The key goes with the contents, or a later `find` would give a page that holds other tokens.
                del self._page_of[self._key_of.pop(page)]
            self._counts[page] = 1
            pages.append(page)
        return pages

    def is_private(self, page: int) -> bool:
        """Whether a held page may be written, because it has only one holder and no key."""
        return self._counts[page] == 1 and page not in self._key_of

    def withdraw(self, page: int) -> bool:
        """Remove the key of a held page, so that no other sequence finds the page.

        Return False, and change nothing, if the page has several holders.
        """
        if self._counts[page] > 1:
            return False
        del self._page_of[self._key_of.pop(page)]
        return True

    def share(self, page: int) -> None:
        """Add a reference to a page; a free page leaves the free list."""
        if self._counts[page] == 0:
            # A page that nobody holds can be shared only if it has a key, so it is in `_cached`.
            del self._cached[page]
        self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one reference from each page; the pages come in sequence order.

        The last page of the sequence is freed first and therefore reused first: a cached beginning is useful without
        its end, but not the reverse.
        """
        for page in reversed(list(pages)):
            assert self._counts[page] > 0, f"page {page} is released but free"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._blank.append(page)

    def publish(self, key: bytes, page: int) -> None:
        """Store the key of a referenced page's contents; do nothing if the key or the page is already published."""
        assert self._counts[page] > 0, f"page {page} is published but free"
        # Two sequences may compute equal pages side by side; the second page gets no key and is freed as blank.
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, key: bytes) -> int | None:
        """Return the page with this key, free or referenced; None if no page has it."""
        return self._page_of.get(key)

    def forget(self) -> None:
        """Forget the contents of all free pages."""
        for page in self._cached:
            del self._page_of[self._key_of.pop(page)]
        self._blank = sorted([*self._blank, *self._cached], reverse=True)
        self._cached = {}

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Check that the pool's tables agree with each other and with the sequences that hold pages.

        Args:
            holders: the page list of every sequence.
        Raises:
            AssertionError: a page is lost, both free and held, held too often, or twice in one list.
        """
        held: Counter[int] = Counter()
        for pages in holders:
            listed = list(pages)
            assert len(set(listed)) == len(listed), f"a sequence holds a page twice: {listed}"
            held.update(listed)
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a page is on the free list twice"
        for page, count in enumerate(self._counts):
            assert count == held[page], f"page {page} has {count} references, {held[page]} sequences hold it"
        assert set(free) == {page for page, count in enumerate(self._counts) if count == 0}, "a free page is lost"
        assert self._key_of == {page: key for key, page in self._page_of.items()}, "keys and pages disagree"
        assert all(page in self._key_of for page in self._cached), "a page without a key is kept for its contents"
        assert not any(page in self._key_of for page in self._blank), "a page with a key is listed without one"


class PrefixCache:
    """Finds cached pages that hold the beginning of a sequence, and publishes pages for later sequences.

    Args:
        pool: the page pool.
        page_size: tokens per page.
        identity: model and KV format, which determine a page's bytes together with its tokens.
        enabled: False = find and publish nothing.
        most: maximum number of tokens at the start of a sequence that may be shared; None = no limit.
        adapters: digest of each adapter that sequences may have, keyed by name.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        *,
        identity: str = "",
        enabled: bool = True,
        most: int | None = None,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.enabled = enabled
        self.num_hit_tokens = 0
        self.num_asked_tokens = 0
        self._pool = pool
        self._page_size = page_size
        self._most_pages = sys.maxsize if most is None else most // page_size
        root = _digest(b"", identity.encode())
        self._roots: dict[str | None, bytes] = {None: root}
        self._roots |= {name: _digest(root, digest.encode()) for name, digest in adapters.items()}

    def match(self, sequence: Sequence) -> list[int]:
        """Return cached pages that hold the beginning of a sequence, without adding references to them.

        Tokens whose logits are needed are never matched, so the model still computes them.
        """
        if not self.enabled:
            return []
        pages = []
        for index in range(self._whole_pages(sequence.first_row)):
            page = self._pool.find(self._key(sequence, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def missing_keys(self, sequence: Sequence, num_known: int) -> list[bytes]:
        """Return the keys of those pages of a sequence that can be shared, without the first `num_known` keys."""
        if not self.enabled:
            return []
        return [self._key(sequence, index) for index in range(num_known, self._whole_pages(sequence.first_row))]

    def take(self, sequence: Sequence, pages: list[int]) -> None:
        """Give pages that `match` has returned to a sequence that starts or restarts."""
        for page in pages:
            self._pool.share(page)
        sequence.pages = list(pages)
        sequence.num_published = len(pages)
        # Computing starts at a page border, so a page that others read is never written.
        sequence.num_computed = len(pages) * self._page_size
        if sequence.num_preemptions == 0:  # a preempted one mostly finds its own pages
            sequence.num_cached = sequence.num_computed
        self.num_hit_tokens += sequence.num_computed
        self.num_asked_tokens += len(sequence.ids)

    def publish(self, sequence: Sequence) -> None:
        """Publish the sequence's pages that are full of computed, final tokens."""
        full = self._whole_pages(sequence.num_computed)
        if not self.enabled or full <= sequence.num_published:
            return
        # Requests for whole rows of logits are always computed anew, and publish no pages either.
        if sequence.params.scoring is None or not sequence.params.scoring.read_logits:
            for index in range(sequence.num_published, full):
                self._pool.publish(self._key(sequence, index), sequence.pages[index])
        sequence.num_published = full

    def _whole_pages(self, num_tokens: int) -> int:
        """Return how many pages this many tokens fill completely, but at most the number of shareable pages."""
        return min(num_tokens // self._page_size, self._most_pages)

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Return the key of a page of the sequence. Tokens of full pages are final, so each key is computed once."""
        keys, size = sequence.page_keys, self._page_size
        while len(keys) <= index:
            start = len(keys) * size
            # Numbers of a fixed width: with a variable one, two different histories could give the same bytes.
            tokens = array("q", sequence.ids[start : start + size])
            assert len(tokens) == size, "only full pages have a key"
            keys.append(_digest(keys[-1] if keys else self._roots[sequence.adapter], tokens.tobytes()))
        return keys[index]


def _digest(parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(parent + content, digest_size=_KEY_BYTES).digest()
