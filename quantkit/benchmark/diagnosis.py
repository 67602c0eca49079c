"""A benchmark in plain words: where the time goes, what binds, what to try next and what it should bring.

Rules over measured numbers, nothing learned. Each finding carries the numbers it rests on; an expected gain is what the
bytes or operations saved would take at the speed that was reached, so it is an upper bound unless it says otherwise.
"""

import math
import statistics
from collections.abc import Iterator, Sequence

from quantkit.benchmark.ceilings import break_even_rows
from quantkit.benchmark.compare import Ratio, compare_results
from quantkit.benchmark.cost import Cost
from quantkit.benchmark.steps import decode_steps, fit_itl
from quantkit.quantities import as_percent, decimal_bytes, duration, rounded_count, times
from quantkit.results import SWEEP_NAME, BenchmarkResult, BenchmarkRun, Diagnosis, Finding, RooflineRecord
from quantkit.results.statistics.summary import percentile

_PAYS = 0.6  # of the tokens per second that a batch would bring if its steps took no longer
_BOUND = 0.4  # of the floor: from here on the floor explains a step, below something else does
_INT4_BYTES = 4.25 / 8  # per weight, group size 64 with 16-bit scales, or 128 with scales and zero points
_INT8_BYTES = 8.25 / 8
_BUSY = 0.5  # p75 - p25 over p50 of ITL
_STALL = 3.0  # p99 over p50 of ITL
_QUEUE = 2.0  # TTFT under load over TTFT alone
_SMALL_CACHES = ("int8", "fp8", "int4")


def diagnose(result: BenchmarkResult, cost: Cost, baseline: BenchmarkResult | None = None) -> Diagnosis:
    """Findings about one model, most important first.

    Args:
        result: measured.
        cost: of the model's steps.
        baseline: of another that was measured in turns with it; how the two compare comes first.
    """
    findings = [] if baseline is None else _compared(result, baseline)
    runs = [run for run in result.runs if run.workload.name != SWEEP_NAME and run.ttft_s]
    if runs:
        # Arrivals by chance have no concurrency; they stand for the request alone only where there is nothing else.
        alone = min(runs, key=lambda run: run.workload.concurrency or 1_000_000)
        decode = sorted((r for r in result.roofline if r.phase == "decode"), key=lambda r: r.batch)
        prefill = next((r for r in result.roofline if r.phase == "prefill"), None)
        findings += [*_busy(alone), *_start_or_stream(alone, prefill, cost.product)]
        if decode:
            small, large = decode[0], decode[-1]
            findings.append(_decode_binding(small, cost, result.kv_cache))
            findings += [*_weight_only_payoff(small, cost), *_cache_weight(large, cost, result)]
            findings += _batching(small, large, result.runs)
        for run in runs:
            findings += [*_stalls(run), *_queue(run, alone), *_goodput(run)]
    return Diagnosis(findings=tuple(findings))


def _compared(result: BenchmarkResult, baseline: BenchmarkResult) -> list[Finding]:
    """Compare two models that were measured in turns, beside what their bytes would allow."""
    findings = []
    for ratio in compare_results(result, baseline):
        if ratio.metric not in ("TTFT", "ITL"):
            continue
        verb = "start" if ratio.metric == "TTFT" else "stream"
        evidence = (
            f"median {ratio.metric} {duration(ratio.value)} against {duration(ratio.baseline)}, ratio "
            f"{ratio.ratio:.2f}, by round {ratio.low:.2f} to {ratio.high:.2f}, noise {as_percent(ratio.noise)}"
            f"{_allowed(result, baseline, ratio)}"
        )
        factor = times(1 / ratio.ratio if ratio.verdict == "faster" else ratio.ratio)
        statement = f"In {ratio.workload} {result.model} {verb}s {factor} {ratio.verdict} than {baseline.model}."
        if ratio.verdict == "noise":
            statement = f"In {ratio.workload} both {verb} alike, within the noise."
        findings.append(Finding(statement=statement, evidence=evidence))
    return findings


def _allowed(result: BenchmarkResult, baseline: BenchmarkResult, ratio: Ratio) -> str:
    """The ratio that the floors of both would give, where both have one."""
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
    """Name the part of a request that takes the time, and what binds the prompt where that is the answer."""
    if not run.tpot_s:
        return
    first = statistics.median(run.ttft_s)
    rest = statistics.median((t.latency_s or 0.0) - (t.ttft_s or 0.0) for t in run.requests if t.token_s)
    share = first / (first + rest)
    sizes = f"{run.workload.prompt_tokens} prompt and {run.workload.new_tokens} new tokens"
    evidence = f"median TTFT {duration(first)}, then {duration(rest)} of streaming ({run.workload.name}, {sizes})"
    if share < 0.5:
        yield Finding(
            statement=f"Slow to stream rather than to start: {as_percent(1 - share)} of a request is streaming.",
            evidence=evidence,
            advice="Look at what binds decoding, below; a faster prefill would not be noticed.",
        )
        return
    yield Finding(
        statement=f"Slow to start rather than to stream: {as_percent(share)} of a request passes before the first "
        "token.",
        evidence=evidence,
        advice="Turn the prefix cache on where prompts begin alike.",
        expected_gain=f"up to {duration(first)} per request whose beginning is known",
    )
    if prefill is not None:
        yield _prefill_binding(prefill, product)


