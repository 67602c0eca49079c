"""Quick products: as exact as slow ones, and torch's own setting comes back."""

from __future__ import annotations

import pytest
import torch

from quantkit.numerics import matmul, native
from quantkit.numerics.matmul import add_products, multiplies_bfloat16, pack_matrix, packed_size, quick_products

CPU = torch.device("cpu")


def test_precision_is_kept_and_the_setting_comes_back():
    left, right = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(1))
    with pytest.raises(ZeroDivisionError), quick_products(CPU):
        error = (left @ right - left.double() @ right.double()).norm() / (left @ right).norm()
        raise ZeroDivisionError
    assert error < 1e-5
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("device", "keeps", "inside"), [("cpu", True, "medium"), ("cpu", False, "highest"),
                                                         ("cuda", True, "highest")])  # fmt: skip
def test_torch_is_allowed_less_only_where_nothing_is_lost(monkeypatch, device, keeps, inside):
    monkeypatch.setattr(matmul, "keeps_precision", lambda: keeps)
    with quick_products(torch.device(device)):
        assert torch.get_float32_matmul_precision() == inside


def test_what_a_user_has_chosen_stays():
    torch.set_float32_matmul_precision("high")
    try:
        with quick_products(CPU):
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def packed(values):
    return pack_matrix(values, torch.empty(packed_size(*values.shape), dtype=torch.bfloat16))


@pytest.mark.skipif(not multiplies_bfloat16(CPU), reason=native.status())
@pytest.mark.parametrize(
    ("rows", "left", "right"),
    [(1, 1, 1), (2, 16, 48), (33, 50, 70), (600, 100, 20), (7, 33, 97), (545, 300, 300), (64, 17, 33)],
)
def test_products_of_bfloat16_have_all_bits_of_float32(rows, left, right):
    one, other = torch.randn(rows, left).bfloat16(), torch.randn(rows, right + 3).bfloat16()[:, 3:]
    total = torch.randn(left, right)
    expected = total.double() + one.double().T @ other.double()
    add_products(total, packed(one), slice(0, left), packed(other))
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5 * rows**0.5)


@pytest.mark.skipif(not multiplies_bfloat16(CPU), reason=native.status())
@pytest.mark.parametrize("threads", [1, 2])
def test_of_a_square_what_is_below_the_diagonal_is_asked_for(threads):
    values, before = torch.randn(40, 150).bfloat16(), torch.get_num_threads()
    total = torch.zeros(70, 150)
    torch.set_num_threads(threads)
    try:
        add_products(total, packed(values), slice(80, 150), packed(values), lower=True)
    finally:
        torch.set_num_threads(before)
    expected = values.double()[:, 80:].T @ values.double()
    torch.testing.assert_close(total.double().tril(80), expected.tril(80), rtol=1e-5, atol=1e-4)


def test_without_packing_products_are_those_of_torch():
    values, total = torch.randn(40, 50), torch.ones(20, 35)
    add_products(total, values, slice(30, 50), values)
    torch.testing.assert_close(total, 1 + values[:, 30:].T @ values[:, :35])
