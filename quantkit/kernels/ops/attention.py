"""Paged attention of a layer: chosen once, when its pages are allocated.

On CUDA Triton's kernels norm, rotate, attend and store; elsewhere `Stepwise` norms and rotates, and C or plain torch
does the rest. A checkpoint may ask that queries and keys are multiplied with a Hadamard matrix before keys are stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.kernels import gpu, ops
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.cpu import attention as on_cpu
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.reference.attention import RotatedAttention, TorchAttention
from quantkit.kernels.types import Angles, AttentionOptions, PagedAttention, States
from quantkit.numerics.kv_cache import hadamard


class Stepwise:
    """Attention that norms and rotates first, each by its own operation; see `PagedAttention`.

    Args:
        inner: attends and stores; takes all arguments but the angles.
    """

    def __init__(self, inner: Callable[..., Tensor]) -> None:
        self.inner = inner

    def __call__(
        self, states: States, batch: ForwardBatch, options: AttentionOptions, angles: Angles | None = None
    ) -> Tensor:
        query, key, value = states
        norms = options.norms
        if norms is not None:
            query, _ = ops.rms_norm(query, norms.query, norms.eps, norms.offset)
            key, _ = ops.rms_norm(key, norms.key, norms.eps, norms.offset)
        if angles is not None:
            ops.rotary_(query, key, *angles, interleaved=options.interleaved)
        return self.inner((query, key, value), batch, options)


def paged_attention(views: KVViews) -> PagedAttention:
    """The fastest attention for a layer's pages."""
    on_gpu = gpu.module("attention", views.pool.device)
    fused: PagedAttention | None = on_gpu.TritonAttention(views) if on_gpu and on_gpu.can(views) else None
    is_rotated = views.layout.scheme.rotation != "none"
    if fused is not None and not is_rotated:
        return fused
    has_c_kernels = on_cpu.is_available(views)
    inner: Callable[..., Tensor] = fused or (on_cpu.NativeAttention if has_c_kernels else TorchAttention)(views)
    if is_rotated:
        inner = RotatedAttention(inner, _rotation(views.layout.head_dim, views.pool.device))
    return Stepwise(inner)


@functools.cache
def _rotation(width: int, device: torch.device) -> Tensor:
    """One matrix for all layers."""
    return hadamard(width).to(device)
