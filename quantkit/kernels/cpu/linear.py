"""Linears on the kernels of `native/linear*.c`: weights laid out in panels of 64 outputs (see `native/linear.h`).

Shapes: T tokens, N outputs, K inputs, G scales per row; P = N / 64 panels, rounded up.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.errors import ResourceError
from quantkit.kernels import cpu
from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor

_PANEL = 64
_BF16, _F32, _W4, _W8, _FP8, _F16, _H8, _U8 = range(8)
# Inputs that are stored together, and the bytes that a panel takes for them.
_UNITS = {
    _BF16: (2, 256),
    _F32: (2, 512),
    _W4: (2, 64),
    _W8: (2, 128),
    _FP8: (2, 128),
    _F16: (2, 256),
    _H8: (2, 128),
    _U8: (4, 256),
}
_ACTIVATIONS = {"int8": 1, "fp8": 2}
# Integer sums of K products of bytes stay below 2**31.
_MAX_INT8_INPUTS = 1 << 16


class _Descriptor(ctypes.Structure):
    """`QkLinear` of native/linear.h."""

    _fields_: ClassVar = [
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("storage", ctypes.c_int32),
        ("scale_is_bf16", ctypes.c_int32),
    ]


class NativeLinear:
    """A weight in panels and the kernel that reads it.

    Args:
        shape: (N, K).
        codes: uint8, laid out for `storage`.
        scale: (P, G, 64) float32 or bf16, or None.
        zero: (P, G, 64) int8, or None.
        bias: (N,), or None.
        group: inputs per scale, even.
        storage: as numbered in native/linear.h.
        activation: how the input is rounded.
        dtype: of inputs and outputs; others are converted.
        description: for tables.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        codes: Tensor,
        scale: Tensor | None,
        zero: Tensor | None,
        bias: Tensor | None,
        group: int,
        storage: int,
        activation: ActivationScheme | None,
        dtype: torch.dtype,
        description: str,
    ) -> None:
        self.out_features, self.in_features = shape
        self.description = description
        padded = None if bias is None else _pad_rows(bias.float()).contiguous()
        self._tensors = (codes, scale, zero, padded)  # kept alive: the descriptor has their addresses
        self.stored_bytes = sum(t.nbytes for t in self._tensors if t is not None)
        self._dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        addresses = [None if t is None else t.data_ptr() for t in self._tensors]
        in_bf16 = scale is not None and scale.dtype == torch.bfloat16
        self._descriptor = _Descriptor(*addresses, *shape, group, storage, in_bf16)
        self._address = ctypes.addressof(self._descriptor)
        self._kind = int(self._dtype == torch.bfloat16)
        self._activation = 0 if activation is None else _ACTIVATIONS[activation.dtype.name]
        self._multiply = _find_kernel("qk_linear_int8" if storage == _U8 else "qk_linear")

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        if x.dtype != self._dtype:
            return self(x.to(self._dtype)).to(x.dtype)
        if not x.is_contiguous():
            x = x.contiguous()
        tokens, width = x.shape
        if width != self.in_features:  # C would read past the end
            raise ValueError(f"inputs {tuple(x.shape)} do not fit a weight of {self.in_features} inputs")
        out = x.new_empty((tokens, self.out_features))
        threads = torch.get_num_threads()
        if self._multiply(self._address, x.data_ptr(), out.data_ptr(), tokens, self._kind, self._activation, threads):
            raise ResourceError(f"out of memory for the inputs of a linear layer, {tokens} x {self.in_features}")
        return out


def _find_kernel(name: str) -> cpu.Function:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found = cpu.function(name, pointer, pointer, pointer, ctypes.c_int64, number, number, number, returns=number)
    assert found is not None, "asked for without a library"
    return found


def available(device: torch.device) -> bool:
    """Whether this machine has the kernels."""
    return device.type == "cpu" and cpu.load() is not None


