"""Linears that run on the kernels of `linear*.c`: weights are stored in panels of 64 outputs (see `linear.h`).

Shapes: T tokens, N outputs, K inputs, G scales per row; P = N / 64 panels, rounded up.
"""

import ctypes
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.errors import ResourceError
from quantkit.kernels import cpu
from quantkit.kernels.types import Linear, LinearSource, nbytes
from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor

_PANEL = 64
_BF16, _F32, _W4, _W8, _FP8, _F16, _H8, _U8 = range(8)
# For each storage type: the number of inputs that are stored together, and their bytes in a panel.
_UNITS = ((2, 256), (2, 512), (2, 64), (2, 128), (2, 128), (2, 256), (2, 128), (4, 256))
_DENSE = {torch.bfloat16: _BF16, torch.float16: _F16, torch.float32: _F32}
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATIONS = {"int8": 1, "fp8": 2}
_AS_IT_IS, _TO_INT16 = 0, 3
# With at most this many inputs, sums of products of bytes stay below 2**31.
_MAX_INT8_INPUTS = 1 << 16


class _Descriptor(ctypes.Structure):
    """The C structure `QkLinear` of linear.h."""

    _fields_: ClassVar = [
        *[(name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "bias")],
        *[(name, ctypes.c_int64) for name in ("n", "k", "group")],
        *[(name, ctypes.c_int32) for name in ("storage", "scale_kind", "zero_is_float")],
    ]


