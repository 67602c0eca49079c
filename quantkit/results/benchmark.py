"""Records of a benchmark: timestamps of requests, memory and roofline points. Latencies are computed from timestamps.

TTFT: time from the arrival of a request to its first token. ITL: gaps between successive tokens of a request, for all
requests together; tokens of one speculative step share the time of the step equally. TPOT: (time from first to last
token) / (tokens - 1), one number per request. A stall shows in the tail of ITL and is averaged away in TPOT.
"""

import math
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Literal

from quantkit.results._record import Record

SWEEP_NAME = "sweep"
"""Name of the run with prompts of different lengths, which shows how latency depends on the number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Record):
    """Description of the requests that a benchmark sends.

    Args:
        name: short name, e.g. "closed-8".
        mode: "closed" keeps `concurrency` requests in flight; "poisson" sends requests at random times, `rate_per_s` on
            average.
        num_requests: number of measured requests, without warm-up.
        prompt_tokens, new_tokens: tokens per request; the largest number if requests differ.
        seed: seed of lengths, prompts and arrivals.
        concurrency: requests in flight (closed).
        rate_per_s: arrivals per second (poisson).
        num_warmup: number of requests before the measured requests.
        ttft_limit_s, tpot_limit_s: limits that a request must meet to count as goodput.
    """

    name: str
    mode: Literal["closed", "poisson"]
    num_requests: int
    prompt_tokens: int
    new_tokens: int
    seed: int = 0
    concurrency: int | None = None
    rate_per_s: float | None = None
    num_warmup: int = 0
    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTiming(Record):
    """Timestamps of one request, in seconds of one clock.

    Args:
        request_id: the engine's id of the request.
        prompt_tokens: length of the prompt.
        arrived_s: time when the request was due (poisson) or was sent (closed).
        token_s: time when each new token was returned; tokens of one speculative step share a time.
        finished_s: time when the request ended; None if it did not end.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: int
    prompt_tokens: int
    arrived_s: float
    token_s: tuple[float, ...]
    finished_s: float | None = None
    cached_tokens: int = 0

    @property
    def num_new_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None if no token came."""
        return self.token_s[0] - self.arrived_s if self.token_s else None

    @property
    def inter_token_s(self) -> tuple[float, ...]:
        """Gaps between successive tokens.

        If a speculative step gives n tokens at once, each of them counts as a gap of 1 / n of the step's time. So the
        gaps add up to the time between the first token and the last.
        """
        steps = [(time, len(list(tokens))) for time, tokens in groupby(self.token_s)]
        gaps = [0.0] * (steps[0][1] - 1) if steps else []  # no step came before the first tokens
        for (before, _), (after, count) in pairwise(steps):
            gaps += [(after - before) / count] * count
        return tuple(gaps)

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between successive tokens of this request; None with fewer than two tokens."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1) if len(self.token_s) > 1 else None

    @property
    def latency_s(self) -> float | None:
        """Time from arrival to the last token; None if no token came."""
        return self.token_s[-1] - self.arrived_s if self.token_s else None


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRun(Record):
    """One workload and the timings of its requests.

    Args:
        workload: description of the requests.
        requests: timestamps of each measured request.
        rounds: number of rounds in which original and model were measured in turns; 1 if the model was measured alone.
    """

    workload: Workload
    requests: tuple[RequestTiming, ...]
    rounds: int = 1

    @property
    def ttft_s(self) -> tuple[float, ...]:
        """Time to first token of each request that received a token."""
        return tuple(timing.ttft_s for timing in self.requests if timing.ttft_s is not None)

    @property
    def inter_token_s(self) -> tuple[float, ...]:
        """Inter-token gaps of all requests in one tuple."""
        return tuple(gap for timing in self.requests for gap in timing.inter_token_s)

    @property
    def tpot_s(self) -> tuple[float, ...]:
        """Time per output token of each request with at least two tokens."""
        return tuple(timing.tpot_s for timing in self.requests if timing.tpot_s is not None)

    @property
    def latencies(self) -> dict[str, tuple[float, ...]]:
        """Latencies of the run, keyed by name: TTFT, ITL and TPOT."""
        return {"TTFT": self.ttft_s, "ITL": self.inter_token_s, "TPOT": self.tpot_s}

    @property
    def context_gaps(self) -> tuple[tuple[int, float], ...]:
        """(tokens in the cache, gap) of each step of all requests, to which ITL = a + b * context is fitted."""
        # During gap i, counted from 1, the step reads the prompt and i new tokens.
        return tuple((t.prompt_tokens + i, gap) for t in self.requests for i, gap in enumerate(t.inter_token_s, 1))

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the last token."""
        ends = [timing.token_s[-1] for timing in self.requests if timing.token_s]
        return max(ends) - min(timing.arrived_s for timing in self.requests) if ends else 0.0

    @property
    def output_tokens_per_s(self) -> float | None:
        """Generated tokens per second of the whole run."""
        tokens = sum(timing.num_new_tokens for timing in self.requests)
        return tokens / self.duration_s if self.duration_s > 0 else None

    @property
    def requests_per_s(self) -> float | None:
        """Requests answered per second of the whole run."""
        return len(self.ttft_s) / self.duration_s if self.duration_s > 0 else None

    @property
    def goodput_per_s(self) -> float | None:
        """Requests per second that met every limit; None without limits."""
        limits = self.workload.ttft_limit_s, self.workload.tpot_limit_s
        if limits == (None, None) or self.duration_s <= 0:
            return None
        first, rest = (math.inf if limit is None else limit for limit in limits)
        # A request without tokens meets no limit; a request with a single token has no TPOT that could be too long.
        met = [t for t in self.requests if t.ttft_s is not None and t.ttft_s <= first and (t.tpot_s or 0.0) <= rest]
        return len(met) / self.duration_s


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecord(Record):
    """Predicted and observed bytes of one part of memory.

    Args:
        part: "weights", "kv pool", "activations", "graphs" or "reserve"; "peak" for the sum of all parts.
        predicted_bytes: bytes computed before loading; None if they cannot be predicted.
        observed_bytes: bytes measured; None if they cannot be measured.
        note: remark, e.g. how many tokens the KV pool can hold.
    """

    part: str
    predicted_bytes: int | None = None
    observed_bytes: int | None = None
    note: str = ""


