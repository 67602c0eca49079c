"""Steps against what the machine can do at best: bytes over bandwidth, operations over the rate of a matrix product.

Both ceilings are measured in the same run, see `ceilings`. A share above 100 % of the bandwidth means that what is read
stays in the processor's caches, which are faster than memory.
Source: Williams, Waterman, Patterson 2009, Roofline.
"""

import statistics

from quantkit.benchmark.ceilings import Ceilings
from quantkit.benchmark.cost import Cost
from quantkit.benchmark.steps import typical_step
from quantkit.results import SWEEP_NAME, BenchmarkRun, RooflineRecord


def decode_record(run: BenchmarkRun, cost: Cost, ceilings: Ceilings) -> RooflineRecord | None:
    """The typical decode step of a run; None when it has none that only decoded."""
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
    """The longest prompts of a run in which every request had the engine to itself; None for other runs.

    Args:
        run: with a concurrency of 1.
        cost: of the model.
        ceilings: of the machine.
        budget: tokens of a chunk.
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
    """Rows of a batch from which the products take longer than reading the weights.

    Below it a step costs the same whatever its batch; above it fewer bytes per weight bring nothing.

    Args:
        read_bytes: of the weights.
        row_flops: operations of one row.
        bytes_per_s, flops_per_s: of the machine.

    Example: 16-bit weights have 2 bytes for 2 operations, so at 4.3 TB/s and 780 TFLOP/s the rows are 780 / 4.3 = 181.
    """
    return (read_bytes / bytes_per_s) / (row_flops / flops_per_s)
