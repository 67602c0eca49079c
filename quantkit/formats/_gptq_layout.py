"""The tensors of a GPTQ checkpoint, which its two versions share; they differ in how a zero point is stored.

    qweight  int32 (K * b / 32, N)   codes + 2**(b - 1), packed along K
    qzeros   int32 (G, N * b / 32)   zero points, packed along N: z - 1 in version 1, z in version 2
    scales   float16 (G, N)
    g_idx    int32 (K,)              group of each input; k // g unless groups follow the activations' order

Codes lie in the original order of the inputs whatever the order of the groups. Not here: config.json (`_gptq_config`).
Shapes: N outputs, K inputs, G scales per row, b bits.
Source: GPTQModel `nn_modules/qlinear/__init__.py`, `utils/model.py`; Frantar et al. 2022.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._packing import pack_words, unpack_words
from quantkit.formats._tensors import check_groups, refuse_activations, take
from quantkit.numerics.scheme import LinearScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

BITS = (2, 3, 4, 8)
SCALE_DTYPES = (torch.float16, torch.bfloat16)


def check(scheme: LinearScheme, shape: tuple[int, int], name: str) -> None:
    """Refuse what neither version holds.

    Args:
        scheme: of one linear.
        shape: (N, K) of its weight.
        name: of the format, for messages.
    Raises:
        SchemeError: says which recipe field to change.
    """
    weight = scheme.weight
    refuse_activations(scheme, name)
    if weight.dtype.kind != "int" or weight.dtype.bits not in BITS or weight.block_rows != 1:
        raise SchemeError(
            f"{name} stores integers of 2, 3, 4 or 8 bits, not {weight.describe()}; set weights.dtype to one of "
            "int2, int3, int4, int8, or set format=compressed-tensors"
        )
    check_groups(scheme, shape)
    for what, size in (("outputs", shape[0]), ("inputs", shape[1])):
        if size % 32:
            raise SchemeError(
                f"{name} loaders want {what} in multiples of 32, this linear has {size}; "
                "add it to ignore, or set format=compressed-tensors"
            )


def encode(weight: QuantizedTensor, zero_offset: int) -> dict[str, Tensor]:
    """Tensors to write in place of a weight.

    Args:
        weight: (N, K), integer codes.
        zero_offset: what is subtracted from a zero point: 1 in version 1, 0 in version 2.
    Raises:
        SchemeError: scales that loaders would round, or a zero point that the version cannot store.
    """
    bits, half = weight.scheme.dtype.bits, -int(weight.scheme.dtype.minimum)
    check_scale(weight.scale)
    rows, width = weight.shape
    codes = weight.codes.to(torch.int16) + half  # (N, K)
    zero = torch.full((rows, weight.scale.shape[1]), half, dtype=torch.int16)
    if weight.zero_point is not None:
        zero = weight.zero_point.to(torch.int16) + half
    stored = zero.to(weight.codes.device) - zero_offset
    if bool((stored < 0).any()) or bool((stored >= 1 << bits).any()):
        raise SchemeError(
            f"a zero point of {int(zero.min())} to {int(zero.max())} cannot be stored minus {zero_offset} "
            f"in {bits} bits; use format gptq-v2"
        )
    group = weight.group_index
    if group is None:
        group = torch.arange(width) // (width // weight.scale.shape[1])
    return {
        "qweight": pack_words(codes, bits).t().contiguous(),  # (K * b / 32, N)
        "qzeros": pack_words(stored.t(), bits),  # (G, N * b / 32)
        "scales": weight.scale.t().contiguous(),  # (G, N)
        "g_idx": group.to(torch.int32),
    }


def decode(tensors: Mapping[str, Tensor], scheme: WeightScheme, zero_offset: int) -> QuantizedTensor:
    """Inverse of `encode`; also reads files without `g_idx`, which some tools leave out.

    Args:
        tensors: of one linear, by local name.
        scheme: of its weight.
        zero_offset: as in `encode`.
    Raises:
        CheckpointError: a tensor is missing, has the wrong shape, or contradicts the scheme.
    """
    bits, half = scheme.dtype.bits, -int(scheme.dtype.minimum)
    words = take(tensors, "qweight", None)
    if words.ndim != 2 or words.dtype != torch.int32 or words.shape[0] * 32 % bits:
        raise CheckpointError(f"tensor 'qweight' is {words.dtype} {tuple(words.shape)}, not int32 words of {bits} bits")
    width, rows = words.shape[0] * 32 // bits, words.shape[1]
    groups = scheme.num_groups(width)
    codes = (unpack_words(words.t().contiguous(), bits) - half).to(torch.int8)  # (N, K)
    packed = take(tensors, "qzeros", (groups, rows * bits // 32))
    zero = unpack_words(packed.to(torch.int32), bits).t() + (zero_offset - half)  # (N, G)
    return QuantizedTensor(
        codes=codes,
        scale=take(tensors, "scales", (groups, rows)).t().contiguous(),
        zero_point=_zero_point(zero, scheme),
        scheme=scheme,
        group_index=_group_index(tensors, width, groups),
    )


def check_scale(scale: Tensor) -> None:
    """Refuse scales that loaders of GPTQ and AWQ files would round to 16 bits.

    Raises:
        SchemeError: float32 scales.
    """
    if scale.dtype not in SCALE_DTYPES:
        raise SchemeError(
            f"scales are {scale.dtype}, but GPTQ and AWQ loaders take 16 bits and would round them; quantize with this "
            "format from the start, or keep format compressed-tensors"
        )


def _zero_point(zero: Tensor, scheme: WeightScheme) -> Tensor | None:
    """Zero points (N, G) in the code range; None for a symmetric scheme, whose zero points must then all be 0."""
    if scheme.symmetric:
        if bool((zero != 0).any()):
            raise CheckpointError(
                "config.json says that weights are symmetric, but 'qzeros' has other zero points than "
                f"{-int(scheme.dtype.minimum)}; set sym to false in its quantization_config, or download it again"
            )
        return None
    if int(zero.max()) > 127:
        raise CheckpointError("'qzeros' has a zero point of 256, which 8 bits cannot hold; the checkpoint is damaged")
    return zero.to(torch.int8).contiguous()


def _group_index(tensors: Mapping[str, Tensor], width: int, groups: int) -> Tensor | None:
    """Group of each input (K,); None when they are in order."""
    if "g_idx" not in tensors:
        return None
    index = take(tensors, "g_idx", (width,)).to(torch.int64)
    if width and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise CheckpointError(
            f"'g_idx' runs from {int(index.min())} to {int(index.max())}, but there are {groups} groups"
        )
    in_order = torch.equal(index, torch.arange(width, device=index.device) // max(1, width // groups))
    return None if in_order else index
