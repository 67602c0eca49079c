"""Paged attention of a layer on a CUDA device: what comes before it in one launch, then sequences with one new token,
and those with more, each in one."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import kv_store, paged_decode, paged_prefill, power_of_two
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.reference.attention import store_residuals
from quantkit.kernels.types import Angles, AttentionOptions, States

_LARGEST_HEAD = 256


def can(views: KVViews) -> bool:
    """Whether the kernels are for these pages; models in float32 are there to be exact, not fast."""
    layout, size = views.layout, views.layout.page_size
    pages = 16 <= size <= 256 and power_of_two(size) == size
    narrow = layout.dtype in (torch.bfloat16, torch.float16)
    return pages and narrow and layout.head_dim <= _LARGEST_HEAD


class TritonAttention:
    """Attention of one layer, as `types.PagedAttention`; of a decode step it reads only what is on the device."""

    is_capturable = True

    def __init__(self, views: KVViews) -> None:
        self._views = views

    def __call__(
        self, states: States, batch: ForwardBatch, options: AttentionOptions, angles: Angles | None = None
    ) -> Tensor:
        views = self._views
        query, key, value = (_contiguous(one) for one in states)
        states = query, key, value
        out = query.new_empty(query.shape)
        if len(key):
            kv_store.enter(states, views, batch, options, angles)
        if any(new == 1 for new in batch.query_lengths):
            paged_decode.attend_tokens(states, views, batch, options, out)
        if any(new > 1 for new in batch.query_lengths):
            paged_prefill.attend_chunks(states, views, batch, options, out)
            if views.key_residual is not None:
                store_residuals(key, views, batch, least=2)
        return out


def _contiguous(states: Tensor) -> Tensor:
    """Channels contiguous, as the kernels read them."""
    return states if states.stride(-1) == 1 else states.contiguous()
