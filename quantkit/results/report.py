"""One document about one checkpoint: what was made, how it answers, how fast it is, and whether that is good enough."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.results._record import SCHEMA_VERSION, Record
from quantkit.results.benchmark import BenchmarkResult, BenchmarkRun, Diagnosis
from quantkit.results.compression import CompressionResult, EngineReading
from quantkit.results.evaluation import EvaluationResult, FidelityResult, SensitivityMap

Verdict = Literal["better", "worse", "no difference seen", "noise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Record):
    """One number of the model beside the original's, on the same items.

    Args:
        subject: task, text, "all tasks" or "answer length".
        metric: what is compared, e.g. "acc".
        baseline, value: of the original and of the model.
        difference: value - baseline; for perplexity the ratio's logarithm is tested, the difference shown.
        low, high: 95 % interval of `difference`; None where samples are missing and no error is known.
        p_value: of the paired test; None where there is nothing to test.
        recovery, recovery_low, recovery_high: value as per cent of baseline with its 95 % interval; for a metric where
            lower is better, baseline as per cent of value. None where baseline is 0.
        noise_floor: how far the original strays from itself under other arithmetic, in units of `difference`; None when
            not measured.
        num_samples: pairs compared.
        higher_is_better: direction of `metric`.
        verdict: "noise" within the noise floor; "no difference seen" when the test cannot tell; else which is better.
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
    """Whether one promise was kept.

    Args:
        gate: as written, e.g. "recovery[demo_facts]>=97".
        metric: the part before the bracket.
        subject: the part inside the bracket; None when there is none.
        limit: the number to hold.
        value: what was measured; None when the report does not have it, which counts as not held.
        held: whether the gate held.
        explanation: one sentence with both numbers.
        remedy: what to change, nearest first; None when held.
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
        name: as it should be printed.
        path: directory it was read from.
        format: on-disk format, "dense" for an original.
        num_parameters: weights.
        num_bytes: tensor bytes on disk.
        bits_per_weight: of the quantized linears; None for an original.
        architecture: class name of config.json.
        scheme: short form, e.g. "int4 g128".
        hub_id: of the model on the Hugging Face hub; None for a local one.
        license: as the source's model card says; None when unknown.
        engines: who reads it.
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
    """Machine, software and seeds that the numbers were made with.

    Args:
        versions: package -> version, quantkit's and python's included.
        platform: operating system and machine.
        cpu: name of the processor.
        num_threads: that computed.
        device: "cpu", or the name of the accelerator.
        seeds: by purpose.
        hashes: of source, checkpoint, data and recipe.
        command: as given; empty from Python.
        created: ISO date and time; empty keeps equal runs equal.
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
    """Document about one checkpoint; a field that was not measured is None or empty.

    Args:
        model, baseline_model: the checkpoint and its original.
        compression: how it was made.
        evaluation, baseline: answers of the checkpoint and of the original.
        noise: answers of the original under other arithmetic.
        comparisons: model beside original, computed from the three above; the first is the headline.
        fidelity: distance of the next-token distributions.
        noise_fidelity: the same of the original under other arithmetic.
        sensitivity: which parts lose most.
        benchmark, baseline_benchmark: speed and memory of both.
        diagnosis: what binds, in plain words.
        gates: promises and whether they were kept.
        environment: where the numbers were made.
        notes: everything out of the ordinary, one sentence each.
        schema_version: of this document.
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
        """Read a report; ignore `metrics`, which is computed and written for readers of the JSON only."""
        known = {key: value for key, value in data.items() if key != "metrics"}
        # Not `super()`, which refers to the class as it was before slots were added.
        return super(Report, cls).from_dict(known, where=where)

    @property
    def held(self) -> bool:
        """Whether every gate held; true when there are none."""
        return all(gate.held for gate in self.gates)

    @property
    def paired_runs(self) -> list[tuple[BenchmarkRun, BenchmarkRun | None]]:
        """The model's runs, each with the original's of the same workload."""
        ours, theirs = self.benchmark.runs if self.benchmark else (), self.baseline_benchmark
        return [(run, theirs.find_run(run.workload.name) if theirs else None) for run in ours]

    def find_comparison(self, subject: str) -> Comparison | None:
        """The comparison of a subject, or None."""
        return next((c for c in self.comparisons if c.subject == subject), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateRecord(Record):
    """One way to store weights, and the model that is stored so throughout.

    Args:
        name: e.g. "int4:32", or "skip" for weights ignored.
        bits_per_weight: stored bits, scales included, if every group took it.
        sum_kl: what the groups do one at a time, added up.
    """

    name: str
    bits_per_weight: float
    sum_kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChoice(Record):
    """Choice for one fused group.

    Args:
        layer: index of the decoder layer.
        group: e.g. "q/k/v", "o", "gate/up", "down".
        modules: full names of its linears.
        num_weights: in it.
        choice: name of the candidate.
        bits_per_weight: stored bits, scales included.
        kl: mean KL to the original with only this group stored so, nats per token.
    """

    layer: int
    group: str
    modules: tuple[str, ...]
    num_weights: int
    choice: str
    bits_per_weight: float
    kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult(Record):
    """Result of `quantkit search`.

    Args:
        model: as given, "demo" for the bundled one.
        recipe: file that was written.
        base: name of the recipe that it started from.
        target: e.g. "bits<=4.5", "kl<=0.02", "recovery>=99".
        reached: whether the measured model meets it.
        bits_per_weight: stored bits, scales and zero points included, over all linears that the search may change;
            those it ignores count as stored.
        output_bytes: of all tensors of the compressed model.
        candidates: what each fused group could be given.
        groups: what each was given.
        data: name of the text.
        num_tokens: positions that sensitivities were measured on, and about as many for what was expected and measured.
        sum_kl: of the groups as chosen, one at a time, added up.
        search_kl: of all of them together, on the tokens that they were chosen on: lower than on others.
        expected_kl: the same on tokens that the search has not used, before anything was compressed by the recipe.
        measured_kl: of the model compressed by the recipe, on the tokens of `expected_kl`.
        recovery: per cent of the original's task scores, where that was the target.
        notes: what is out of the ordinary.
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
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def prediction_error(self) -> float:
        """Expected over measured KL, less one."""
        return self.expected_kl / self.measured_kl - 1 if self.measured_kl > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord(Record):
    """One recipe on one model.

    Args:
        name: of the trial, and of its checkpoint.
        model: as given, "demo" for the bundled one.
        recipe: its name.
        identity: everything that decides its figures but times.
        exit_code: of the command that ended it; 0 = done, 130 = not finished.
        reason: why there is no report.
        attempts: how often it was begun.
        seconds: wall time of the last attempt.
        report: about its checkpoint.
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
