"""Fine-grained FP8 as DeepSeek and Qwen publish it, for reading: one scale per block of 128 x 128 weights.

    weight             float8_e4m3fn (N, K)
    weight_scale_inv   float32 (ceil(N / 128), ceil(K / 128)); value = code * scale, its name notwithstanding

Inputs are quantized at run time in groups of 128 per token.
Source: transformers `integrations/finegrained_fp8.py`; DeepSeek-V3 `inference/fp8_cast_bf16.py`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from quantkit.errors import SchemeError
from quantkit.formats._tensors import take_matrix
from quantkit.formats._unpacked import with_scales
from quantkit.formats.base import Format, ignored_rules
from quantkit.numerics.dtype import FP8
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor


class FineGrainedFP8(Format):
    """The format itself; a scale is repeated for every row of its block."""

    name: ClassVar[str] = "fp8"
    method: ClassVar[str] = "fp8"
    is_written: ClassVar[bool] = False
    scale_name: ClassVar[str] = "weight_scale_inv"

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        codes = take_matrix(tensors, "weight", scheme.weight.dtype.storage)
        return with_scales(codes, tensors, scheme.weight, self.scale_name)

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        block = section.get("weight_block_size", [128, 128])
        sizes_known = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        if not sizes_known or section.get("activation_scheme", "dynamic") != "dynamic":
            raise SchemeError(
                f"quantization_config has weight_block_size {block!r} and activation_scheme "
                f"{section.get('activation_scheme')!r}; can be decoded: two sizes and 'dynamic'"
            )
        weight = WeightScheme(dtype=FP8, group_size=block[1], block_rows=block[0])
        linear = LinearScheme(weight=weight, activation=ActivationScheme(dtype=FP8, group_size=block[1]))
        return Scheme(default=linear, rules=ignored_rules(section, "modules_to_not_convert"))


FORMAT = FineGrainedFP8()
