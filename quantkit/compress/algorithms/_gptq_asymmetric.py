"""Choose how far a set of linears compensates for the errors of earlier layers.

Let W be a linear's weight, o its input in the original model, and x its input in the quantized model. The weight V with
the least |V x - W o|^2 is V = W + W E H^-1, with E = mean (o - x) x' and H = mean x x'. This fit has K unknowns per
output. With few tokens, the correction W E H^-1 is mostly noise, and worse than none. Therefore a ridge is added to H,
and only a share of the correction is applied. Cross-validation chooses the ridge and the share: the correction is
computed from one half of the tokens and tested on the other half.
Shapes: N outputs, K inputs, R outputs or combinations of outputs.
Source: Li et al. 2025, GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration, section 4, which
applies the same correction column by column; the cross-validation is our own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.compress.algorithms._gptq_factor import plain_factor
from quantkit.compress.calibration.observers import CrossErrors
from quantkit.distributed import assign_work, fill, rank
from quantkit.numerics.matmul import add_products, multiplies_bfloat16, pack_matrix

# Ridges to try, as fractions of the Hessian's mean diagonal.
_RIDGES = (0.01, 0.1, 0.3)
# Number of rows that are divided by a Hessian at once, and of columns per block of the Hessian's factor. With these
# sizes, most of the work is matrix products, and the triangles to solve are small.
_DIVIDED_ROWS, _DIVIDED_COLUMNS = 1024, 256

Shift = Tensor | tuple[Tensor, ...]
"""The (K, K) matrix E H^-1, or for each linear i of a set the (N_i, K) matrix W_i E H^-1."""


class Correction(NamedTuple):
    """Parameters of a correction: the ridge, as a fraction of the Hessian's mean diagonal, and the share to apply."""

    ridge: float
    share: float


def choose_correction(hessians: list[Tensor], halves: list[Tensor], limit: float) -> Correction:
    """Choose the ridge and the share of a correction by cross-validation between two halves of the tokens.

    With the chosen ridge, the correction computed from the first half lowers the error on the second half the most.

    Args:
        hessians: Hessian (K, K) of each half; the upper triangles are not read; not modified.
        halves: see `CrossErrors`; not modified.
        limit: upper limit of the share.
    Returns:
        The chosen correction, with a share of 0 if no correction lowers the error.
    """
    first, second = hessians
    best, gain = Correction(0.0, 0.0), 0.0
    for ridge in _RIDGES if halves[0].any() else ():
        lower = plain_factor(first, ridge)
        if lower is None:
            continue
        shift = divide(halves[0].clone(), lower)
        # On the second half a share s of the shift changes the squared error by s^2 b - 2 s a.
        a, b = (shift * halves[1]).sum().item(), _energy(shift, second)
        share = min(a / b, 1.0) if a > 0 and b > 0 else 0.0
        if share * (2 * a - share * b) > gain:
            gain = share * (2 * a - share * b)
            # Of b, the part a is signal, the rest is noise. With the tokens of both halves, the noise is half as large.
            best = Correction(ridge, min(2 * a / (a + b), limit))
    return best


def _energy(rows: Tensor, hessian: Tensor) -> float:
    """Return the sum of r H r' over the rows r of a matrix (R, K); the upper triangle of H (K, K) is not read."""
    total = 0.0
    for start in range(0, len(hessian), _DIVIDED_COLUMNS):
        stop = start + _DIVIDED_COLUMNS
        own = rows[:, start:stop]
        below = (rows[:, stop:] @ hessian[stop:, start:stop]).mul_(own).sum()
        corner = hessian[start:stop, start:stop]
        inside = (own @ (corner.tril() + corner.tril(-1).T)).mul_(own).sum()
        total += (2 * below + inside).item()
    return total


def shift_of(errors: CrossErrors, hessian: Tensor, chosen: Correction, *, by_all: bool) -> Shift | None:
    """Compute the matrices with which `corrected` corrects weights. They overwrite the memory of `errors.mean`.

    Args:
        errors: errors of the inputs; must not be used afterwards.
        hessian: (K, K); the upper triangle is not read; not modified.
        chosen: result of `choose_correction`.
        by_all: whether every process calls this with equal arguments. Each process then computes some rows of E H^-1,
            and all get the whole matrix.
    Returns:
        E H^-1 times the share, (K, K), or for each linear i of the set, W_i E H^-1 times the share, (N_i,
        K). None if the share is 0 or the Hessian cannot be factorized.
    """
    lower = plain_factor(hessian, chosen.ridge) if chosen.share else None
    if lower is None:
        return None
    if not isinstance(errors.mean, Tensor):
        return tuple(divide(part, lower).mul_(chosen.share) for part in errors.mean)
    parts = torch.split(errors.mean, _DIVIDED_ROWS)
    owners = assign_work([len(part) for part in parts]) if by_all else [rank()] * len(parts)
    for part, owner in zip(parts, owners, strict=True):
        if owner == rank():
            divide(part, lower).mul_(chosen.share)
    for part, owner in zip(parts, owners, strict=True) if by_all else ():
        fill(part, owner)
    return errors.mean


def corrected(weights: list[Tensor], shift: Shift) -> list[Tensor]:
    """Return weights, corrected so that their outputs in the quantized model are closer to those in the original model.

    Args:
        weights: weight (N_i, K) of each linear; not modified.
        shift: returned by `shift_of`. If it is a tuple, the corrected weights overwrite its matrices.
    Returns:
        A float32 weight (N_i, K) for each linear.
    """
    if not isinstance(shift, Tensor):
        return [own.add_(weight) for own, weight in zip(shift, weights, strict=True)]
    if weights[0].dtype != torch.bfloat16 or not multiplies_bfloat16(shift.device):
        return [torch.addmm(values, values, shift) for values in (weight.float() for weight in weights)]
    packed, targets = pack_matrix(shift.bfloat16()), [weight.float() for weight in weights]
    for weight, target in zip(weights, targets, strict=True):
        add_products(target, pack_matrix(weight.T.contiguous()), slice(0, len(weight)), packed)
    return targets


def divide(matrix: Tensor, lower: Tensor) -> Tensor:
    """Return M H^-1. Unlike LAPACK, this does not copy the factor of H. Most of the work is matrix products.

    Args:
        matrix: M (N, K), overwritten with the result.
        lower: Cholesky factor (K, K) of H; its upper triangle is not read.
    """
    width = len(lower)
    blocks = [slice(start, min(start + _DIVIDED_COLUMNS, width)) for start in range(0, width, _DIVIDED_COLUMNS)]
    for values in torch.split(matrix, _DIVIDED_ROWS):
        for own in blocks:
            block = values[:, own].addmm_(values[:, : own.start], lower[own, : own.start].T, alpha=-1)
            block.copy_(torch.linalg.solve_triangular(lower[own, own].T, block, upper=True, left=False))
        for own in reversed(blocks):
            block = values[:, own].addmm_(values[:, own.stop :], lower[own.stop :, own], alpha=-1)
            block.copy_(torch.linalg.solve_triangular(lower[own, own], block, upper=False, left=False))
    return matrix
