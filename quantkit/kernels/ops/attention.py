"""Paged attention of a layer; its kernel is chosen once, when the pages are allocated.

On CUDA, Triton's kernels normalize, rotate, attend and store. Elsewhere, `Stepwise` normalizes and rotates, and C or
plain torch does the rest. A checkpoint may require a Hadamard rotation of queries and keys before keys are stored.
"""

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from quantkit.kernels import gpu, ops
from quantkit.kernels.cpu import attention as on_cpu
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.reference.attention import TorchAttention
from quantkit.kernels.types import Angles, AttentionOptions, ForwardBatch, PagedAttention, States
from quantkit.numerics.kv_cache import hadamard


class Stepwise:
    """Attention with separate operations for norm and rotation; see `PagedAttention`.

    Args:
        inner: attends and stores; takes all arguments except the angles.
        matrix: (D, D) float32, orthogonal: multiplied with queries and keys. Their dot products do not change, but
            outliers of stored keys are spread over all channels. None = no multiplication.
    """

    def __init__(self, inner: Callable[..., Tensor], matrix: Tensor | None = None) -> None:
        self.inner, self.matrix = inner, matrix

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
        if self.matrix is not None:
            query, key = ((one.float() @ self.matrix).to(one.dtype) for one in (query, key))
        return self.inner((query, key, value), batch, options)


def paged_attention(views: KVViews) -> PagedAttention:
    """Return the fastest attention for a layer's pages."""
    if views.layout.rope_dim or views.layout.sinks:
        return Stepwise(TorchAttention(views))  # no other kernel supports these
    on_gpu, fused = gpu.module("attention", views.pool.device), None
    if on_gpu and on_gpu.can(views):
        fused = on_gpu.TritonAttention(views, otherwise=Stepwise(TorchAttention(views)))
    is_rotated = views.layout.scheme.rotation != "none"
    # Triton's kernels normalize and rotate; only a multiplication by a matrix must be done separately.
    if fused is not None and not is_rotated:
        return cast(PagedAttention, fused)
    inner = fused or (on_cpu.NativeAttention if on_cpu.is_available(views) else TorchAttention)(views)
    return Stepwise(inner, _rotation(views.layout.head_dim, views.pool.device) if is_rotated else None)


@functools.cache
def _rotation(width: int, device: torch.device) -> Tensor:
    """Return the Hadamard matrix, shared by all layers."""
    return hadamard(width).to(device)
