"""Run a verification: evaluate both models, compare their distributions, time both, and check the gates.

The checkpoint and its original both run in the bundled runtime, with the same settings except those that belong to the
compression (KV cache, quantized head, speculation). The original also runs in another dtype. Its results change by
rounding alone, so losses of the checkpoint that are no larger count as noise. The models are evaluated first, and freed
before anything is timed.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.benchmark.diagnosis import diagnose
from quantkit.benchmark.options import BenchmarkOptions
from quantkit.benchmark.run import check_target, find_ceilings, load_target, measure_served, measure_targets
from quantkit.distributed import share_out
from quantkit.errors import ModelError, first_line
from quantkit.evaluate import sensitivity
from quantkit.evaluate.acceptance import check_heads, compare_acceptance
from quantkit.evaluate.behaviour import Trace
from quantkit.evaluate.decision_margins import compare_behaviour
from quantkit.evaluate.drift import check_drift, measure_drift
from quantkit.evaluate.fidelity import MAX_TOKENS, Windows, fidelity, fixed_windows
from quantkit.evaluate.lm_eval_run import check_items
from quantkit.evaluate.loading import Evaluated, load_llm, other_arithmetic
from quantkit.evaluate.run import answer_prompts, behaviour_plan, evaluate
from quantkit.evaluate.tasks import GENERAL, available_text, load_suite, read_named_text, speaks_demo
from quantkit.evaluate.top_fidelity import TopReading, read_top, top_fidelity
from quantkit.evaluate.verify.options import VerifyOptions, check_options
from quantkit.evaluate.verify.pair_checks import Pair, compression, environment, model_facts
from quantkit.evaluate.work_sharing import Say, about
from quantkit.machine.memory import free_models
from quantkit.quantities import dtype_name
from quantkit.results import BehaviourResult, DriftResult, EvaluationResult, FidelityResult, Report
from quantkit.results.gates import behaviour_gates, evaluate_gates
from quantkit.results.statistics.comparison import compare_evaluations
from quantkit.runtime.llm import LLM
from quantkit.runtime.vllm_engine import VllmLLM

# Options that belong to the compression, so the original runs without them: quantkit's, and vLLM's own.
OF_THE_COMPRESSION = (
    *("kv_cache", "kv_budget", "kv_policy", "head_dtype", "speculate"),
    *("kv_cache_dtype", "speculative_config", "quantization"),
)
_NOISE_SHARE = 4  # noise is measured on a quarter of the items and of the texts


def of_the_original(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an engine, quantkit's or vLLM's, without the settings that belong to the compression."""
    return {name: value for name, value in settings.items() if name not in OF_THE_COMPRESSION}


