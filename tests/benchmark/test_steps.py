"""Steps are found again in the timestamps they left, and the fits find the line behind them."""

from __future__ import annotations

import pytest

from quantkit.benchmark.ceilings import DecodeStep, decode_steps, fit_itl, fit_ttft, typical_step
from quantkit.benchmark.workload import closed_loop, make_load, run_load
from quantkit.results import SWEEP_NAME, BenchmarkResult, BenchmarkRun, RequestTiming, Workload
from tests.benchmark.fakes import Clock, FakeEngine


def timing(number, prompt, arrived, first, *gaps):
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    return RequestTiming(request_id=number, prompt_tokens=prompt, arrived_s=arrived, token_s=tuple(times))


def workload(name="closed-2", concurrency=2):
    return Workload(name=name, mode="closed", num_requests=2, prompt_tokens=9, new_tokens=9, concurrency=concurrency)


def test_sequences_in_one_step_share_it():
    run = BenchmarkRun(
        workload=workload(),
        requests=(timing(0, 10, 0.0, 1.0, 0.5, 0.25, 0.25), timing(1, 20, 0.5, 1.5, 0.25, 0.25, 0.5)),
    )
    # 1.0 -> 1.5 computed the other's prompt; 1.5 -> 1.75 and 1.75 -> 2.0 decoded both; then one was left.
    assert decode_steps(run) == [
        DecodeStep(batch=2, context=12 + 21, seconds=0.25),
        DecodeStep(batch=2, context=13 + 22, seconds=0.25),
        DecodeStep(batch=1, context=23, seconds=0.5),
    ]
    assert typical_step(run) == DecodeStep(batch=2, context=34, seconds=0.25)


def test_a_burst_is_one_step():
    run = BenchmarkRun(workload=workload(), requests=(timing(0, 10, 0.0, 1.0, 0.5, 0.0, 0.0, 0.5),))
    assert [(step.context, step.seconds) for step in decode_steps(run)] == [(11, 0.5), (14, 0.5)]


def test_steps_of_a_driven_engine():
    clock = Clock()
    load = make_load(closed_loop(4, prompt_tokens=7, new_tokens=30, num_requests=8), 50)
    run = run_load(FakeEngine(clock), load, clock=clock, sleep=clock.sleep)
    steps = decode_steps(run)
    assert {round(step.seconds, 6) for step in steps} == {0.1}  # no step with a prompt in it
    assert max(step.batch for step in steps) == 4
    assert typical_step(run).batch == 4
    assert len(steps) > 30


def test_a_run_without_pure_steps_has_none():
    run = BenchmarkRun(workload=workload(), requests=(timing(0, 10, 0.0, 1.0),))
    assert decode_steps(run) == []
    assert typical_step(run) is None


def known(length, a=0.004, b=2e-6):
    """A request alone whose ITL is a + b context and whose TTFT is 3 ms + 20 us prompt + 1 ns prompt^2."""
    first = 0.003 + 2e-5 * length + 1e-9 * length**2
    return timing(length, length, float(length), length + first, *(a + b * (length + i + 1) for i in range(8)))


def test_both_fits_find_what_is_there():
    lengths = (100, 300, 500, 700, 900, 1100)
    run = BenchmarkRun(workload=workload(SWEEP_NAME, 1), requests=tuple(map(known, lengths)))
    # Requests of a batch are not alone, and would bend the lines.
    crowd = BenchmarkRun(
        workload=workload(), requests=(timing(0, 50, 0.0, 9.0, 1.0, 1.0), timing(1, 50, 0.0, 9.0, 1.0, 1.0))
    )
    result = BenchmarkResult(model="m", runs=(crowd, run))
    itl, ttft = fit_itl(result), fit_ttft(result)
    assert itl.coefficients == pytest.approx((0.004, 2e-6), rel=1e-6)
    assert ttft.coefficients == pytest.approx((0.003, 2e-5, 1e-9), rel=1e-6)
    assert max(ttft.standard_errors) < 1e-8
    assert (itl.num_points, ttft.num_points) == (48, 6)


def test_few_lengths_make_a_line_and_one_makes_nothing():
    two = BenchmarkRun(workload=workload("closed-1", 1), requests=tuple(map(known, (100, 900, 900))))
    assert len(fit_ttft(BenchmarkResult(model="m", runs=(two,))).coefficients) == 2
    one = BenchmarkRun(workload=workload("closed-1", 1), requests=(known(100),))
    assert fit_ttft(BenchmarkResult(model="m", runs=(one,))) is None
    assert fit_itl(BenchmarkResult(model="m")) is None
