"""Ownership of the KV pool's pages. This module handles page numbers only: `kv_cache` holds the bytes.

A page is free or referenced. A free page keeps its content key until it is reused. Allocation first takes free pages
without a key, then the free pages that were released longest ago.
"""

from collections import Counter
from collections.abc import Iterable


class PagePool:
    """Reference-counted pages 0 .. num_pages - 1, and a table from content key to page.

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
        """Whether a held page may be written: it has one holder and no key."""
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
        """Check that the pool agrees with itself and with the sequences that hold pages.

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
