"""What Triton refuses to compile or to load is done by torch from then on, and said once; no request ends by it."""

from __future__ import annotations

import logging

import pytest
import torch
from triton.runtime.errors import OutOfResources

from quantkit.kernels import gpu, ops
from quantkit.kernels.gpu import experts as gpu_experts
from quantkit.kernels.gpu import kv_store, paged_attention, quantized_linear, w4a16
from quantkit.kernels.gpu import ops as gpu_ops
from quantkit.kernels.gpu.quantized_linear import PackedLinear
from quantkit.kernels.ops import Stepwise
from quantkit.kernels.reference import experts as reference
from quantkit.kernels.reference import ops as plain
from quantkit.kernels.reference.attention import TorchAttention
from quantkit.kernels.types import LinearSource
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme
from quantkit.runtime.cache import kv_cache
from tests.kernels.gpu.interpreted.packed import CPU, quantized
from tests.kernels.gpu.interpreted.test_attention import assert_same_memory
from tests.kernels.gpu.interpreted.test_experts import Experts, rows
from tests.kernels.paged import Sequences, layout

REASON = "OutOfResources: out of resource: shared memory, Required: 2, Hardware limit: 1."


@pytest.fixture
def refuse(monkeypatch, caplog):
    """Makes a launch fail as Triton's do; afterwards it was tried once, and one warning says so."""
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    monkeypatch.setattr(gpu, "_replaced", {})
    tried = []

    def refuse(family, module, name):
        def launch(*given, **named):
            tried.append(family)
            raise OutOfResources(2, 1, "shared memory")

        monkeypatch.setattr(module, name, launch)

    with caplog.at_level(logging.WARNING):
        yield refuse
    (family,) = tried
    assert gpu.why_replaced(family, CPU).startswith(REASON)
    (record,) = caplog.get_records("call")
    assert record.message.startswith(f"GPU kernels for {gpu.FAMILIES[family]}: {REASON}")
    assert "torch replaces them on cpu" in record.message


@pytest.mark.parametrize("kind", ["auto", "int4"])
@pytest.mark.parametrize(("module", "name"), [(kv_store, "enter"), (paged_attention, "attend")])
def test_attention(refuse, monkeypatch, module, name, kind):
    """Prompts, decodes over a page border, a chunk behind: as by torch, whichever launch fails first."""
    refuse("attention", module, name)
    made = Sequences(layout(kind, dim=32, page_size=16, dtype=torch.float16), (20, 60))
    turns = torch.randn(64, 16)
    caches, outputs = [], []
    for implementation in (lambda views: Stepwise(TorchAttention(views)), ops.paged_attention):
        monkeypatch.setattr(kv_cache, "paged_attention", implementation)
        caches.append(made.cache())
        outputs.append([])
        for spans in ([(0, 0, 15), (1, 0, 31)], [(0, 15, 16), (1, 31, 32)], [(0, 16, 17), (1, 32, 60)]):
            at = torch.cat([turns[start:stop] for _, start, stop in spans])
            outputs[-1] += made.step(caches[-1], spans, angles=(at.cos(), at.sin()))
    for actual, expected in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(actual, expected, atol=4e-3, rtol=0)
    assert_same_memory(*caches)


def test_products(refuse):
    refuse("quantized_linear", w4a16, "multiply")
    weight, x = quantized("int4", 64, True, (32, 256)), torch.randn(2, 256).half()
    linear = PackedLinear(LinearSource(weight=weight, dtype=torch.float16, device=CPU))
    for _ in range(2):
        torch.testing.assert_close(linear(x), x @ weight.dequantize(torch.float16).T, atol=2e-2, rtol=0)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_products_of_quantized_inputs(refuse, name):
    refuse("quantized_linear", w4a16, "multiply")
    weight, x = quantized(name, None, True, (32, 256)), torch.randn(2, 256).half()
    activation = ActivationScheme(dtype=DTYPES["int8"])
    linear = quantized_linear.linear_of(LinearSource(weight=weight, activation=activation, dtype=x.dtype, device=CPU))
    for _ in range(2):
        torch.testing.assert_close(linear(x), x @ weight.dequantize(torch.float16).T, atol=1.5, rtol=0)


@pytest.mark.parametrize("name", ["rms_norm", "gated"])
def test_small_operations(refuse, monkeypatch, name):
    refuse("ops", gpu_ops, name)
    monkeypatch.setattr(ops, "_on_gpu", lambda x: gpu.module("ops", x.device))
    x = torch.randn(4, 2, 64)
    arguments = {
        "rms_norm": (x, torch.randn(64), 1e-6),
        "gated": (x.flatten(1), "silu"),
    }[name]
    for _ in range(2):
        copies = [one.clone() if torch.is_tensor(one) else one for one in arguments]
        torch.testing.assert_close(getattr(ops, name)(*arguments), getattr(plain, name)(*copies))


@pytest.mark.parametrize("kind", [None, ("int4", 64, True)], ids=str)
def test_experts(refuse, kind):
    refuse("experts", gpu_experts, "multiply_tiles")
    made, scores = Experts(kind), torch.randn(3, 4)
    x = rows(3, made.hidden)
    shared, score = rows(3, made.hidden), torch.randn(3, 1).half()
    weights, chosen = reference.route(scores, 2, True)
    expected = made.expected(x, chosen, weights) + shared * score.sigmoid()
    for _ in range(2):
        actual = made.stacked(x, scores, shared, score, made.choose)
        torch.testing.assert_close(actual.double(), expected, atol=8e-3, rtol=8e-3)
