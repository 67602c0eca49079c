"""MLX's affine quantization, which mlx-lm loads on Macs: unsigned codes, and a scale and a bias for each group.

    weight   uint32 (N, K * b / 32)   codes + 2**(b - 1), packed along K
    scales   float32 (N, G)           scales
    biases   float32 (N, G)           -scale * (zero point + 2**(b - 1))

MLX computes scale * code + bias, in the dtype of these two tensors. In 16 bits it would round the product and the sum,
with 8-bit codes by up to a whole step. So quantkit writes both in float32, in which every step is exact if the scale
has 16 bits. mlx-lm then also computes activations in float32.

Groups have 32, 64 or 128 inputs. The scale of a larger group, or of a whole row, is repeated for each of its parts.
config.json has the most common bits and group size under `quantization`; linears that differ and unquantized linears
(`false`) follow by name. mlx-lm writes the same entry as `quantization_config`, without a `quant_method`.

quantkit reads such files if all biases are whole multiples of their scales, which is not the case in files that
mlx-lm quantized itself. Not supported: the modes mxfp4, mxfp8 and nvfp4.
Shapes: N outputs, K inputs, G scales per row, b bits.
Source: MLX `mlx/ops.cpp` (affine_dequantize), `mlx/backend/cpu/quantized.cpp`, `python/mlx/nn/layers/quantized.py`;
mlx-lm `mlx_lm/utils.py` (load_model, quantize_model).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats import SECTIONS
from quantkit.formats._packing import pack_words, packed_bytes, unpack_words
from quantkit.formats._tensors import matrix_shape, take, take_matrix
from quantkit.formats.base import HALF_DTYPES, Format, Read, Shapes
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

if TYPE_CHECKING:
    from quantkit.models.family import Family

_BITS = (2, 3, 4, 5, 6, 8)
_KEY = "quantization"
_EXPERT = re.compile(r"\.experts\.\d+\.")
# Tested with tiny models, which gave the same logits in mlx-lm 0.32.2 as in quantkit: model types, model types with a
# sliding window, and types of position embeddings.
_COMPARED = frozenset(
    {"cohere", "cohere2", "ernie4_5", "gemma", "gemma3_text", "glm4", "granite", "helium", "hunyuan_v1_dense", "llama"}
    | {"mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "seed_oss"}
    | {"smollm3", "stablelm"}
)
_WINDOWED = frozenset({"cohere2", "gemma3_text", "olmo3"})
_ROPES = frozenset({"default", "llama3", "linear", "yarn"})


class MLXFormat(Format):
    """The MLX format, written by `convert` only."""

    name: ClassVar[str] = "mlx"
    is_recipe_format: ClassVar[bool] = False
    section_keys: ClassVar[tuple[str, ...]] = SECTIONS
    scale_name: ClassVar[str] = "scales"
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = HALF_DTYPES
    group_sizes: ClassVar[tuple[int, ...]] = (128, 64, 32)
    fuses: ClassVar[bool] = False
    library: ClassVar[str] = "mlx"
    engines: ClassVar[tuple[str, ...]] = ("mlx-lm",)
    package: ClassVar[str] = "mlx-lm"

    def linear_bytes(self, scheme: LinearScheme, out_features: int, in_features: int, scale_bytes: int) -> int:
        # A scale and a bias, both float32.
        return packed_bytes(scheme.weight, out_features, in_features, 8, zeros=False)

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        super().check(scheme, shape)
        weight = scheme.weight
        if DTYPES.get(weight.dtype.name) != weight.dtype or weight.dtype.kind != "int" or weight.block_rows != 1:
            raise SchemeError(f"mlx stores integers of 2, 3, 4, 5, 6 or 8 bits in groups, not {weight.describe()}")
        if weight.group_size not in self.group_sizes:
            raise SchemeError(
                f"mlx has groups of 32, 64 or 128 inputs, and {weight.describe()} with {shape[1]} inputs "
                "cannot be divided into such groups"
            )
        if weight.symmetric:
            raise SchemeError("mlx stores a bias per group, so weights need zero points; set weights.symmetric=false")

    def check_model(self, family: "Family", layers: Sequence[Mapping[str, LinearScheme]]) -> tuple[str, ...]:
        super().check_model(family, layers)
        raise SchemeError(
            "`quantize` does not write mlx; set format=compressed-tensors, then run `quantkit convert --to mlx`"
        )

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        words = matrix_shape(shapes.get("weight"))
        return words and (words[0], words[1] * 32 // scheme.weight.dtype.bits)

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        bits, half = weight.scheme.dtype.bits, -int(weight.scheme.dtype.minimum)
        if weight.group_index is not None:
            raise SchemeError("mlx cannot store groups in activation order; set steps.gptq.act_order=weight")
        if weight.zero_point is None or weight.scale.dtype not in HALF_DTYPES:
            given = "no zero points" if weight.zero_point is None else f"scales in {weight.scale.dtype}"
            raise SchemeError(f"mlx needs zero points and scales of 16 bits, but this weight has {given}")
        if bool((weight.scale == 0).any()):
            raise SchemeError("a scale is 0, so no bias can store its zero point; quantize the original model again")
        # Exact: 11 bits of the scale times 8 bits of the zero point fit into float32's 24.
        scale = weight.scale.float()
        return {
            "weight": pack_words(weight.codes, bits, half).view(torch.uint32),  # (N, K * b / 32)
            "scales": scale.contiguous(),  # (N, G)
            "biases": (scale * -(weight.zero_point.float() + half)).contiguous(),  # (N, G)
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        bits, half = scheme.weight.dtype.bits, -int(scheme.weight.dtype.minimum)
        words = take_matrix(tensors, "weight", torch.uint32).view(torch.int32)
        width = words.shape[1] * 32 // bits
        shape = (words.shape[0], scheme.weight.num_groups(width))
        scale, bias = take(tensors, "scales", shape), take(tensors, "biases", shape)
        zero = (bias.double() / scale.double()).neg_().round_()
        if not torch.equal(zero * scale.double(), -bias.double()) or not _within(zero, bits):
            raise SchemeError(
                f"a bias of this weight is not -scale times a whole number from 0 to {(1 << bits) - 1}; quantkit only "
                "reads MLX files that quantkit wrote, so use the original model"
            )
        return QuantizedTensor(
            codes=unpack_words(words, bits, half, width),  # (N, K)
            scale=scale,
            zero_point=(zero - half).to(torch.int8),
            scheme=scheme.weight,
        )

    def check_encoded(
        self, module: str, weight: QuantizedTensor, scheme: LinearScheme, tensors: Mapping[str, Tensor]
    ) -> None:
        # The file has the same scales in float32.
        super().check_encoded(module, replace(weight, scale=weight.scale.float()), scheme, tensors)

    def model_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        check_model_type(config)
        return {key: value for key, value in _own_entries(config) if key not in config}

    def section(self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], group_order: bool) -> dict[str, Any]:
        ignored = [name for name in ignored if not name.endswith(".")]  # mlx-lm looks up full names
        _check_experts({**dict.fromkeys(ignored), **linears})
        common = Counter(linears.values()).most_common(1)[0][0].weight
        others = {name: _numbers(scheme.weight) for name, scheme in linears.items() if scheme.weight != common}
        return {**_numbers(common), "mode": "affine", **others, **dict.fromkeys(ignored, False)}

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        section = config.get(_KEY)
        if isinstance(section, Mapping) and {"bits", "group_size"} <= section.keys():
            return self.scheme(section)
        return None

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        if (mode := section.get("mode", "affine")) != "affine":
            raise SchemeError(f"{_KEY}.mode {mode!r} is not supported; supported: 'affine'")
        rules = [
            Rule(pattern=name, linear=_linear(own, name) if own else None)
            for name, own in section.items()
            if isinstance(own, Mapping) or own is False
        ]
        return Scheme(default=_linear(section, _KEY), rules=tuple(rules))


FORMAT = MLXFormat()


def _check_experts(schemes: Mapping[str, LinearScheme | None]) -> None:
    """Check that the experts of a layer share one scheme, because mlx-lm stacks their tensors."""
    stacks: dict[str, LinearScheme | None] = {}
    for name, scheme in schemes.items():
        stack = _EXPERT.sub(".experts.*.", name)
        if stack != name and stacks.setdefault(stack, scheme) != scheme:
            raise SchemeError(
                f"mlx-lm stacks the experts of a layer, so {stack} needs one scheme; use the same for all experts"
            )


def check_model_type(config: Mapping[str, Any]) -> None:
    """Refuse models whose results in mlx-lm were not compared with quantkit's, or differed from them.

    Raises:
        SchemeError: the message names the entry of config.json.
    """
    name = config.get("model_type")
    if name not in _COMPARED:
        raise SchemeError(
            f"quantkit does not write model_type {name!r} for mlx-lm, because results were not compared or differed; "
            f"supported: {', '.join(sorted(_COMPARED))}"
        )
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    is_used = config.get("use_sliding_window", True) and name not in _WINDOWED
    if is_used and isinstance(window, int) and not (isinstance(longest, int) and longest <= window):
        raise SchemeError(
            f"mlx-lm ignores sliding_window {window} of model_type {name!r}, so results for longer texts would "
            "differ; use another format"
        )
    for rope in _ropes(config):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _ROPES:
            raise SchemeError(
                f"quantkit does not write rope_type {kind!r} for mlx-lm, because results were not compared; supported: "
                f"{', '.join(sorted(_ROPES))}"
            )


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the position embeddings of a config.json: one, or one for each type of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), Mapping):
            parts = [part for part in rope.values() if isinstance(part, Mapping)]
            yield from parts or [rope]


def _own_entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield entries that transformers 5 renamed, under the names that mlx-lm reads.

    Without them, mlx-lm would use its own defaults for most models.
    """
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    if isinstance(local := rope.get("sliding_attention"), Mapping):  # one entry for each type of layer
        yield "rope_local_base_freq", local.get("rope_theta")
        rope = rope.get("full_attention") or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            yield key, rope[key]
    if rope.get("rope_type", "default") != "default":
        yield "rope_scaling", dict(rope)


def _within(zero: Tensor, bits: int) -> bool:
    return bool(((zero >= 0) & (zero < 1 << bits)).all())


def _numbers(weight: WeightScheme) -> dict[str, Any]:
    return {"group_size": weight.group_size, "bits": weight.dtype.bits}


def _linear(numbers: Mapping[str, Any], where: str) -> LinearScheme:
    bits, size = numbers.get("bits"), numbers.get("group_size")
    if type(bits) is not int or bits not in _BITS or size not in MLXFormat.group_sizes:
        raise CheckpointError(
            f"config.json gives {where} {bits!r} bits in groups of {size!r}; MLX has 2, 3, 4, 5, 6 or 8 bits in groups "
            "of 32, 64 or 128"
        )
    return LinearScheme(weight=WeightScheme(dtype=DTYPES[f"int{bits}"], group_size=size, symmetric=False))
