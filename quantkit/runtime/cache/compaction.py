"""Tokens moved within a sequence's pages, so that the pages that it gives up hold nothing that it keeps.

Every head of every layer keeps as many tokens as any other, but each its own. The pages that go are the same for all,
so a head moves what it keeps of these to where it evicted others; nothing else moves. Pages of 3, the second goes:

    slots                     [a b c | d e f | g h i | k]
    evicted by one head              [b, e, g]              d and f survive in the page that goes, b and g leave holes
    after                     [a d c | f h i | k]

Keys were rotated by their position, and what a cache holds is older than every query: the order does not matter. Only
sliding windows ask for it, and there the oldest page goes as it is. What is stored for a token moves as it is, but for
keys that share a scale with others of their page and head: pages that change are rounded once more.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels.layouts import KVViews
from quantkit.kernels.reference.attention import page_keys
from quantkit.kernels.reference.kv_codes import codes_of

Array = np.ndarray[Any, Any]


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
        for array in (side.codes, side.scale, side.zero):
            if array is not None:
                array[end] = array[start]


def _move_keys(views: KVViews, pages: Tensor, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
    """The same for keys with a scale per channel, by head and slot: what a page's head has then is rounded together."""
    keys, (heads, slots), size = page_keys(views, pages), target, views.layout.page_size  # (H, P, S, D)
    keys.flatten(1, 2)[target] = keys.flatten(1, 2)[source]
    changed = torch.unique(heads * len(pages) + slots // size)
    heads, indices = changed // len(pages), changed % len(pages)
    stored = codes_of(keys[heads, indices], views.key.scheme)
    for array, one in zip((views.key.codes, views.key.scale, views.key.zero), stored, strict=True):
        if array is not None and one is not None:
            array[pages[indices], heads] = one
