"""Cases of the first run's self-test: right kernels pass with room to spare, one wrong number in a family does not."""

from __future__ import annotations

import itertools
import os

import pytest

from quantkit.kernels import gpu, ops
from quantkit.kernels.gpu import experts as gpu_experts
from quantkit.kernels.gpu import ops as gpu_ops
from quantkit.kernels.gpu import paged_attention, w4a16
from quantkit.runtime.engine import kernel_check
from quantkit.runtime.engine.kernel_check import TOLERANCE
from tests.kernels.gpu.interpreted.packed import CPU

PLANTED = {
    "ops": (gpu_ops, "gated"),
    "quantized_linear": (w4a16, "multiply"),
    "experts": (gpu_experts, "multiply_tiles"),
    "attention": (paged_attention, "attend"),  # writes into its last argument
}


@pytest.mark.parametrize(
    "family", [one if one == "ops" else pytest.param(one, marks=pytest.mark.slow) for one in PLANTED]
)
def test_one_number_that_is_wrong_is_found(monkeypatch, family):
    monkeypatch.setenv("QUANTKIT_TRITON", "1")  # and what it was, afterwards
    monkeypatch.setenv("QUANTKIT_NATIVE", "1")
    monkeypatch.setattr(gpu, "is_used", lambda device: os.environ["QUANTKIT_TRITON"] == "1")
    monkeypatch.setattr(ops, "_on_gpu", lambda x: gpu.module("ops", x.device))
    monkeypatch.setattr(kernel_check, "WIDTH", 128)  # the interpreter is slow
    monkeypatch.setattr(kernel_check, "_ROWS", (2,))
    case = next(iter(kernel_check.CASES[family].values()))
    module, name = PLANTED[family]
    launch = getattr(module, name)

    def wrong(*given, **named):
        result = launch(*given, **named)
        numbers = given[-1] if result is None else result
        numbers.view(-1)[0] = numbers.abs().max() + 1
        return result

    with monkeypatch.context() as patch:
        patch.setattr(module, name, wrong)
        # The first output shows it; those of `ops` begin with norms, which are right.
        few = None if family == "ops" else 1
        assert not kernel_check.error_of(lambda *where: itertools.islice(case(*where), few), CPU) <= TOLERANCE
    assert kernel_check.error_of(case, CPU) < TOLERANCE / 10


def test_every_family_is_planted():
    assert set(kernel_check.CASES) == set(gpu.FAMILIES) == set(PLANTED)


PRETENDED = """
import os
from quantkit.kernels import gpu, ops
from quantkit.kernels.gpu import ops as kernels
gpu.is_used = lambda device: os.environ["QUANTKIT_TRITON"] != "0"
ops._on_gpu = lambda x: gpu.module("ops", x.device)
right = kernels.gated
kernels.gated = lambda *given: right(*given) + 1
"""


@pytest.mark.slow
def test_a_wrong_kernel_is_found_in_a_child(monkeypatch, tmp_path):
    monkeypatch.delenv("QUANTKIT_TRITON", raising=False)
    monkeypatch.setattr(gpu, "_replaced", {})
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    monkeypatch.setattr(kernel_check, "_CHILD", kernel_check._CHILD.replace("main()", f"exec({PRETENDED!r}); main()"))
    monkeypatch.setattr(kernel_check, "CASES", {"ops": kernel_check.CASES["ops"]})
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(kernel_check, "identity", lambda device: {})
    kernel_check.check_kernels(CPU)
    assert "norms and gates: " in gpu.why_replaced("ops", CPU)
    assert "error relative to torch's largest value" in kernel_check.describe_kernels(CPU)
