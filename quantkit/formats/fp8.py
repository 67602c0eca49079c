"""Reader for fine-grained FP8 of DeepSeek, Qwen and MiniMax: one scale per block of 128 x 128 weights.

    weight             float8_e4m3fn (N, K)
    weight_scale_inv   (ceil(N / 128), ceil(K / 128)); value = code * scale, despite the name "inv"
    activation_scale   () if inputs have a fixed scale

Scales are floats, or E8M0 bytes (`scale_fmt: ue8m0`). Without a block size, one scale applies to the whole weight.
Inputs are quantized at run time in groups of 128 per token, or with the fixed scale. Stacked experts are stored as
`<name>` (E, N, K) and `<name>_scale_inv`. An int8 weight holds two FP4 codes per byte, as for the experts of
DeepSeek-V4.
Source: transformers `integrations/finegrained_fp8.py`; DeepSeek-V3 `inference/fp8_cast_bf16.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import SchemeError
from quantkit.formats._tensors import matrix_shape, take, take_matrix, take_one
from quantkit.formats._unpacked import decode_microscaling, powers_of_two, with_scales
from quantkit.formats.base import Format, Read, Shapes, ignored_rules
from quantkit.numerics.dtype import FP8, MXFP4
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_SCALE, _INPUT = "weight_scale_inv", "activation_scale"
# Suffixes that tools give these two tensors, after the name of a module or of a stack of experts.
_SUFFIXES = {
    **dict.fromkeys((".weight_scale_inv", ".scale", ".qscale_weight", "_scale_inv"), _SCALE),
    **dict.fromkeys((".activation_scale", ".input_scale", ".qscale_act", "_activation_scale"), _INPUT),
}
_FP4 = WeightScheme(dtype=MXFP4, group_size=MXFP4.group)


class FineGrainedFP8(Format):
    """The fine-grained FP8 format. Decoding repeats a scale for every row of its block."""

    name: ClassVar[str] = "fp8"
    is_written: ClassVar[bool] = False
    scale_name: ClassVar[str] = _SCALE

    def stored_weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        known, weights = set(names), dict[str, dict[str, str]]()
        for name in sorted(known):
            suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
            if suffix is None:
                continue
            owner = name.removesuffix(suffix)
            weight = f"{owner}.weight" if suffix.startswith(".") else owner
            if weight in known or _SUFFIXES[suffix] == _SCALE:
                weights.setdefault(weight, {"weight": weight} if weight in known else {})[_SUFFIXES[suffix]] = name
        return weights

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        stored, scale = matrix_shape(shapes.get("weight")), shapes.get(_SCALE)
        # Dtypes are not known here; the shape of the scales identifies FP4: no FP8 block has 16 inputs and one output.
        is_fp4 = stored is not None and scale == (stored[0], stored[1] * 2 // _FP4.group_width(32))
        return (stored[0], stored[1] * 2) if stored is not None and is_fp4 else stored

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        scale, stored = take(tensors, self.scale_name, None), take(tensors, "weight", None)
        if stored.dtype == torch.int8:
            packed = {"weight_packed": stored.view(torch.uint8), "weight_scale": scale.view(torch.uint8)}
            return decode_microscaling(packed, _FP4)
        codes = take_matrix(tensors, "weight", scheme.weight.dtype.storage)
        if scale.dtype.itemsize == 1:
            scale = powers_of_two(scale)
        weight = with_scales(codes, {self.scale_name: scale}, scheme.weight, self.scale_name)
        if scheme.activation is None or scheme.activation.dynamic:
            return weight
        return replace(weight, input_scale=take_one(tensors, _INPUT).float())

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        block, inputs = section.get("weight_block_size", [128, 128]), section.get("activation_scheme", "dynamic")
        sizes_known = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        if (not sizes_known and block is not None) or inputs not in ("dynamic", "static"):
            raise SchemeError(
                f"quantization_config: weight_block_size {block!r} with activation_scheme {inputs!r} is not supported; "
                "supported: two sizes or null, with 'dynamic' or 'static'"
            )
        activation = ActivationScheme(dtype=FP8, granularity="tensor", dynamic=False)
        if inputs == "dynamic":
            activation = ActivationScheme(dtype=FP8, group_size=None if block is None else block[1])
        rows, width = (None, None) if block is None else block
        weight = WeightScheme(dtype=FP8, group_size=width, block_rows=rows)
        linear = LinearScheme(weight=weight, activation=activation)
        return Scheme(default=linear, rules=ignored_rules(section, "modules_to_not_convert", "ignored_layers"))


FORMAT = FineGrainedFP8()
