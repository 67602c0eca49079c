"""Interpret a benchmark: where time goes, what limits speed, what to try next, and the expected gain.

It applies fixed rules to measured numbers. Each finding states the numbers it uses. An expected gain is the time that
the saved bytes or operations take at the measured speed, so it is an upper bound unless stated otherwise. The sentences
are in `findings.yaml`.
"""

import functools
import math
import statistics
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from quantkit.benchmark.ceilings import Cost, break_even_rows, decode_steps, fit_itl
from quantkit.benchmark.compare import Ratio, compare_results
from quantkit.models.kv_sizes import KV_FORMS
from quantkit.quantities import as_percent, decimal_bytes, duration, rounded_count, times
from quantkit.results import SWEEP_NAME, BenchmarkResult, BenchmarkRun, Diagnosis, Finding, RooflineRecord
from quantkit.results.statistics.summary import percentile

_PAYS = 0.6  # a larger batch pays if it brings this share of the gain that it would bring if steps took no longer
_BOUND = 0.4  # floor / time of a step: from this ratio on, the floor explains the time; below, something else does
_INT4_BYTES = 4.25 / 8  # per weight, group size 64 with 16-bit scales, or 128 with scales and zero points
_INT8_BYTES = 8.25 / 8
_BUSY = 0.5  # p75 - p25 over p50 of ITL
_STALL = 3.0  # p99 over p50 of ITL
_QUEUE = 2.0  # TTFT under load over TTFT alone
_SHORTER = "Shorten contexts."
_SPECULATION = "speculation"  # key that the settings of a result have only if drafts are on
# Advice for a smaller KV cache. Caches of 3 and 2 bits cause several times the error, so they are not advised.
_SMALLER_CACHE = {"int8": "Use --kv-cache int4.", "fp8": "Use --kv-cache int4."}
_SMALLEST_CACHES = tuple(form.name for form in KV_FORMS.values() if form.bits <= 4)


_UNITS: dict[str, Callable[[float], str]] = {
    "percent": as_percent,
    "duration": duration,
    "times": times,
    "bytes": decimal_bytes,
    "count": rounded_count,
    "giga": lambda value: f"{value / 1e9:.0f}",
}


class _Sentences(string.Formatter):
    """Formatter whose format specs name units: `{value:duration}` prints a number of seconds, such as `31.0 ms`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        unit = _UNITS.get(format_spec)
        return str(super().format_field(value, format_spec) if unit is None else unit(value))


@functools.cache
def _texts() -> dict[str, dict[str, str]]:
    texts: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text("utf-8"))
    return texts


def _finding(name: str, **values: Any) -> Finding:
    """Return the finding that has this name in findings.yaml, with the values filled into its sentences."""
    return Finding(**{part: _Sentences().format(text, **values) for part, text in _texts()[name].items()})


def diagnose(result: BenchmarkResult, cost: Cost, baseline: BenchmarkResult | None = None) -> Diagnosis:
    """Return findings about one model, most important first.

    Args:
        result: measured result.
        cost: bytes and operations of the model's steps.
        baseline: result of another model, measured in alternating rounds. Its comparison comes before all other
            findings.
    """
    findings = [] if baseline is None else list(_compared(result, baseline))
    runs = [run for run in result.runs if run.workload.name != SWEEP_NAME and run.ttft_s]
    if runs:
        # A run with random arrivals has no concurrency; it counts as unloaded only if there is no other run.
        alone = min(runs, key=lambda run: run.workload.concurrency or 1_000_000)
        decode = sorted((r for r in result.roofline if r.phase == "decode"), key=lambda r: r.batch)
        prefill = next((r for r in result.roofline if r.phase == "prefill"), None)
        findings += [*_busy(alone), *_start_or_stream(alone, prefill, cost.product)]
        if decode:
            small, large = decode[0], decode[-1]
            findings.append(_decode_binding(small, cost, result))
            findings += [*_weight_only_payoff(small, cost), *_cache_weight(large, cost, result)]
            findings += _batching(small, large, result.runs)
        for run in runs:
            findings += [*_stalls(run), *_queue(run, alone), *_goodput(run)]
    return Diagnosis(findings=tuple(findings))


def _compared(result: BenchmarkResult, baseline: BenchmarkResult) -> Iterator[Finding]:
    """Compare two models measured in alternating rounds, and give the ratio that the roofline would allow."""
    for ratio in compare_results(result, baseline):
        if ratio.metric in ("TTFT", "ITL"):
            yield _finding(
                "alike" if ratio.verdict == "noise" else "compared",
                ratio=ratio,
                verb="start" if ratio.metric == "TTFT" else "stream",
                factor=1 / ratio.ratio if ratio.verdict == "faster" else ratio.ratio,
                model=result.model,
                other=baseline.model,
                allowed=_allowed(result, baseline, ratio),
            )


def _allowed(result: BenchmarkResult, baseline: BenchmarkResult, ratio: Ratio) -> str:
    """Return a clause with the ratio of both models' least possible times (floors); empty if a floor is unknown."""
    run = result.find_run(ratio.workload)
    phase, batch = ("prefill", 1) if ratio.metric == "TTFT" else ("decode", run and run.workload.concurrency)
    floors = [
        next((r.floor_s for r in side.roofline if r.phase == phase and r.batch == batch), None)
        for side in (result, baseline)
    ]
    if floors[0] is None or not floors[1] or (phase == "prefill" and run and run.workload.concurrency != 1):
        return ""
    return f"; the roofline would allow {floors[0] / floors[1]:.2f}"


