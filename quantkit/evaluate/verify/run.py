"""The whole of a verification: both models answer, their distributions are compared, both are timed, gates judge.

The checkpoint is read back from disk and runs in the bundled runtime, as does the original, with the same settings but
those that belong to the compression (KV cache, rounded head, speculation). The original is also run in another
arithmetic: what changes there is noise. Answers and distributions come first and are freed before anything is timed.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.benchmark.diagnosis import diagnose, diagnose_against
from quantkit.benchmark.options import BenchmarkOptions
from quantkit.benchmark.run import (
    check_target,
    find_ceilings,
    load_target,
    measure_targets,
)
from quantkit.checkpoints.memory import release_freed_memory
from quantkit.demo import GENERAL_TEXT
from quantkit.errors import DataError, ModelError, first_line
from quantkit.evaluate.data import read_text, speaks_demo
from quantkit.evaluate.engine import load_llm
from quantkit.evaluate.fidelity import Windows, check_vocabulary, fidelity, fixed_windows
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.pairing import other_arithmetic
from quantkit.evaluate.run import EXTRA, check_evaluation, evaluate
from quantkit.evaluate.sensitivity import sensitivity_map
from quantkit.evaluate.suites import load_suite
from quantkit.evaluate.verify.facts import baseline_facts, compression, environment, model_facts
from quantkit.evaluate.verify.goals import failed_accuracy, repair_goal
from quantkit.evaluate.verify.pair import Pair, check_pair
from quantkit.results import EvaluationResult, FidelityResult, Report
from quantkit.results.gates import evaluate_gates
from quantkit.results.statistics import compare_evaluations
from quantkit.runtime.llm import LLM

Progress = Callable[[str], None]

OF_THE_COMPRESSION = ("kv_cache", "head_dtype", "speculate")
BENCH = BenchmarkOptions(concurrencies=(1, 8), prompt_tokens=128, new_tokens=32, rounds=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """What to look at.

    Args:
        evaluation: what both models are asked.
        text: that distributions are compared on, a name as for perplexity; None = the first text of the evaluation.
        noise: whether the original is run in another arithmetic, to know what is noise.
        bench: what is timed; None = nothing.
        sensitivity: whether to map which parts are sensitive; None = when a gate about accuracy fails.
        engine: keywords of `LLM`, for both models; KV cache, head and speculation only for the checkpoint.
        command: as given, for the record.
    """

    evaluation: EvaluationOptions = field(default_factory=lambda: EvaluationOptions(suite="quick"))
    text: str | None = None
    noise: bool = True
    bench: BenchmarkOptions | None = BENCH
    sensitivity: bool | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """What distributions are compared on."""

    name: str
    content: str
    note: str = ""


def check_options(options: VerifyOptions) -> None:
    """Refuse what can be refused before anything is compressed or loaded.

    Raises:
        DataError: lm-eval is missing, or there is no such suite or text.
    """
    check_evaluation(options.evaluation)
    if options.text is not None:
        read_text(options.text, options.evaluation.data)
    if options.evaluation.suite is None and not options.evaluation.tasks:
        return
    try:
        import quantkit.evaluate.language_model  # noqa: F401
    except ImportError as error:
        raise DataError(f"{EXTRA} ({first_line(error)})") from error


def verify_pair(pair: Pair, options: VerifyOptions | None = None, *, progress: Progress = lambda _: None) -> Report:
    """Compare a checkpoint with its original and judge it.

    Args:
        pair: both, checked; see `check_pair`.
        options: what to look at; None = everything, briefly.
        progress: told what is going on, in lines.
    Raises:
        DataError: tasks or texts cannot be had.
        RequestError: what is timed does not fit the models.
        ModelError: a model cannot be run, or the vocabularies differ.
    """
    options = options or VerifyOptions()
    check_options(options)
    bench = None if options.bench is None else _fitting(pair, options)
    report, text = _answers(pair, options, progress)
    gc.collect()
    release_freed_memory()
    if bench is not None:
        report = _timed(pair, options, bench, report, progress)
    made = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return replace(
        report,
        gates=tuple(evaluate_gates(report, pair.gates)),
        environment=environment(
            pair,
            device="cpu" if report.benchmark is None else report.benchmark.device or "cpu",
            seeds={"evaluation": options.evaluation.seed or 0, "workload": bench.seed if bench else 0},
            text=text.content,
            command=options.command,
            created=made,
        ),
    )


def verify_checkpoint(
    checkpoint: str | Path,
    baseline: str | Path | None = None,
    *,
    gates: Iterable[str] | None = None,
    options: VerifyOptions | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """`check_pair` and `verify`."""
    return verify_pair(check_pair(checkpoint, baseline, gates), options, progress=progress)


def _answers(pair: Pair, options: VerifyOptions, progress: Progress) -> tuple[Report, _Text]:
    """Tasks, perplexity, fidelity and sensitivity; no model outlives this."""
    progress("loading the original")
    original = _load(pair.baseline, _baseline_engine(options))
    progress("loading the checkpoint")
    llm = _load(pair.path, options.engine)
    check_vocabulary(llm, original)
    text = _find_text(original, options)
    windows = fixed_windows(original, text.content)
    progress(f"distributions on {text.name}, {sum(map(len, windows)):,} tokens")
    distances = fidelity(llm, original, windows, data=text.name)
    baseline = _evaluate(original, options, "original", progress)
    ours = _evaluate(llm, options, "checkpoint", progress)
    noise, noise_fidelity = _noise(pair, options, original, windows, text, progress)
    report = Report(
        model=model_facts(pair.path, pair.path.resolve().name),
        baseline_model=baseline_facts(pair),
        compression=compression(pair),
        evaluation=ours,
        baseline=baseline,
        noise=noise,
        comparisons=compare_evaluations(ours, baseline, noise) if ours and baseline else (),
        fidelity=distances,
        noise_fidelity=noise_fidelity,
        notes=(*pair.notes, *([text.note] if text.note else []), *llm.model.notes),
    )
    report = replace(report, gates=tuple(evaluate_gates(report, pair.gates)))
    return _sensitivity(pair, options, llm, original, windows, text, report, progress), text


def _load(path: Path, engine: Mapping[str, Any]) -> LLM:
    return load_llm(str(path), **engine)


def _baseline_engine(options: VerifyOptions) -> dict[str, Any]:
    return {name: value for name, value in options.engine.items() if name not in OF_THE_COMPRESSION}


def _evaluate(llm: LLM, options: VerifyOptions, who: str, progress: Progress) -> EvaluationResult | None:
    """The answers of one model; None when nothing is asked."""
    asked = options.evaluation
    if asked.suite is None and not (asked.tasks or asked.texts):
        return None
    return evaluate(llm, options.evaluation, progress=lambda text: progress(f"{who}: {text}"))


def _find_text(original: LLM, options: VerifyOptions) -> _Text:
    """The text for distributions: the one named, the evaluation's first, or one that is shipped."""
    names = [options.text, *options.evaluation.texts]
    if options.evaluation.suite is not None:
        suite = load_suite(options.evaluation.suite)
        names += [part.text for part in (suite.demo if speaks_demo(original) else suite.others).perplexity]
    name = next((name for name in names if name), "demo" if speaks_demo(original) else None)
    if name is not None:
        try:
            return _Text(name=name, content=read_text(name, options.evaluation.data))
        except DataError:
            if name in (options.text, *options.evaluation.texts):
                raise
    note = (
        "Distributions are compared on quantkit's own calibration text, which the compression may have seen; "
        "give another with --text."
    )
    return _Text(name="general.txt (calibration text)", content=GENERAL_TEXT.read_text(encoding="utf-8"), note=note)


