"""The two limits of a machine, memory bandwidth and compute, and the share of each that a step reaches (roofline).

Data sheet figures are not reachable, and a shared machine is slower than an idle one. So the limits are measured just
before a run, by a plain read and a plain matrix product with the same threads. More than 100 % of the bandwidth means
that the data fit in the processor's caches. Steps are derived from timestamps: sequences that decode in one step share
its timestamp. Steps during which a prompt was computed or waiting are left out, because the prompt slows them by
varying amounts.
Source: Williams, Waterman, Patterson 2009, Roofline.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.benchmark.step_work import Cost
from quantkit.quantities import dtype_name
from quantkit.results import SWEEP_NAME, BenchmarkResult, BenchmarkRun, RooflineRecord
from quantkit.results.statistics.summary import PolynomialFit, fit_polynomial

# Several times the last-level cache of any machine, so that memory is measured and not the cache.
_BUFFER_BYTES = 1 << 28
_GEMM_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Measured limits of a machine.

    Args:
        device: the device.
        threads: number of torch threads, on a CPU.
        bytes_per_s: memory bandwidth; on a CPU, the rate of reading; on a GPU, the higher of the reading and copying
            rates.
        flops_per_s: operations per second of a square matrix product, keyed by dtype name, e.g. {"bfloat16": 2.1e11}.
    """

    device: str
    threads: int
    bytes_per_s: float
    flops_per_s: dict[str, float]


def measure_ceilings(device: torch.device, dtypes: tuple[torch.dtype, ...] = (), *, repeats: int = 5) -> Ceilings:
    """Measure both limits; takes about a tenth of a second per repeat on a CPU.

    Args:
        device: the device.
        dtypes: dtypes of the matrix products; none = measure memory only.
        repeats: number of repeats; the fastest one counts, because disturbances only slow a measurement down.
    """
    return Ceilings(
        device=str(device),
        threads=torch.get_num_threads(),
        bytes_per_s=memory_bandwidth(device, repeats=repeats),
        flops_per_s={dtype_name(dtype): gemm_rate(device, dtype, repeats=repeats) for dtype in dtypes},
    )