class NativeLinear(Linear):
    """A weight in panels, and the kernel that multiplies with it.

    Args:
        weight: (N, K), elements of the given storage type.
        storage: number of the storage type in linear.h.
        dtype: dtype of inputs and outputs; inputs of other dtypes are converted.
        description: text for tables.
        bias: (N,), or None.
        scale: (P, G, 64) float32, bf16 or fp16, or None.
        zero: (P, G, 64) int8 or float32, or None.
        activation: scheme with which inputs are quantized at run time; None = inputs are not quantized.
        rounds_inputs: see `LinearSettings`.
    Attributes:
        address: address of the `QkLinear`, which `program` passes to C.
        activation: number type to which inputs are rounded, as a number of linear.h.
        is_int8: whether `qk_linear_int8` multiplies.
        is_dense: whether the weight is unquantized.
        dtype: float32 or bfloat16.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        storage: int,
        dtype: torch.dtype,
        description: str,
        bias: Tensor | None,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        activation: ActivationScheme | None = None,
        rounds_inputs: bool = False,
    ) -> None:
        outputs, width = weight.shape
        codes = _lay_out(storage, weight)
        padded = None if bias is None else _pad_rows(bias.float()).contiguous()
        self._tensors = (codes, scale, zero, padded)  # kept alive: the descriptor has their addresses
        super().__init__(weight.shape, nbytes(*self._tensors), description)
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        addresses = [None if t is None else t.data_ptr() for t in self._tensors]
        kinds = (
            _SCALES.index(torch.float32 if scale is None else scale.dtype),
            zero is not None and zero.is_floating_point(),
        )
        groups, unit = 1 if scale is None else scale.shape[1], _UNITS[storage][0]
        # Inputs are stored by units, so the only group of a row ends with its last unit.
        group = width // groups if groups > 1 else -(-width // unit) * unit
        self._descriptor = _Descriptor(*addresses, outputs, width, group, storage, *kinds)
        self.address = ctypes.addressof(self._descriptor)
        self._kind = int(self.dtype == torch.bfloat16)
        unquantized = _TO_INT16 if rounds_inputs and self.dtype == torch.float32 else _AS_IT_IS
        self.activation = unquantized if activation is None else _ACTIVATIONS[activation.dtype.name]
        self.is_int8, self.is_dense = storage == _U8, storage in _DENSE.values()
        name = "qk_linear_int8" if self.is_int8 else "qk_linear"
        self._multiply = cpu.function(name, "pppniii", "i")

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.dtype:
            return self(x.to(self.dtype)).to(x.dtype)
        if not x.is_contiguous():
            x = x.contiguous()
        tokens, width = x.shape
        if width != self.in_features:  # C would read past the end
            raise ValueError(f"inputs of shape {tuple(x.shape)} do not match a weight with {self.in_features} inputs")
        out = x.new_empty((tokens, self.out_features))
        threads = torch.get_num_threads()
        if self._multiply(self.address, x.data_ptr(), out.data_ptr(), tokens, self._kind, self.activation, threads):
            raise ResourceError(
                f"out of memory for the inputs of a linear layer ({tokens} x {self.in_features}); lower token_budget"
            )
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows (T, K) of an unquantized weight in its stored dtype, for indices (T,)."""
        kind = next(dtype for dtype, storage in _DENSE.items() if storage == self._descriptor.storage)
        elements, panel, row = self._tensors[0].view(kind), indices // _PANEL, indices % _PANEL
        # (P, K, 64), but inputs in pairs in bf16: (P, K / 2, 64, 2).
        panels = elements.view(-(-self.out_features // _PANEL), -1, _PANEL, 2 if kind == torch.bfloat16 else 1)
        return panels[panel, :, row].flatten(1)[:, : self.in_features]


def available(device: torch.device) -> bool:
    """Whether the kernels can run on this device."""
    return device.type == "cpu" and cpu.library() is not None


def dense(weight: Tensor, *, bias: Tensor | None, dtype: torch.dtype, name: str) -> NativeLinear:
    """Build a linear with an unquantized weight; a 16-bit weight stays 16-bit even if the computation is in float32.

    Args:
        weight: (N, K) float.
        bias: (N,), or None.
        dtype: dtype of the computation.
        name: name of the weight's number type, for tables.
    """
    stored = torch.bfloat16 if dtype == torch.bfloat16 else weight.dtype if weight.dtype in _DENSE else torch.float32
    description = f"{name} {str(stored).removeprefix('torch.')} (native)"
    return NativeLinear(weight.to(stored), storage=_DENSE[stored], dtype=dtype, description=description, bias=bias)


def linear_of(source: LinearSource) -> NativeLinear | None:
    """Build a linear with a quantized weight; None if no kernel supports it, e.g. for groups in activation order."""
    weight, activation = source.weight, source.activation
    if not available(source.device) or not _has_layout(weight):
        return None
    kind = weight.scheme.dtype
    wide = kind.kind == "int" and kind.bits > 4
    # FP4 codes are kept in e4m3, which holds them exactly.
    storage = _FP8 if kind.storage == torch.float8_e4m3fn else _W8 if wide else _W4
    if activation is not None and activation.dtype.name == kind.name == "int8" and _fits_integers(weight):
        storage = _U8
    elif wide and cpu.has_avx512() and (source.dtype == torch.bfloat16 or activation is not None):
        storage = _H8
    return NativeLinear(
        weight.codes,
        storage=storage,
        dtype=source.dtype,
        description=source.describe("native"),
        bias=source.bias,
        scale=_by_panel(weight.scale if weight.scale.dtype in _SCALES else weight.scale.float()),
        zero=None if weight.zero_point is None else _by_panel(weight.zero_point),
        activation=activation,
        rounds_inputs=source.rounds_inputs,
    )


def _has_layout(weight: QuantizedTensor) -> bool:
    """Whether panels can hold a weight: groups in input order, an even number of inputs per scale, no NaN in FP8."""
    groups = weight.scale.shape[1]
    if weight.group_index is not None or (groups > 1 and (weight.shape[1] // groups) % 2):
        return False
    is_fp8 = weight.scheme.dtype.storage == torch.float8_e4m3fn
    return not is_fp8 or not bool((weight.codes.view(torch.uint8) & 0x7F == 0x7F).any())


def _fits_integers(weight: QuantizedTensor) -> bool:
    """Whether the int8 kernel supports a weight: sums cannot overflow, and groups consist of whole quads of inputs."""
    width, groups = weight.shape[1], weight.scale.shape[1]
    if weight.zero_point is not None and weight.zero_point.is_floating_point():
        return False
    return width <= _MAX_INT8_INPUTS and (groups == 1 or (width // groups) % 4 == 0)


def _pad_rows(values: Tensor) -> Tensor:
    """Append zeros along the first dimension to fill the last panel."""
    missing = -len(values) % _PANEL
    return functional.pad(values, (0, 0) * (values.dim() - 1) + (0, missing)) if missing else values


def _by_panel(values: Tensor) -> Tensor:
    """Rearrange scales or zero points (N, G) as panels (P, G, 64); zeros fill the last panel."""
    return _pad_rows(values).view(-1, _PANEL, values.shape[1]).transpose(1, 2).contiguous()


def _lay_out(storage: int, weight: Tensor) -> Tensor:
    """Convert elements (N, K) of a storage type to panels, uint8."""
    rows, width = weight.shape
    unit, unit_bytes = _UNITS[storage]
    panel_bytes = -(-width // unit) * unit_bytes
    panels = torch.zeros(-(-rows // _PANEL) * panel_bytes, dtype=torch.uint8)
    lay_out = cpu.function("qk_linear_layout", "ipnnpn")
    dense = weight.contiguous()  # by name: C reads it after data_ptr() has returned
    lay_out(storage, dense.data_ptr(), rows, width, panels.data_ptr(), panel_bytes)
    return panels
