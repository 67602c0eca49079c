"""Costs of serving requests: raw timestamps, memory, roofline points. Latencies are computed from the timestamps.

TTFT: request arrived -> first token. ITL: each gap between successive tokens, pooled over requests. TPOT: (last token -
first token) / (tokens - 1), one number per request. A stall shows in the tail of ITL and is averaged away in TPOT.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from quantkit.results._record import Record

SWEEP_NAME = "sweep"
"""The run whose prompts differ in length: TTFT is fitted against prompt length, ITL against context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Record):
    """Requests that were sent, and their times.

    Args:
        name: short, e.g. "closed-8".
        mode: "closed" keeps `concurrency` requests in flight; "poisson" lets them arrive at `rate_per_s`.
        num_requests: measured requests, warm-up excluded.
        prompt_tokens, new_tokens: of each request; the largest where they differ.
        seed: of lengths, prompts and arrivals.
        concurrency: requests in flight (closed).
        rate_per_s: arrivals per second (poisson).
        num_warmup: requests before the measured ones.
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
    """Raw timestamps of one request, all on one clock, seconds.

    Args:
        request_id: of the engine.
        prompt_tokens: length of the prompt.
        arrived_s: when it was due to be sent (poisson) or was sent (closed).
        token_s: when each new token was handed out; tokens of one speculative burst share a time.
        finished_s: when the request ended; None if it did not.
        cached_tokens: of the prompt, found in the prefix cache.
    """

    request_id: int
    prompt_tokens: int
    arrived_s: float
    token_s: tuple[float, ...]
    finished_s: float | None = None
    cached_tokens: int = 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated."""
        return len(self.token_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None if none came."""
        return self.token_s[0] - self.arrived_s if self.token_s else None

    @property
    def inter_token_s(self) -> tuple[float, ...]:
        """Gaps between successive tokens, one fewer than tokens."""
        return tuple(after - before for before, after in pairwise(self.token_s))

    @property
    def tpot_s(self) -> float | None:
        """Mean gap of this request; None with fewer than two tokens."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1) if len(self.token_s) > 1 else None

    @property
    def latency_s(self) -> float | None:
        """Arrival to last token; None if no token came."""
        return self.token_s[-1] - self.arrived_s if self.token_s else None


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRun(Record):
    """One workload and the requests it sent.

    Args:
        workload: what was sent.
        requests: timestamps of each measured request.
        rounds: how often original and model took turns (interleaved A/B); 1 when measured alone.
    """

    workload: Workload
    requests: tuple[RequestTiming, ...]
    rounds: int = 1

    @property
    def ttft_s(self) -> tuple[float, ...]:
        """One per request that got a token."""
        return tuple(timing.ttft_s for timing in self.requests if timing.ttft_s is not None)

    @property
    def inter_token_s(self) -> tuple[float, ...]:
        """Gaps of all requests, one list."""
        return tuple(gap for timing in self.requests for gap in timing.inter_token_s)

    @property
    def tpot_s(self) -> tuple[float, ...]:
        """One per request with two tokens or more."""
        return tuple(timing.tpot_s for timing in self.requests if timing.tpot_s is not None)

    @property
    def latencies(self) -> dict[str, tuple[float, ...]]:
        """TTFT, ITL and TPOT by name."""
        return {"TTFT": self.ttft_s, "ITL": self.inter_token_s, "TPOT": self.tpot_s}

    @property
    def context_gaps(self) -> tuple[tuple[int, float], ...]:
        """(tokens in the cache when the step ran, gap) of all requests: what ITL = a + b * context is fitted to."""
        # The step behind gap i had the prompt and i new tokens before it.
        return tuple((t.prompt_tokens + i, gap) for t in self.requests for i, gap in enumerate(t.inter_token_s, 1))

    @property
    def duration_s(self) -> float:
        """First arrival to last token."""
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
        """Requests per second that met every stated limit; None when none is stated."""
        limits = self.workload.ttft_limit_s, self.workload.tpot_limit_s
        if limits == (None, None) or self.duration_s <= 0:
            return None
        first, rest = (math.inf if limit is None else limit for limit in limits)
        # One without tokens meets no limit; one with a single token has no TPOT to miss.
        met = [t for t in self.requests if t.ttft_s is not None and t.ttft_s <= first and (t.tpot_s or 0.0) <= rest]
        return len(met) / self.duration_s


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecord(Record):
    """One part of memory, predicted beside observed.

    Args:
        part: "weights", "kv pool", "activations", "graphs", "reserve", or "peak" for their sum.
        predicted_bytes: computed before loading; None where it cannot be known.
        observed_bytes: None where it cannot be seen.
        note: e.g. tokens of capacity of the KV pool.
    """

    part: str
    predicted_bytes: int | None = None
    observed_bytes: int | None = None
    note: str = ""


CACHE_BYTES = 32_000_000
"""Less than this is at home in the last cache of a server, at least in part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineRecord(Record):
    """One kind of step against the ceilings of the machine, measured in the same run.

    Args:
        phase: "prefill" or "decode".
        batch: sequences in the step.
        context: tokens before the step, per sequence.
        num_tokens: new tokens in the step, over all sequences.
        bytes_moved: weights, KV and activations the step must read and write.
        flops: multiply-adds count two.
        seconds: median time of the step.
        copy_bytes_per_s: bandwidth of a large copy here (bytes read + written).
        gemm_flops_per_s: of a large matrix product here, in the arithmetic of the step.
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
        """Operations per byte."""
        return self.flops / self.bytes_moved

    @property
    def mbu(self) -> float:
        """Share of the copy bandwidth reached."""
        return self.bytes_moved / self.seconds / self.copy_bytes_per_s

    @property
    def mfu(self) -> float:
        """Share of the matrix-product rate reached."""
        return self.flops / self.seconds / self.gemm_flops_per_s

    @property
    def in_caches(self) -> bool:
        """Whether so little is read that it may come from the processor's caches, which are faster than memory."""
        return self.bytes_moved < CACHE_BYTES

    def shown_share(self, share: float) -> str:
        """A share of a ceiling, `mbu` or `mfu`, for people: none above 100 %, which says something else.

        Then what is read comes from the caches, or the machine was busier while the ceiling was measured.
        """
        if share <= 1.005:
            return f"{100 * share:.0f} %"
        # Caches explain more than the whole bandwidth, never more than the whole matrix-product rate.
        return "caches" if self.in_caches and share == self.mbu else "busy"

    @property
    def floor_s(self) -> float:
        """The least time the step could take on this machine."""
        return max(self.bytes_moved / self.copy_bytes_per_s, self.flops / self.gemm_flops_per_s)

    @property
    def bound_by(self) -> Literal["memory", "compute"]:
        """Name of the ceiling that lies lower at this intensity."""
        return "memory" if self.floor_s <= self.bytes_moved / self.copy_bytes_per_s else "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult(Record):
    """Measurements of one model's speed and memory.

    Args:
        model: directory or name.
        runs: one per workload.
        memory: one record per part.
        roofline: one record per kind of step.
        kv_cache: scheme of the KV cache, e.g. "int8".
        capacity_tokens: tokens that the KV pool holds.
        device: as named by the machine.
        settings: threads, page size, token budget, ... as text.
    """

    model: str
    runs: tuple[BenchmarkRun, ...] = ()
    memory: tuple[MemoryRecord, ...] = ()
    roofline: tuple[RooflineRecord, ...] = ()
    kv_cache: str = ""
    capacity_tokens: int | None = None
    device: str = ""
    settings: dict[str, str] = field(default_factory=dict)

    def find_run(self, name: str) -> BenchmarkRun | None:
        """The run of the workload of that name, or None."""
        return next((run for run in self.runs if run.workload.name == name), None)

    def memory_part(self, part: str) -> MemoryRecord | None:
        """The record of one part of memory, or None."""
        return next((record for record in self.memory if record.part == part), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Record):
    """One sentence of a diagnosis.

    Args:
        statement: what binds, in plain words.
        evidence: the numbers it rests on.
        advice: what to try next; empty when nothing.
        expected_gain: what that should bring, e.g. "about 1.6x at batch 8".
    """

    statement: str
    evidence: str
    advice: str = ""
    expected_gain: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis(Record):
    """Findings about where the time goes and what to do about it, most important first."""

    findings: tuple[Finding, ...] = ()