CACHE_BYTES = 32_000_000
"""If a step moves fewer bytes than this, some of them may come from the last-level cache of a server's CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineRecord(Record):
    """Time and traffic of one kind of step, and the machine's ceilings measured in the same run.

    Args:
        phase: "prefill" or "decode".
        batch: sequences in the step.
        context: tokens before the step, per sequence.
        num_tokens: new tokens in the step, over all sequences.
        bytes_moved: bytes of weights and KV cache that the step must read and write.
        flops: operations of the step; a multiply-add counts as two.
        seconds: median time of the step.
        copy_bytes_per_s: bandwidth of a large copy on this machine (bytes read + written).
        gemm_flops_per_s: operations per second of a large matrix product on this machine, in the step's arithmetic.
    """

    phase: Literal["prefill", "decode"]
    batch: int
    context: int
    num_tokens: int
    bytes_moved: int
    flops: int
    seconds: float
    copy_bytes_per_s: float
    gemm_flops_per_s: float

    @property
    def intensity(self) -> float:
        """Operations per byte that the step moves."""
        return self.flops / self.bytes_moved

    @property
    def mbu(self) -> float:
        """Share of the copy bandwidth that the step reached."""
        return self.bytes_moved / self.seconds / self.copy_bytes_per_s

    @property
    def mfu(self) -> float:
        """Share of the matrix-product rate that the step reached."""
        return self.flops / self.seconds / self.gemm_flops_per_s

    @property
    def in_caches(self) -> bool:
        """Whether the step reads so few bytes that they may come from processor caches instead of memory."""
        return self.bytes_moved < CACHE_BYTES

    def shown_share(self, share: float) -> str:
        """Format a share of a ceiling, `mbu` or `mfu`; a word replaces shares above 100 %.

        The word is "caches" if the data came from caches, or "busy" if the machine was busier during the measurement of
        its ceiling.
        """
        if share <= 1.005:
            return f"{100 * share:.0f} %"
        # Caches can explain more than 100 % of the bandwidth, but not of the matrix-product rate.
        return "caches" if self.in_caches and share == self.mbu else "busy"

    @property
    def floor_s(self) -> float:
        """Minimum time of the step on this machine."""
        return max(self.bytes_moved / self.copy_bytes_per_s, self.flops / self.gemm_flops_per_s)

    @property
    def bound_by(self) -> Literal["memory", "compute"]:
        """Ceiling that limits the speed of this step: memory bandwidth or arithmetic."""
        return "memory" if self.floor_s <= self.bytes_moved / self.copy_bytes_per_s else "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult(Record):
    """Measurements of one model's speed and memory.

    Args:
        model: directory or name.
        runs: one record per workload.
        memory: one record per part of memory.
        roofline: one record per kind of step.
        kv_cache: scheme of the KV cache, e.g. "int8".
        capacity_tokens: tokens that the KV pool can hold.
        device: name of the device as the machine reports it.
        settings: threads, page size, token budget, ... as text.
        acceptance: share of the first, second, ... drafts of a sequence in a step that were accepted; empty without
            speculation.
    """

    model: str
    runs: tuple[BenchmarkRun, ...] = ()
    memory: tuple[MemoryRecord, ...] = ()
    roofline: tuple[RooflineRecord, ...] = ()
    kv_cache: str = ""
    capacity_tokens: int | None = None
    device: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    acceptance: tuple[float, ...] = ()

    def find_run(self, name: str) -> BenchmarkRun | None:
        """Return the run of the workload with this name; None if there is none."""
        return next((run for run in self.runs if run.workload.name == name), None)

    def memory_part(self, part: str) -> MemoryRecord | None:
        """Return the record of a part of memory, such as "weights" or "kv pool"; None if there is no such record."""
        return next((record for record in self.memory if record.part == part), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Record):
    """One finding of a diagnosis, with its evidence and advice.

    Args:
        statement: the limiting factor, in plain words.
        evidence: the numbers behind the statement.
        advice: what to try next; empty = nothing.
        expected_gain: expected effect of the advice, e.g. "about 1.6x at batch 8".
    """

    statement: str
    evidence: str
    advice: str = ""
    expected_gain: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis(Record):
    """Findings about what limits speed and what to try, most important first."""

    findings: tuple[Finding, ...] = ()
