"""The KV cache: one pool of pages per layer, and the layer's attention over it. This module knows pages, not sequences.

`pages` counts references to pages, and lets sequences share them.

Compaction moves kept tokens out of the pages that a sequence is about to lose. Every head of every layer keeps the same
number of tokens, but chooses for itself which ones. The lost pages are the same for all heads. A head's remaining
tokens in these pages therefore move into slots of tokens that this head evicts from other pages. Example with pages of
3 tokens; the second page is lost:

    slots                     [a b c | d e f | g h i | k]
    evicted by one head              [b, e, g]              d and f are kept and move to the slots of b and g
    after                     [a d c | f h i | k]

The order of cached tokens does not matter: keys are already rotated, and all are older than every query. Only layers
with a sliding window need the order; they lose the page without any moves, because its tokens lie before the window.
Stored bits move unchanged, except keys with a scale per channel: if a page changes, its keys are quantized again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import ResourceError
from quantkit.kernels.layouts import EntryLayout, KVLayout, KVViews, Layout, StateLayout, page_bytes, residual_bytes
from quantkit.kernels.ops import paged_attention
from quantkit.kernels.reference.attention import page_keys
from quantkit.kernels.reference.kv_codes import codes_of
from quantkit.runtime.cache.non_paged import EntryPool, StatePool

Array = np.ndarray[Any, Any]


class KVCache:
    """Pages of all layers. *Mutable*: attention stores new keys and values.

    Rules for callers that allocate pages and build batches:

    - Before a step, the first (context length - query length) tokens of each sequence must be valid in the cache. After
      drafts were rejected, a later step may rewrite up to `MAX_ROLLBACK` tokens before the furthest position written.
      The shorter context length of that step is enough to signal the rewriting.
    - A page is final, and may be published to the prefix cache, once all its tokens are accepted. This holds for the
      first accepted_tokens // page_size pages. No flush is needed: a page is quantized in the step that completes it,
      and again if some of its tokens are rejected and rewritten.
    - A sequence that starts from shared pages must start at a page boundary, so that shared pages are never written.
    - `batch.residual_rows` must give a sequence the same row in every step from its first token on (after a preemption,
      from the recomputed first token on). Two running sequences must not share a row. The row may hold anything when a
      sequence starts from shared pages.
    - Pages need no clearing: slots past a sequence's end are never used.

    Args:
        layouts: layout of each layer; all have the same page size.
        num_pages: pages per layer.
        max_sequences: number of rows in the residual windows.
        device: device of the pools.
    Attributes:
        attention: functions keyed by layer number; each stores the keys and values of the new tokens, and lets the new
            tokens attend to the cache and to each other.
        states: states of recurrent layers, which have no pages, keyed by layer number.
        entries: pools of layers whose entries each represent several tokens, keyed by layer number.
    Raises:
        ResourceError: memory is too small; the message gives the number of bytes.
    """

    def __init__(
        self, layouts: Sequence[Layout], num_pages: int, max_sequences: int, device: torch.device | str = "cpu"
    ) -> None:
        self.layouts = tuple(layouts)
        self.page_size = self.layouts[0].page_size
        self.num_pages = num_pages
        self.max_sequences = max_sequences
        self.device = torch.device(device)
        paged = {n: layout for n, layout in enumerate(self.layouts) if isinstance(layout, KVLayout)}
        try:
            # Plain bytes: a page holds codes and scales of several types; the layout's views have their dtypes.
            self._pools = [
                torch.empty(num_pages, layout.page_bytes, dtype=torch.uint8, device=self.device)
                for layout in paged.values()
            ]
            # Keys and values wait here unquantized until their page is complete.
            windows = [layout.new_residuals(max_sequences, self.device) for layout in paged.values()]
            self.states = {
                n: StatePool(layout.shape, max_sequences, self.device)
                for n, layout in enumerate(self.layouts)
                if isinstance(layout, StateLayout)
            }
            self.entries = {
                n: EntryPool(layout, num_pages, max_sequences, self.device)
                for n, layout in enumerate(self.layouts)
                if isinstance(layout, EntryLayout)
            }
        except RuntimeError as error:
            # Allocators of the host and of CUDA both end here: torch.cuda.OutOfMemoryError is a RuntimeError.
            needed = num_pages * page_bytes(self.layouts) + residual_bytes(self.layouts, max_sequences)
            raise ResourceError(
                f"a KV cache of {num_pages} pages needs {needed / 2**20:.0f} MiB on {self.device}, more than is free; "
                "lower num_pages or memory, or use a smaller KV type"
            ) from error
        parts = zip(paged.items(), self._pools, windows, strict=True)
        self._views = {n: layout.views(pool, own) for (n, layout), pool, own in parts}
        self._residuals = [window for own in windows for window in own]
        self.attention = {n: paged_attention(views) for n, views in self._views.items()}

    @property
    def is_capturable(self) -> bool:
        """Whether attention of a decode step has all inputs on the device, so that a CUDA graph can capture it."""
        return all(getattr(attention, "is_capturable", False) for attention in self.attention.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(pool.nbytes for pool in self._pools) + sum(pool.num_page_bytes for pool in self.entries.values())

    @property
    def residual_bytes(self) -> int:
        """Bytes of the rows that sequences need besides pages: residual windows, states, and rows of entry pools."""
        windows = sum(window.nbytes for window in self._residuals)
        rows = sum(pool.num_bytes for pool in self.states.values())
        return windows + rows + sum(pool.num_bytes for pool in self.entries.values())

    def keys_of(self, pages: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each layer with full attention, and its keys in these complete pages.

        `Policy.scores` describes the shape of the keys.
        """
        numbers = torch.tensor(pages, device=self.device)
        for n, views in self._views.items():
            if not views.layout.is_windowed:
                yield n, page_keys(views, numbers).flatten(1, 2)

    def compact(self, pages: Sequence[int], given_up: range, evicted: Mapping[int, Array]) -> None:
        """Fill slots of evicted tokens with the tokens that remain in pages that a sequence is about to lose.

        See `fill_holes`.

        Args:
            pages: complete pages of one sequence.
            given_up: slots of the pages that the sequence is about to lose.
            evicted: slots of the tokens to evict, keyed by layer number; each value has shape (H, len(given_up)).
        """
        numbers = torch.tensor(pages, device=self.device)
        for n, slots in evicted.items():
            fill_holes(self._views[n], numbers, given_up, torch.from_numpy(slots.astype("int64")).to(self.device))

    def copy_page(self, page: int, copy: int) -> None:
        """Copy the contents of `page` to `copy` in all layers that store a key and value per token."""
        for pool in self._pools:
            pool[copy] = pool[page]

    def move_up(self, row: int, count: int) -> None:
        """Shift a sequence's row of each residual window towards the beginning, after tokens were evicted.

        Args:
            row: row of the sequence in the residual windows.
            count: number of evicted tokens, by which to shift.
        """
        for window in self._residuals:
            window[row] = window[row].roll(-count, dims=1)


