"""The KV cache: one pool of pages per layer, and what attention does with it. It knows pages, not sequences.

Which page belongs to whom, reference counts and prefix sharing are the business of `pages` and `prefix_cache`.

Compaction moves tokens within a sequence's pages, so that the pages that it gives up hold nothing that it keeps. Every
head of every layer keeps as many tokens as any other, but each its own. The pages that go are the same for all,
so a head moves what it keeps of these to where it evicted others; nothing else moves. Pages of 3, the second goes:

    slots                     [a b c | d e f | g h i | k]
    evicted by one head              [b, e, g]              d and f survive in the page that goes, b and g leave holes
    after                     [a d c | f h i | k]

Keys were rotated by their position, and what a cache holds is older than every query: the order does not matter. Only
sliding windows ask for it, and there the oldest page goes as it is. What is stored for a token moves as it is, but for
keys that share a scale with others of their page and head: pages that change are rounded once more.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import ResourceError
from quantkit.kernels.layouts import EntryLayout, KVLayout, KVViews, Layout, StateLayout, page_bytes, residual_bytes
from quantkit.kernels.ops.attention import paged_attention
from quantkit.kernels.reference.attention import page_keys
from quantkit.kernels.reference.kv_codes import codes_of
from quantkit.runtime.cache.non_paged import EntryPool, StatePool

Array = np.ndarray[Any, Any]


class KVCache:
    """Pages of all layers. *Mutable*: attention stores what it is given.

    Rules for whoever hands out pages and builds batches:

    - Tokens of a sequence that precede this step (context length - query length) must all be valid. A later step may
      write positions again that an earlier one wrote (rejected drafts), up to `MAX_ROLLBACK` tokens before the furthest
      position written; nothing needs to be told, shorter context lengths say it.
    - A page is final, and may be published to the prefix cache, once all its tokens are accepted: pages before
      accepted_tokens // page_size. There is nothing to flush: a page is quantized in the step that completes it, and
      again if some of those tokens are taken back.
    - A page that others may read is never written: a sequence that starts from shared pages starts at a page border.
    - `batch.residual_rows` must be the same row for a sequence from its first token on (after a preemption, from the
      recomputed first token on) and not be shared by two running sequences. A sequence that starts from shared pages
      needs nothing in it.
    - Pages need no clearing: what lies in slots past a sequence's end is never used, whatever its bits.

    Args:
        layouts: one per layer, same page size.
        num_pages: pages of each layer.
        max_sequences: rows of the residual windows.
        device: where the pools live.
    Attributes:
        attention: by number of the layer: of its new tokens to what is cached and to each other; then they are cached
            too.
        states: by number of the layer: of recurrent layers, which have no pages.
        entries: by number of the layer: of layers whose entries each stand for several tokens.
    Raises:
        ResourceError: the memory is not there; the message gives the bytes.
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
            # Plain bytes: a page holds codes and scales of several types, which the layout's views give their dtypes.
            self._pools = [
                torch.empty(num_pages, layout.page_bytes, dtype=torch.uint8, device=self.device)
                for layout in paged.values()
            ]
            self._residuals = [self._residual(layout) for layout in paged.values()]
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
                f"a KV cache of {num_pages} pages needs {needed / 2**20:.0f} MiB on {self.device}, which are not free; "
                "lower num_pages or memory, or use a smaller KV type"
            ) from error
        parts = zip(paged.items(), self._pools, self._residuals, strict=True)
        self._views = {n: layout.views(pool, residual) for (n, layout), pool, residual in parts}
        self.attention = {n: paged_attention(views) for n, views in self._views.items()}

    def _residual(self, layout: KVLayout) -> Tensor | None:
        if not layout.has_residual:
            return None
        # A scale per channel spans a page, so keys wait here unquantized until their page is complete.
        shape = (self.max_sequences, layout.num_heads, layout.residual_tokens, layout.head_dim)
        return torch.empty(shape, dtype=layout.dtype, device=self.device)

    @property
    def is_capturable(self) -> bool:
        """Whether attention of a decode step reads all that changes from step to step on the device."""
        return all(getattr(attention, "is_capturable", False) for attention in self.attention.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(pool.nbytes for pool in self._pools) + sum(pool.num_page_bytes for pool in self.entries.values())

    @property
    def residual_bytes(self) -> int:
        """Bytes of what each sequence has beside its pages: its newest keys and its states."""
        windows = sum(residual.nbytes for residual in self._residuals if residual is not None)
        rows = sum(pool.num_bytes for pool in self.states.values())
        return windows + rows + sum(pool.num_bytes for pool in self.entries.values())

    def keys_of(self, pages: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each layer that sees a whole sequence, and the keys in its complete pages.

        See `Policy.scores` for their shape.
        """
        numbers = torch.tensor(pages, device=self.device)
        for n, views in self._views.items():
            if not views.layout.is_windowed:
                yield n, page_keys(views, numbers).flatten(1, 2)

    def compact(self, pages: Sequence[int], given_up: range, evicted: Mapping[int, Array]) -> None:
        """Move what stays of the slots that are given up to where tokens are evicted elsewhere; see `fill_holes`.

        Args:
            pages: complete ones of a sequence.
            given_up: slots.
            evicted: (H, len(given_up)) slots, by number of the layer.
        """
        numbers = torch.tensor(pages, device=self.device)
        for n, slots in evicted.items():
            fill_holes(self._views[n], numbers, given_up, torch.from_numpy(slots.astype("int64")).to(self.device))

    def copy_page(self, page: int, copy: int) -> None:
        """Write what a page holds, in all layers, to another."""
        for pool in self._pools:
            pool[copy] = pool[page]

    def move_up(self, row: int, count: int) -> None:
        """The newest tokens of a sequence are from now on so many places nearer to its beginning: pages were evicted.

        Args:
            row: of the residual windows.
            count: tokens.
        """
        for residual in self._residuals:
            if residual is not None:
                residual[row] = residual[row].roll(-count, dims=1)


def lowest(scores: Tensor, candidates: range, count: int) -> Array:
    """Slots of each head's tokens with the lowest scores, (H, count) in order; of equal ones the first go.

    Args:
        scores: (H, N).
        candidates: slots that are asked about, at least `count`.
        count: how many go.
    """
    order = scores[:, candidates.start : candidates.stop].argsort(dim=1, stable=True)[:, :count]
    slots: Array = (order.sort(1).values + candidates.start).cpu().numpy()
    return slots.astype(np.min_scalar_type(candidates.stop))  # many are kept for long


def fill_holes(views: KVViews, pages: Tensor, given_up: range, evicted: Tensor) -> None:
    """Move what each head keeps of the slots that are given up to where it evicts others.

    Args:
        views: of a layer; modified.
        pages: (P,) complete ones of a sequence.
        given_up: slots.
        evicted: (H, len(given_up)) int64, slots.
    """
    size = views.layout.page_size
    holes = torch.zeros(len(evicted), len(pages) * size, dtype=torch.bool, device=pages.device)
    holes.scatter_(1, evicted, True)
    survivors = ~holes
    survivors[:, : given_up.start] = survivors[:, given_up.stop :] = False
    holes[:, given_up.start : given_up.stop] = False
    # Head by head and in order; a head has as many of one as of the other.
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
    """Move keys with a scale per channel, by head and slot; what a page's head then holds is rounded together."""
    keys, (heads, slots), size = page_keys(views, pages), target, views.layout.page_size  # (H, P, S, D)
    keys.flatten(1, 2)[target] = keys.flatten(1, 2)[source]
    changed = torch.unique(heads * len(pages) + slots // size)
    heads, indices = changed // len(pages), changed % len(pages)
    views.key.put((pages[indices], heads), codes_of(keys[heads, indices], views.key.scheme))
