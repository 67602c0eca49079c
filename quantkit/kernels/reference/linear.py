"""The product with a dequantized weight, and inputs rounded to the values of their number type.

Shapes: T tokens, N outputs, K inputs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.kernels.types import LinearFacts, nbytes
from quantkit.numerics.scheme import ActivationScheme


class DenseLinear(LinearFacts):
    """Reference: the dequantized weight and torch's GEMM, on any device, in any dtype.

    Args:
        weight: (N, K) in the dtype of the computation; kept, not copied.
        bias: (N,) or None.
        description: for tables.
    """

    def __init__(self, weight: Tensor, *, bias: Tensor | None, description: str) -> None:
        super().__init__(weight.shape, nbytes(weight, bias), description)
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


def quantize_tokens(x: Tensor, scheme: ActivationScheme) -> tuple[Tensor, Tensor]:
    """Codes and scales of `fake_quantize_inputs`, a scale per token.

    Args:
        x: (T, K) float; not modified.
        scheme: number type.
    Returns:
        codes: (T, K) float32; a row that holds a NaN or an infinity has codes 0.
        scale: (T, 1) float32; NaN for such a row, so that its outputs are NaN.
    """
    kind = scheme.dtype
    single = x.float()
    scale = single.abs().amax(dim=-1, keepdim=True) / kind.half_range
    finite = scale.isfinite()
    # Of a row of zeros, where 0 / 0 would be NaN.
    scale = torch.where(finite & (scale == 0), torch.finfo(torch.float32).eps, scale)
    codes = torch.where(finite, single / scale, 0.0).clamp_(kind.minimum, kind.maximum)
    codes = codes.round_() if kind.kind == "int" else codes.to(kind.storage).float()
    return codes, torch.where(finite, scale, torch.nan)
