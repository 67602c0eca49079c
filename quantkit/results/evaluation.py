"""Results of answering questions and reading text: per-sample records, perplexity, fidelity, and the sensitivity map.

Raw counts and per-sample scores are stored; perplexity, agreement and the like are computed from them, so that two
models can be compared sample by sample. Nothing here computes a statistic: see `quantkit.results.statistics`.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, Self

from quantkit.results._record import Record

Through = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord(Record):
    """One item of a task, answered by one model.

    Args:
        task: name of the task.
        index: position of the item in the task; with `task` it names the item.
        scores: metric -> score; 1.0 and 0.0 where an answer is right or wrong.
        answer_tokens: length of the generated answer; None where nothing was generated.
        item_hash: of the item's text, so that only equal items are paired; empty when unknown.
        answer: what was generated, if kept.
    """

    task: str
    index: int
    scores: dict[str, float]
    answer_tokens: int | None = None
    item_hash: str = ""
    answer: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult(Record):
    """One task by its main metric.

    Args:
        task: name of the task.
        metric: main metric, e.g. `acc`; a key of every sample's scores.
        value: as the task aggregates it.
        stderr: standard error of `value`; None where the task gives none.
        num_samples: items answered.
        higher_is_better: direction of `metric`.
        samples: one record per item, in order; may be empty where a task scores only as a whole.
        others: further metrics of the task.
        num_fewshot: examples in the prompt.
        version: of the task's definition.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    num_samples: int
    higher_is_better: bool = True
    samples: tuple[SampleRecord, ...] = ()
    others: dict[str, float] = field(default_factory=dict)
    num_fewshot: int = 0
    version: str = ""

    @property
    def scores(self) -> tuple[float, ...]:
        """Per-sample scores of the main metric."""
        return tuple(sample.scores[self.metric] for sample in self.samples)

    @property
    def mean_answer_tokens(self) -> float | None:
        """Mean length of generated answers; None where nothing was generated."""
        lengths = [sample.answer_tokens for sample in self.samples if sample.answer_tokens is not None]
        return sum(lengths) / len(lengths) if lengths else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityResult(Record):
    """Perplexity of one text.

    Args:
        data: name of the text.
        window: tokens per window.
        stride: tokens from one window to the next; each token is scored once, in the first window that reaches it.
        through: "prefill" scores a window in one pass, "decode" token by token through the cache.
        window_nll: summed negative log-likelihood (nats) of the tokens scored in each window.
        window_tokens: how many tokens those are.
        read_tokens: of the text that the windows hold, from its beginning; None = a record of before, which lacks it.
        text_tokens: of the whole text.
    """

    data: str
    window: int
    stride: int
    through: Through
    window_nll: tuple[float, ...]
    window_tokens: tuple[int, ...]
    read_tokens: int | None = None
    text_tokens: int | None = None

    @property
    def part(self) -> str:
        """Part of the text that was read, e.g. `the first 20,480 of 341,469 tokens`."""
        if self.read_tokens is None or self.text_tokens is None:
            return f"{self.num_tokens:,} tokens"
        if self.read_tokens < self.text_tokens:
            return f"the first {self.read_tokens:,} of {self.text_tokens:,} tokens"
        return f"all {self.text_tokens:,} tokens"

    @property
    def nll(self) -> float:
        """Summed negative log-likelihood, nats."""
        return math.fsum(self.window_nll)

    @property
    def num_tokens(self) -> int:
        """Tokens scored."""
        return sum(self.window_tokens)

    @property
    def perplexity(self) -> float:
        """exp(nll per token); infinite when it exceeds a float."""
        mean = self.nll / self.num_tokens
        # exp overflows a float from about 709 on.
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult(Record):
    """Answers of one model to all questions.

    Args:
        model: directory or name.
        arithmetic: in which the runtime computed, e.g. "bfloat16"; the noise run uses another than the original's.
        tasks: one result each.
        perplexity: one result per text and path.
        settings: suite, limit, seed, chat template, whether BOS is added, KV cache, ... as text.
        seconds: wall time of the whole.
    """

    model: str
    arithmetic: str = ""
    tasks: tuple[TaskResult, ...] = ()
    perplexity: tuple[PerplexityResult, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def parts_read(self) -> tuple[str, ...]:
        """One line for each text whose perplexity was measured in part."""
        cut = [text for text in self.perplexity if text.read_tokens != text.text_tokens]
        return tuple(dict.fromkeys(f"Perplexity of {text.data} is of {text.part}." for text in cut))

    def find_task(self, task: str) -> TaskResult | None:
        """The result of a task, or None."""
        return next((result for result in self.tasks if result.task == task), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityResult(Record):
    """Distance of the model's next-token distributions from the original's, on fixed text.

    Args:
        data: name of the text.
        num_tokens: positions compared.
        mean_kl: KL(original || model) per position, nats.
        p99_kl: its 99th percentile.
        max_kl: its largest value.
        top1_agreement: share of positions where both prefer the same token.
        window_kl: mean KL of each window, for intervals.
        first_divergence: for each prompt, how many greedily generated tokens agree before the first that differs; None
            where all of them agree.
        greedy_tokens: how many tokens were generated per prompt.
        engine: that computed both.
        mean_kl_low: where only the likeliest tokens of each position are known, the least that `mean_kl` can be, which
            is then the upper end; None where whole distributions were compared.
        top: how many tokens those are.
        remainder: probability, on average, that the original leaves to the others.
    """

    data: str
    num_tokens: int
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    max_kl: float | None = None
    window_kl: tuple[float, ...] = ()
    first_divergence: tuple[int | None, ...] = ()
    greedy_tokens: int = 0
    engine: str = ""
    mean_kl_low: float | None = None
    top: int | None = None
    remainder: float | None = None

    def within(self, noise: Self) -> tuple[float, float]:
        """Least and most that `mean_kl` can be in an arithmetic that is as far from this one as `noise` says.

        A small KL is half a squared distance, and distances add at most: so do the roots of KL. Both models move, each
        as far as the original is taken to.

        Args:
            noise: of the original in another arithmetic.
        """
        low = self.mean_kl if self.mean_kl_low is None else self.mean_kl_low
        # A file may say less than nothing, and a power of what is too large is an error where a product is infinite.
        least, most, step = (math.sqrt(max(0.0, kl)) for kl in (low, self.mean_kl, 4 * noise.mean_kl))
        least, most = max(0.0, least - step), most + step
        return least * least, most * most


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityRecord(Record):
    """Effect of one fused group that is quantized alone in the original model.

    Args:
        layer: index of the decoder layer.
        group: the linears that engines fuse, e.g. "q/k/v", "o", "gate/up", "down".
        modules: full names of the linears in it.
        kl: mean KL to the original, nats per token.
        quantized_bytes, dense_bytes: of the group, as stored and in 16 bits.
    """

    layer: int
    group: str
    modules: tuple[str, ...]
    kl: float
    quantized_bytes: int = 0
    dense_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityProposal(Record):
    """Change of the recipe with which the model should pass.

    Args:
        action: "ignore" the fused groups, or give them "more bits".
        groups: (layer, fused group) in the order of sensitivity per byte.
        overrides: arguments for `quantkit quantize --set`, ready to paste.
        predicted_kl: of the model after the change, from the records' sum.
        extra_bytes: what the change costs on disk.
    """

    action: Literal["ignore", "more bits"]
    groups: tuple[tuple[int, str], ...]
    overrides: tuple[str, ...]
    predicted_kl: float
    extra_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityMap(Record):
    """Sensitivity by layer and fused group.

    Args:
        data: name of the text.
        num_tokens: positions compared.
        records: one per fused group, in the order of the model.
        total_kl: with every group quantized at once; if the parts add up, about the sum of the records.
        proposal: what to change; None when nothing needs it.
    """

    data: str
    num_tokens: int
    records: tuple[SensitivityRecord, ...]
    total_kl: float
    proposal: SensitivityProposal | None = None

    @property
    def sum_kl(self) -> float:
        """Sum over the groups."""
        return math.fsum(record.kl for record in self.records)

    @property
    def additivity(self) -> float | None:
        """Sum of the parts over the whole; near 1 the map can be read part by part."""
        return self.sum_kl / self.total_kl if self.total_kl > 0 else None

    def worst(self, count: int = 5) -> list[SensitivityRecord]:
        """The groups with the largest KL, worst first."""
        return sorted(self.records, key=lambda record: record.kl, reverse=True)[:count]