def _start_or_stream(run: BenchmarkRun, prefill: RooflineRecord | None, product: str) -> Iterator[Finding]:
    """Name the part of a request that takes the most time and, if that is the prefill, what limits it."""
    if not run.tpot_s:
        return
    first = statistics.median(run.ttft_s)
    rest = statistics.median((t.latency_s or 0.0) - (t.ttft_s or 0.0) for t in run.requests if t.token_s)
    share = first / (first + rest)
    name = "slow to stream" if share < 0.5 else "slow to start"
    yield _finding(name, starting=share, streaming=1 - share, first=first, rest=rest, work=run.workload)
    if share >= 0.5 and prefill is not None:
        yield _prefill_binding(prefill, product)


def _prefill_binding(record: RooflineRecord, product: str) -> Finding:
    reached = record.floor_s / record.seconds
    name = "prefill, bound"
    if reached < _BOUND:
        name = "prefill, overhead"
    elif record.bound_by == "compute" and product != "int8":
        name = "prefill, arithmetic"
    binding = "memory" if record.bound_by == "memory" else "arithmetic"
    return _finding(name, record=record, product=product, reached=reached, most=1 / reached, binding=binding)


def _decode_binding(record: RooflineRecord, cost: Cost, result: BenchmarkResult) -> Finding:
    """Name the resource that limits a decode step of the smallest batch."""
    moved, reached = record.bytes_moved, record.floor_s / record.seconds
    weights, note, smaller, gain = cost.weight_bytes(record.batch), "", "", ""
    if record.in_caches and record.mbu <= 1:
        note = "; some of these few bytes may come from the processor's caches, which are faster"
    # Checked first: if a step takes far longer than its floor, neither ceiling explains it.
    if reached < _BOUND:
        name = "decode, overhead" if _SPECULATION not in result.settings else "decode, overhead with drafts"
    elif record.bound_by == "compute":
        name = "decode, arithmetic"
        note += f"; {as_percent(record.mfu)} of {record.gemm_flops_per_s / 1e9:.0f} GFLOP/s"
    elif record.mbu > 1 and not record.in_caches:
        name = "decode, busy"
    else:
        name = "decode, caches" if record.mbu > 1 else "decode, memory"
        smaller, saved = _fewer_bytes(cost, weights, moved - weights, result)
        gain = f"about {times(moved / (moved - saved))} at batch {record.batch}" if saved else ""
    return _finding(
        name,
        record=record,
        reached=reached,
        weights=weights / moved,
        cached=(moved - weights) / moved,
        speed=moved / record.seconds / 1e9,
        bandwidth=record.copy_bytes_per_s / 1e9,
        most=1 / reached,
        by_memory=record.seconds / (moved / record.copy_bytes_per_s),
        note=note,
        smaller=smaller,
        gain=gain,
    )