def _noise(
    pair: Pair, options: VerifyOptions, original: LLM, windows: Windows, text: _Text, progress: Progress
) -> tuple[EvaluationResult | None, FidelityResult | None]:
    """The original in another arithmetic, asked and compared with itself."""
    if not options.noise:
        return None, None
    dtype = other_arithmetic(str(original.model.dtype).removeprefix("torch."))
    progress(f"noise: the original again, in {dtype}")
    other = _load(pair.baseline, {**_baseline_engine(options), "dtype": dtype})
    result = _evaluate(other, options, f"original in {dtype}", progress)
    return result, fidelity(other, original, windows, data=text.name)


def _sensitivity(
    pair: Pair,
    options: VerifyOptions,
    llm: LLM,
    original: LLM,
    windows: Windows,
    text: _Text,
    report: Report,
    progress: Progress,
) -> Report:
    """The report with the sensitivity map, where one is wanted and can be made."""
    if not (bool(failed_accuracy(report)) if options.sensitivity is None else options.sensitivity):
        return report
    try:
        measured = sensitivity_map(
            llm,
            original,
            windows,
            data=text.name,
            goal=repair_goal(report),
            ignored=pair.ignored,
            progress=progress,
        )
    except ModelError as error:
        if options.sensitivity:
            raise
        return replace(report, notes=(*report.notes, f"No sensitivity map: {first_line(error)}."))
    return replace(report, sensitivity=measured)


def _fitting(pair: Pair, options: VerifyOptions) -> BenchmarkOptions:
    """What is timed, checked against both models before any is loaded."""
    assert options.bench is not None
    for path, engine in ((pair.path, dict(options.engine)), (pair.baseline, _baseline_engine(options))):
        check_target(path, options.bench, _known(engine))
    return options.bench


def _known(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Without what was not given, which has defaults."""
    return {name: value for name, value in engine.items() if value is not None}


def _timed(pair: Pair, options: VerifyOptions, bench: BenchmarkOptions, report: Report, progress: Progress) -> Report:
    """The report with latency, memory and diagnosis of both models, measured in turns."""
    progress("loading both models for the clock")
    target = replace(load_target(pair.path, bench, _known(options.engine)), name=report.model.name)
    original = load_target(pair.baseline, bench, _known(_baseline_engine(options)))
    baseline = replace(original, name=pair.baseline_name)
    progress("measuring the ceilings of this machine")
    ceilings = find_ceilings([target, baseline])
    ours, theirs = measure_targets([target, baseline], bench, ceilings, progress)
    own, compared = diagnose(ours, target.cost), diagnose_against(ours, theirs)
    return replace(
        report,
        benchmark=ours,
        baseline_benchmark=theirs,
        diagnosis=replace(own, findings=(*compared.findings, *own.findings)),
    )
