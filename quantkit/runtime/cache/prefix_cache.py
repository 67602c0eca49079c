"""Pages of common prefixes, computed once: a chained hash of full pages identifies their contents.

    key(page 0) = H(root, its tokens)     key(page i) = H(key(page i - 1), its tokens)     root = H(model, KV format)

A sequence with an adapter has the root H(root, adapter), so the pages of one adapter are never found by another.

H is BLAKE2b with 128 bits, so equal keys mean equal token histories and no tokens are compared on a hit. Three rules
keep results exact. At least one token is left to compute, because its logits are needed. A page is published only after
the step that filled it. A page is published only if all its tokens are final; unverified drafts are not. With a KV
budget, only pages before the first possible eviction are shared; see `eviction`.
Source: the block hash of vLLM (Kwon et al. 2023, PagedAttention), with the KV format in the key.
"""

import hashlib
import sys
from array import array
from collections.abc import Mapping
from types import MappingProxyType

from quantkit.runtime.cache.pages import PagePool
from quantkit.runtime.sequence import Sequence

_KEY_BYTES = 16


class PrefixCache:
    """Finds and publishes pages by content.

    Args:
        pool: the page pool.
        page_size: tokens per page.
        identity: everything else that determines a page's bytes: model and KV format.
        enabled: False = find and publish nothing.
        most: share at most this many tokens from the start of a sequence; None = all.
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
        """Return the keys of a sequence's shareable pages, without the first `num_known` of them."""
        if not self.enabled:
            return []
        return [self._key(sequence, index) for index in range(num_known, self._whole_pages(sequence.first_row))]

    def take(self, sequence: Sequence, pages: list[int]) -> None:
        """Give the matched pages to a sequence that starts or restarts."""
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