def memory_bandwidth(device: torch.device, *, repeats: int = 5) -> float:
    """Return the bytes per second of reading a buffer much larger than the caches; see `Ceilings`."""
    buffer = torch.ones(_BUFFER_BYTES // 4, dtype=torch.float32, device=device)
    # Decoding reads weights and writes next to nothing, so reading is what bounds it.
    best = _BUFFER_BYTES / _shortest(buffer.sum, device, repeats)
    if device.type != "cpu":
        target = torch.empty_like(buffer)
        best = max(best, 2 * _BUFFER_BYTES / _shortest(lambda: target.copy_(buffer), device, repeats))
    return best


def gemm_rate(device: torch.device, dtype: torch.dtype, *, repeats: int = 5) -> float:
    """Return the operations per second of a matrix product of random data; zeros would run faster."""
    # A GPU reaches its rate only with products that fill all of its processors.
    size = _GEMM_ROWS if device.type == "cpu" else 8 * _GEMM_ROWS
    if dtype == torch.int8:
        codes = torch.randint(-128, 128, (2, size, size), device=device, dtype=dtype)
        return 2 * size**3 / _shortest(lambda: torch._int_mm(codes[0], codes[1].t()), device, repeats)
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _shortest(lambda: torch.nn.functional.linear(left, right), device, repeats)


def _shortest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of the fastest of several runs after one warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        # Wait before and after the work, because a launch on a GPU returns before its work is done.
        wait_for(device)
        start = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work; a CPU never has pending work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode_record(run: BenchmarkRun, cost: Cost, ceilings: Ceilings) -> RooflineRecord | None:
    """Return the typical decode step of a run; None for the length sweep, or if no step is typical."""
    step = typical_step(run)
    # The sweep mixes lengths, so none of its steps is typical.
    if step is None or run.workload.name == SWEEP_NAME:
        return None
    context = round(step.context / step.batch)
    return RooflineRecord(
        phase="decode",
        batch=step.batch,
        context=context,
        num_tokens=step.batch,
        bytes_moved=cost.decode_bytes(step.batch, context),
        flops=cost.decode_flops(step.batch, context),
        seconds=step.seconds,
        **_limits(cost, ceilings),
    )


def _limits(cost: Cost, ceilings: Ceilings) -> dict[str, float]:
    return {"copy_bytes_per_s": ceilings.bytes_per_s, "gemm_flops_per_s": ceilings.flops_per_s[cost.product]}


def prefill_record(run: BenchmarkRun, cost: Cost, ceilings: Ceilings, budget: int) -> RooflineRecord | None:
    """Return the prefill of the longest prompts, for runs with a concurrency of 1; None for other runs.

    Args:
        run: the run.
        cost: bytes and operations of the model's steps.
        ceilings: limits of the machine.
        budget: number of tokens per prompt chunk.
    """
    timings = [timing for timing in run.requests if timing.token_s]
    if run.workload.concurrency != 1 or not timings:
        return None
    longest = max(timing.prompt_tokens for timing in timings)
    seconds = [t.ttft_s for t in timings if t.prompt_tokens == longest and t.ttft_s is not None]
    return RooflineRecord(
        phase="prefill",
        batch=1,
        context=0,
        num_tokens=longest,
        bytes_moved=cost.prefill_bytes(longest, budget),
        flops=cost.prefill_flops(longest),
        seconds=statistics.median(seconds),
        **_limits(cost, ceilings),
    )


def break_even_rows(read_bytes: float, row_flops: float, bytes_per_s: float, flops_per_s: float) -> float:
    """Return the number of batch rows above which the products take longer than reading the weights.

    Below this number, a step takes the same time for every batch size. Above it, fewer bytes per weight bring no gain.

    Args:
        read_bytes: bytes of the weights.
        row_flops: operations per row.
        bytes_per_s, flops_per_s: limits of the machine.

    Example: a 16-bit weight has 2 bytes and needs 2 operations per row, so at 4.3 TB/s and 780 TFLOP/s the number of
    rows is 780 / 4.3 = 181.
    """
    return (read_bytes / bytes_per_s) / (row_flops / flops_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """A step that only decoded: every sequence got its next token.

    Args:
        batch: number of sequences.
        context: total tokens of all sequences before the step.
        seconds: time since the previous step.
    """

    batch: int
    context: int
    seconds: float


def decode_steps(run: BenchmarkRun) -> list[DecodeStep]:
    """Return those steps of a run in which no request was in prefill, in order of time."""
    starts = [(t.arrived_s, t.token_s[0]) for t in run.requests if t.token_s]
    contexts_by_span: dict[tuple[float, float], list[int]] = {}
    for timing in run.requests:
        for index in range(1, len(timing.token_s)):
            before, after = timing.token_s[index - 1], timing.token_s[index]
            if after > before:  # tokens with equal times come from one speculative step
                contexts_by_span.setdefault((before, after), []).append(timing.prompt_tokens + index)
    return [
        DecodeStep(batch=len(contexts), context=sum(contexts), seconds=after - before)
        for (before, after), contexts in sorted(contexts_by_span.items())
        # Leave out steps during which a prompt waited or was computed; its first token may come from the same step.
        if not any(arrived < after and before < first for arrived, first in starts)
    ]


def typical_step(run: BenchmarkRun) -> DecodeStep | None:
    """Return the median step of the largest batch size that 10 % or more of the steps have; None if there is none."""
    steps = decode_steps(run)
    counts = Counter(step.batch for step in steps)
    # The beginning and the end of a run have smaller batches; a rare larger batch would give a median of few steps.
    often = [batch for batch, count in counts.items() if 10 * count >= len(steps)]
    if not often:
        return None
    chosen = [step for step in steps if step.batch == max(often)]
    return DecodeStep(
        batch=max(often),
        context=round(statistics.fmean(step.context for step in chosen)),
        seconds=statistics.median(step.seconds for step in chosen),
    )


def fit_itl(result: BenchmarkResult) -> PolynomialFit | None:
    """Fit ITL = a + b context (seconds, tokens) over all steps of a single sequence; None if there are too few."""
    steps = [step for run in result.runs for step in decode_steps(run) if step.batch == 1]
    return fit_polynomial([(step.context, step.seconds) for step in steps])


def fit_ttft(result: BenchmarkResult) -> PolynomialFit | None:
    """Fit TTFT = a + b prompt + c prompt^2 (seconds, tokens) over requests that had the engine to themselves.

    With too few lengths for a curve it fits a straight line; with too few for a line it returns None.
    """
    # Requests of a batch wait for each other, which bends the curve.
    alone = [timing for run in result.runs if run.workload.concurrency == 1 for timing in run.requests]
    points = [(timing.prompt_tokens, timing.ttft_s) for timing in alone if timing.ttft_s is not None]
    return fit_polynomial(points, degree=2 if len({length for length, _ in points}) >= 4 else 1)
