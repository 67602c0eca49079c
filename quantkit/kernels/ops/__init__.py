"""The operations of a model as plain functions; each uses the fastest version available for its tensors.

| operation      | what it does                                 | torch     | C, on CPU      | Triton, on CUDA |
|----------------|----------------------------------------------|-----------|----------------|-----------------|
| `rms_norm`     | x / rms(x) * weight, also for x + residual   | reference | bf16, fp32     | all floats      |
| `rotary_`      | rotate queries and keys by position          | reference | bf16, fp32     | in `attention`  |
| `activate`     | activation by name                           | reference | -              | -               |
| `gated`        | activation(gate) * up                        | reference | silu, gelu     | silu, gelu tanh |
| `gated_linear` | `gated` applied to a linear's outputs        | -         | -              | packed weights  |

`paged_attention` chooses the attention kernel of a layer once, when the layer's pages are allocated. On CUDA, Triton's
kernels normalize, rotate, attend and store. Elsewhere, `Stepwise` normalizes and rotates, and C or plain torch does the
rest. A checkpoint may require a Hadamard rotation of queries and keys before keys are stored.

Linears have their own module, `linear`. Recurrent layers have no faster version than `reference.recurrence`.
`kernels.gpu` holds the Triton versions; it is imported when the first CUDA tensor arrives. If the next linear takes
quantized inputs, norms and gates quantize their outputs in the same launch.
Shapes: T tokens, K features, H heads, D channels of a head, R channels that rotate, I width of the feed-forward layer.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels.cpu import attention as cpu_attention
from quantkit.kernels.cpu import ops as on_cpu
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.reference import ops as reference
from quantkit.kernels.reference.attention import TorchAttention
from quantkit.kernels.reference.ops import activate as activate
from quantkit.kernels.types import (
    ActivationQuantization,
    Angles,
    AttentionOptions,
    ForwardBatch,
    Linear,
    PagedAttention,
    States,
)
from quantkit.numerics.kv_cache import hadamard


def _on_gpu(x: Tensor) -> Any:
    """Return the module of Triton versions, each of which returns None for tensors that it does not support.

    Return None if Triton does not handle the device of this tensor.
    """
    return None if x.is_cpu else gpu.module("ops", x.device)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    residual: Tensor | None = None,
    quantization: ActivationQuantization | None = None,
) -> tuple[Tensor, Tensor]:
    """Divide x, or x + residual, by its root mean square and multiply by the weight; computed in float32, rounded once.

    Args:
        x: (..., K); not modified.
        weight: (K,).
        eps: added to the mean square.
        offset: added to the weight; 1.0 for models that store weights around zero.
        residual: like x, or None.
        quantization: quantization of the outputs after rounding to the dtype of x; None = no quantization.
    Returns:
        normed: like x. With a quantization: `QuantizedActivations` if a kernel supports that; otherwise like x, and the
            linears that read `normed` quantize it.
        total: x + residual, the next residual; x if there is no residual.
    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
    """
    both: tuple[Tensor, Tensor] | None
    if (kernels := _on_gpu(x)) is not None:
        both = gpu.attempt("ops", x.device, kernels.rms_norm, x, weight, eps, offset, residual, quantization)
    else:
        both = on_cpu.rms_norm(x, weight, eps, offset, residual)
    return reference.rms_norm(x, weight, eps, offset, residual) if both is None else both


def rotary_(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first R channels by angles that grow with position, in place.

    Args:
        query: (T, Hq, D), may be a slice of a larger tensor; modified.
        key: (T, Hkv, D), may be a slice too; modified.
        cos, sin: (T, R/2) float32, for each token's position.
        interleaved: whether pairs are channels (2i, 2i + 1) instead of (i, i + R/2).
    Returns:
        query, key: the tensors given.
    Source: Su et al. 2021, RoFormer.
    """
    if on_cpu.rotary_(query, key, cos, sin, interleaved):
        return query, key
    return reference.rotary_(query, key, cos, sin, interleaved=interleaved)


def gated(gate_up: Tensor, activation: str, quantization: ActivationQuantization | None = None) -> Tensor:
    """Compute activation(gate) * up.

    Args:
        gate_up: (T, 2I), gate first; not modified.
        activation: a key of `reference.ops.ACTIVATIONS`.
        quantization: quantization of the outputs, see `rms_norm`.
    Returns:
        (T, I), dtype of gate_up; or quantized, see `rms_norm`.
    """
    opened: Tensor | None
    if (kernels := _on_gpu(gate_up)) is not None:
        opened = gpu.attempt("ops", gate_up.device, kernels.gated, gate_up, activation, quantization)
    else:
        opened = on_cpu.gated(gate_up, activation)
    return reference.gated(gate_up, activation) if opened is None else opened


def gated_linear(up: Linear, x: Tensor, activation: str, quantization: ActivationQuantization | None = None) -> Tensor:
    """Apply `gated` to a linear's outputs, in the same launch if the kernel of the linear supports that.

    Args:
        up: linear from (T, K) to (T, 2I), gate first.
        x: (T, K), or quantized if `up` takes quantized inputs.
        activation, quantization: see `gated`.
    """
    opened = up.gated(x, activation) if quantization is None and isinstance(x, Tensor) else None
    return gated(up(x), activation, quantization) if opened is None else opened


class Stepwise:
    """Attention with separate operations for norm and rotation; see `PagedAttention`.

    Args:
        inner: computes attention, and stores keys and values; takes all arguments except the angles.
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
            query, _ = rms_norm(query, norms.query, norms.eps, norms.offset)
            key, _ = rms_norm(key, norms.key, norms.eps, norms.offset)
        if angles is not None:
            rotary_(query, key, *angles, interleaved=options.interleaved)
        if self.matrix is not None:
            query, key = ((one.float() @ self.matrix).to(one.dtype) for one in (query, key))
        return self.inner((query, key, value), batch, options)


def paged_attention(views: KVViews) -> PagedAttention:
    """Return the fastest attention that supports the pages of a layer."""
    if views.layout.rope_dim or views.layout.sinks:
        return Stepwise(TorchAttention(views))  # no other kernel supports these
    on_gpu, fused = gpu.module("attention", views.pool.device), None
    if on_gpu and on_gpu.can(views):
        fused = on_gpu.TritonAttention(views, otherwise=Stepwise(TorchAttention(views)))
    is_rotated = views.layout.scheme.rotation != "none"
    # Triton's kernels normalize and rotate; only a multiplication by a matrix must be done separately.
    if fused is not None and not is_rotated:
        return cast(PagedAttention, fused)
    inner = fused or (cpu_attention.NativeAttention if cpu_attention.is_available(views) else TorchAttention)(views)
    return Stepwise(inner, _rotation(views.layout.head_dim, views.pool.device) if is_rotated else None)


@functools.cache
def _rotation(width: int, device: torch.device) -> Tensor:
    """Return the Hadamard matrix (width, width), which all layers share."""
    return hadamard(width).to(device)