def lowest(scores: Tensor, candidates: range, count: int) -> Array:
    """Return the slots with each head's lowest scores; ties go to the first slots.

    Args:
        scores: (H, N), one score per head and slot.
        candidates: slots to choose from, at least `count`.
        count: slots to return per head.
    Returns:
        (H, count), in slot order.
    """
    order = scores[:, candidates.start : candidates.stop].argsort(dim=1, stable=True)[:, :count]
    slots: Array = (order.sort(1).values + candidates.start).cpu().numpy()
    return slots.astype(np.min_scalar_type(candidates.stop))  # the smallest type: many arrays are kept for long


def fill_holes(views: KVViews, pages: Tensor, given_up: range, evicted: Tensor) -> None:
    """For each head, fill slots of evicted tokens in other pages with the tokens that remain in the slots `given_up`.

    Args:
        views: pages of one layer; modified.
        pages: (P,) complete pages of one sequence.
        given_up: slots of the pages that the sequence is about to lose.
        evicted: (H, len(given_up)) int64, slots of the tokens that each head evicts.
    """
    size = views.layout.page_size
    holes = torch.zeros(len(evicted), len(pages) * size, dtype=torch.bool, device=pages.device)
    holes.scatter_(1, evicted, True)
    survivors = ~holes
    survivors[:, : given_up.start] = survivors[:, given_up.stop :] = False
    holes[:, given_up.start : given_up.stop] = False
    # Both are ordered by head and slot; each head has as many holes as survivors.
    (heads, source), (_, target) = survivors.nonzero(as_tuple=True), holes.nonzero(as_tuple=True)
    start, end = ((pages[slot // size], heads, slot % size) for slot in (source, target))
    sides = [] if views.layout.rope_dim else [views.value]
    if views.layout.has_residual:
        _move_keys(views, pages, (heads, source), (heads, target))
    else:
        sides.append(views.key)
    for side in sides:
        side.put(end, [array[start] for array in side.stored])


def _move_keys(views: KVViews, pages: Tensor, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
    """Move keys that have a scale per channel, and quantize each changed page of a head again.

    Args:
        views: pages of one layer; modified.
        pages: (P,) complete pages of one sequence.
        source, target: heads and slots of the keys before and after the move.
    """
    keys, (heads, slots), size = page_keys(views, pages), target, views.layout.page_size  # (H, P, S, D)
    keys.flatten(1, 2)[target] = keys.flatten(1, 2)[source]
    changed = torch.unique(heads * len(pages) + slots // size)
    heads, indices = changed // len(pages), changed % len(pages)
    views.key.put((pages[indices], heads), codes_of(keys[heads, indices], views.key.scheme))
