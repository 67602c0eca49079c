"""Rotations: orthogonal at every width, flat where there is a Hadamard matrix, the same for the same seed."""

from __future__ import annotations

import pytest
import torch

from quantkit.numerics.hadamard import random_rotation


@pytest.mark.parametrize("width", [1, 2, 6, 8, 12, 20, 28, 36, 64, 96, 112, 172, 352, 896])
def test_orthogonal_at_every_width(width):
    matrix = random_rotation(width, 3).apply(torch.eye(width)).double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [8, 12, 20, 28, 36, 64, 96, 352, 896])
def test_hadamard_where_there_is_one(width):
    """Every coordinate goes into all others in equal parts, so no outlier survives."""
    matrix = random_rotation(width, 3).apply(torch.eye(width))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, width**-0.5), rtol=0, atol=1e-6)


def test_seeds_and_blocks():
    rows = torch.randn(3, 64)
    assert torch.equal(random_rotation(64, 1).apply(rows), random_rotation(64, 1).apply(rows))
    assert not torch.equal(random_rotation(64, 1).apply(rows), random_rotation(64, 2).apply(rows))
    by_block = random_rotation(16, 1).apply_blocks(rows)
    assert torch.equal(by_block[:, 16:32], random_rotation(16, 1).apply(rows[:, 16:32].contiguous()))
