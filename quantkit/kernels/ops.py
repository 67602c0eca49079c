"""The operations that a model is made of, as plain functions; each picks the fastest version there is for its tensors.

| operation      | what it does                                 | torch     | C, on CPU      | Triton, on CUDA |
|----------------|----------------------------------------------|-----------|----------------|-----------------|
| `rms_norm`     | x / rms(x) * weight                          | reference | bf16, fp32     | all floats      |
| `add_rms_norm` | the same after adding the residual           | reference | bf16, fp32     | all floats      |
| `layer_norm`   | (x - mean) / deviation * weight + bias       | reference | -              | -               |
| `rotary_`      | rotate queries and keys by position          | reference | bf16, fp32     | all floats      |
| `activate`     | activation by name                           | reference | -              | -               |
| `gated`        | activation(gate) * up                        | reference | silu, gelu     | silu, gelu tanh |
| `attention`    | norm and rotate heads, attend to cached and  | attention | bf16, fp32;    | bf16, fp16;     |
|                | fresh tokens, quantize those into pages      |           | all KV types   | all KV types    |

Triton versions are in `kernels/triton` and imported when the first tensor on a CUDA device comes by.
Linear layers have layouts of their own and live in `linear`, mixtures of experts in `experts`; some linears
want their inputs rounded, which norms and gates do in the same launch (`rounded_rms_norm`, `rounded_gated`).
Shapes: T tokens, K features, H heads, D channels of a head, R channels that rotate, I width of the feed-forward layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from quantkit.kernels import gpu, reference
from quantkit.kernels.attention import AttentionOptions, HeadNorms, RotatedAttention, TorchAttention
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.cpu import ops as _native_ops
from quantkit.kernels.cpu.attention import NativeAttention
from quantkit.kernels.cpu.attention import is_available as _has_native_attention
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.quantized_activations import RoundedRows, Rounding
from quantkit.numerics.kv_cache import hadamard

__all__ = [
    "Angles",
    "AttentionOptions",
    "HeadNorms",
    "PagedAttention",
    "Stepwise",
    "activate",
    "add_rms_norm",
    "attention",
    "gated",
    "layer_norm",
    "rms_norm",
    "rotary_",
    "rounded_gated",
    "rounded_rms_norm",
]


Angles = tuple[Tensor, Tensor]
"""Cosine and sine (T, R/2) float32 of each new token."""


class PagedAttention(Protocol):
    """Attention of one layer, bound to its pages."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: ForwardBatch,
        options: AttentionOptions,
        angles: Angles | None = None,
    ) -> Tensor:
        """Norm and rotate queries and keys, attend to the cache and to each other, store keys and values in it.

        Args:
            query: (T, Hq, D), may be a slice of a larger tensor; modified where it is normed or rotated.
            key: (T, Hkv, D), likewise; Hkv divides Hq.
            value: (T, Hkv, Dv).
            batch: what belongs to whom; its page table covers all tokens, new ones included.
            options: scale, window, norms and the like.
            angles: to rotate by, see `rotary_`; None = not at all.
        Returns:
            (T, Hq, Dv), dtype of query.
        """
        ...


class Stepwise:
    """Attention that norms and rotates first, each by its own operation; see `PagedAttention`.

    Args:
        inner: attends and stores; takes all arguments but the angles.
    """

    def __init__(self, inner: Callable[..., Tensor]) -> None:
        self.inner = inner

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: ForwardBatch,
        options: AttentionOptions,
        angles: Angles | None = None,
    ) -> Tensor:
        """See `PagedAttention`."""
        norms = options.norms
        if norms is not None:
            query = rms_norm(query, norms.query, norms.eps, offset=norms.offset)
            key = rms_norm(key, norms.key, norms.eps, offset=norms.offset)
        if angles is not None:
            rotary_(query, key, angles[0], angles[1], interleaved=options.interleaved)
        return self.inner(query, key, value, batch, options)


def attention(views: KVViews) -> PagedAttention:
    """The fastest attention for a layer's pages; chosen once, when they are allocated."""
    found = _on_gpu(views)
    turned = views.layout.scheme.rotation != "none"
    if found is not None and not turned:
        return found
    inner: Callable[..., Tensor] = found or (NativeAttention if _has_native_attention(views) else TorchAttention)(views)
    if turned:
        inner = RotatedAttention(inner, _rotation(views.layout.head_dim, views.pool.device))
    return Stepwise(inner)


@functools.cache
def _rotation(width: int, device: torch.device) -> Tensor:
    """One matrix for all layers."""
    return hadamard(width).to(device)


