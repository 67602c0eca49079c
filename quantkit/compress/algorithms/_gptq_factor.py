"""Cholesky factor of a Hessian (K, K) for GPTQ's loop, computed in the memory of one (K, K) matrix."""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.errors import ModelError

# Rows copied at once into another order, or from one half to the other.
_COPIED = 256
# Columns that are factorised at once on a CPU.
_PANEL = 512
_DAMPING_FACTOR = 3.0
_DAMPING_LIMIT = 100.0


class Factor(NamedTuple):
    """A damped Hessian and its factor, H = L L', in one square.

    The columns of L are in the order opposite to that in which they are settled, so that the loop can use it as it
    comes, from its last row up; H is in the order of the inputs.

    Args:
        lower: (K, K) float32, L on its diagonal and below, H above.
        backwards: (K,) input column of each row of L.
        raised: the damping that was needed if it had to be raised, else 0.
        diagonal: (K,) float32, of H.
    """

    lower: Tensor
    backwards: Tensor
    raised: float
    diagonal: Tensor

    def hessian(self, rows: slice) -> Tensor:
        """Return a copy of some rows (R, K) of H."""
        copied = torch.empty(rows.stop - rows.start, len(self.lower), device=self.lower.device)
        _transpose(self.lower[: rows.stop, rows], copied[:, : rows.stop])
        own = copied[:, rows].tril_(-1)
        own += own.T + self.diagonal[rows].diag()
        copied[:, rows.stop :] = self.lower[rows, rows.stop :]
        return copied


def cholesky_factor(hessian: Tensor, order: Tensor, damping: float) -> Factor:
    """Cholesky factor of the reordered, damped Hessian: the column settled first comes last, and H = L L'.

    Args:
        hessian: (K, K) float32, of which the upper half is not read; damped in place.
        order: (K,) columns in the order in which they are settled.
        damping: fraction of the mean diagonal that is added.
    Raises:
        ModelError: no damping makes it positive definite; the inputs are not finite.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean().item()
    diagonal[diagonal == 0] = mean if mean > 0 else 1.0  # an input that never fires: rounded on its own
    backwards = order.flip(0)
    lower = torch.empty_like(hessian)
    _copy_upper(hessian, hessian)
    amount, added = damping, 0.0
    while amount < _DAMPING_LIMIT:
        diagonal.add_((amount - added) * mean)
        added = amount
        for start in range(0, len(order), _COPIED):
            rows = backwards[start : start + _COPIED]
            torch.index_select(hessian.index_select(0, rows), 1, backwards, out=lower[start : start + _COPIED])
        if _factorise(lower) and torch.isfinite(lower.diagonal()).all():
            _copy_upper(hessian, lower)
            return Factor(lower, backwards, amount if amount != damping else 0.0, diagonal.clone())
        amount *= _DAMPING_FACTOR
    raise ModelError(f"the input Gram matrix cannot be factorised even with damping {added:.3g}: inputs are not finite")


def add_lower(total: Tensor, other: Tensor) -> None:
    """Add one (K, K) matrix to another, on and below the diagonal; memory above it stays untouched, so not taken."""
    for start in range(0, len(total), _COPIED):
        rows, columns = slice(start, start + _COPIED), slice(0, start + _COPIED)
        total[rows, columns] += other[rows, columns]


def plain_factor(hessian: Tensor, ridge: float) -> Tensor | None:
    """Cholesky factor (K, K) of a Hessian with its columns as they are; None where it has none.

    Args:
        hessian: (K, K) float32, of which the upper half is not read; not modified.
        ridge: fraction of the mean diagonal that is added.
    Returns:
        a matrix of which what is above the diagonal means nothing.
    """
    lower, diagonal = torch.empty_like(hessian), hessian.diagonal()
    for start in range(0, len(hessian), _COPIED):
        lower[start : start + _COPIED, : start + _COPIED] = hessian[start : start + _COPIED, : start + _COPIED]
    lower.diagonal().add_(ridge * diagonal.mean())
    return lower if _factorise(lower) and torch.isfinite(lower.diagonal()).all() else None


def _factorise(matrix: Tensor) -> bool:
    """Replace the lower half of a square by its Cholesky factor; whether it has one. What is above means nothing.

    On a CPU by panels, so that most of it are products, see `quick_products`: MKL alone takes twice as long on AMD's.
    """
    size = _PANEL if matrix.device.type == "cpu" else len(matrix)
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    for start in range(0, len(matrix), size):
        stop = start + size
        matrix[start:, start:stop].addmm_(matrix[start:, :start], matrix[start:stop, :start].T, alpha=-1)
        own, below = matrix[start:stop, start:stop].T, matrix[stop:, start:stop]
        # L' in column-major order is L in row-major order; where the panel is the whole square, it stays in place.
        torch.linalg.cholesky_ex(own, upper=True, out=(own, info))
        if info.item():
            return False
        below.copy_(torch.linalg.solve_triangular(own, below, upper=True, left=False))
    return True


def _copy_upper(lower: Tensor, upper: Tensor) -> None:
    """Copy the values below the diagonal of `lower` to above the diagonal of `upper`, transposed."""
    for start in range(0, len(lower), _COPIED):
        stop = start + _COPIED
        _transpose(lower[stop:, start:stop], upper[start:stop, stop:])
        own = upper[start:stop, start:stop].tril_()
        own += lower[start:stop, start:stop].tril(-1).T


def _transpose(matrix: Tensor, out: Tensor) -> None:
    """Copy (R, C) into (C, R), in blocks: torch is several times as slow where the one or the other is not whole."""
    for own, block in zip(torch.split(out, _COPIED, dim=1), torch.split(matrix, _COPIED), strict=True):
        own.copy_(block.contiguous().T.contiguous())
