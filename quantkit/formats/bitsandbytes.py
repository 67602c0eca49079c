"""Reader for checkpoints of bitsandbytes: NF4 and FP4 with plain or nested scales, and LLM.int8.

    4 bit   weight uint8 (N * K / 2, 1), first value in the high nibble, an index into quant_map (16,)
            absmax (blocks,) float32, or uint8: an index into nested_quant_map, times nested_absmax, plus an offset
            quant_state.bitsandbytes__nf4: a JSON text with shape and block sizes
    8 bit   weight int8 (N, K), SCB (N,) float32; value = code * SCB / 127

Blocks run over the flattened weight. If the block size does not divide the row, blocks cross rows; the reader then
repeats scales for smaller groups, which changes no value.
Source: bitsandbytes `functional.py` (QuantState, dequantize_blockwise).
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._tensors import matrix_shape, take, take_matrix
from quantkit.formats.base import Format, Read, Shapes
from quantkit.numerics.dtype import INT8, NF4
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.safety.untrusted import parse_object, shorten

_STATE = "weight.quant_state.bitsandbytes__"


class BitsAndBytes(Format):
    """The bitsandbytes format.

    The codes of a decoded 4-bit weight are values of its lookup table. Groups may be smaller than the stored blocks, so
    that no group crosses a row.
    """

    name: ClassVar[str] = "bitsandbytes"
    is_written: ClassVar[bool] = False
    scale_name: ClassVar[str] = ""  # differs between 4 and 8 bits
    package: ClassVar[str] = "bitsandbytes"

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        if scheme.weight.dtype == INT8:
            return matrix_shape(shapes.get("weight"))
        if read is None:  # only the JSON text has the shape of a 4-bit weight
            return None
        rows, width = _state({name: read(name) for name in shapes if name.startswith(_STATE)})["shape"]
        return rows, width

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        if scheme.weight.dtype != INT8:
            return _decode_4bit(tensors)
        codes = take_matrix(tensors, "weight", torch.int8)
        scale = take(tensors, "SCB", (codes.shape[0],)).float().view(-1, 1) / 127
        return QuantizedTensor(codes=codes, scale=scale, zero_point=None, scheme=scheme.weight)

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        if section.get("load_in_4bit") is True:
            # The library's default; the JSON text of each weight has its actual block size.
            weight = WeightScheme(dtype=NF4, group_size=64)
        elif section.get("load_in_8bit") is True:
            weight = WeightScheme(dtype=INT8)
        else:
            raise SchemeError(
                "quantization_config of bitsandbytes sets neither load_in_4bit nor load_in_8bit to true; download "
                "config.json again"
            )
        # By default, transformers does not quantize the head.
        return Scheme(default=LinearScheme(weight=weight), rules=(Rule(pattern="lm_head", linear=None),))


FORMAT = BitsAndBytes()


def _decode_4bit(tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    state = _state(tensors)
    rows, width, block = state["shape"][0], state["shape"][1], state["blocksize"]
    packed = take(tensors, "weight", None).contiguous().view(-1).view(torch.uint8)
    table = take(tensors, "weight.quant_map", (16,)).float()
    if packed.numel() * 2 != rows * width or width < 1:
        raise CheckpointError(
            f"tensor 'weight' has {packed.numel() * 2} codes of 4 bits, but its quant_state gives the shape ({rows}, "
            f"{width}); download the checkpoint again"
        )
    codes = table[torch.stack([packed >> 4, packed & 15], dim=1).long()].view(rows, width)
    # The largest size that divides a row and a block, so that no group crosses the border of either.
    size = math.gcd(width, block)
    scale = _absmax(tensors, state, math.ceil(rows * width / block))
    block_of_scale = torch.arange(rows * (width // size)) * size // block
    weight = WeightScheme(dtype=NF4, group_size=size)
    return QuantizedTensor(codes=codes, scale=scale[block_of_scale].view(rows, -1), zero_point=None, scheme=weight)


def _state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Parse and check the JSON text that describes how a weight was packed."""
    name = next((name for name in tensors if name.startswith(_STATE)), None)
    if name is None:
        present = ", ".join(sorted(tensors))
        raise CheckpointError(
            f"the 4-bit linear has no tensor {_STATE}nf4; its tensors: {present}; download the checkpoint again"
        )
    state = parse_object(bytes(tensors[name].view(-1).view(torch.uint8).tolist()), f"tensor {name!r}", CheckpointError)
    shape = state.get("shape")
    sizes = [*shape, state.get("blocksize")] if isinstance(shape, list) else []
    if len(sizes) != 3 or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        raise CheckpointError(f"tensor {name!r} is {shorten(state)}; expected a shape [rows, columns] and a blocksize")
    return state


def _absmax(tensors: Mapping[str, Tensor], state: Mapping[str, Any], count: int) -> Tensor:
    """Decode the float32 scale of each block."""
    absmax = take(tensors, "weight.absmax", (count,))
    if absmax.dtype != torch.uint8:
        return absmax.float()
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(block) is not int or block < 1 or not isinstance(offset, int | float):
        raise CheckpointError(
            f"quant_state must give numbers for nested_blocksize and nested_offset, found {block!r} and {offset!r}; "
            "download the checkpoint again"
        )
    table = take(tensors, "weight.nested_quant_map", (256,)).float()
    outer = take(tensors, "weight.nested_absmax", (math.ceil(count / block),)).float()
    return table[absmax.long()] * outer[torch.arange(count) // block] + offset
