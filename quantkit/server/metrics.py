"""Metrics for operators in Prometheus' text format: counts and times of requests, and the engine's figures."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quantkit.runtime.types import Completion
from quantkit.server.bridge import Bridge

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Metrics of one server: counts and times of its requests, and the engine's figures.

    Args:
        bridge: connection to the engine.
    """

    def __init__(self, bridge: Bridge) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_EngineFigures(bridge))
        self.rejected = Counter(
            "quantkit_requests_rejected",
            "Requests that were refused or failed, by status.",
            ["status"],
            registry=registry,
        )
        self._ended = Counter(
            "quantkit_requests_ended", "Prompts that ended, by reason.", ["reason"], registry=registry
        )
        self._prompt_tokens = Counter("quantkit_prompt_tokens", "Prompt tokens of ended requests.", registry=registry)
        self._new_tokens = Counter("quantkit_generated_tokens", "Tokens generated.", registry=registry)
        self._ttft = Histogram(
            "quantkit_time_to_first_token_seconds",
            "Time from arrival to first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._itl = Histogram(
            "quantkit_inter_token_seconds", "Gaps between tokens.", buckets=_SECONDS, registry=registry
        )

    def ended(self, completion: Completion) -> None:
        """Count a finished completion, its tokens and its times."""
        timing = completion.timing
        self._ended.labels(completion.finish_reason).inc()
        self._prompt_tokens.inc(timing.prompt_tokens)
        self._new_tokens.inc(len(completion.token_ids))
        if timing.token_s:
            self._ttft.observe(timing.token_s[0] - timing.arrived_s)
            for gap in timing.inter_token_s:
                self._itl.observe(gap)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineFigures:
    """Figures of the engine, read each time that a client asks for the metrics."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: otherwise the registry would ask for the figures before the model is loaded."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the figures; none while the model is loading."""
        if not self._bridge.is_ready:
            return
        engine, stats = self._bridge.engine, self._bridge.llm.stats()
        free, total = stats["kv_free_pages"], stats["kv_pages"]
        for name, text, value in (
            ("requests_running", "Requests that are being computed.", len(engine.scheduler.running)),
            ("requests_waiting", "Requests that are waiting.", len(engine.scheduler.waiting)),
            ("kv_pages", "Pages of the KV cache.", total),
            ("kv_pages_used", "KV-cache pages that requests hold.", total - free),
            ("kv_pages_cached", "Free KV-cache pages that the prefix cache can still find.", engine.pool.num_cached),
            ("weight_bytes", "Bytes of the weights.", stats["weight_bytes"]),
        ):
            yield GaugeMetricFamily(f"quantkit_{name}", text, value)
        for name, text, key in (
            ("prefix_hit_tokens", "Prompt tokens taken from the prefix cache.", "prefix_hit_tokens"),
            ("preemptions", "Number of preemptions: times that a request lost its pages.", "preemptions"),
            ("drafted_tokens", "Tokens that speculation proposed.", "drafted_tokens"),
            ("accepted_tokens", "Proposed tokens that were accepted.", "accepted_tokens"),
        ):
            yield CounterMetricFamily(f"quantkit_{name}", text, stats[key])
