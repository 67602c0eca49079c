"""Tunable rounding of one weight matrix: an offset per element, a factor per scale, and a shift per zero point.

Value = scale (code - zero), code = clamp(round(weight / scale + offset) + zero), scale = start * factor. The gradients
take clamping into account, but not rounding (straight-through estimator). Explicit formulas compute the gradients: in C
on a CPU, else in torch, in blocks of rows. This needs no autograd graph and no temporary of the weight's size.
`_autoround_block` computes the gradient of the loss with respect to the values, and decides when to take a step.
Shapes: N outputs, K inputs, G groups of g inputs.
Source: Cheng et al. 2023, Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs; Esser et
al. 2019, Learned Step Size Quantization (gradient of the scale).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quantkit.numerics import native
from quantkit.numerics.affine import Ranges, WeightGrid, assemble, on_rows
from quantkit.numerics.scales import round_scale
from quantkit.numerics.tensor import QuantizedTensor

# Number of elements that are processed at once.
_BLOCK = 1 << 19
# Largest offset, in codes. The paper's 0.5 can only choose between the two nearest codes.
_FURTHEST = 1.0
_FACTORS = (0.25, 2.0)


class TunedWeight:
    """One weight matrix whose rounding and ranges are tuned. The object holds a reference to the matrix and one float32
    tensor of the same shape.

    Args:
        weight: (N, K), any float dtype; not modified, and must not change during tuning.
        grid: grid that the weight is rounded to: an integer type with a scale per row or per group of a row.
        ranges: initial ranges.
    """

    def __init__(self, weight: Tensor, grid: WeightGrid, ranges: Ranges) -> None:
        self._weight, self._grid, self._dtype = weight, grid, grid.scheme.dtype
        scale, zero = ranges[:2]
        self._start, self._start_zero = scale.clone(), None if zero is None else zero.clone()
        self._step_rows = max(1, _BLOCK // weight.shape[1])
        self.reset()

    def reset(self) -> None:
        """Undo all tuning, so that the weight is again rounded to nearest in the initial ranges."""
        self.offset = torch.zeros(self._weight.shape, device=self._weight.device)
        self.factor = torch.ones_like(self._start)
        self.shift = torch.zeros_like(self._start)
        self._scale, self._zero = self._parameters()  # as stored

    def dequantize(self, out: Tensor) -> None:
        """Write the values of the current codes to `out` (N, K), in the dtype of `out`."""
        if self._in_c(out):
            self._call("qk_tuned_values", "ppi", self.offset.data_ptr(), out.data_ptr(), out.dtype == torch.bfloat16)
            return
        for rows, (ratio, codes, *_) in self._blocks():
            scale, zero = self._present(rows)
            self._clamped(self._raw(rows, self._ratio(rows, scale, ratio), zero, codes))
            if zero is not None:
                codes -= zero.unsqueeze(-1)
            out[rows].view_as(codes).copy_(codes.mul_(scale.unsqueeze(-1)))

    def step(self, gradient: Tensor, values: Tensor, rate: float) -> None:
        """Move the parameters one step against the sign of their gradients, and write the new values.

        Args:
            gradient: (N, K) gradient of the loss with respect to the values, any float dtype; not modified.
            values: (N, K), overwritten with the values after the step.
            rate: step size of the offsets. Factors move by rate / 2, shifts by rate / 2 times half the code range.
        """
        by_scale, by_zero = torch.empty_like(self._start), torch.empty_like(self._start)
        if self._in_c(gradient):
            self._call(
                "qk_tuned_move", "pipppff", gradient.data_ptr(), gradient.dtype == torch.bfloat16,
                self.offset.data_ptr(), by_scale.data_ptr(), by_zero.data_ptr(), rate, _FURTHEST,
            )  # fmt: skip
        else:
            for rows, scratch in self._blocks():
                by_scale[rows], by_zero[rows] = self._move(rows, gradient[rows], rate, scratch)
        # d loss / d factor = d loss / d scale * start. The sign of start matters, because it may be negative.
        self.factor.sub_((by_scale * self._start).sign_(), alpha=rate / 2).clamp_(*_FACTORS)
        if self._zero is not None:
            self.shift.sub_(by_zero.sign_(), alpha=rate / 2 * self._dtype.half_range)
        scale, zero = self._parameters()
        self._scale.copy_(scale)
        if self._zero is not None and zero is not None:
            self._zero.copy_(zero)
        self.dequantize(values)

    def result(self) -> QuantizedTensor:
        """Return the quantized weight with the current codes and ranges."""
        stored = torch.empty(self._weight.shape, dtype=self._dtype.storage, device=self._weight.device)
        for rows, (ratio, codes, *_) in self._blocks():
            scale, zero = self._present(rows)
            self._clamped(self._raw(rows, self._ratio(rows, scale, ratio), zero, codes))
            stored[rows] = codes.view_as(stored[rows])
        return assemble(stored, Ranges(self._scale, self._zero), self._grid)

    def _blocks(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield blocks of rows. Each comes with the same four float32 scratch tensors (R, G, g), whose contents are
        undefined.

        Reusing memory is faster: otherwise, a CPU would free memory after each operation and map it again for the next.
        """
        num_rows, groups = self._weight.shape[0], self._start.shape[1]
        scratch = torch.empty(
            4, min(self._step_rows, num_rows), groups, self._weight.shape[1] // groups, device=self._weight.device
        )
        for row in range(0, num_rows, self._step_rows):
            yield slice(row, row + self._step_rows), [part[: num_rows - row] for part in scratch]

    def _present(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return the current scales and zero points (R, G) of these rows."""
        return self._scale[rows], None if self._zero is None else self._zero[rows]

    def _parameters(self) -> tuple[Tensor, Tensor | None]:
        """Compute the scales and zero points (N, G) from the tuned parameters; scales keep their initial signs."""
        # Round the magnitude, because a scale that underflows becomes a positive epsilon; then restore the sign.
        magnitude = round_scale(self._start.abs() * self.factor, self._grid.scale_dtype)
        scale = on_rows(magnitude, self._grid).copysign_(self._start)
        if self._start_zero is None:
            return scale, None
        return scale, (self._start_zero + self.shift).round_().clamp_(self._dtype.minimum, self._dtype.maximum)

    def _ratio(self, rows: slice, scale: Tensor, out: Tensor) -> Tensor:
        """Write weight / scale to `out` (R, G, g), and return `out`."""
        return out.copy_(self._weight[rows].view_as(out)).div_(scale.unsqueeze(-1))

    def _raw(self, rows: slice, ratio: Tensor, zero: Tensor | None, out: Tensor) -> Tensor:
        """Write the codes before clamping to `out` (R, G, g), and return `out`."""
        torch.add(ratio, self.offset[rows].view_as(ratio), out=out).round_()
        return out if zero is None else out.add_(zero.unsqueeze(-1))

    def _clamped(self, raw: Tensor) -> Tensor:
        return raw.clamp_(self._dtype.minimum, self._dtype.maximum)

    def _move(self, rows: slice, gradient: Tensor, rate: float, scratch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Move the offsets of some rows, in torch, given the gradient of these rows.

        Returns:
            The gradients of the loss with respect to scales and zero points, (R, G).
        """
        ratio, codes, inside, by_value = scratch
        scale, zero = self._present(rows)
        raw = self._raw(rows, self._ratio(rows, scale, ratio), zero, inside)
        torch.clamp(raw, self._dtype.minimum, self._dtype.maximum, out=codes)
        inside.eq_(codes)  # as floats, because writing and reading booleans is several times slower
        by_value.copy_(gradient.view_as(ratio))
        if zero is not None:
            codes -= zero.unsqueeze(-1)
        # d value / d scale is code - zero; where nothing was clamped, weight / scale is subtracted.
        by_scale = codes.addcmul_(ratio, inside, value=-1).mul_(by_value).sum(-1)
        # A shift of the zero point moves unclamped codes equally, so only clamped values depend on the zero point.
        by_zero = torch.addcmul(by_value, by_value, inside, value=-1, out=codes).sum(-1).mul_(-scale)
        moved = self.offset[rows].view_as(ratio)
        moved.addcmul_(by_value.mul_(inside).sign_(), scale.sign().unsqueeze(-1), value=-rate)
        moved.clamp_(-_FURTHEST, _FURTHEST)
        return by_scale, by_zero

    def _in_c(self, other: Tensor) -> bool:
        """Whether the C code can compute a step with the gradient `other`, or write values to `other`."""
        tensors = (self._weight, other)
        usable = all(t.is_cpu and t.is_contiguous() and t.dtype in (torch.float32, torch.bfloat16) for t in tensors)
        return usable and native.library() is not None

    def _call(self, name: str, types: str, *arguments: Any) -> None:
        """Call one of the functions of tune.c with the weight, its current ranges, and these arguments, whose `types`
        are letters as in `Library.function`.
        """
        scale, zero = self._scale.contiguous(), None if self._zero is None else self._zero.contiguous()
        native.function(name, f"pippnnff{types}i")(
            self._weight.data_ptr(), self._weight.dtype == torch.bfloat16, scale.data_ptr(),
            None if zero is None else zero.data_ptr(), scale.numel(), self._weight.numel() // scale.numel(),
            self._dtype.minimum, self._dtype.maximum, *arguments, torch.get_num_threads(),
        )  # fmt: skip