def _prefill_binding(record: RooflineRecord, product: str) -> Finding:
    reached = record.floor_s / record.seconds
    gain = f"{times(1 / reached)} at most"
    if reached < _BOUND:
        statement = "Neither arithmetic nor memory explains the prefill: overhead or slow kernels do."
        advice = "Try longer prompts or a larger token budget per step; check --threads."
    elif record.bound_by == "compute" and product != "int8":
        statement = "Arithmetic binds the prefill; fewer bits per weight do not help it."
        advice = "Quantize the activations too (recipes with 8-bit activations): integers multiply faster."
        gain = f"about 2x of {duration(record.seconds)} where INT8 products run at twice the rate"
    else:
        binding = "memory" if record.bound_by == "memory" else "arithmetic"
        statement, advice = f"The prefill runs at {as_percent(reached)} of what {binding} allows.", ""
        gain += ", by better kernels"
    evidence = (
        f"{record.num_tokens} tokens in {duration(record.seconds)}: {as_percent(record.mfu)} of the measured "
        f"{record.gemm_flops_per_s / 1e9:.0f} GFLOP/s ({product}), floor {duration(record.floor_s)}"
    )
    return Finding(statement=statement, evidence=evidence, advice=advice, expected_gain=gain)


def _decode_binding(record: RooflineRecord, cost: Cost, kv_cache: str) -> Finding:
    """Name the resource that binds a decode step of the smallest batch."""
    batch, moved, reached = record.batch, record.bytes_moved, record.floor_s / record.seconds
    weights = cost.weight_bytes(batch)
    evidence = (
        f"batch {batch}, context {record.context}: {decimal_bytes(moved)} per step (weights "
        f"{as_percent(weights / moved)}, KV {as_percent((moved - weights) / moved)}) in {duration(record.seconds)} = "
        f"{moved / record.seconds / 1e9:.3g} of {record.copy_bytes_per_s / 1e9:.3g} GB/s measured; "
        f"floor {duration(record.floor_s)}"
    )
    if record.in_caches and record.mbu <= 1:
        evidence += "; so few bytes may partly come from the processor's caches, which are faster"
    # First: where a step takes far longer than its floor, neither ceiling explains it.
    if reached < _BOUND:
        statement = (
            f"Overhead binds decoding at batch {batch}: memory and arithmetic explain only {as_percent(reached)} of a "
            "step."
        )
        advice = "Batch more requests, or speculate: both share the overhead. Fewer bits will bring little."
        gain = f"{times(record.seconds / record.floor_s)} at most"
    elif record.bound_by == "compute":
        statement = f"Arithmetic binds decoding at batch {batch}."
        evidence += f"; {as_percent(record.mfu)} of {record.gemm_flops_per_s / 1e9:.0f} GFLOP/s"
        advice = "Quantize the activations too, so that products are made of 8-bit integers."
        gain = f"{times(record.seconds / (moved / record.copy_bytes_per_s))} at most"
    elif record.mbu > 1 and not record.in_caches:
        statement = (
            f"Memory traffic binds decoding at batch {batch}; what share of the bandwidth it uses is not known: the "
            "machine was busier while that was measured."
        )
        advice, gain = "Measure again when nothing else runs.", ""
    else:
        where, used = "Memory traffic", as_percent(record.mbu)
        if record.mbu > 1:
            where, used = "Reading the weights from the processor's caches, not from memory,", "more than all"
        statement = f"{where} binds decoding at batch {batch}: {used} of the bandwidth is used."
        advice, saved = _fewer_bytes(cost, weights, moved - weights, kv_cache)
        gain = f"about {times(moved / (moved - saved))} at batch {batch}" if saved else ""
    return Finding(statement=statement, evidence=evidence, advice=advice, expected_gain=gain)


