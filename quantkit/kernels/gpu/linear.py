"""Linears over packed weights of 2 to 8 bits on a CUDA device: which kernel for how many rows.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.kernels.gpu import configs, layout, w4a16
from quantkit.kernels.gpu.choices import Vendor
from quantkit.numerics.tensor import QuantizedTensor


def can(weight: QuantizedTensor) -> bool:
    """Whether a weight can be packed."""
    return layout.find_span(weight) is not None


class PackedLinear:
    """Integer weights of 2 to 8 bits, FP8 and FP4, 16-bit inputs.

    Few rows are multiplied with the packed weight; for more, where nothing is to be won by that, it is decoded into
    memory that lives as long as the product, which is then the vendor's.
    """

    def __init__(
        self, weight: QuantizedTensor, *, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = layout.pack(weight, device)
        self.bias = None if bias is None else bias.to(device, dtype)
        self._dtype = dtype
        self.stored_bytes = self.packed.num_bytes + (0 if self.bias is None else self.bias.nbytes)
        self.description = f"{weight.scheme.describe()} (Triton)"

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        inputs = x.to(self._dtype).contiguous()
        if not isinstance(configs.product(self.packed, len(x), x.device), Vendor):
            return w4a16.multiply(inputs, self.packed, self.bias).to(x.dtype)
        return functional.linear(inputs, w4a16.decode(self.packed, self._dtype), self.bias).to(x.dtype)

    def logits(self, x: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor] | None:
        """`w4a16.multiply_head`; None where the weight would be decoded for so many rows."""
        if isinstance(configs.product(self.packed, len(x), x.device), Vendor):
            return None
        return w4a16.multiply_head(x.to(self._dtype).contiguous(), self.packed, self.bias, scale, softcap)
