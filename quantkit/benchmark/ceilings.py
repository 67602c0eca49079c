"""The two limits of a machine, memory bandwidth and compute, and the share of each that a step reaches (roofline).

Data sheet figures are not reachable, and a shared machine is slower than an idle one. So the limits are measured just
before a run, by a plain read and a plain matrix product with the same threads. More than 100 % of the bandwidth means
that the data fit in the processor's caches.

The bytes and operations of a step are computed from the layers of the loaded model, not measured. The bytes include
every weight that the step reads, once; the cached keys and values that it reads; and the new keys and values that it
writes. They do not include activations, which stay in the processor's caches at these sizes, or the embedding rows of
the tokens.

The durations of steps are derived from timestamps: sequences that decode in one step share its timestamp. Steps during
which a prompt was computed or waiting are left out, because the prompt slows them by varying amounts.
Source: Williams, Waterman, Patterson 2009, Roofline.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.kernels.layouts import Layout
from quantkit.models.kv_budget import kept_tokens
from quantkit.models.kv_sizes import KVForm, form_of_schemes
from quantkit.models.layer_state_sizes import AttentionShape, StateShape
from quantkit.quantities import dtype_name
from quantkit.results import SWEEP_NAME, BenchmarkResult, BenchmarkRun, RooflineRecord
from quantkit.results.statistics.summary import PolynomialFit, fit_polynomial
from quantkit.runtime.model.model import Model, NativeModel

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
    """Measure the memory bandwidth and compute rate of a machine; on a CPU, each repeat takes about 0.1 s.

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
    """Measure the memory bandwidth in bytes per second, on a buffer much larger than the caches; see `Ceilings`."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Bytes and operations of a model's steps.

    Args:
        read_bytes: bytes of weights that a step of one sequence reads.
        expert_bytes: bytes of experts within `read_bytes`; larger batches read more experts.
        expert_share: share of a layer's experts that each token uses; 1 without experts.
        parameters: number of weights, without the head, by which one token is multiplied.
        head_parameters, head_bytes: number of weights and bytes of the head.
        layers: for each layer, the shape of its cache or recurrent state, and the number form in which this is stored.
        kv_budget: maximum number of tokens per sequence in the KV cache; None = no limit.
        product: number type of the products, e.g. "bfloat16" or "int8".
    """

    read_bytes: int
    expert_bytes: int = 0
    expert_share: float = 1.0
    parameters: int
    head_parameters: int = 0
    head_bytes: int = 0
    layers: tuple[tuple[AttentionShape | StateShape, KVForm], ...] = ()
    kv_budget: int | None = None
    product: str

    def weight_bytes(self, tokens: int) -> int:
        """Return the bytes of weights that a step of this many tokens reads, if tokens choose experts at random."""
        # Expected share of experts that at least one token picks, divided by the share that one token picks.
        grown = (1 - (1 - self.expert_share) ** tokens) / self.expert_share
        return round(self.read_bytes + self.expert_bytes * (grown - 1))

    def kv_bytes(self, context: int) -> float:
        """Return the cache bytes that the next token of a sequence of `context` tokens reads."""
        kept = kept_tokens(self.kv_budget, context)
        return sum(layer.read_bytes(kept, form) for layer, form in self.layers)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes that one more token adds to the cache."""
        return sum(layer.token_bytes(form) for layer, form in self.layers)

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the bytes of weights and cache that a decode step of `batch` sequences of `context` tokens moves."""
        return self.weight_bytes(batch) + round(batch * (self.kv_bytes(context) + self.kv_token_bytes))

    def decode_flops(self, batch: int, context: int) -> int:
        """Return the operations of a decode step of `batch` sequences of `context` tokens."""
        kept = kept_tokens(self.kv_budget, context)
        attention = sum(layer.decode_flops(kept + 1) for layer, _ in self.layers)
        return batch * round(2 * (self.parameters + self.head_parameters) + attention)

    def prefill_bytes(self, prompt: int, budget: int) -> int:
        """Return the bytes that the prefill of a prompt moves; each chunk of `budget` tokens reads all weights."""
        starts = range(0, prompt, budget)
        weights = sum(self.weight_bytes(min(budget, prompt - start)) for start in starts)
        return weights + round(sum(self.kv_bytes(start) for start in starts) + prompt * self.kv_token_bytes)

    def prefill_flops(self, prompt: int) -> int:
        """Return the operations of the prefill of a prompt, including the logits of its last token."""
        attention = sum(layer.prefill_flops(prompt) for layer, _ in self.layers)
        return round(2 * prompt * self.parameters + 2 * self.head_parameters + attention)