def _cache_type(result: BenchmarkResult) -> str:
    """Return the number type that most layers of the KV cache have, without the record's note on other layers."""
    return result.kv_cache.partition(" ")[0]


def _smaller_cache(result: BenchmarkResult) -> str:
    return _SMALLER_CACHE.get(_cache_type(result), "Quantize the KV cache: --kv-cache int8.")


def _fewer_bytes(cost: Cost, weights: int, cached: float, result: BenchmarkResult) -> tuple[str, float]:
    """Return advice on how a decode step can move fewer bytes, and the number of bytes that this saves."""
    now = (cost.read_bytes - cost.head_bytes) / max(1, cost.parameters)
    if cached > weights:
        if _cache_type(result) in _SMALLEST_CACHES:
            return _SHORTER, cached * 0.45
        # Half of 16 bits, less what the scales add.
        return _smaller_cache(result), cached * (0.45 if _cache_type(result) in _SMALLER_CACHE else 0.48)
    linears = weights - cost.head_bytes
    to_int4 = "Quantize the weights to 4 bits (awq-int4, gptq-int4).", linears * (1 - _INT4_BYTES / now)
    if now > 1.5 * _INT8_BYTES:
        return to_int4
    if cost.head_bytes > 0.15 * weights and cost.head_bytes > 1.5 * _INT8_BYTES * cost.head_parameters:
        return "Quantize the output head, which recipes leave unquantized: --head int8.", cost.head_bytes * 0.48
    if now > 1.3 * _INT4_BYTES:
        return to_int4
    if _SPECULATION in result.settings:
        return "", 0.0
    return (
        "Use speculation (--speculate ngram, or a small draft model): it gives several tokens each time the weights "
        "are read."
    ), 0.0


def _weight_only_payoff(record: RooflineRecord, cost: Cost) -> Iterator[Finding]:
    """Report the batch size from which products take longer than reading weights, unquantized and in at most 4 bits."""
    if cost.product == "int8" or not cost.parameters:
        return
    speeds = record.copy_bytes_per_s, record.gemm_flops_per_s
    size, weights = 4 if cost.product == "float32" else 2, cost.parameters + cost.head_parameters
    full = break_even_rows(size * weights, 2 * weights, *speeds)
    shrinks = break_even_rows(min(cost.read_bytes, _INT4_BYTES * weights), 2 * weights, *speeds)
    yield _finding(
        "weight-only, never" if full < 1 else "weight-only, until",
        record=record,
        product=cost.product,
        bandwidth=speeds[0] / 1e9,
        intensity=speeds[1] / speeds[0],
        bits=8 * size,
        full=math.ceil(full),
        shrinks=max(1, math.ceil(shrinks)),
    )


def _cache_weight(record: RooflineRecord, cost: Cost, result: BenchmarkResult) -> Iterator[Finding]:
    """Report how many cached tokens take as many bytes as the weights, and how much context slows a step."""
    if not cost.kv_token_bytes:
        return
    share = 1 - cost.weight_bytes(record.batch) / record.bytes_moved
    fitted, grows = fit_itl(result), ""
    if fitted is not None:
        slope, error = fitted.coefficients[1], fitted.standard_errors[1]
        by = f"grows by {duration(1000 * slope)} (+/- {duration(1000 * error)}) per 1,000 tokens of context"
        # Two standard errors: about where the 95 % interval of the slope excludes zero.
        grows = f"; ITL {by if slope > 2 * error else 'does not measurably grow with context'}"
    yield _finding(
        "cache, small" if share < 0.3 else "cache, large",
        share=share,
        record=record,
        cost=cost,
        tokens=cost.read_bytes / cost.kv_token_bytes,
        grows=grows,
        smaller=_SHORTER if _cache_type(result) in _SMALLEST_CACHES else _smaller_cache(result),
        most=1 / (1 - 0.48 * share),
    )