def _on_gpu(views: KVViews) -> PagedAttention | None:
    if gpu.is_used(views.pool.device):
        from quantkit.kernels.gpu import attention as on_gpu

        if on_gpu.can(views):
            return on_gpu.TritonAttention(views)
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Divide by the root mean square and scale; computed in float32, rounded once.

    Args:
        x: (..., K); not modified.
        weight: (K,).
        eps: added to the mean square.
        offset: added to the weight, 1.0 for models that store it around zero.
    Returns:
        As x.
    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
    """
    if not x.is_cpu and gpu.is_used(x.device):
        from quantkit.kernels.gpu import norms

        found = norms.rms_norm(x, weight, eps, offset)
        if found is not None:
            return found[0]
    out = _native_ops.rms_norm(x, weight, eps, offset)
    return reference.rms_norm(x, weight, eps, offset=offset) if out is None else out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Subtract the mean, divide by the deviation, scale and shift.

    Args:
        x: (..., K); not modified.
        weight, bias: (K,), or None for 1 and 0.
        eps: added to the variance.
    Returns:
        As x.
    """
    return reference.layer_norm(x, weight, bias, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x + residual, and that sum, which is the next residual.

    Args:
        x, residual: (..., K), same shape and dtype; not modified.
        weight, eps, offset: see `rms_norm`.
    Returns:
        normed, total: both as x.
    """
    if not x.is_cpu and gpu.is_used(x.device):
        from quantkit.kernels.gpu import norms

        found = norms.rms_norm(x, weight, eps, offset, residual)
        if found is not None:
            return found
    out = _native_ops.add_rms_norm(x, residual, weight, eps, offset)
    return reference.add_rms_norm(x, residual, weight, eps, offset=offset) if out is None else out


def rounded_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, offset: float, rounding: Rounding
) -> tuple[Tensor | RoundedRows, Tensor]:
    """`rms_norm` or `add_rms_norm`, its outputs rounded to 8 bits in the same launch where there is a kernel for it.

    Args:
        x, weight, eps, offset: see `rms_norm`.
        residual: as x, or None.
        rounding: of the outputs, after they have been rounded to the dtype of x.
    Returns:
        normed: rounded, or not, which the linears that read it do then.
        total: x + residual.
    """
    if gpu.is_used(x.device):
        from quantkit.kernels.gpu import norms

        found = norms.rounded_rms_norm(x, weight, eps, offset, residual, rounding)
        if found is not None:
            return found
    if residual is None:
        return rms_norm(x, weight, eps, offset=offset), x
    return add_rms_norm(x, residual, weight, eps, offset=offset)


def rotary_(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first R channels by angles that grow with position. In place.

    Args:
        query: (T, Hq, D), may be a slice of a larger tensor; modified.
        key: (T, Hkv, D), likewise.
        cos, sin: (T, R/2) float32, of each token's position.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, i + R/2).
    Returns:
        query, key: the tensors given.
    Source: Su et al. 2021, RoFormer.
    """
    if not query.is_cpu and gpu.is_used(query.device):
        from quantkit.kernels.gpu import norms

        if norms.rotary_(query, key, cos, sin, interleaved):
            return query, key
    if not interleaved and _native_ops.rotary_(query, key, cos, sin):
        return query, key
    return reference.rotary_(query, key, cos, sin, interleaved=interleaved)


def activate(x: Tensor, activation: str) -> Tensor:
    """Activation of a feed-forward layer without a gate.

    Args:
        x: any shape; not modified.
        activation: name as in config.json.
    Raises:
        ModelError: no such activation.
    """
    return reference.activate(x, activation)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up.

    Args:
        gate_up: (T, 2I), gate first; not modified.
        activation: name as in config.json.
    Returns:
        (T, I), dtype of gate_up.
    Raises:
        ModelError: no such activation.
    """
    if not gate_up.is_cpu and gpu.is_used(gate_up.device):
        from quantkit.kernels.gpu import norms

        found = norms.gated(gate_up, activation)
        if found is not None:
            return found
    out = _native_ops.gated(gate_up, activation)
    return reference.gated(gate_up, activation) if out is None else out


def rounded_gated(gate_up: Tensor, activation: str, rounding: Rounding) -> Tensor | RoundedRows:
    """`gated`, its outputs rounded to 8 bits in the same launch where there is a kernel for it.

    Args:
        gate_up, activation: see `gated`.
        rounding: of the outputs, after they have been rounded to the dtype of gate_up.
    """
    if gpu.is_used(gate_up.device):
        from quantkit.kernels.gpu import norms

        found = norms.rounded_gated(gate_up, activation, rounding)
        if found is not None:
            return found
    return gated(gate_up, activation)