def verify_pair(
    pair: Pair,
    options: VerifyOptions | None = None,
    *,
    progress: Say = lambda _: None,
    keep: Callable[[Report], object] = lambda _: None,
) -> Report:
    """Compare a checkpoint with its original and check the gates.

    Args:
        pair: the checked pair; see `check_pair`.
        options: options of the verification; None = the defaults.
        progress: callback for progress messages.
        keep: called with the report so far, before the sensitivity map is made, which may take long.
    Raises:
        DataError: tasks or texts are not available.
        RequestError: a request to be timed exceeds the context of a model.
        ModelError: a model cannot run, or the vocabularies differ.
    """
    options = options or VerifyOptions()
    check_options(options)
    pair.check_engine(options.engine, vllm=options.vllm is not None, sensitivity=bool(options.sensitivity))
    verification = _Verification(pair=pair, options=options, progress=progress, keep=keep)
    bench = options.bench
    if bench is not None and options.vllm is None:  # must fit both models before either is loaded
        for path, engine in verification.sides:
            check_target(path, bench, engine)
    drafts = options.engine.get("speculate") == "mtp"
    if drafts:
        check_heads(verification.sides)
    report, text = verification.answers() if options.vllm is None else verification.served_answers(options.vllm)
    if drafts:
        accepted = compare_acceptance(verification.sides, text, progress)
        report = replace(report, comparisons=(*report.comparisons, *accepted))
    free_models()  # or they would count towards the memory of the timed models
    if bench is not None:
        timed = verification.timed if options.vllm is None else verification.served_timed
        # One rank of a distributed run has the machine to itself; the others wait for what it measures.
        (report,) = share_out([report], partial(timed, bench), owners=[0])
    return verification.completed(report, text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verification:
    """The verification of one pair with fixed options."""

    pair: Pair
    options: VerifyOptions
    progress: Say
    keep: Callable[[Report], object]

    @property
    def sides(self) -> tuple[tuple[Path, dict[str, Any]], tuple[Path, dict[str, Any]]]:
        """(directory, keywords of `LLM`) of the checkpoint and of the original."""
        # If the checkpoint has an adapter already, --adapter says where it is.
        left_out = ("adapters", "adapter") if self.pair.has_adapter else ()
        engine = {k: value for k, value in self.options.engine.items() if value is not None and k not in left_out}
        return (self.pair.path, engine), (self.pair.baseline, of_the_original(engine) | self.pair.merging)

    def answers(self) -> tuple[Report, str]:
        """Evaluate and compare both models in quantkit's engine, and free them.

        Returns:
            The report, and the content of the text on which fidelity was measured.
        """
        (path, engine), (source, plain) = self.sides
        self.progress("loading the original")
        original = load_llm(str(source), **plain)
        check_items(original, self.options.evaluation)
        self.progress("loading the checkpoint")
        llm = load_llm(str(path), **engine)
        if self.options.drift is not None:
            check_drift(llm, original, self.options.drift)
        data, text, note = _find_text(original, self.options)
        windows = fixed_windows(original, text, max_tokens=_fidelity_tokens(self.options))
        distances = self._distances(llm, original, windows, data)
        drift = self._drift(llm, original, windows)
        behaviour, traces, of_prompts = self._behaviour(llm, original)
        count = 3 if self.options.noise else 2
        baseline = self._evaluate(original, f"original (1 of {count})", traces[0])
        ours = self._evaluate(llm, f"checkpoint (2 of {count})", traces[1])
        notes = (*of_prompts, *llm.notes)
        del llm  # the original in another dtype needs the memory; a sensitivity map loads the checkpoint again
        noise, noise_fidelity = self._noise(original, windows, data) if self.options.noise else (None, None)
        answers = {"evaluation": ours, "baseline": baseline, "noise": noise}
        distances_fields = {"fidelity": distances, "noise_fidelity": noise_fidelity, "drift": drift}
        report = self._report(note, notes, behaviour=behaviour, **answers, **distances_fields)
        asked_for = self.options.sensitivity
        if not (sensitivity.failed_accuracy(report) if asked_for is None else asked_for):
            return report, text
        early = "This report was written before the sensitivity map was made and the models were timed."
        self.keep(replace(self.completed(report, text), notes=(*report.notes, early)))
        return self._with_sensitivity(load_llm(str(path), **engine), original, windows, report), text

    def completed(self, report: Report, text: str) -> Report:
        """Add the environment, and check the gates again, because gates about speed and memory need the timing."""
        bench = self.options.bench
        return replace(
            report,
            gates=tuple(evaluate_gates(report, self.gates(report))),
            environment=environment(
                self.pair,
                text,
                device="cpu" if report.benchmark is None else report.benchmark.device or "cpu",
                seeds={"evaluation": self.options.evaluation.seed or 0, "workload": bench.seed if bench else 0},
                command=self.options.command,
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            ),
        )

    def _distances(self, llm: LLM, original: LLM, windows: Windows, data: str) -> FidelityResult:
        subject = f"distributions on {data}, {sum(map(len, windows)):,} tokens"
        self.progress(subject)
        return fidelity(llm, original, windows, data=data, say=about(subject, self.progress))

    def _drift(self, llm: LLM, original: LLM, windows: Windows) -> DriftResult | None:
        tokens = self.options.drift
        if tokens is None:
            return None
        say = about(f"drift over {tokens:,} tokens", self.progress)
        return measure_drift(llm, original, windows, tokens=tokens, seed=self.options.evaluation.seed or 0, say=say)

    def _noise(self, original: LLM, windows: Windows, data: str) -> tuple[EvaluationResult | None, FidelityResult]:
        """Evaluate the original in another dtype, and compare the distributions in both dtypes on part of the text.

        The model in the other dtype is freed.
        """
        source, plain = self.sides[1]
        dtype = other_arithmetic(dtype_name(original.model.dtype))
        self.progress(f"noise: the original again, in {dtype}")
        free_models()
        other = load_llm(str(source), **{**plain, "dtype": dtype})
        noise = self._evaluate(other, f"original in {dtype} (3 of 3)", behaviour=False, share=_NOISE_SHARE)
        return noise, self._distances(other, original, windows[: -(-len(windows) // _NOISE_SHARE)], data)

    def _report(self, of_text: Iterable[str], of_run: Iterable[str], **fields: Any) -> Report:
        """Build the report of these results and check the gates."""
        pair, ours, baseline = self.pair, fields["evaluation"], fields["baseline"]
        report = Report(
            model=model_facts(pair.path, pair.path.resolve().name),
            baseline_model=model_facts(pair.baseline, pair.baseline_name),
            compression=compression(pair),
            comparisons=compare_evaluations(ours, baseline, fields["noise"]) if ours and baseline else (),
            notes=(*pair.notes, *of_text, *(ours.parts_read if ours else ()), *of_run),
            **fields,
        )
        return replace(report, gates=tuple(evaluate_gates(report, self.gates(report))))

    def gates(self, report: Report) -> tuple[str, ...]:
        """Return the gates to check: the user's; without these, the recipe's and, if it has any, `behaviour_gates`."""
        own = () if self.pair.gates_given or not self.pair.gates else behaviour_gates(report)
        return tuple(dict.fromkeys((*self.pair.gates, *own)))

    def _behaviour(
        self, llm: LLM, original: LLM
    ) -> tuple[BehaviourResult | None, tuple[Sequence[Trace] | None, Sequence[Trace] | None], tuple[str, ...]]:
        """Return the comparison of behaviour, the answers of the original and of the checkpoint, and notes.

        All of them are None or empty if no test is requested.
        """
        asked = self.options.evaluation
        plan = behaviour_plan(original, asked)
        # This raises an error if only the original has a chat template.
        own = plan and behaviour_plan(llm, replace(asked, behaviour=True))
        if plan is None or own is None:
            return None, (None, None), ()
        notes: tuple[str, ...] = ()
        if [each.ids for each in plan.questions] != [each.ids for each in own.questions]:
            notes = ("The checkpoint's chat template formats some prompts differently from the original's.",)
        theirs = answer_prompts(original, plan, about("original", self.progress))
        ours = answer_prompts(llm, own, about("checkpoint", self.progress))
        subject = "margins of the original's decisions"
        self.progress(subject)
        compared = compare_behaviour(llm, original, own, (theirs, ours), about(subject, self.progress))
        return compared, (theirs, ours), notes

    def _evaluate(
        self,
        llm: Evaluated,
        name: str,
        traces: Sequence[Trace] | None = None,
        *,
        behaviour: bool | None = None,
        share: int = 1,
    ) -> EvaluationResult | None:
        """Evaluate one model; None if there are no tasks, texts or prompts."""
        asked = self.options.evaluation
        asked = asked if behaviour is None else replace(asked, behaviour=behaviour, prompts=None)
        if asked.suite is None and not (asked.tasks or asked.texts or asked.behaviour or asked.prompts):
            return None
        return evaluate(llm, asked, progress=about(name, self.progress), traces=traces, share=share)

    def _with_sensitivity(self, llm: LLM, original: LLM, windows: Windows, report: Report) -> Report:
        """Add a sensitivity map to the report. If the map cannot be made, add a note, or raise if it was requested."""
        asked = self.options.sensitivity
        assert report.fidelity is not None
        try:
            measured = sensitivity.sensitivity_map(
                llm,
                original,
                windows,
                data=report.fidelity.data,
                goal=sensitivity.repair_goal(report),
                ignored=self.pair.ignored,
                moved=self.pair.moves_scales,
                # A map that nobody asked for should not take longer than the check itself.
                max_tokens=sensitivity.MAX_TOKENS if asked else sensitivity.FEW_TOKENS,
                progress=self.progress,
            )
        except ModelError as error:
            # If nobody asked for the map, only note that it cannot be made.
            if asked:
                raise
            return replace(report, notes=(*report.notes, f"No sensitivity map: {first_line(error)}."))
        return replace(report, sensitivity=measured)

    def served_answers(self, vllm: Mapping[str, Any]) -> tuple[Report, str]:
        """Evaluate both models in vLLM, one after the other; return what `answers` returns.

        The distances are bounds, which are computed from the likeliest tokens at each position.
        """
        (path, engine), (source, plain) = self.sides
        text: list[Any] = []  # name, content, notes and windows; the first model cuts the windows

        def ask(
            name: str, path: Path, vllm: Mapping[str, Any], settings: Mapping[str, Any], **asked: Any
        ) -> tuple[EvaluationResult | None, TopReading]:
            self.progress(f"{name}: loading into vLLM")
            with VllmLLM(path, options=vllm, **settings) as llm:
                if not text:
                    text.extend(_find_text(llm, self.options))
                    text.append(fixed_windows(llm, text[1], max_tokens=_fidelity_tokens(self.options)))
                reading = read_top(llm, text[-1])
                return self._evaluate(llm, name, **asked), reading

        baseline, original = ask("original", source, of_the_original(vllm), plain)
        ours, reading = ask("checkpoint", path, vllm, engine)
        noise = noise_fidelity = None
        if self.options.noise:
            dtype = other_arithmetic(original.arithmetic)
            other = {**plain, "dtype": dtype}
            name, settings = f"original in {dtype}", of_the_original(vllm)
            noise, again = ask(name, source, settings, other, behaviour=False, share=_NOISE_SHARE)
            noise_fidelity = top_fidelity(again, original, data=text[0])
        return self._report(
            text[2],
            reading.notes,
            evaluation=ours,
            baseline=baseline,
            noise=noise,
            fidelity=top_fidelity(reading, original, data=text[0]),
            noise_fidelity=noise_fidelity,
        ), text[1]

    def served_timed(self, bench: BenchmarkOptions, report: Report) -> Report:
        """Time the original and then the checkpoint in vLLM, and add their latencies to the report."""
        vllm = self.options.vllm or {}
        (path, engine), (source, plain) = self.sides
        theirs = measure_served(source, bench, of_the_original(vllm), plain, self.progress)
        ours = measure_served(path, bench, vllm, engine, self.progress)
        return replace(
            report,
            benchmark=replace(ours, model=report.model.name),
            baseline_benchmark=replace(theirs, model=self.pair.baseline_name),
            notes=(*report.notes, "The models were timed one after the other, not in alternating rounds."),
        )

    def timed(self, bench: BenchmarkOptions, report: Report) -> Report:
        """Time both models in turns, and add their latency and memory and a diagnosis to the report."""
        self.progress("loading both models for timing")
        names = report.model.name, self.pair.baseline_name
        target, baseline = (
            replace(load_target(path, bench, engine), name=name)
            for name, (path, engine) in zip(names, self.sides, strict=True)
        )
        self.progress("measuring the ceilings (bandwidth and arithmetic rate) of this machine")
        ceilings = find_ceilings([target, baseline])
        ours, theirs = measure_targets([target, baseline], bench, ceilings, self.progress)
        diagnosis = diagnose(ours, target.cost, theirs)
        return replace(report, benchmark=ours, baseline_benchmark=theirs, diagnosis=diagnosis)


def _fidelity_tokens(options: VerifyOptions) -> int:
    """Return the number of tokens on which distributions are compared: `MAX_TOKENS`, or --text-tokens if smaller."""
    asked = options.evaluation.text_tokens
    return MAX_TOKENS if asked == "all" else min(MAX_TOKENS, int(asked))


def _find_text(original: Evaluated, options: VerifyOptions) -> tuple[str, str, tuple[str, ...]]:
    """Return the name, the content and notes of the text on which distributions are compared.

    It is the text that --text names. Without --text, it is the first text of the evaluation, or a shipped text.
    """
    asked = options.evaluation
    names = [options.text, *asked.texts]
    if asked.suite is not None:
        parts = load_suite(asked.suite).part(speaks_demo(original)).perplexity
        names += [available_text(part.text, asked.data) for part in parts]
    name = next((name for name in names if name), "demo" if speaks_demo(original) else GENERAL)
    note = (
        "Distributions are compared on quantkit's own calibration text, which the compression may have used; give "
        "another text with --text."
    )
    return name, read_named_text(name, asked.data), (note,) if name == GENERAL else ()
