"""Records of an evaluation: per-sample scores of tasks, perplexity, fidelity, and the sensitivity map.

Records store raw counts and per-sample scores, so that two models can be compared sample by sample. Perplexity,
agreement and similar numbers are computed from them. `quantkit.results.statistics` computes intervals and tests.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, Self

from quantkit.quantities import counted
from quantkit.results._record import Record

Through = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord(Record):
    """Scores of one model's answer to one item of a task.

    Args:
        task: name of the task.
        index: position of the item in the task; task and index identify the item.
        scores: scores, keyed by metric; 1.0 or 0.0 for right or wrong answers.
        answer_tokens: length of the generated answer; None if nothing was generated.
        item_hash: hash of the item's text, so that only equal items are paired; empty if unknown.
        answer: the generated text, if it was kept.
    """

    task: str
    index: int
    scores: dict[str, float]
    answer_tokens: int | None = None
    item_hash: str = ""
    answer: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult(Record):
    """Result of one model in one task.

    Args:
        task: name of the task.
        metric: main metric, e.g. `acc`; a key of every sample's scores.
        value: value of the metric as the task aggregates it.
        stderr: standard error of `value`; None if the task gives none.
        num_samples: number of answered items.
        higher_is_better: direction of `metric`.
        samples: one record per item, in order; empty if the task only gives one score for all items.
        others: values of the task's other metrics, keyed by metric.
        num_fewshot: number of examples in the prompt.
        version: version of the task's definition.
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
        """Mean length of generated answers; None if nothing was generated."""
        lengths = [sample.answer_tokens for sample in self.samples if sample.answer_tokens is not None]
        return sum(lengths) / len(lengths) if lengths else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityResult(Record):
    """Perplexity of one model on one text, computed in overlapping or adjacent windows.

    Args:
        data: name of the text.
        window: tokens per window.
        stride: tokens between the starts of two windows; a token is scored in the first window that contains it.
        through: "prefill" scores a window in one pass; "decode" scores it token by token through the cache.
        window_nll: summed negative log-likelihood (nats) of the tokens scored in each window.
        window_tokens: number of tokens scored in each window.
        read_tokens: number of tokens, from the beginning of the text, that the windows cover; None in records of an
            earlier version.
        text_tokens: number of tokens of the whole text.
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
        """Describe the part of the text that was scored, e.g. `the first 20,480 of 341,469 tokens`."""
        if self.read_tokens is None or self.text_tokens is None:
            return counted(self.num_tokens, "token")
        if self.read_tokens < self.text_tokens:
            return f"the first {self.read_tokens:,} of {self.text_tokens:,} tokens"
        return f"all {self.text_tokens:,} tokens"

    @property
    def nll(self) -> float:
        """Summed negative log-likelihood, nats."""
        return math.fsum(self.window_nll)

    @property
    def num_tokens(self) -> int:
        """Number of scored tokens."""
        return sum(self.window_tokens)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood per token; infinite if it exceeds the range of a float."""
        mean = self.nll / self.num_tokens
        # exp overflows a float from about 709 on.
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult(Record):
    """Results of one model in all tasks and texts.

    Args:
        model: directory or name.
        arithmetic: dtype of the computation, e.g. "bfloat16"; the noise run and the baseline run use different dtypes.
        tasks: one result per task.
        perplexity: one result per text and path (prefill or decode).
        behaviour: one result per rate of sampled behaviour, such as `loop_rate`; not included in the mean over tasks.
        settings: suite, limit, seed, chat template, whether BOS is added, KV cache, ... as text.
        seconds: total wall time.
    """

    model: str
    arithmetic: str = ""
    tasks: tuple[TaskResult, ...] = ()
    perplexity: tuple[PerplexityResult, ...] = ()
    behaviour: tuple[TaskResult, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def parts_read(self) -> tuple[str, ...]:
        """Return one sentence for each text that was scored only in part."""
        cut = [text for text in self.perplexity if text.read_tokens != text.text_tokens]
        return tuple(dict.fromkeys(f"Perplexity of {text.data} covers only {text.part}." for text in cut))

    def find_task(self, task: str) -> TaskResult | None:
        """Return the result of a task; None if there is none."""
        return next((result for result in self.tasks if result.task == task), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftResult(Record):
    """KL of the model to the original along texts that the original wrote; both models read them one token per step.

    Args:
        num_texts: number of texts.
        num_tokens: number of tokens that the original wrote after each prompt.
        ends: the texts are divided into stretches; for each, the position after its last token.
        part_kl: mean KL(original || model) of the tokens in each stretch, nats.
        text_kl: mean KL of each text, nats per token.
        slope: increase of the KL per 1,000 tokens: a least-squares fit for each text, averaged over the texts.
        slope_low, slope_high: 95 % interval of the slope, from its spread over the texts; None for a single text.
        first_difference: for each text, number of positions before the first at which the two models have different
            likeliest tokens; None if there is no such position.
    """

    num_texts: int
    num_tokens: int
    ends: tuple[int, ...]
    part_kl: tuple[float, ...]
    text_kl: tuple[float, ...]
    slope: float
    slope_low: float | None = None
    slope_high: float | None = None
    first_difference: tuple[int | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityResult(Record):
    """Distance of the model's next-token distributions from the original's, on fixed text.

    Args:
        data: name of the text.
        num_tokens: number of positions whose distributions were compared.
        mean_kl: mean KL(original || model) per position, nats.
        p99_kl: 99th percentile of KL.
        max_kl: largest KL.
        top1_agreement: share of positions where both models have the same likeliest token.
        window_kl: mean KL of each window of the text, from which intervals are computed.
        first_divergence: for each prompt, number of greedy tokens before the first that differs between the models;
            None if all agree.
        greedy_tokens: number of greedy tokens generated per prompt.
        engine: engine that ran both models.
        mean_kl_low: lower bound of the mean KL if only the likeliest tokens of each position are known; `mean_kl` is
            then the upper bound. None if whole distributions were compared.
        top: number of likeliest tokens that are known per position; None if whole distributions were compared.
        remainder: mean probability that the original gives to all other tokens; None if whole distributions were
            compared.
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
        """Return the lower and upper bound of the mean KL that the same two models would have in another dtype.

        A small KL is half a squared distance, so the triangle inequality holds for the square roots of KL. The bounds
        assume that the change of dtype moves the model as far as it moves the original.

        Args:
            noise: distance of the original in the other dtype from the original in this dtype.
        """
        low = self.mean_kl if self.mean_kl_low is None else self.mean_kl_low
        # A file may hold a negative KL. Products replace powers, because a power that overflows raises an error.
        least, most, step = (math.sqrt(max(0.0, kl)) for kl in (low, self.mean_kl, 4 * noise.mean_kl))
        least, most = max(0.0, least - step), most + step
        return least * least, most * most


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityRecord(Record):
    """Effect of quantizing one fused group of the original model, with all others unquantized.

    Args:
        layer: index of the decoder layer.
        group: name of the fused group (linears that engines fuse), e.g. "q/k/v", "o", "gate/up", "down".
        modules: full names of the linears in the group.
        kl: mean KL to the original, nats per token.
        quantized_bytes, dense_bytes: bytes of the group as quantized and in 16 bits.
    """

    layer: int
    group: str
    modules: tuple[str, ...]
    kl: float
    quantized_bytes: int = 0
    dense_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityProposal(Record):
    """Change of the recipe that should make the model pass its gates.

    Args:
        action: "ignore" the fused groups, or give them "more bits".
        groups: (layer, fused group) of each group to change, the most sensitive per byte first.
        overrides: arguments for `quantkit quantize --set`, ready to paste.
        predicted_kl: predicted KL after the change.
        extra_bytes: additional bytes on disk.
    """

    action: Literal["ignore", "more bits"]
    groups: tuple[tuple[int, str], ...]
    overrides: tuple[str, ...]
    predicted_kl: float
    extra_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityMap(Record):
    """KL that quantizing each fused group alone causes, by layer and group.

    Args:
        data: name of the text.
        num_tokens: number of compared positions.
        records: one record per fused group, in the order of the model.
        total_kl: KL with all groups quantized at once, nats; near the sum of the groups' KL if groups do not interact.
        proposal: proposed change of the recipe; None if no change is needed, or none was found.
    """

    data: str
    num_tokens: int
    records: tuple[SensitivityRecord, ...]
    total_kl: float
    proposal: SensitivityProposal | None = None

    @property
    def sum_kl(self) -> float:
        """Sum of the groups' KL."""
        return math.fsum(record.kl for record in self.records)

    @property
    def additivity(self) -> float | None:
        """Sum of the groups' KL divided by the total KL; a value near 1 means that groups do not interact."""
        return self.sum_kl / self.total_kl if self.total_kl > 0 else None

    def worst(self, count: int = 5) -> list[SensitivityRecord]:
        """Return the groups with the largest KL, worst first."""
        return sorted(self.records, key=lambda record: record.kl, reverse=True)[:count]