def _batching(small: RooflineRecord, large: RooflineRecord, runs: Sequence[BenchmarkRun]) -> Iterator[Finding]:
    """Report the cost and the gain of a larger batch."""
    if large.batch == small.batch:
        return
    ideal, slower = large.batch / small.batch, large.seconds / small.seconds
    gain = ideal / slower
    (slowest, fastest), (slow, fast) = _spread(runs, large.batch), _spread(runs, small.batch)
    least, most = gain * slowest / fast, gain * fastest / slow
    # No verdict if the spread of the steps includes both answers.
    unknown = least <= _PAYS * ideal < most
    name = "batching, unknown" if unknown else "batching, pays" if gain > _PAYS * ideal else "batching, little"
    yield _finding(name, small=small, large=large, least=least, most=most, gain=gain, slower=slower)


def _spread(runs: Sequence[BenchmarkRun], batch: int) -> tuple[float, float]:
    """Return the quartiles of the step rates at this batch size, relative to the median step's rate."""
    seconds = [step.seconds for run in runs for step in decode_steps(run) if step.batch == batch]
    # With fewer steps, a quartile would be a single step.
    if len(seconds) < 4:
        return 1.0, 1.0
    low, middle, high = (percentile(seconds, at) for at in (25, 50, 75))
    return middle / high, middle / low


def _busy(run: BenchmarkRun) -> Iterator[Finding]:
    """Report gaps between tokens that vary although a request had the engine to itself; other processes cause this."""
    gaps = run.inter_token_s
    if run.workload.concurrency != 1 or len(gaps) < 20:
        return
    low, middle, high = (percentile(gaps, at) for at in (25, 50, 75))
    if middle > 0 and high - low >= _BUSY * middle:
        spread = (high - low) / middle
        yield _finding("busy", work=run.workload, spread=spread, low=low, middle=middle, high=high, count=len(gaps))


def _stalls(run: BenchmarkRun) -> Iterator[Finding]:
    """Report that streaming stalls: the 99th percentile of ITL lies far above the median."""
    gaps = run.inter_token_s
    # With fewer gaps, the 99th percentile lies between the two largest ones: a single stall would decide.
    if len(gaps) < 100:
        return
    middle, tail = percentile(gaps, 50), percentile(gaps, 99)
    if middle > 0 and tail >= _STALL * middle:
        name = "stalls, alone" if run.workload.concurrency == 1 else "stalls, together"
        yield _finding(name, work=run.workload, factor=tail / middle, middle=middle, tail=tail, count=len(gaps))


def _queue(run: BenchmarkRun, alone: BenchmarkRun) -> Iterator[Finding]:
    """Report that randomly arriving requests wait for earlier ones."""
    if run.workload.rate_per_s is None or run is alone:
        return
    here, single = statistics.median(run.ttft_s), statistics.median(alone.ttft_s)
    if here >= _QUEUE * single:
        done = run.requests_per_s or 0.0
        yield _finding("queue", work=run.workload, factor=here / single, here=here, single=single, done=done)


def _goodput(run: BenchmarkRun) -> Iterator[Finding]:
    """Report that requests miss the latency limits, and which limits."""
    met, answered = run.goodput_per_s, run.requests_per_s
    if met is None or not answered or met >= 0.995 * answered:
        return
    limits = {"TTFT": run.workload.ttft_limit_s, "TPOT": run.workload.tpot_limit_s}
    missed = [
        f"{name} above {duration(limit)} in {count} of {len(run.latencies[name])} requests"
        for name, limit in limits.items()
        if limit is not None and (count := sum(value > limit for value in run.latencies[name]))
    ]
    yield _finding("goodput", work=run.workload, share=met / answered, missed="; ".join(missed))
