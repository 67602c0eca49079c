"""What cuBLAS multiplies in 8 bits through torch, and which shapes it takes.

Shapes: T tokens, N outputs, K inputs.
"""

import torch
from torch import Tensor

from quantkit.kernels.types import LinearSource
from quantkit.numerics.tensor import QuantizedTensor

# torch._int_mm on CUDA takes more than 16 rows and multiples of 8.
_INT_MM_ROWS = 32


def fits_int_mm(weight: QuantizedTensor) -> bool:
    """Whether `torch._int_mm` takes a weight (N, K) of this shape on CUDA."""
    return weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0


def int_mm_rows(count: int) -> int:
    """The rows of inputs that `torch._int_mm` wants in place of `count`; what is in the added ones does not matter."""
    return max(_INT_MM_ROWS, -(-count // 8) * 8)


def is_int8_by_output(weight: QuantizedTensor, inputs: str) -> bool:
    """Whether a weight and inputs of this number type are INT8 with scales that can wait until their sums are there."""
    is_int8 = inputs == weight.scheme.dtype.name == "int8"
    return is_int8 and weight.zero_point is None and weight.scale.shape[1] == 1


def fits_scaled_mm(source: LinearSource) -> bool:
    """Whether the device multiplies FP8 by FP8 with one scale per row on each side (compute capability 8.9 on)."""
    weight, activation = source.weight, source.activation
    return (
        source.device.type == "cuda"
        and activation is not None
        and activation.dtype.name == weight.scheme.dtype.name == "fp8"
        and weight.scale.shape[1] == 1
        and source.dtype == torch.bfloat16
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 16 == 0
        and torch.cuda.get_device_capability(source.device) >= (8, 9)
    )


def scaled_mm(codes: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Inputs times a weight, both FP8.

    Args:
        codes: (T, K) e4m3.
        row_scale: (T, 1) float32.
        weight: (N, K) e4m3, contiguous; cuBLAS reads it as a column-major (K, N).
        scale: (N,) or (N, 1) float32.
        bias: (N,) bfloat16 or None.
    Returns:
        (T, N) bfloat16.
    """
    return torch._scaled_mm(
        codes,
        weight.t(),
        scale_a=row_scale,
        scale_b=scale.view(1, -1),
        bias=bias,
        out_dtype=torch.bfloat16,
    )
