"""Fine-grained FP8 as DeepSeek and Qwen publish it, for reading: one scale per block of 128 x 128 weights.

    weight             float8_e4m3fn (N, K)
    weight_scale_inv   float32 (ceil(N / 128), ceil(K / 128)); value = code * scale, its name notwithstanding

Inputs are quantized at run time in groups of 128 per token.
Source: transformers `integrations/finegrained_fp8.py`; DeepSeek-V3 `inference/fp8_cast_bf16.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from quantkit.errors import SchemeError
from quantkit.formats._blocks import decode_fp8_blocks
from quantkit.formats._read_only import ReadOnly
from quantkit.formats._tensors import matrix_shape
from quantkit.numerics.dtype import FP8
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor


@dataclass(frozen=True)
class FineGrainedFP8(ReadOnly):
    """The format itself; see `quantkit.formats.base.Format`."""

    name: ClassVar[str] = "fp8"

    def shape(self, shapes: Mapping[str, tuple[int, ...]], scheme: LinearScheme) -> tuple[int, int] | None:
        """(N, K) of a linear from the shapes of its tensors."""
        return matrix_shape(shapes.get("weight"))

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        """Codes and scales of one linear; a scale is repeated for every row of its block.

        Raises:
            CheckpointError: a tensor is missing or has the wrong shape.
        """
        return decode_fp8_blocks(tensors, scheme.weight, "weight_scale_inv")

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        """The scheme of a config.json with `quant_method: fp8`; None when it is of another method.

        Args:
            config: contents of config.json.
        Raises:
            SchemeError: blocks or activations that cannot be decoded.
        """
        section = config.get("quantization_config")
        if not isinstance(section, Mapping) or section.get("quant_method") != "fp8":
            return None
        block = section.get("weight_block_size", [128, 128])
        sizes_known = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        if not sizes_known or section.get("activation_scheme", "dynamic") != "dynamic":
            raise SchemeError(
                f"quantization_config has weight_block_size {block!r} and activation_scheme "
                f"{section.get('activation_scheme')!r}; can be decoded: two sizes and 'dynamic'"
            )
        names = section.get("modules_to_not_convert") or []
        names = names if isinstance(names, list) else [names]
        weight = WeightScheme(dtype=FP8, group_size=block[1], block_rows=block[0])
        linear = LinearScheme(weight=weight, activation=ActivationScheme(dtype=FP8, group_size=block[1]))
        return Scheme(default=linear, rules=tuple(Rule(pattern=str(name), linear=None) for name in names))


FORMAT = FineGrainedFP8()
