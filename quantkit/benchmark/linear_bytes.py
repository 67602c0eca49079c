"""Bytes of one linear in the layouts that kernels want: whole panels of outputs, even inputs, scales as they multiply.

Arithmetic of its own beside `kernels.ops.linear`, see `predict`. N outputs, K inputs, G scales per row, g = K / G.
"""

from dataclasses import dataclass, replace

import torch

from quantkit.numerics.scheme import LinearScheme

_PANEL = 64  # outputs that the native kernels lay out together
_TORCH_GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearKernels:
    """The kernels that run linears.

    Args:
        device: of the model.
        dtype: of the computation.
        native: by the kernels compiled from C.
    """

    device: torch.device
    dtype: torch.dtype
    native: bool


def dense_bytes(rows: int, width: int, bias: bool, stored: torch.dtype, kernels: LinearKernels) -> int:
    """A linear (N, K) whose weight is values, of dtype `stored` in the checkpoint."""
    if not kernels.native:
        return rows * (width + bias) * kernels.dtype.itemsize
    size = 2 if torch.bfloat16 in (kernels.dtype, stored) else 4
    return padded(rows, _PANEL) * (padded(width, 2) * size + 4 * bias)


def quantized_bytes(
    rows: int, width: int, scheme: LinearScheme, bias: bool, scale_dtype: torch.dtype, kernels: LinearKernels
) -> int:
    """Codes, scales, zero points and bias of a linear (N, K).

    Args:
        rows, width: N and K.
        scheme: how it is stored.
        bias: whether it has one.
        scale_dtype: of the scales in the checkpoint.
        kernels: that run it.
    """
    if scheme.activation is not None and not scheme.activation.is_per_token:
        scheme = replace(scheme, activation=None)  # rounded before the product, not by its kernel
    groups = scheme.weight.num_groups(width)
    group, kind = width // groups, scheme.weight.dtype
    if not kernels.native:
        return _torch_bytes(rows, width, scheme, bias, kernels)
    # Native kernels read inputs in pairs; an odd group splits one between two scales, so they keep values instead.
    if groups > 1 and group % 2:
        return dense_bytes(rows, width, bias, kernels.dtype, kernels)
    integer = kind.name == "int8" and scheme.activation is not None and scheme.activation.dtype.name == "int8"
    integer = integer and (groups == 1 or group % 4 == 0)
    codes = padded(width, 4 if integer else 2) * (4 if kind.kind == "int" and kind.bits <= 4 else 8) // 8
    scales = groups * (2 if scale_dtype == torch.bfloat16 else 4)
    zeros = 0 if scheme.weight.symmetric else groups
    return padded(rows, _PANEL) * (codes + scales + zeros + 4 * bias)


def _torch_bytes(rows: int, width: int, scheme: LinearScheme, bias: bool, kernels: LinearKernels) -> int:
    """Bytes in the layout of torch's own kernels where they take the scheme, else as the values it decodes to."""
    groups = scheme.weight.num_groups(width)
    on_cpu, in_bf16 = kernels.device.type == "cpu", kernels.dtype == torch.bfloat16
    kind = scheme.weight.dtype
    inputs = None if scheme.activation is None else scheme.activation.dtype.name
    if kind.kind == "int" and kind.bits <= 4 and inputs is None:
        divides = rows % 64 == 0 and width % 32 == 0 if on_cpu else rows % 8 == 0 and width % 128 == 0
        if divides and in_bf16 and width // groups in _TORCH_GROUPS:
            return rows * (width // 2 + 4 * groups + 2 * bias)
    eights = on_cpu or (rows % 8 == 0 and width % 8 == 0)
    if kind.name == inputs == "int8" and groups == 1 and eights:
        return rows * (width + 4 + 4 * bias)
    sixteens = rows % 16 == 0 and width % 16 == 0
    if kind.name == inputs == "fp8" and groups == 1 and not on_cpu and in_bf16 and sixteens:
        return rows * (width + 4 + 2 * bias)
    return dense_bytes(rows, width, bias, kernels.dtype, kernels)


def padded(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple
