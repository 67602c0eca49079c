"""The operations of a model as plain functions; each uses the fastest version available for its tensors.

| operation      | what it does                                 | torch     | C, on CPU      | Triton, on CUDA |
|----------------|----------------------------------------------|-----------|----------------|-----------------|
| `rms_norm`     | x / rms(x) * weight, also for x + residual   | reference | bf16, fp32     | all floats      |
| `rotary_`      | rotate queries and keys by position          | reference | bf16, fp32     | in `attention`  |
| `activate`     | activation by name                           | reference | -              | -               |
| `gated`        | activation(gate) * up                        | reference | silu, gelu     | silu, gelu tanh |
| `gated_linear` | `gated` applied to a linear's outputs        | -         | -              | packed weights  |

Paged attention and linears have their own modules: `attention`, `linear`. Recurrent layers have no faster version than
`reference.recurrence`. `kernels.gpu` holds the Triton versions, which are imported when the first CUDA tensor
arrives. For linears that take quantized inputs, norms and gates quantize in the same launch.
Shapes: T tokens, K features, H heads, D channels of a head, R channels that rotate, I width of the feed-forward layer.
"""

from typing import Any

from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels.cpu import ops as on_cpu
from quantkit.kernels.reference import ops as reference
from quantkit.kernels.reference.ops import activate as activate
from quantkit.kernels.types import ActivationQuantization, Linear


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
