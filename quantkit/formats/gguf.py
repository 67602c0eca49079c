"""GGUF, the single-file format of llama.cpp: schemes whose codes are stored as GGUF blocks without further rounding.

    symmetric int2, int3, int4    Q4_0   scale repeated in each block of 32, code + 8
    symmetric int5                Q5_0
    symmetric int6                Q6_K   one scale per 256 inputs, so groups of 256 or whole rows
    symmetric int8                Q8_0
    asymmetric int4               Q4_1   minimum = -(zero point + 8) * scale, if exact in float16
    asymmetric int2, int3         Q4_0   code - zero point
    asymmetric int4 otherwise     Q5_0   code - zero point
    mxfp4                         MXFP4  the same numbers in a different order
    q4_1, q5_1, q2_k to q6_k      the block of that name, with the scales and minimums of its groups

A GGUF file cannot hold an incomplete model, so a run first writes a folder from which it can resume. The folder is in
the compressed-tensors format, restricted to schemes and float16 scales that fit GGUF blocks; this module defines those
limits. In the folder, linears of ggml's types are stored as their blocks. `quantization_config` lists these linears;
its entry "codes" holds the compressed-tensors `quantization_config` of all other quantized linears.
`quantkit.compress.convert` converts the folder to the file. `ggml.blocks` defines blocks, `ggml.gguf_file` the file.

When quantkit reads a GGUF file, `quantkit.checkpoints.gguf_checkpoint` presents the file like such a folder: its
`quantization_config` lists the modules of each ggml type, and the blocks of a linear are one tensor, such as
`weight_q4_k`, which `ggml.codes` decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import SchemeError
from quantkit.formats.base import HALF_DTYPES, Format, Read, Shapes, stores_codes
from quantkit.formats.compressed_tensors import CompressedTensorsFormat
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType as Block

    from quantkit.models.family import Family

# Types that matrices can be rounded to without calibration data, keyed by name in recipes. Each has ggml's names of two
# blocks: its own, and the block to use if the size of the first does not divide the row, as in llama-quantize.
MATRIX_BLOCKS = {
    **{name: (name.upper(), name.upper()) for name in ("f32", "f16", "bf16")},
    **{name: (name.upper(), "F16") for name in ("q4_0", "q4_1", "q8_0")},
    "q2_k": ("Q2_K", "Q4_0"),
    "q3_k": ("Q3_K", "Q4_0"),
    "q4_k": ("Q4_K", "Q5_0"),
    "q5_k": ("Q5_K", "Q5_1"),
    "q6_k": ("Q6_K", "Q8_0"),
}
_ASYMMETRIC = ("int2", "int3", "int4")
# ggml's name of the block that holds a symmetric number type.
_SYMMETRIC = {**dict.fromkeys(_ASYMMETRIC, "Q4_0"), "int5": "Q5_0", "int6": "Q6_K", "int8": "Q8_0", "mxfp4": "MXFP4"}


def _block_size(name: str) -> tuple[int, int]:
    """Return the values and the bytes of a block, by ggml's name."""
    import gguf  # other formats do without the package

    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return values, size


def matrix_block(type_name: str, width: int) -> str:
    """Return ggml's name of the block for rows of this width; `type_name` is a key of `MATRIX_BLOCKS`."""
    return next(block for block in (*MATRIX_BLOCKS[type_name], "F16") if width % _block_size(block)[0] == 0)


def matrix_bytes(type_name: str, rows: int, width: int) -> int:
    """Return the bytes of a matrix (rows, width) in the blocks of `matrix_block`."""
    values, size = _block_size(matrix_block(type_name, width))
    return rows * width // values * size


