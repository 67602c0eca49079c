"""The operations that a model is made of, as plain functions; each picks the fastest version there is for its tensors.

| operation      | what it does                                 | torch     | C, on CPU      | Triton, on CUDA |
|----------------|----------------------------------------------|-----------|----------------|-----------------|
| `rms_norm`     | x / rms(x) * weight                          | reference | bf16, fp32     | all floats      |
| `add_rms_norm` | the same after adding the residual           | reference | bf16, fp32     | all floats      |
| `layer_norm`   | (x - mean) / deviation * weight + bias       | reference | -              | -               |
| `rotary_`      | rotate queries and keys by position          | reference | bf16, fp32     | all floats      |
| `activate`     | activation by name                           | reference | -              | -               |
| `gated`        | activation(gate) * up                        | reference | silu, gelu     | silu, gelu tanh |

Layers that carry state or a layout have rooms of their own: `attention`, `linear`, `experts`, `head`, `sampling`.
Triton versions are in `kernels.gpu` and imported when the first tensor on a CUDA device comes by. Some linears want
quantized inputs: norms and gates quantize in the same launch (`quantized_rms_norm`, `quantized_gated`).
Shapes: T tokens, K features, H heads, D channels of a head, R channels that rotate, I width of the feed-forward layer.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels.cpu import ops as on_cpu
from quantkit.kernels.reference import block as reference
from quantkit.kernels.types import ActivationQuantization, QuantizedActivations


def _kernels(x: Tensor) -> ModuleType:
    """The fast versions for a tensor's device; each gives None where it is not for what it was given."""
    if not x.is_cpu and gpu.is_used(x.device):
        from quantkit.kernels.gpu import ops as on_gpu

        return on_gpu
    return on_cpu


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
    normed: Tensor | None = _kernels(x).rms_norm(x, weight, eps, offset)
    return reference.rms_norm(x, weight, eps, offset=offset) if normed is None else normed


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
    both: tuple[Tensor, Tensor] | None = _kernels(x).add_rms_norm(x, residual, weight, eps, offset)
    return reference.add_rms_norm(x, residual, weight, eps, offset=offset) if both is None else both


def quantized_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    offset: float,
    quantization: ActivationQuantization,
) -> tuple[Tensor | QuantizedActivations, Tensor]:
    """`rms_norm` or `add_rms_norm`, its outputs quantized to 8 bits in the same launch where there is a kernel for it.

    Args:
        x, weight, eps, offset: see `rms_norm`.
        residual: as x, or None.
        quantization: of the outputs, after they have been rounded to the dtype of x.
    Returns:
        normed: quantized, or not, which the linears that read it do then.
        total: x + residual.
    """
    if gpu.is_used(x.device):
        from quantkit.kernels.gpu import ops as on_gpu

        both = on_gpu.quantized_rms_norm(x, residual, weight, eps, offset, quantization)
        if both is not None:
            return both
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
    if _kernels(query).rotary_(query, key, cos, sin, interleaved):
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
    opened: Tensor | None = _kernels(gate_up).gated(gate_up, activation)
    return reference.gated(gate_up, activation) if opened is None else opened


def quantized_gated(
    gate_up: Tensor, activation: str, quantization: ActivationQuantization
) -> Tensor | QuantizedActivations:
    """`gated`, its outputs quantized to 8 bits in the same launch where there is a kernel for it.

    Args:
        gate_up, activation: see `gated`.
        quantization: of the outputs, after they have been rounded to the dtype of gate_up.
    """
    if gpu.is_used(gate_up.device):
        from quantkit.kernels.gpu import ops as on_gpu

        opened = on_gpu.quantized_gated(gate_up, activation, quantization)
        if opened is not None:
            return opened
    return gated(gate_up, activation)
