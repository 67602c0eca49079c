"""The dtype that this CPU computes in fastest."""

import platform

import pytest
import torch

from quantkit.machine.devices import fast_cpu_dtype


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have no AVX-512")
@pytest.mark.parametrize(
    ("multiplies", "has_products", "dtype"),
    [(True, True, torch.bfloat16), (True, False, torch.float32), (False, False, torch.float32)],
)
def test_bfloat16_needs_its_own_products(monkeypatch, multiplies, has_products, dtype):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: multiplies)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_products)
    assert fast_cpu_dtype() == dtype
