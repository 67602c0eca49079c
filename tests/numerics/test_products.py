"""Quick products: as exact as slow ones, and torch's own setting comes back."""

from __future__ import annotations

import pytest
import torch

from quantkit.numerics import products
from quantkit.numerics.products import quick_products

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
    monkeypatch.setattr(products, "keeps_precision", lambda: keeps)
    with quick_products(torch.device(device)):
        assert torch.get_float32_matmul_precision() == inside


def test_what_a_user_has_chosen_stays():
    torch.set_float32_matmul_precision("high")
    try:
        with quick_products(CPU):
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
