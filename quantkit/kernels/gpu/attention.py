"""Paged attention of a layer on a CUDA device, in up to four launches.

The first launch normalizes, rotates and stores heads. The second computes attention for sequences with one new token,
the third for sequences with several. If keys are quantized per channel, the fourth stores them, together with values
that are quantized per token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels.gpu import kv_store, page_store, paged_attention, power_of_two
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.reference.attention import attend, store_residuals
from quantkit.kernels.reference.kv_codes import is_turned
from quantkit.kernels.types import Angles, AttentionOptions, ForwardBatch, PagedAttention, States

_LARGEST_HEAD = 256
_LARGEST_TURNED = 128  # rotating values back needs a square matrix of the head's width in shared memory


def can(views: KVViews) -> bool:
    """Whether the kernels support these pages. They do not for float32 models, which need exact results from torch."""
    layout, size = views.layout, views.layout.page_size
    pages = 16 <= size <= 256 and power_of_two(size) == size
    narrow = layout.dtype in (torch.bfloat16, torch.float16)
    most = _LARGEST_TURNED if is_turned(layout.scheme.value) else _LARGEST_HEAD
    return pages and narrow and layout.head_dim <= most


class TritonAttention:
    """Attention of one layer, see `types.PagedAttention`. The kernels read lengths on the device.

    Args:
        views: pages of the layer.
        otherwise: attention to use if Triton refuses a kernel; None = there is none.
    """

    is_capturable = True

    def __init__(self, views: KVViews, otherwise: PagedAttention | None = None) -> None:
        self._views, self._otherwise = views, otherwise

    def __call__(
        self, states: States, batch: ForwardBatch, options: AttentionOptions, angles: Angles | None = None
    ) -> Tensor:
        # Kernels need contiguous channels; tokens and heads may have any strides.
        query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in states)
        states, views = (query, key, value), self._views
        # A fixed batch cannot fall back to torch, which reads lengths on the host.
        otherwise = None if batch.is_fixed else self._otherwise
        attempt: Callable[..., Any] = partial(gpu.attempt, "attention", query.device)
        if otherwise is None:
            attempt = lambda launch, *arguments: launch(*arguments)  # noqa: E731
        if len(key) and attempt(kv_store.enter, states, views, batch, options, angles) is None and otherwise:
            return otherwise(states, batch, options, angles)
        out: Tensor | None = attempt(_attend, states, views, batch, options)
        if out is None:
            out = attend(states, views, batch, options)
        if len(key) and views.residuals and attempt(page_store.store_waiting, key, value, views, batch) is None:
            store_residuals(key, value, views, batch)
        return out


def _attend(states: States, views: KVViews, batch: ForwardBatch, options: AttentionOptions) -> Tensor:
    out = states[0].new_empty(states[0].shape)
    if any(new == 1 for new in batch.query_lengths):
        paged_attention.attend(states, views, batch, options, out, single=True)
    if any(new > 1 for new in batch.query_lengths):
        paged_attention.attend(states, views, batch, options, out, single=False)
    return out
