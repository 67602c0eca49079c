"""Randomised Hadamard rotations: orthogonal matrices that spread every coordinate over all others.

Hadamard matrices are available for widths 2^k m, where m is 1 or a size of Paley's constructions over a prime; other
widths get a random orthogonal matrix. The factor 2^k is applied by sums and differences, without a matrix.
Shapes: D width, T rows.
Source: Ashkboos et al. 2024, QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs; Paley 1933.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# No Paley blocks wider than this: multiplying by them would cost as much as by a dense matrix.
_WIDEST_BLOCK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """An orthogonal (D, D) matrix Q that is never stored as a whole.

    Args:
        block: (m, m) float32 orthogonal matrix.
        signs: (D,) float32, 1 or -1: Q = diag(signs) (H kron block), H the normalised Hadamard matrix of size D / m.
    """

    block: Tensor
    signs: Tensor

    def apply(self, rows: Tensor) -> Tensor:
        """Return (T, D) float32 rows times Q; the rows are not modified."""
        width, size = len(self.signs), len(self.block)
        product = (rows * self.signs).view(len(rows), width // size, size) @ self.block
        half = 1
        while half < width // size:
            pairs = product.view(len(rows), -1, 2, half * size)
            product = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
            half *= 2
        return product.view(len(rows), width).div_((width // size) ** 0.5)

    def apply_blocks(self, rows: Tensor) -> Tensor:
        """Return (T, n D) rows with each of their n blocks, e.g. heads, multiplied by Q."""
        return self.apply(rows.reshape(-1, len(self.signs))).view(rows.shape)


def random_rotation(width: int, seed: int) -> Rotation:
    """Return a randomised Hadamard rotation of this width if there is one, else a random orthogonal matrix.

    Args:
        width: D > 0.
        seed: equal arguments give equal matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    # Without signs, a row of constant values would end up in a single coordinate.
    signs = torch.randint(0, 2, (width,), generator=generator).float().mul_(2).sub_(1)
    odd = width & -width
    # Smallest block first: a dense block of size m costs m operations per value, the factor 2^k only k.
    for size in (width // odd << shift for shift in range(odd.bit_length())):
        block = _hadamard(size) if size <= _WIDEST_BLOCK else None
        if block is not None:
            return Rotation(block=block / size**0.5, signs=signs)
    # In float64, so that Q is orthogonal up to its rounding to float32.
    normal = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return Rotation(block=torch.linalg.qr(normal)[0].float(), signs=signs)


def _hadamard(size: int) -> Tensor | None:
    """Return an (m, m) Hadamard matrix; m = 1, q + 1 for a prime q = 3 mod 4, or 2 q + 2 for a prime q = 1 mod 4.

    None for other sizes.
    """
    if size == 1:
        return torch.ones(1, 1)
    # Hadamard matrices above size 2 exist for multiples of 4 only.
    if size % 4:
        return None
    # Paley's first construction: q = size - 1 is 3 mod 4, as size is a multiple of 4.
    if _is_prime(size - 1):
        return _bordered(size - 1, -1) + torch.eye(size)
    if _is_prime(size // 2 - 1) and (size // 2 - 1) % 4 == 1:
        # Paley's second: each entry 1, -1 or 0 of the conference matrix becomes a 2 x 2 block.
        core, one = _bordered(size // 2 - 1, 1), torch.eye(size // 2)
        for_core, for_one = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]]])
        return torch.kron(core, for_core) + torch.kron(one, for_one)
    return None


def _bordered(prime: int, corner: int) -> Tensor:
    """Return Paley's (q + 1, q + 1) matrix: quadratic residues of all differences, bordered by a row of ones and
    a column of `corner`.

    It is skew-symmetric for corner -1 and symmetric for corner 1.
    """
    squares = {value * value % prime for value in range(1, prime)}
    residue = torch.tensor([0.0] + [1.0 if value in squares else -1.0 for value in range(1, prime)])
    indices = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1)
    matrix[0, 1:], matrix[1:, 0] = 1, corner
    matrix[1:, 1:] = residue[(indices[:, None] - indices[None]) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
