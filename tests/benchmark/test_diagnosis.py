"""Each rule speaks when its numbers say so, with those numbers, and is silent otherwise."""

from __future__ import annotations

import dataclasses

import pytest

from quantkit.benchmark.ceilings import Cost
from quantkit.benchmark.diagnosis import diagnose
from quantkit.models.kv_sizes import BF16
from quantkit.models.layer_state_sizes import AttentionShape
from quantkit.results import BenchmarkResult, BenchmarkRun, Diagnosis, RooflineRecord, Workload
from tests.benchmark.test_steps import timing

MILLION = 1_000_000
COST = Cost(
    read_bytes=200 * MILLION,  # 100 million weights in 16 bits
    expert_bytes=0,
    parameters=90 * MILLION,
    head_parameters=10 * MILLION,
    head_bytes=20 * MILLION,
    layers=((AttentionShape(num_heads=1, num_kv_heads=1, key_dim=500, value_dim=500), BF16),),  # 2000 bytes per token
    product="bfloat16",
)
INT4 = dataclasses.replace(COST, read_bytes=53 * MILLION, head_bytes=5 * MILLION)
HEAD = dataclasses.replace(COST, read_bytes=(20 + 48) * MILLION)


def run(name="closed-1", *, first=0.1, gap=0.01, count=101, requests=4, concurrency=1, **changes):
    return BenchmarkRun(
        workload=Workload(
            name=name,
            mode="closed",
            num_requests=requests,
            prompt_tokens=100,
            new_tokens=count,
            concurrency=concurrency,
            **changes,
        ),
        requests=tuple(timing(i, 100, 10.0 * i, 10.0 * i + first, *([gap] * (count - 1))) for i in range(requests)),
    )


def decode(seconds, *, batch=1, context=100, cost=COST, flops=100e9):
    return RooflineRecord(
        phase="decode",
        batch=batch,
        context=context,
        num_tokens=batch,
        bytes_moved=cost.decode_bytes(batch, context),
        flops=cost.decode_flops(batch, context),
        seconds=seconds,
        copy_bytes_per_s=20e9,
        gemm_flops_per_s=flops,
    )


def prefill(seconds):
    return RooflineRecord(
        phase="prefill",
        batch=1,
        context=0,
        num_tokens=100,
        bytes_moved=COST.prefill_bytes(100, 512),
        flops=COST.prefill_flops(100),
        seconds=seconds,
        copy_bytes_per_s=20e9,
        gemm_flops_per_s=100e9,
    )


def findings(*runs, roofline=(), cost=COST, kv="auto", settings=None):
    result = BenchmarkResult(model="m", runs=runs, roofline=tuple(roofline), kv_cache=kv, settings=settings or {})
    return diagnose(result, cost).findings


def about(listed, words):
    matching = [finding for finding in listed if words in finding.statement]
    assert len(matching) == 1, [finding.statement for finding in listed]
    return matching[0]


def test_slow_to_stream():
    listed = findings(run())[0]
    assert listed.statement == "Slow to stream rather than to start: 91 % of a request's time is streaming."
    assert "median TTFT 100 ms, then 1.00 s of streaming" in listed.evidence


def test_slow_to_start_and_why():
    long = run(first=3.0)
    listed = findings(long, roofline=[prefill(0.2)])
    assert listed[0].statement.startswith("Slow to start rather than to stream: 75 %")
    assert listed[1].statement == "Arithmetic limits the prefill; fewer bits per weight do not help it."
    assert "90 % of the measured 100 GFLOP/s" in listed[1].evidence  # 2 * 100 tokens * 90 million in 0.2 s
    assert "activations" in listed[1].advice
    assert "overhead" in findings(long, roofline=[prefill(2.0)])[1].statement
    assert len(findings(long)) == 1  # no record, no claim


