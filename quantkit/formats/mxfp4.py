"""Reader for the experts of OpenAI's gpt-oss: FP4 with one power-of-two scale per 32 inputs.

    <name>_blocks   uint8 (E, N, G, 16), two codes per byte, the even input in the low nibble
    <name>_scales   uint8 (E, N, G), exponent + 127

<name> is `gate_up_proj` or `down_proj`, which the model keeps as (E, K, N). All other weights are unquantized.
Shapes: E experts, N outputs, K inputs, G groups of 32 inputs.
Source: transformers `integrations/mxfp4.py` (convert_moe_packed_tensors); gpt-oss `torch/weights.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats._tensors import take
from quantkit.formats._unpacked import decode_microscaling
from quantkit.formats.base import Format, Read, Shapes
from quantkit.numerics.dtype import MXFP4
from quantkit.numerics.scheme import LinearScheme, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_BYTES = 16  # of one group


class StackedMXFP4(Format):
    """The format of the experts of gpt-oss; the local tensor names of one expert are `blocks` and `scales`."""

    name: ClassVar[str] = "mxfp4"
    is_written: ClassVar[bool] = False
    is_stacked: ClassVar[bool] = True
    scale_name: ClassVar[str] = "scales"
    package: ClassVar[str] = "kernels"

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        blocks = shapes.get("blocks", ())
        return (blocks[0], blocks[1] * 2 * _BYTES) if len(blocks) == 3 and blocks[2] == _BYTES else None

    def stored_weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        known = set(names)
        stacks = {
            name.removesuffix(f"_{part}")
            for name in known
            for part in ("blocks", "scales")
            if name.endswith(f"_{part}")
        }
        return {
            stack: {part: f"{stack}_{part}" for part in ("blocks", "scales") if f"{stack}_{part}" in known}
            for stack in sorted(stacks)
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        blocks = take(tensors, "blocks", None)
        if blocks.dtype != torch.uint8 or blocks.ndim != 3 or blocks.shape[2] != _BYTES:
            raise CheckpointError(
                f"tensor 'blocks' is {blocks.dtype} {tuple(blocks.shape)}; expected uint8 (N, G, {_BYTES}); "
                "download the checkpoint again"
            )
        parts = {"weight_packed": blocks.flatten(1), "weight_scale": take(tensors, "scales", tuple(blocks.shape[:2]))}
        return decode_microscaling(parts, scheme.weight)

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        # Unquantized modules are found by their tensors: they have no codes.
        return Scheme(default=LinearScheme(weight=WeightScheme(dtype=MXFP4, group_size=MXFP4.group)))


FORMAT = StackedMXFP4()
