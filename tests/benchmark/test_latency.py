"""Timestamps are those of an independent stopwatch; requests are sent when the workload says."""

from __future__ import annotations

import dataclasses
import statistics
import time
from itertools import pairwise

import pytest
import torch

from quantkit.benchmark.workload import closed_loop, make_load, poisson, run_load
from quantkit.errors import RequestError
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams
from tests.benchmark.fakes import Clock, FakeEngine


def run(workload, *, spread=0.0, **engine):
    clock = Clock()
    fake = FakeEngine(clock, **engine)
    load = make_load(workload, 50, spread=spread)
    return run_load(fake, load, clock=clock, sleep=clock.sleep), fake


def test_one_at_a_time():
    result, fake = run(closed_loop(1, prompt_tokens=7, new_tokens=5, num_requests=3))
    assert result.ttft_s == pytest.approx([0.5] * 3)
    assert result.inter_token_s == pytest.approx([0.1] * 12)
    assert result.tpot_s == pytest.approx([0.1] * 3)
    assert result.duration_s == pytest.approx(3 * (0.5 + 4 * 0.1))
    assert fake.most_running == 1
    assert [timing.request_id for timing in result.requests] == [1, 2, 3]  # 0 was the warm-up
    assert {timing.prompt_tokens for timing in result.requests} == {7}
    assert {timing.cached_tokens for timing in result.requests} == {3}  # from the engine


def test_a_closed_loop_keeps_its_number_in_flight():
    result, fake = run(closed_loop(3, prompt_tokens=7, new_tokens=4, num_requests=9))
    assert fake.most_running == 3
    arrivals = [timing.arrived_s for timing in result.requests]
    ends = sorted(timing.token_s[-1] for timing in result.requests)
    assert arrivals[3:] == pytest.approx(ends[:6])  # the next is sent the moment one has ended


def test_static_batches_wait_for_their_last():
    workload = closed_loop(3, prompt_tokens=7, new_tokens=40, num_requests=9)
    static, _ = run(dataclasses.replace(workload, name="static-3"), spread=0.9, prefill_s=0.01)
    ends = [timing.token_s[-1] for timing in static.requests]
    for first in (3, 6):
        assert {timing.arrived_s for timing in static.requests[first : first + 3]} == {max(ends[first - 3 : first])}
    continuous, _ = run(workload, spread=0.9, prefill_s=0.01)
    assert [t.num_new_tokens for t in continuous.requests] == [t.num_new_tokens for t in static.requests]
    assert continuous.duration_s < 0.9 * static.duration_s


def test_poisson_requests_count_from_when_they_were_due():
    workload = poisson(0.5, prompt_tokens=7, new_tokens=5, num_requests=20)
    load = make_load(workload, 50)
    result, fake = run(workload)
    start = result.requests[0].arrived_s
    assert [t.arrived_s - start for t in result.requests] == pytest.approx(load.due_s)
    sent = [when - start for when, _, _ in fake.added[load.workload.num_warmup :]]
    late = [real - due for real, due in zip(sent, load.due_s, strict=True)]
    assert min(late) >= -1e-9
    assert max(late) < 0.7  # a step was running
    busy = run(poisson(50.0, prompt_tokens=7, new_tokens=5, num_requests=20))[0]
    assert statistics.median(busy.ttft_s) > 3 * statistics.median(result.ttft_s)  # waiting counts


def test_tokens_of_a_burst_share_a_time():
    result, _ = run(closed_loop(1, prompt_tokens=7, new_tokens=9, num_requests=2), burst=4)
    assert result.inter_token_s == pytest.approx([0.1 / 4] * 16)
    assert result.tpot_s == pytest.approx([0.2 / 8] * 2)


def test_a_request_that_ends_early_is_no_measurement():
    with pytest.raises(RequestError, match="ended with 'error' after 5 tokens instead of at its full length"):
        run(closed_loop(1, prompt_tokens=7, new_tokens=5), reason="error")


@pytest.fixture(scope="module")
def demo():
    return LLM(max_sequences=4, prefix_cache=False, threads=1)


def gaps_of(times):
    return [after - before for before, after in pairwise(times)]


@pytest.mark.slow
def test_a_slow_model_by_two_clocks(demo, monkeypatch):
    """bench and a stopwatch around `LLM.stream` in turns, on a model that takes 120 ms and then 50 ms a token."""

    def slow(batch, cache):
        time.sleep(0.05 if set(batch.query_lengths) == {1} else 0.12)
        return torch.zeros(len(batch.logit_rows), demo.model.vocab_size), None

    monkeypatch.setattr(demo.model, "compute", slow)
    load = make_load(closed_loop(1, prompt_tokens=16, new_tokens=9, num_requests=1), 1000, avoid=(0, 1))
    alone = dataclasses.replace(load.workload, num_warmup=0)
    load = dataclasses.replace(load, workload=alone, prompts=load.prompts[-1:], new_tokens=(9,))
    bench_firsts, bench_gaps, firsts, gaps = [], [], [], []
    with demo.engine.runner.layer_by_layer():  # one native call would not call `compute`
        for _ in range(4):
            bench = run_load(demo.engine, load)
            bench_firsts.extend(bench.ttft_s)
            bench_gaps.extend(bench.inter_token_s)
            start = time.monotonic()
            params = SamplingParams(max_tokens=9, ignore_eos=True)
            times = [time.monotonic() for _ in demo.stream(load.prompts[0], params)]
            firsts.append(times[0] - start)
            gaps.extend(gaps_of(times))
    assert min(bench_firsts) >= 0.12
    assert min(bench_gaps) >= 0.05
    # Neighbours on a shared machine only ever add time, to either clock's turn: the shortest are compared.
    assert min(bench_firsts) == pytest.approx(min(firsts), rel=0.03)
    assert sorted(bench_gaps)[8] == pytest.approx(sorted(gaps)[8], rel=0.03)


class Stopwatch:
    """Between bench and engine: stamps what passes through, with a clock and sums of its own."""

    def __init__(self, engine):
        self.engine, self.sent, self.times = engine, {}, {}

    @property
    def has_work(self):
        return self.engine.has_work

    def add(self, prompt_ids, params):
        now = time.monotonic_ns()
        number = self.engine.add(prompt_ids, params)
        self.sent[number] = now
        return number

    def step(self):
        outputs = self.engine.step()
        now = time.monotonic_ns()
        for output in outputs:
            self.times.setdefault(output.request_id, []).extend([now] * len(output.token_ids))
        return outputs


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_demo_model_by_two_clocks(demo, concurrency):
    watch = Stopwatch(demo.engine)
    workload = closed_loop(concurrency, prompt_tokens=100, new_tokens=30, num_requests=8)
    bench = run_load(watch, make_load(workload, 1000, avoid=(0, 1)))
    measured = [timing.request_id for timing in bench.requests]
    firsts = [(watch.times[n][0] - watch.sent[n]) / 1e9 for n in measured]
    gaps = [gap / 1e9 for n in measured for gap in gaps_of(watch.times[n])]
    assert len(gaps) == len(bench.inter_token_s) == 8 * 29
    # One by one: a neighbour that cuts in between the two clocks spoils one value, not the comparison.
    for ours, theirs in ((bench.ttft_s, firsts), (bench.inter_token_s, gaps)):
        errors = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
        assert statistics.median(errors) < 0.02
    assert statistics.fmean(bench.inter_token_s) == pytest.approx(statistics.fmean(gaps), rel=0.03)