@pytest.mark.parametrize(
    ("cost", "kv", "context", "advice", "gain"),
    [
        (COST, "auto", 100, "4 bits", "about 2.9x"),
        (HEAD, "auto", 100, "--head int8", "about 1.2x"),
        (INT4, "auto", 100, "--speculate", ""),
        (COST, "auto", 200_000, "--kv-cache int8", "about 1.5x"),
        (COST, "int8", 200_000, "--kv-cache int4", "about 1.4x"),
    ],
)
def test_memory_binds_and_what_to_make_smaller(cost, kv, context, advice, gain):
    record = decode(0, context=context, cost=cost)
    record = dataclasses.replace(record, seconds=record.bytes_moved / 20e9 / 0.8)
    finding = about(findings(run(), roofline=[record], cost=cost, kv=kv), "Memory traffic limits decoding at batch 1")
    assert "80 % of the bandwidth" in finding.statement
    assert advice in finding.advice
    assert finding.expected_gain.startswith(gain)


def test_caches_are_not_called_memory():
    small = dataclasses.replace(COST, read_bytes=20 * MILLION, head_bytes=2 * MILLION)
    finding = about(
        findings(run(), roofline=[decode(0.0005, cost=small, flops=1e12)], cost=small), "processor's caches"
    )
    assert finding.statement.startswith("Reading")
    assert "more than all of the memory bandwidth" in finding.statement


def test_few_bytes_make_no_sharp_floor():
    def evidence(cost):
        return about(findings(run(), roofline=[decode(0.1, cost=cost)], cost=cost), "Overhead").evidence

    assert "caches" in evidence(dataclasses.replace(COST, read_bytes=20 * MILLION))
    assert "caches" not in evidence(COST)


def test_overhead_binds():
    finding = about(findings(run(), roofline=[decode(0.1)]), "Overhead limits decoding")
    assert "only 10 % of a step" in finding.statement
    assert finding.expected_gain == "10x at most"


@pytest.mark.parametrize(("cost", "reached"), [(COST, 0.1), (INT4, 0.8)])
def test_speculation_is_not_advised_when_it_is_on(cost, reached):
    record = decode(0, cost=cost)
    record = dataclasses.replace(record, seconds=record.bytes_moved / 20e9 / reached)
    for settings, advised in (({}, True), ({"speculation": "85% of 20 drafts accepted"}, False)):
        told = findings(run(), roofline=[record], cost=cost, settings=settings)
        finding = next(each for each in told if each.statement.startswith(("Overhead limits", "Memory traffic limits")))
        assert ("speculation" in finding.advice.lower()) is advised


def test_arithmetic_binds():
    finding = about(findings(run(), roofline=[decode(0.03, flops=10e9)]), "Arithmetic limits decoding")
    assert "activations" in finding.advice


def test_the_batch_at_which_fewer_bits_stop_paying():
    # 100 GFLOP/s over 20 GB/s: 5 operations per byte, a 16-bit weight has 2 bytes for 2 operations per row.
    finding = about(findings(run(), roofline=[decode(0.012)]), "Weight-only quantization stops paying")
    assert "at batch 5:" in finding.statement
    assert "from batch 2 on" in finding.statement  # 4.25 bits: 1.3 rows
    assert "100 GFLOP/s, memory at 20 GB/s: 5 operations per byte" in finding.evidence
    slow = findings(run(), roofline=[decode(0.03, flops=10e9)])
    about(slow, "does not pay here")
    integer = dataclasses.replace(COST, product="int8")
    assert not any("Weight-only" in f.statement for f in findings(run(), roofline=[decode(0.012)], cost=integer))


def test_what_the_cache_weighs():
    small = about(findings(run(), roofline=[decode(0.012)]), "smaller part")
    assert "batch x context = 100,000 tokens" in small.statement  # 200 MB / 2 kB
    large = decode(0.03, batch=8, context=12_500)
    finding = about(findings(run(), roofline=[decode(0.012), large]), "The KV cache is 50 %")
    assert "--kv-cache int8" in finding.advice
    assert finding.expected_gain.startswith("1.3x at most")


@pytest.mark.parametrize(("slope", "words"), [(1e-5, "ITL grows by 10.0 ms"), (-1e-5, "does not measurably grow")])
def test_what_context_costs(slope, words):
    gaps = [0.02 + slope * i + 1e-7 * (i % 3) for i in range(100)]
    alone = dataclasses.replace(run(), requests=(timing(0, 100, 0.0, 0.1, *gaps),))
    finding = about(findings(alone, roofline=[decode(0.012)]), "smaller part")
    assert words in finding.evidence