def dense(weight: Tensor, *, bias: Tensor | None, dtype: torch.dtype, name: str) -> NativeLinear:
    """A dense weight; one in 16 bits stays so, also when the computation is in float32.

    Args:
        weight: (N, K) float.
        bias: (N,), or None.
        dtype: of the computation.
        name: what it is, for tables.
    """
    if weight.dtype == torch.bfloat16 or dtype == torch.bfloat16:
        kept, storage, stored = "bfloat16", _BF16, torch.bfloat16
    elif weight.dtype == torch.float16:
        kept, storage, stored = "float16", _F16, torch.float16
    else:
        kept, storage, stored = "float32", _F32, torch.float32
    return NativeLinear(
        (weight.shape[0], weight.shape[1]),
        codes=_lay_out(storage, weight.to(stored)),
        scale=None,
        zero=None,
        bias=bias,
        group=_even(weight.shape[1]),
        storage=storage,
        activation=None,
        dtype=dtype,
        description=f"{name} {kept} (native)",
    )


def can_quantized(weight: QuantizedTensor) -> bool:
    """Whether there is a layout: inputs in order, an even number of them per scale, FP8 without NaN."""
    width = weight.shape[1]
    groups = weight.scale.shape[1]
    if weight.group_index is not None or (groups > 1 and (width // groups) % 2):
        return False
    is_fp8 = weight.scheme.dtype.storage == torch.float8_e4m3fn
    return not is_fp8 or not bool((weight.codes.view(torch.uint8) & 0x7F == 0x7F).any())


def quantized(
    weight: QuantizedTensor, *, bias: Tensor | None, activation: ActivationScheme | None, dtype: torch.dtype
) -> NativeLinear:
    """A quantized weight for which `can_quantized` holds.

    Args:
        weight: (N, K).
        bias: (N,), or None.
        activation: how the input is rounded.
        dtype: of the computation.
    """
    rows, width = weight.shape
    groups = weight.scale.shape[1]
    name = weight.scheme.dtype.name
    group = _even(width) if groups == 1 else width // groups
    kind, wide = weight.scheme.dtype, weight.scheme.dtype.kind == "int" and weight.scheme.dtype.bits > 4
    # FP4 codes are kept in e4m3, which holds them exactly.
    storage = _FP8 if kind.storage == torch.float8_e4m3fn else _W8 if wide else _W4
    if name == "int8" and activation is not None and activation.dtype.name == "int8" and _fits_integers(width, groups):
        storage, group = _U8, -(-width // 4) * 4 if groups == 1 else group
    elif wide and (dtype == torch.bfloat16 or activation is not None):
        storage = _H8
    return NativeLinear(
        (rows, width),
        codes=_lay_out(storage, weight.codes),
        scale=_lay_out_scale(weight.scale),
        zero=None if weight.zero_point is None else _by_panel(weight.zero_point),
        bias=bias,
        group=group,
        storage=storage,
        activation=activation,
        dtype=dtype,
        description=_describe(weight.scheme.describe(), activation),
    )


def _fits_integers(width: int, groups: int) -> bool:
    return width <= _MAX_INT8_INPUTS and (groups == 1 or (width // groups) % 4 == 0)


def _describe(name: str, activation: ActivationScheme | None) -> str:
    return name + ("" if activation is None else f", activations {activation.describe()}") + " (native)"


def _even(count: int) -> int:
    return count + count % 2


def _pad_rows(values: Tensor) -> Tensor:
    """Zeros after the first dimension's end, to whole panels."""
    missing = -len(values) % _PANEL
    return functional.pad(values, (0, 0) * (values.dim() - 1) + (0, missing)) if missing else values


def _by_panel(values: Tensor) -> Tensor:
    """(N, G) -> (P, G, 64)."""
    return _pad_rows(values).view(-1, _PANEL, values.shape[1]).transpose(1, 2).contiguous()


def _lay_out_scale(scale: Tensor) -> Tensor:
    return _by_panel(scale if scale.dtype == torch.bfloat16 else scale.float())


def _lay_out(storage: int, weight: Tensor) -> Tensor:
    """(N, K) elements of a storage -> its panels, uint8."""
    rows, width = weight.shape
    unit, unit_bytes = _UNITS[storage]
    panel_bytes = -(-width // unit) * unit_bytes
    panels = torch.zeros(-(-rows // _PANEL) * panel_bytes, dtype=torch.uint8)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function = cpu.function("qk_linear_layout", ctypes.c_int, pointer, number, number, pointer, number)
    assert function is not None, "asked for without a library"
    dense = weight.contiguous()  # by name: C reads it after data_ptr() has returned
    function(storage, dense.data_ptr(), rows, width, panels.data_ptr(), panel_bytes)
    return panels