def _fewer_bytes(cost: Cost, weights: int, cached: float, kv_cache: str) -> tuple[str, float]:
    """Name what to make smaller, and the bytes of a step that this saves."""
    now = (cost.read_bytes - cost.head_bytes) / max(1, cost.parameters)
    if cached > weights:
        if kv_cache not in _SMALL_CACHES:
            # Half of 16 bits, less what the scales add.
            return "Quantize the KV cache: --kv-cache int8.", cached * 0.48
        return ("Take --kv-cache int4." if kv_cache != "int4" else "Shorten contexts."), cached * 0.45
    linears = weights - cost.head_bytes
    to_int4 = "Quantize the weights to 4 bits (awq-int4, gptq-int4).", linears * (1 - _INT4_BYTES / now)
    if now > 1.5 * _INT8_BYTES:
        return to_int4
    if cost.head_bytes > 0.15 * weights and cost.head_bytes > 1.5 * _INT8_BYTES * cost.head_parameters:
        return "Round the output head, which recipes leave: --head int8.", cost.head_bytes * 0.48
    if now > 1.3 * _INT4_BYTES:
        return to_int4
    return "Speculate (--speculate ngram, or a small draft model): several tokens per reading of the weights.", 0.0


def _weight_only_payoff(record: RooflineRecord, cost: Cost) -> Iterator[Finding]:
    """Rows from which products take longer than reading the weights: as they are, and with 16 bits."""
    if cost.product == "int8" or not cost.parameters:
        return
    speeds = record.copy_bytes_per_s, record.gemm_flops_per_s
    size, weights = 4 if cost.product == "float32" else 2, cost.parameters + cost.head_parameters
    full = break_even_rows(size * weights, 2 * weights, *speeds)
    shrinks = break_even_rows(min(cost.read_bytes, _INT4_BYTES * weights), 2 * weights, *speeds)
    if full < 1:
        statement = "Weight-only quantization does not pay here: products take longer than reading the weights."
    else:
        statement = (
            f"Weight-only quantization stops paying at batch {rounded_count(math.ceil(full))}: from there on products "
            f"take longer than reading {8 * size}-bit weights; with 4 bits the gain shrinks from batch "
            f"{rounded_count(max(1, math.ceil(shrinks)))} on."
        )
    yield Finding(
        statement=statement,
        evidence=f"a large {cost.product} product runs at {speeds[1] / 1e9:.0f} GFLOP/s, memory at "
        f"{speeds[0] / 1e9:.3g} GB/s: {speeds[1] / speeds[0]:.0f} operations per byte, two per weight and row",
        advice="For larger batches take 8-bit activations, whose products are faster too, or a quantized KV cache.",
    )


def _cache_weight(record: RooflineRecord, cost: Cost, result: BenchmarkResult) -> Iterator[Finding]:
    """Say how many tokens of cache weigh as much as the weights, and what context costs."""
    if not cost.kv_token_bytes:
        return
    share = 1 - cost.weight_bytes(record.batch) / record.bytes_moved
    fitted = fit_itl(result)
    evidence = f"{decimal_bytes(cost.kv_token_bytes)} per token beside {decimal_bytes(cost.read_bytes)} of weights"
    if fitted is not None:
        slope, error = fitted.coefficients[1], fitted.standard_errors[1]
        grows = f"{duration(1000 * slope)} (+/- {duration(1000 * error)}) per 1,000 tokens of context"
        # Two standard errors: about where the 95 % interval of the slope excludes zero.
        evidence += f"; ITL grows by {grows}" if slope > 2 * error else "; ITL does not measurably grow with context"
    read = f"{as_percent(share)} of what a step reads at batch {record.batch}"
    if share < 0.3:
        tokens = rounded_count(cost.read_bytes / cost.kv_token_bytes)
        statement = (
            f"The KV cache is the small part: {read}; it weighs as much as the weights at batch x context = {tokens} "
            "tokens."
        )
        advice = gain = ""
    else:
        statement = f"The KV cache is {read}, context {record.context}."
        advice = "Take --kv-cache int4." if result.kv_cache in _SMALL_CACHES else "Quantize it: --kv-cache int8."
        gain = f"{times(1 / (1 - 0.48 * share))} at most in that step, and twice the tokens in the same memory"
    yield Finding(statement=statement, evidence=evidence, advice=advice, expected_gain=gain)


