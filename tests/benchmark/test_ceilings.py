"""The measured limits of this machine are plausible, and follow what is measured."""

import torch

from quantkit.benchmark import ceilings
from quantkit.benchmark.ceilings import gemm_rate, measure_ceilings, memory_bandwidth


def test_limits_are_those_of_a_machine(monkeypatch):
    monkeypatch.setattr(ceilings, "_BUFFER_BYTES", 1 << 24)
    monkeypatch.setattr(ceilings, "_GEMM_ROWS", 256)
    ceilings_here = measure_ceilings(torch.device("cpu"), (torch.float32,), repeats=2)
    assert ceilings_here.threads == torch.get_num_threads()
    assert 1e8 < ceilings_here.bytes_per_s < 1e13
    assert 1e8 < ceilings_here.flops_per_s["float32"] < 1e15


def test_seconds_decide(monkeypatch):
    monkeypatch.setattr(ceilings, "_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "_GEMM_ROWS", 64)
    monkeypatch.setattr(ceilings, "_shortest", lambda work, device, repeats: 0.5)
    assert memory_bandwidth(torch.device("cpu")) == 2 * (1 << 20)
    assert gemm_rate(torch.device("cpu"), torch.float32) == 2 * 2 * 64**3
