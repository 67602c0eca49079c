"""Timing on the host's clock; graphs need a GPU and are timed in `evals/gpu`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quantkit.benchmark import timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when a call moves it; in seconds."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_turns_alternate_and_each_call_counts_for_itself(clock):
    order = []

    def call(name, seconds):
        def run():
            order.append(name)
            clock[0] += seconds

        return run

    items = [timing.record([call("a", 1e-6), call("b", 3e-6)], "cpu"), timing.record([call("c", 5e-6)], "cpu")]
    times = timing.in_turns(items, "cpu", 3)
    assert order == ["a", "b", "c", "c", "a", "b", "a", "b", "c"]
    assert times[0] == pytest.approx([2.0, 2.0, 2.0])
    assert times[1] == pytest.approx([5.0, 5.0, 5.0])


def test_a_measurement_is_a_median_with_its_spread(clock):
    steps = iter([1e-6, 9e-6, 2e-6])

    def call():
        clock[0] += next(steps)

    times = timing.measure([call], "cpu")
    assert times["us"] == pytest.approx(2.0)
    assert (times["p10"], times["p90"], times["how"]) == (pytest.approx(1.0), pytest.approx(9.0), "host")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_are_timed():
    x = torch.randn(1024, 1024, device="cuda")
    times = timing.measure([lambda: x @ x], "cuda")
    assert times["how"] == "graph"
    assert 0 < times["p10"] <= times["us"] <= times["p90"]
    assert timing.num_copies(1 << 20, "cuda") > 1
