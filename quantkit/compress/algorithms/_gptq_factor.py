"""Cholesky factor of a Hessian (K, K) for GPTQ's loop, computed in the memory of one (K, K) matrix."""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.errors import ModelError

# Number of rows that are copied at once when a matrix is reordered or one triangle is copied to the other.
_COPIED = 256
# Number of columns that are factorised at once on a CPU.
_PANEL = 512
_DAMPING_FACTOR = 3.0
_DAMPING_LIMIT = 100.0


class Factor(NamedTuple):
    """A damped Hessian H and its Cholesky factor L, H = L L', stored in one square matrix.

    The rows of L are in reverse rounding order, so GPTQ's loop begins with the last row. H has the order of the inputs.

    Args:
        lower: (K, K) float32: L on and below the diagonal, H above it.
        backwards: (K,) input column of each row of L.
        raised: the damping that was used if the requested damping was not enough; otherwise 0.
        diagonal: (K,) float32, diagonal of H.
    """

    lower: Tensor
    backwards: Tensor
    raised: float
    diagonal: Tensor

    def hessian(self, rows: slice) -> Tensor:
        """Return a copy of the given rows of H, (R, K)."""
        copied = torch.empty(rows.stop - rows.start, len(self.lower), device=self.lower.device)
        _transpose(self.lower[: rows.stop, rows], copied[:, : rows.stop])
        own = copied[:, rows].tril_(-1)
        own += own.T + self.diagonal[rows].diag()
        copied[:, rows.stop :] = self.lower[rows, rows.stop :]
        return copied


def cholesky_factor(hessian: Tensor, order: Tensor, damping: float) -> Factor:
    """Return the Cholesky factor of the reordered, damped Hessian; the column that is rounded first comes last.

    Args:
        hessian: (K, K) float32; the upper triangle is overwritten without being read, and the diagonal is damped in
            place.
        order: (K,) columns in the order in which they are rounded.
        damping: fraction of the mean diagonal to add to the diagonal.
    Raises:
        ModelError: the Hessian is not positive definite with any damping, because the inputs are not finite.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean().item()
    diagonal[diagonal == 0] = mean if mean > 0 else 1.0  # for always-zero inputs, which affect no other column
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
    raise ModelError(f"inputs are not finite: their Gram matrix cannot be factorised even with damping {added:.3g}")


def add_lower(total: Tensor, other: Tensor) -> None:
    """Add `other` (K, K) to `total` (K, K) on and below the diagonal. Blocks above the diagonal are not touched, so
    their memory stays unallocated.
    """
    for start in range(0, len(total), _COPIED):
        rows, columns = slice(start, start + _COPIED), slice(0, start + _COPIED)
        total[rows, columns] += other[rows, columns]


def plain_factor(hessian: Tensor, ridge: float) -> Tensor | None:
    """Return the Cholesky factor of a Hessian plus a ridge; None if the sum is not positive definite.

    Args:
        hessian: (K, K) float32; the upper triangle is not read; not modified.
        ridge: fraction of the mean diagonal to add to the diagonal.
    Returns:
        The factor (K, K), in the order of the inputs; its entries above the diagonal are undefined.
    """
    lower, diagonal = torch.empty_like(hessian), hessian.diagonal()
    for start in range(0, len(hessian), _COPIED):
        lower[start : start + _COPIED, : start + _COPIED] = hessian[start : start + _COPIED, : start + _COPIED]
    lower.diagonal().add_(ridge * diagonal.mean())
    return lower if _factorise(lower) and torch.isfinite(lower.diagonal()).all() else None


def _factorise(matrix: Tensor) -> bool:
    """Replace a matrix by its Cholesky factor in place; return False if the matrix is not positive definite.

    Only the lower triangle is read. The entries above the diagonal are undefined afterwards. On a CPU, the factor is
    computed in panels, so that most of the work is matrix products; see `numerics.matmul.quick_products`. MKL's own
    factorization takes twice as long on AMD CPUs.
    """
    size = _PANEL if matrix.device.type == "cpu" else len(matrix)
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    for start in range(0, len(matrix), size):
        stop = start + size
        matrix[start:, start:stop].addmm_(matrix[start:, :start], matrix[start:stop, :start].T, alpha=-1)
        own, below = matrix[start:stop, start:stop].T, matrix[stop:, start:stop]
        # L' in column-major order is L in row-major order; if the panel is the whole matrix, the result stays in place.
        torch.linalg.cholesky_ex(own, upper=True, out=(own, info))
        if info.item():
            return False
        below.copy_(torch.linalg.solve_triangular(own, below, upper=True, left=False))
    return True


def _copy_upper(lower: Tensor, upper: Tensor) -> None:
    """Transpose the part of `lower` below the diagonal, and write it above the diagonal of `upper`."""
    for start in range(0, len(lower), _COPIED):
        stop = start + _COPIED
        _transpose(lower[stop:, start:stop], upper[start:stop, stop:])
        own = upper[start:stop, start:stop].tril_()
        own += lower[start:stop, start:stop].tril(-1).T


def _transpose(matrix: Tensor, out: Tensor) -> None:
    """Write the transpose of a matrix (R, C) to `out` (C, R), in blocks. `Tensor.copy_` alone is several times slower
    if either tensor is not contiguous.
    """
    for own, block in zip(torch.split(out, _COPIED, dim=1), torch.split(matrix, _COPIED), strict=True):
        own.copy_(block.contiguous().T.contiguous())
