"""Linears over packed weights of 2 to 8 bits on a CUDA device: which kernel for how many rows.

Shapes: T tokens, N outputs, K inputs.
"""

from torch import Tensor
from torch.nn import functional

from quantkit.kernels.gpu import attempt, packing, w4a16
from quantkit.kernels.gpu.gates import GATES
from quantkit.kernels.types import LinearFacts, LinearSource, nbytes


class PackedLinear(LinearFacts):
    """Integer weights of 2 to 8 bits, FP8 and FP4, 16-bit inputs.

    Few rows are multiplied with the packed weight; for more, where nothing is to be won by that, it is dequantized into
    memory that lives as long as the product, which is then that of cuBLAS.
    """

    def __init__(self, source: LinearSource) -> None:
        self.packed = packing.pack(source.weight, source.device)
        self.bias = source.bias_in(source.dtype)
        self._dtype = source.dtype
        num_bytes = self.packed.num_bytes + nbytes(self.bias)
        super().__init__(source.weight.shape, num_bytes, f"{source.weight.scheme.describe()} (Triton)")

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        inputs = x.to(self._dtype).contiguous()
        if w4a16.is_best(self.packed, len(x), x.device):
            product = attempt("quantized_linear", x.device, w4a16.multiply, inputs, self.packed, self.bias)
            if product is not None:
                return product.to(x.dtype)
        return functional.linear(inputs, w4a16.dequantize_weight(self.packed, self._dtype), self.bias).to(x.dtype)

    def gated(self, x: Tensor, activation: str) -> Tensor | None:
        """`ops.gated` of the product, in its launch; None where that takes two."""
        # cuBLAS has no gates, so with it they are a launch of their own whoever asks.
        if activation not in GATES or len(x) == 0 or not w4a16.is_best(self.packed, len(x), x.device):
            return None
        inputs = x.to(self._dtype).contiguous()
        opened = attempt("quantized_linear", x.device, w4a16.multiply, inputs, self.packed, self.bias, activation)
        return None if opened is None else opened.to(x.dtype)

    def logits(self, x: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor] | None:
        """`w4a16.multiply_head`; None where the weight would be dequantized for so many rows."""
        if not w4a16.is_best(self.packed, len(x), x.device):
            return None
        return w4a16.multiply_head(x.to(self._dtype).contiguous(), self.packed, self.bias, scale, softcap)
