"""Paged attention of a layer on a CUDA device: what comes before it in one launch, then sequences with one new token,
and those with more, each in one; last the latter's keys, where those are quantized per channel."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import kv_store, paged_decode, paged_prefill, power_of_two, residual_store
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.reference.attention import attend, store_residuals
from quantkit.kernels.types import Angles, AttentionOptions, PagedAttention, States

_LARGEST_HEAD = 256


def can(views: KVViews) -> bool:
    """Whether the kernels are for these pages; models in float32 are there to be exact, not fast."""
    layout, size = views.layout, views.layout.page_size
    pages = 16 <= size <= 256 and power_of_two(size) == size
    narrow = layout.dtype in (torch.bfloat16, torch.float16)
    return pages and narrow and layout.head_dim <= _LARGEST_HEAD


class TritonAttention:
    """Attention of one layer, as `types.PagedAttention`; of a decode step it reads only what is on the device.

    Args:
        views: the layer's pages.
        otherwise: does it where Triton refuses; None = nothing does.
    """

    is_capturable = True

    def __init__(self, views: KVViews, otherwise: PagedAttention | None = None) -> None:
        self._views, self._otherwise = views, otherwise

    def __call__(
        self, states: States, batch: ForwardBatch, options: AttentionOptions, angles: Angles | None = None
    ) -> Tensor:
        # Kernels read channels as neighbours; tokens and heads may have any strides.
        query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in states)
        states, views = (query, key, value), self._views
        # A fixed batch cannot be left to torch, which asks the host.
        otherwise = None if batch.is_fixed else self._otherwise
        attempt = partial(_launch if otherwise is None else gpu.attempt, "attention", query.device)
        if len(key) and attempt(kv_store.enter, states, views, batch, options, angles) is None and otherwise:
            return otherwise(states, batch, options, angles)
        out = attempt(_attend, states, views, batch, options)
        if out is None:
            out = attend(states, views, batch, options)
        has_chunks = views.key_residual is not None and any(new > 1 for new in batch.query_lengths)
        if has_chunks and attempt(residual_store.store_chunks, key, views, batch) is None:
            store_residuals(key, views, batch, least=2)
        return out


def _launch(family: str, device: torch.device, launch: Callable[..., Any], *arguments: Any) -> Any:
    """`gpu.attempt` of what nothing else can do."""
    return launch(*arguments)


def _attend(states: States, views: KVViews, batch: ForwardBatch, options: AttentionOptions) -> Tensor:
    out = states[0].new_empty(states[0].shape)
    if any(new == 1 for new in batch.query_lengths):
        paged_decode.attend_tokens(states, views, batch, options, out)
    if any(new > 1 for new in batch.query_lengths):
        paged_prefill.attend_chunks(states, views, batch, options, out)
    return out