def test_what_a_batch_brings():
    good = about(findings(run(), roofline=[decode(0.012), decode(0.016, batch=8)]), "Batching pays:")
    assert "6.0x the tokens per second at batch 8 for 1.3x the ITL" in good.statement
    about(findings(run(), roofline=[decode(0.012), decode(0.08, batch=8)]), "Batching pays little")
    assert not any("Batching" in f.statement for f in findings(run(), roofline=[decode(0.012)]))


def test_a_busy_machine_is_said_and_no_verdict_is_built_on_it():
    """The same medians as where batching pays little, but steps of batch 1 that take anything from 4 to 30 ms."""
    gaps = [0.004, 0.012, 0.03, 0.005, 0.012, 0.028] * 10
    noisy = dataclasses.replace(run(), requests=(timing(0, 100, 0.0, 0.1, *gaps),))
    records = [decode(0.012), decode(0.03, batch=8)]
    about(findings(run(gap=0.012), roofline=records), "Batching pays little")
    listed = findings(noisy, roofline=records)
    assert "1.3x to 7.5x the tokens per second" in about(listed, "It is unknown whether batching pays").statement
    assert listed[0].statement.startswith("The machine was busy")
    assert not any("busy" in finding.statement for finding in findings(run(), roofline=records))


def test_no_share_above_the_whole_is_printed():
    wrong = decode(0.005)  # 200 MB in 5 ms where 20 GB/s were measured
    finding = about(findings(run(), roofline=[wrong]), "unknown, because the machine was busier")
    assert "%" not in finding.statement
    assert wrong.shown_share(wrong.mbu) == "busy"
    cached = decode(0.0005, cost=dataclasses.replace(COST, read_bytes=20 * MILLION))
    assert cached.shown_share(cached.mbu) == "caches"
    assert cached.shown_share(0.5) == "50 %"


def test_stalls():
    gaps = [0.01] * 97 + [0.08] * 3
    stalled = dataclasses.replace(run(), requests=(timing(0, 100, 0.0, 0.1, *gaps),))
    finding = about(findings(stalled), "Streaming stalls in closed-1")
    assert "8.0x" in finding.statement
    assert "other work on this machine" in finding.advice
    crowd = dataclasses.replace(stalled, workload=dataclasses.replace(stalled.workload, concurrency=8))
    assert "token budget" in about(findings(crowd), "Streaming stalls").advice
    assert not any("stalls" in finding.statement for finding in findings(run()))


def test_a_queue():
    busy = run("poisson-4", first=0.9)
    busy = dataclasses.replace(
        busy, workload=dataclasses.replace(busy.workload, mode="poisson", concurrency=None, rate_per_s=4.0)
    )
    finding = about(findings(run(), busy), "Requests queue at 4 per second")
    assert "9.0x that of a request alone" in finding.statement
    calm = dataclasses.replace(busy, requests=run().requests)
    assert not any("queue" in finding.statement for finding in findings(run(), calm))


def test_goodput_names_the_limit_that_failed():
    limited = run(ttft_limit_s=0.05, tpot_limit_s=0.5)
    finding = about(findings(limited), "Only 0 % of the requests of closed-1")
    assert finding.evidence == "TTFT above 50.0 ms in 4 of 4 requests"
    assert not any("Only" in f.statement for f in findings(run(ttft_limit_s=0.2, tpot_limit_s=0.5)))


def test_nothing_measured_nothing_said():
    assert diagnose(BenchmarkResult(model="m"), COST) == Diagnosis()


def test_two_models():
    ours = BenchmarkResult(model="small", runs=(run(gap=0.005),), roofline=(decode(0.005, cost=INT4),))
    theirs = BenchmarkResult(model="large", runs=(run(gap=0.01),), roofline=(decode(0.01),))
    listed = diagnose(ours, COST, theirs).findings
    stream = about(listed, "closed-1 small streams 2.0x faster than large")
    assert "ratio 0.50, in single rounds 0.50 to 0.50" in stream.evidence
    assert "the roofline would allow 0.27" in stream.evidence
    about(listed, "both models start equally fast, within the noise")
    about(diagnose(theirs, COST, ours).findings, "large streams 2.0x slower than small")
