"""Records of a report about one checkpoint, of a search, and of the trials of a sweep."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.results._record import SCHEMA_VERSION, Record
from quantkit.results.behaviour import BehaviourResult
from quantkit.results.benchmark import BenchmarkResult, BenchmarkRun, Diagnosis
from quantkit.results.compression import CompressionResult, EngineReading
from quantkit.results.evaluation import DriftResult, EvaluationResult, FidelityResult, SensitivityMap

Verdict = Literal["better", "worse", "no difference seen", "noise", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Record):
    """Comparison of one number of the model with the original's, on the same items.

    Args:
        subject: what is compared: a task, "all tasks", or one of "perplexity: TEXT", "answer length: TASK",
            "behaviour: RATE" and "accepted drafts: POSITION".
        metric: name of the metric that is compared, e.g. "acc".
        baseline, value: the original's and the model's number.
        difference: value - baseline; for perplexity, the test uses the logarithm of the ratio instead.
        low, high: 95 % interval of `difference`; None if neither samples nor standard errors are known.
        p_value: p value of the paired test; None if there is nothing to test.
        recovery, recovery_low, recovery_high: value as per cent of baseline with its 95 % interval; if lower is better,
            baseline as per cent of value. None if baseline is 0.
        noise_floor: how much the original's number can change by computing in another dtype; None if not measured.
        num_samples: number of items that both models answered; for perplexity, number of windows.
        higher_is_better: direction of `metric`.
        verdict: "noise": within the noise floor; "no difference seen": not significant; "unknown": too little data for
            a test; else "better" or "worse".
        method: names of interval and test.
    """

    subject: str
    metric: str
    baseline: float
    value: float
    difference: float
    low: float | None
    high: float | None
    p_value: float | None
    num_samples: int
    verdict: Verdict
    recovery: float | None = None
    recovery_low: float | None = None
    recovery_high: float | None = None
    noise_floor: float | None = None
    higher_is_better: bool = True
    method: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult(Record):
    """Result of checking one gate.

    Args:
        gate: text of the gate, e.g. "recovery[demo_facts]>=97".
        metric: name of the metric, which is the part of `gate` before the bracket.
        subject: the part of `gate` inside the brackets; None without brackets.
        limit: the limit.
        value: the measured value; None if it was not measured, and the gate then fails.
        held: whether the gate held.
        explanation: one sentence that states the value and the limit, or why there is no value.
        remedy: what to change; None if the gate held.
    """

    gate: str
    metric: str
    limit: float
    value: float | None
    held: bool
    subject: str | None = None
    explanation: str = ""
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts(Record):
    """Facts about a model that are known without running it.

    Args:
        name: name to print.
        path: directory of the model.
        format: on-disk format, "dense" for an original.
        num_parameters: number of weights.
        num_bytes: tensor bytes on disk.
        bits_per_weight: average over the quantized linears; None for an original.
        architecture: class name in config.json.
        scheme: short form of the scheme, e.g. "int4 g128".
        hub_id: id on the Hugging Face hub; None for a local model.
        license: license that the model's card names; None if unknown.
        engines: predictions of how engines read the checkpoint.
    """

    name: str
    path: str = ""
    format: str = "dense"
    num_parameters: int = 0
    num_bytes: int = 0
    bits_per_weight: float | None = None
    architecture: str = ""
    scheme: str = ""
    hub_id: str | None = None
    license: str | None = None
    engines: tuple[EngineReading, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment(Record):
    """Machine, software and seeds that produced the numbers.

    Args:
        versions: versions keyed by package, including quantkit and python.
        platform: operating system and machine.
        cpu: name of the processor.
        num_threads: number of computing threads.
        device: "cpu", or the name of the accelerator.
        seeds: seeds keyed by purpose.
        hashes: hashes of the checkpoint's files, of the text, and of the inputs of the compression, keyed by name.
        command: command line; empty if run from Python.
        created: ISO date and time of the report; may be left empty so that equal runs give equal reports.
    """

    versions: dict[str, str] = field(default_factory=dict)
    platform: str = ""
    cpu: str = ""
    num_threads: int = 0
    device: str = "cpu"
    seeds: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    command: str = ""
    created: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(Record):
    """Report about one checkpoint; a field that was not measured is None or empty.

    Args:
        model, baseline_model: the checkpoint and its original.
        compression: record of the compression.
        evaluation, baseline: evaluation of the checkpoint and of the original.
        noise: evaluation of the original in another dtype.
        comparisons: comparisons of model and original, computed from `evaluation`, `baseline` and `noise`; the mean
            over tasks comes first, if there are tasks.
        fidelity: distance of the model's next-token distributions from the original's.
        noise_fidelity: distance of the original in another dtype from the original.
        drift: KL to the original along long texts, while decoding.
        behaviour: decision margins on the original's answers to chat prompts, and answers of both models.
        sensitivity: KL that quantizing each fused group alone causes.
        benchmark, baseline_benchmark: speed and memory of both models.
        diagnosis: what limits speed, in plain words.
        gates: results of the gates.
        environment: machine, software and seeds.
        notes: unusual events, one sentence each.
        schema_version: version of this document.
    """

    model: ModelFacts
    baseline_model: ModelFacts | None = None
    compression: CompressionResult | None = None
    evaluation: EvaluationResult | None = None
    baseline: EvaluationResult | None = None
    noise: EvaluationResult | None = None
    comparisons: tuple[Comparison, ...] = ()
    fidelity: FidelityResult | None = None
    noise_fidelity: FidelityResult | None = None
    drift: DriftResult | None = None
    behaviour: BehaviourResult | None = None
    sensitivity: SensitivityMap | None = None
    benchmark: BenchmarkResult | None = None
    baseline_benchmark: BenchmarkResult | None = None
    diagnosis: Diagnosis | None = None
    gates: tuple[GateResult, ...] = ()
    environment: Environment = field(default_factory=Environment)
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "report") -> "Report":
        """Create a report from a dict; ignore the entry `metrics`, which is computed from the other entries."""
        known = {key: value for key, value in data.items() if key != "metrics"}
        # Not `super()`, which refers to the class as it was before slots were added.
        return super(Report, cls).from_dict(known, where=where)

    @property
    def held(self) -> bool:
        """Whether every gate held; true without gates."""
        return all(gate.held for gate in self.gates)

    @property
    def paired_runs(self) -> list[tuple[BenchmarkRun, BenchmarkRun | None]]:
        """Each run of the model, paired with the original's run of the same workload."""
        ours, theirs = self.benchmark.runs if self.benchmark else (), self.baseline_benchmark
        return [(run, theirs.find_run(run.workload.name) if theirs else None) for run in ours]

    def find_comparison(self, subject: str) -> Comparison | None:
        """Return the comparison of a subject; None if there is none."""
        return next((c for c in self.comparisons if c.subject == subject), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateRecord(Record):
    """Size and KL of one candidate scheme of a search, if all groups use the scheme.

    Args:
        name: name of the candidate, e.g. "int4:32", or "skip" for unquantized weights.
        bits_per_weight: stored bits per weight, including scales, if every group uses it.
        sum_kl: sum of the groups' KL, with each group quantized alone.
    """

    name: str
    bits_per_weight: float
    sum_kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChoice(Record):
    """Candidate scheme that a search chose for one fused group.

    Args:
        layer: index of the decoder layer.
        group: name of the group, e.g. "q/k/v", "o", "gate/up", "down".
        modules: full names of the group's linears.
        num_weights: number of weights in the group.
        choice: name of the chosen candidate.
        bits_per_weight: stored bits per weight, including scales.
        kl: mean KL to the original with only this group quantized, nats per token.
    """

    layer: int
    group: str
    modules: tuple[str, ...]
    num_weights: int
    choice: str
    bits_per_weight: float
    kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayerChoice(Record):
    """Number types that a search chose for one layer's cache.

    Args:
        layer: index of the decoder layer.
        keys, values: names of the number types.
        key_kl, value_kl: estimated KL to the original if only this layer's keys, or only its values, are quantized.
    """

    layer: int
    keys: str
    values: str
    key_kl: float
    value_kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheChoice(Record):
    """KV cache that a search chose. Every KL is a mean over tokens, relative to the original, while decoding, in nats.

    Args:
        bits: stored bits per key or value, including scales, on average over `layers`.
        layers: number types of each layer whose cache quantkit can quantize.
        uniform: KL of up to two caches within the target that use the same types in all layers, keyed by these types;
            measured on the tokens used for the choice.
        num_tokens: number of positions used for the choice; `measured_kl` uses about as many positions. As in any
            sequence, keys and values in the last page of a window are not quantized yet.
        sum_kl: sum of the layers' estimated KL.
        search_kl: KL of the chosen cache on the tokens used for the choice.
        measured_kl: as `search_kl`, but on tokens that the choice did not use, if the text has enough tokens.
    """

    bits: float
    layers: tuple[CacheLayerChoice, ...]
    uniform: dict[str, float]
    num_tokens: int
    sum_kl: float
    search_kl: float
    measured_kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSearchResult(Record):
    """Result of `quantkit search --kv-bits` without a target for the weights.

    Args:
        model: model as given by the user, "demo" for the bundled one.
        recipe: path of the written recipe.
        base: name of the recipe that the search started from.
        target: target of the search, e.g. "kv_bits<=3.5".
        kv_cache: the chosen cache.
        data: name of the text.
        notes: unusual events.
        seconds: wall time of this process.
    """

    model: str
    recipe: str
    base: str
    target: str
    kv_cache: CacheChoice
    data: str
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult(Record):
    """Result of `quantkit search` with a target for the weights.

    Args:
        model: model as given by the user, "demo" for the bundled one.
        recipe: path of the written recipe.
        base: name of the recipe that the search started from.
        target: target of the search, e.g. "bits<=4.5", "kl<=0.02", "recovery>=99".
        reached: whether the compressed model meets the target.
        bits_per_weight: stored bits per weight, including scales and zero points, over all linears that the search may
            change; linears that it leaves unquantized count with their stored bits.
        output_bytes: bytes of all tensors of the compressed model.
        candidates: one record per candidate scheme.
        groups: chosen candidate of each fused group.
        data: name of the text.
        num_tokens: number of positions on which the groups' KL is measured. `expected_kl` and `measured_kl` use about
            as many other positions, or the same ones if the text is too short.
        sum_kl: sum of the groups' KL, with each group quantized alone by its chosen candidate.
        search_kl: KL with all groups quantized by their chosen candidates, on the tokens used for the choice; usually
            lower than on other tokens.
        expected_kl: as `search_kl`, but on other tokens (see `num_tokens`) and with the chosen KV cache, if any;
            measured before the model is compressed with the recipe.
        measured_kl: KL of the model compressed with the recipe, on the same tokens as `expected_kl`.
        recovery: task scores in per cent of the original's; None if recovery was not the target.
        kv_cache: the chosen KV cache; `expected_kl` and `measured_kl` include its error. None if the search chose only
            weights.
        notes: unusual events.
        seconds: wall time of this process.
    """

    model: str
    recipe: str
    base: str
    target: str
    reached: bool
    bits_per_weight: float
    output_bytes: int
    candidates: tuple[CandidateRecord, ...]
    groups: tuple[GroupChoice, ...]
    data: str
    num_tokens: int
    sum_kl: float
    search_kl: float
    expected_kl: float
    measured_kl: float
    recovery: float | None = None
    kv_cache: CacheChoice | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def prediction_error(self) -> float:
        """Relative error of the prediction: expected KL / measured KL - 1."""
        return self.expected_kl / self.measured_kl - 1 if self.measured_kl > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord(Record):
    """One trial of a sweep: one recipe on one model.

    Args:
        name: name of the trial and of its checkpoint.
        model: model as given by the user, "demo" for the bundled one.
        recipe: name of the recipe.
        identity: all inputs that determine the trial's results, except measured times.
        exit_code: exit code of the trial's last command; 0 = done, 130 = not finished.
        reason: why there is no report.
        attempts: number of attempts.
        seconds: wall time of the last attempt.
        report: report about the trial's checkpoint; None if the trial is not finished or failed.
    """

    name: str
    model: str
    recipe: str
    identity: dict[str, Any]
    exit_code: int = 130
    reason: str = "not finished"
    attempts: int = 0
    seconds: float = 0.0
    report: Report | None = None