def _batching(small: RooflineRecord, large: RooflineRecord, runs: Sequence[BenchmarkRun]) -> Iterator[Finding]:
    """Say what a larger batch costs and brings."""
    if large.batch == small.batch:
        return
    ideal, slower = large.batch / small.batch, large.seconds / small.seconds
    gain = ideal / slower
    evidence = (
        f"a step takes {duration(small.seconds)} at batch {small.batch} and {duration(large.seconds)} at batch "
        f"{large.batch}; its floor {duration(small.floor_s)} and {duration(large.floor_s)}"
    )
    (slowest, fastest), (slow, fast) = _spread(runs, large.batch), _spread(runs, small.batch)
    least, most = gain * slowest / fast, gain * fastest / slow
    brings = f"{times(gain)} the tokens per second at batch {large.batch} for {times(slower)} the ITL."
    # No verdict where the spread of the steps includes both answers.
    if least <= _PAYS * ideal < most:
        statement = (
            f"Whether batching pays is not known: {times(least)} to {times(most)} the tokens per second at batch "
            f"{large.batch}, the machine was too busy to say."
        )
        evidence += "; the middle half of the steps gives this range"
        advice = "Measure again when nothing else runs, or with --rounds 4."
    elif gain > _PAYS * ideal:
        statement = f"Batching pays: {brings}"
        advice = "Raise the batch further while ITL stays within what users accept."
    else:
        statement = f"Batching pays little: {brings}"
        advice = "Work per row binds there: look for slow kernels at more than one row, or a large KV cache."
    yield Finding(statement=statement, evidence=evidence, advice=advice)


def _spread(runs: Sequence[BenchmarkRun], batch: int) -> tuple[float, float]:
    """Quartiles of the rates of steps of this batch, as factors of the median step's rate."""
    seconds = [step.seconds for run in runs for step in decode_steps(run) if step.batch == batch]
    # Quartiles of fewer steps are single steps.
    if len(seconds) < 4:
        return 1.0, 1.0
    low, middle, high = (percentile(seconds, at) for at in (25, 50, 75))
    return middle / high, middle / low


def _busy(run: BenchmarkRun) -> Iterator[Finding]:
    """Gaps of a request that had the engine to itself differ where nothing of ours differs."""
    gaps = run.inter_token_s
    if run.workload.concurrency != 1 or len(gaps) < 20:
        return
    low, middle, high = (percentile(gaps, at) for at in (25, 50, 75))
    if middle <= 0 or high - low < _BUSY * middle:
        return
    yield Finding(
        statement=f"The machine was busy: the middle half of the gaps of {run.workload.name} differ by "
        f"{as_percent((high - low) / middle)}, and shares of its limits are as uncertain.",
        evidence=f"ITL p25 {duration(low)}, p50 {duration(middle)}, p75 {duration(high)}, {len(gaps)} gaps",
        advice="Measure again when nothing else runs.",
    )


def _stalls(run: BenchmarkRun) -> Iterator[Finding]:
    """The tail of ITL lies far above its median."""
    gaps = run.inter_token_s
    # Below, the 99th percentile lies between the two largest gaps: a single stall decides.
    if len(gaps) < 100:
        return
    middle, tail = percentile(gaps, 50), percentile(gaps, 99)
    if middle <= 0 or tail < _STALL * middle:
        return
    alone = run.workload.concurrency == 1
    yield Finding(
        statement=f"Streaming stalls in {run.workload.name}: one gap in a hundred is {times(tail / middle)} the usual.",
        evidence=f"ITL p50 {duration(middle)}, p99 {duration(tail)}, {len(gaps)} gaps",
        advice="Nothing else ran in the engine: look for other work on this machine."
        if alone
        else "Prompts of newcomers are computed between tokens: a smaller token budget makes the pieces smaller.",
    )


def _queue(run: BenchmarkRun, alone: BenchmarkRun) -> Iterator[Finding]:
    """Requests that arrive by chance wait for those before them."""
    if run.workload.rate_per_s is None or run is alone:
        return
    here, single = statistics.median(run.ttft_s), statistics.median(alone.ttft_s)
    if here < _QUEUE * single:
        return
    done = run.requests_per_s or 0.0
    yield Finding(
        statement=f"Requests queue at {run.workload.rate_per_s:g} per second: TTFT is {times(here / single)} that of a "
        "request alone.",
        evidence=f"median TTFT {duration(here)} against {duration(single)}; {done:.2g} requests/s answered",
        advice=f"Offer less than {done:.2g} requests per second, or add a machine.",
    )


def _goodput(run: BenchmarkRun) -> Iterator[Finding]:
    """Requests miss the limits, and which."""
    met, answered = run.goodput_per_s, run.requests_per_s
    if met is None or not answered or met >= 0.995 * answered:
        return
    limits = {"TTFT": run.workload.ttft_limit_s, "TPOT": run.workload.tpot_limit_s}
    missed = [
        f"{name} above {duration(limit)} in {count} of {len(run.latencies[name])} requests"
        for name, limit in limits.items()
        if limit is not None and (count := sum(value > limit for value in run.latencies[name]))
    ]
    yield Finding(
        statement=f"Only {as_percent(met / answered)} of the requests of {run.workload.name} keep the limits.",
        evidence="; ".join(missed),
        advice="Lower the concurrency or rate until goodput stops growing.",
    )