class GGUFFormat(CompressedTensorsFormat):
    """The GGUF format; `encode` and `section` write the intermediate compressed-tensors folder."""

    name: ClassVar[str] = "gguf"
    suffix: ClassVar[str] = ".gguf"
    holds_activations: ClassVar[bool] = False
    describes_cache: ClassVar[bool] = False
    holds_cache_scales: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = HALF_DTYPES
    library: ClassVar[str] = "gguf"
    engines: ClassVar[tuple[str, ...]] = ("llama.cpp",)
    package: ClassVar[str] = ""
    fuses: ClassVar[bool] = False

    def linear_bytes(self, scheme: LinearScheme, out_features: int, in_features: int, scale_bytes: int) -> int:
        weight = scheme.weight
        # Asymmetric int4 becomes Q5_0 if float16 cannot hold a minimum. Only the weights tell, so count Q5_0.
        wide = not weight.symmetric and weight.dtype.name == "int4"
        values, size = _block_size("Q5_0" if wide else self.symmetric_block(weight))
        return out_features * in_features // values * size

    def beside_bytes(self, scheme: LinearScheme, scale_bytes: int) -> int:
        return 0

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        self._check_activations(scheme)
        weight = scheme.weight
        if weight.dtype.block is not None:
            weight.group_width(shape[1])
            return
        if weight.dtype.name not in (_SYMMETRIC if weight.symmetric else _ASYMMETRIC) or weight.block_rows != 1:
            raise SchemeError(
                "gguf holds int2 to int4 (with or without zero points), int5, int6 and int8 (symmetric only), mxfp4 "
                f"and ggml's q4_1, q5_1 and q2_k to q6_k; not {weight.describe()}. Set weights.dtype=int4, or int8 "
                "with weights.symmetric=true"
            )
        super().check(scheme, shape)
        values = 256 if self.symmetric_block(weight) == "Q6_K" else 32
        if shape[1] % values or weight.group_width(shape[1]) % values:
            sizes = "32, 64, 128 or channel" if values == 32 else "256 or channel, or weights.dtype to int5 or int8"
            raise SchemeError(
                f"gguf stores one scale per {values} inputs, so {weight.describe()} with {shape[1]} inputs does not "
                f"fit; set weights.group_size to {sizes}, or add this linear to ignore"
            )

    def check_model(self, family: Family, layers: Sequence[Mapping[str, LinearScheme]]) -> tuple[str, ...]:
        return Format.check_model(self, family, layers)  # loaders of compressed-tensors never see the folder

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        blocks = self.blocks(weight)[1]  # a scale that does not fit raises an error here, not at the end of the run
        if scheme.weight.dtype.block is not None:
            return {f"weight_{scheme.weight.dtype.name}": blocks}
        return super().encode(weight, scheme)

    def section(self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], group_order: bool) -> dict[str, Any]:
        types: dict[str, list[str]] = {}
        for name, scheme in linears.items():
            if scheme.weight.dtype.block is not None:
                types.setdefault(scheme.weight.dtype.name.upper(), []).append(name)
        if not types:
            return super().section(linears, ignored, group_order)
        others = {name: scheme for name, scheme in linears.items() if scheme.weight.dtype.block is None}
        outside = [*ignored, *(name for names in types.values() for name in names)]
        codes = super().section(others, outside, group_order) if others else {}
        return {"quant_method": self.name, "types": types, "codes": codes}

    def owns(self, section: Mapping[str, Any]) -> bool:
        return section.get("quant_method") in (self.name, CompressedTensorsFormat.name)

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        if section.get("quant_method") != self.name:
            return super().scheme(section)
        from quantkit.formats.ggml.codes import SCHEMES

        types = section.get("types")
        if not isinstance(types, Mapping) or not types.keys() <= SCHEMES.keys():
            raise SchemeError("quantization_config describes a GGUF file; give the .gguf file itself")
        own, codes = SCHEMES, section.get("codes")
        if codes is not None:  # the folder of a run, whose schemes are those of the recipe
            own = {kind: _of_blocks(kind.lower()) for kind in types}
        rules = tuple(Rule(pattern=str(name), linear=own[kind]) for kind in types for name in types[kind])
        others = super().scheme(codes) if codes else Scheme(default=None)
        return replace(others, rules=(*others.rules, *rules))

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        local = next((name for name in shapes if _is_blocks(name)), None)
        if local is None:
            return super().shape(shapes, scheme, read)
        from quantkit.formats.ggml.codes import width_of

        return shapes[local][0], width_of(local, shapes[local][1])

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        if not any(map(_is_blocks, tensors)):
            return super().decode(tensors, scheme)
        from quantkit.formats.ggml.codes import decode_codes

        return decode_codes(tensors)

    def symmetric_block(self, weight: WeightScheme) -> str:
        """Return ggml's name of the block type for a scheme that `check` accepts, as if integers were symmetric."""
        if weight.dtype.block is not None:
            return weight.dtype.name.upper()
        return _SYMMETRIC[weight.dtype.name]

    def blocks(self, weight: QuantizedTensor) -> tuple[Block, Tensor]:
        """Convert a weight to GGUF blocks with exactly the same values; see `encode_blocks`."""
        from quantkit.formats.ggml.blocks import encode_blocks  # imports the gguf package

        return encode_blocks(weight, self.symmetric_block(weight.scheme))


FORMAT = GGUFFormat()


def _of_blocks(name: str) -> LinearScheme:
    """Return the scheme that a recipe describes by the name of a ggml type."""
    dtype = find_dtype(name)
    return LinearScheme(weight=WeightScheme(dtype=dtype, group_size=dtype.group, symmetric=not dtype.has_minimums))


def _is_blocks(local: str) -> bool:
    """Whether a tensor of a linear holds the blocks of a GGUF file."""
    return local.startswith(("weight_q", "weight_mx")) and stores_codes([local])