def model_cost(model: Model, layouts: Sequence[Layout]) -> Cost:
    """Count the bytes and operations of a model's steps.

    Args:
        model: loaded model. For a model that transformers runs, only the weights are counted, without attention.
        layouts: layouts of the model's KV cache.
    """
    if not isinstance(model, NativeModel):
        return Cost(
            read_bytes=model.stored_bytes,
            parameters=model.stored_bytes // model.dtype.itemsize,
            product=product_type(model),
        )
    config, experts = model.config, model.config.experts
    linears = [linear for block in model.blocks for linear in _linears(block)]
    share = 1.0 if experts is None else experts.num_chosen / experts.num_experts
    dtypes = [getattr(layout, "dtype", model.dtype) for layout in layouts]
    forms = [form_of_schemes("", [at.scheme], dtype.itemsize) for at, dtype in zip(layouts, dtypes, strict=True)]
    return Cost(
        read_bytes=model.stored_bytes,
        expert_bytes=round(sum(linear.stored_bytes * share for linear, routed in linears if routed)),
        expert_share=share,
        parameters=round(sum(_size(linear) * (share if routed else 1.0) for linear, routed in linears)),
        head_parameters=_size(model.head),
        head_bytes=model.head.stored_bytes,
        # Without the layer of an MTP head, which only drafts.
        layers=tuple((config.attention(index), form) for index, form in enumerate(forms[: config.num_layers])),
        product=product_type(model),
    )


def product_type(model: Model) -> str:
    """Return the number type in which most of a model's matrix products are computed, e.g. "bfloat16" or "int8"."""
    name = dtype_name(model.dtype)
    if not isinstance(model, NativeModel):
        return name
    described = [linear.description for block in model.blocks for linear, _ in _linears(block)]
    integer = sum("activations int8" in text for text in described)
    return "int8" if 2 * integer > len(described) else name


def linear_kinds(model: Model) -> dict[str, int]:
    """Return the number of linears, keyed by number type and kernel, most frequent first."""
    if not isinstance(model, NativeModel):
        return {}
    counts = Counter(linear.description for block in model.blocks for linear, _ in _linears(block))
    return dict(Counter({**counts, f"head {model.head.description}": 1}).most_common())


def _linears(block: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the linears of a block, and whether each belongs to an expert that only some tokens use."""
    mlp, is_mixture = block.mlp, hasattr(block.mlp, "router")
    dense = mlp.shared if is_mixture else mlp
    mixing = () if block.attention is None else block.attention.linears
    plain = [*mixing, *((dense.up, dense.down) if dense is not None else ())]
    if is_mixture:
        plain += [mlp.router, *([] if mlp.shared_gate is None else [mlp.shared_gate])]
        yield from ((linear, True) for linear in mlp.linears)
    yield from ((linear, False) for linear in plain)


def _size(linear: Any) -> int:
    return int(linear.in_features * linear.out_features)


def decode_record(run: BenchmarkRun, cost: Cost, ceilings: Ceilings) -> RooflineRecord | None:
    """Return the roofline record of a run's `typical_step`; None for the length sweep, or if there is no such step."""
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
    """Return the roofline record of the prefill of a run's longest prompts; None if the concurrency is not 1.

    Its duration is the median over these prompts.

    Args:
        run: the run.
        cost: bytes and operations of the model's steps.
        ceilings: limits of the machine.
        budget: number of prompt tokens that one step computes.
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
        context: number of tokens of all sequences together, before the step.
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
    """Return the typical decode step of a run; None if there is none.

    It is the median step at the largest batch size that 10 % or more of the steps have.
    """
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
    """Fit ITL = a + b * context (seconds, tokens) to all decode steps of a single sequence; None with too few steps."""
    steps = [step for run in result.runs for step in decode_steps(run) if step.batch == 1]
    return fit_polynomial([(step.context, step.seconds) for step in steps])


def fit_ttft(result: BenchmarkResult) -> PolynomialFit | None:
    """Fit TTFT = a + b * prompt + c * prompt^2 (seconds, tokens) to requests that ran alone in the engine.

    With too few lengths for a curve it fits a straight line; with too few for a line it returns None.
    """
    # Requests of a batch wait for each other, which bends the curve.
    alone = [timing for run in result.runs if run.workload.concurrency == 1 for timing in run.requests]
    points = [(timing.prompt_tokens, timing.ttft_s) for timing in alone if timing.ttft_s is not None]
    return fit_polynomial(points, degree=2 if len({length for length, _ in points}) >= 4 else 1)
