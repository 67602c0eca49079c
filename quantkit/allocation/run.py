"""The whole of a search: measure fused groups, choose, write the recipe, compress by it, and say how it came out.

Every other window of the text is what sensitivities are measured on and groups chosen by; the others are kept for what
is expected and measured at the end, since a choice looks better on the tokens that it was chosen on than on others.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.allocation.candidates import (
    SKIP,
    Candidate,
    Usable,
    base_groups,
    default_candidates,
    mixed_changes,
    read_candidates,
    usable,
)
from quantkit.allocation.choose import within_budget, within_kl
from quantkit.allocation.options import SearchOptions, SearchTarget
from quantkit.allocation.outputs import Outputs, open_outputs
from quantkit.allocation.recipe_file import default_candidate, flat, overrides, write_recipe
from quantkit.allocation.recovery import Judge
from quantkit.allocation.sensitivities import MeasuredGroups, TrialRunner, measure_groups
from quantkit.allocation.solve import Choice, total
from quantkit.allocation.state import SearchState
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.checkpoints.source import resolve
from quantkit.compress.pipeline.identity import describe_versions
from quantkit.compress.recipe import Recipe
from quantkit.compress.recipe.load import build
from quantkit.compress.recipe.override import patched
from quantkit.demo import DEMO_MODEL, GENERAL_TEXT
from quantkit.errors import DataError, GateFailure, InputError, RecipeError
from quantkit.evaluate.data import read_text, speaks_demo
from quantkit.evaluate.engine import load_llm
from quantkit.evaluate.fidelity import Windows, fixed_windows
from quantkit.evaluate.sensitivity import Probe, few
from quantkit.numerics.dtype import find_dtype
from quantkit.results import CandidateRecord, CompressionResult, GroupChoice, SearchResult
from quantkit.runtime.llm import LLM

_REFERENCE_BYTES = 2 << 30  # of the original's logits on them
_TRIES = 3  # recipes that are made and measured before a target is given up


def search(
    model: str | None, target: SearchTarget, options: SearchOptions, *, progress: Callable[[str], None] = lambda _: None
) -> SearchResult:
    """Find which numbers each fused group of a model should have, and write them as a recipe.

    Args:
        model: directory or hub id; None = the demo model.
        target: what is asked for.
        options: how to search.
        progress: told what is going on, in lines.
    Returns:
        what was chosen, expected and measured; `reached` says whether the target is met.
    Raises:
        InputError: model, recipe, text or output cannot be used.
        GateFailure: no choice can meet the target.
    """
    started = time.perf_counter()
    output = options.output or Path(f"{_short(model)}-{_slug(target)}.yaml")
    with open_outputs(
        output, options.checkpoint, options.work, resume=options.resume, overwrite=options.overwrite
    ) as outputs:
        run = _prepare(model, target, options, outputs, progress)
        result = run.find()
        outputs.hand_over(run.draft, run.folder)
    return replace(result, seconds=time.perf_counter() - started)


def _prepare(
    model: str | None, target: SearchTarget, options: SearchOptions, outputs: Outputs, progress: Callable[[str], None]
) -> _Run:
    """Measure what each unit costs in each of its forms."""
    output, work = outputs.recipe.output, outputs.work.path
    candidates = _candidates(model, options)
    candidates.require(target.bits)
    engine = {"dtype": "float32", "device": options.device, **options.engine}
    folder = DEMO_MODEL if model is None else resolve(model)
    progress("loading the original")
    original = load_llm(str(folder), **engine)
    name, windows, text_notes = _windows(original, options)
    used = few(windows[::2], original.model.vocab_size, options.max_tokens, _REFERENCE_BYTES)
    identity = _identity(options.recipe, folder, original, used)
    state = SearchState(work / "state.json", identity)
    engine["threads"] = state.threads
    torch.set_num_threads(state.threads)
    if state.resumed:
        progress(f"{state.resumed} numbers taken over from an earlier search in {work}")
    runner = TrialRunner(
        model=model,
        source=identity["source"],
        base=options.recipe,
        folder=work,
        device=options.device,
        engine=engine,
        progress=progress,
    )
    measured = measure_groups(runner, candidates.candidates, original, Probe(original, used), state)
    return _Run(
        runner=runner,
        target=target,
        candidates=candidates.candidates,
        measured=measured,
        original=original,
        probed=used,
        held_out=windows[1::2][: len(used)] or used,
        data=name,
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", output.stem).lstrip("._-") or "searched",
        output=output,
        notes=(*candidates.notes, *text_notes),
    )


@dataclass(kw_only=True, slots=True)
class _Run:
    """One search with everything measured; what is left is to choose and to prove."""

    runner: TrialRunner
    target: SearchTarget
    candidates: tuple[Candidate, ...]
    measured: MeasuredGroups
    original: LLM
    probed: Windows
    held_out: Windows
    data: str
    name: str
    output: Path
    notes: tuple[str, ...]
    folder: Path | None = None

    @property
    def draft(self) -> Path:
        """The recipe until everything is known; only then it takes its place."""
        return self.runner.folder / self.output.name

    def find(self) -> SearchResult:
        """Choose, write, compress and measure, again with a stricter KL where the target was missed."""
        target, weights = self.target, self.measured.num_weights
        if target.bits is not None:
            return self.verify(within_budget(self.measured, target.bits * weights / 8, progress=self.runner.progress))
        if target.num_bytes is not None:
            left = target.num_bytes - self.measured.rest_bytes
            if left <= 0:
                raise GateFailure(
                    f"what is never compressed alone takes {self.measured.rest_bytes} bytes; ask for more"
                )
            return self.verify(within_budget(self.measured, left, progress=self.runner.progress))
        judge = None if target.recovery is None else Judge(original=self.original, wanted=target.recovery)
        kl = target.kl if judge is None else judge.first_kl(self._rough())
        assert kl is not None
        result: SearchResult | None = None
        for _ in range(_TRIES):
            result = self.verify(within_kl(self.measured, kl, progress=self.runner.progress), judge)
            if result.reached:
                break
            kl = kl * 0.97 * kl / result.measured_kl if judge is None else judge.next_kl(result)
        assert result is not None
        return result

    def _rough(self) -> tuple[LLM, float]:
        """The model in its coarsest form that is still a model: what a loss of accuracy is first learned from."""
        choices = [(n,) * len(self.measured.groups) for n in range(len(self.candidates))]
        known = sorted((self.measured.kl(choice), choice[0]) for choice in choices)
        kl, number = next(((kl, n) for kl, n in reversed(known) if kl < 0.2), known[0])
        recipe = f"{self.candidates[number].dtype}-{self.candidates[number].group_size}"
        return self.runner.load(self.runner.folder / recipe), kl

    def verify(self, choice: Choice, judge: Judge | None = None) -> SearchResult:
        """Write the recipe of a choice, compress by it and measure; the file is written before and after."""
        measured, runner = self.measured, self.runner
        summed, fresh = total(measured.options, choice), Probe(self.original, self.held_out)
        expected = measured.kl_on(fresh, choice)
        bits = 8 * summed.cost / measured.num_weights
        hopes = [
            f"Written by `quantkit search` for {self.target.text} from {runner.base.name}: {bits:.3f} bits per weight.",
            f"Expected KL to the original {expected:.5f} nats per token, on {self.data}.",
            f"On the tokens of the choice {measured.kl(choice):.5f}; one at a time {summed.sensitivity:.5f}.",
        ]
        recipe = self._write(choice, hopes)
        runner.progress(f"expecting a KL of {expected:.6f} at {bits:.3f} bits; compressing")
        said = json.dumps([recipe.source, recipe.gates])  # a choice is only numbers of candidates, which may change
        folder = runner.folder / f"result-{hashlib.sha256(said.encode()).hexdigest()[:12]}"
        made = runner.compress(recipe, folder)
        self.folder = folder
        llm = runner.load(folder)
        kl = fresh.compare(llm).mean
        self._write(choice, [*hopes, f"Measured after compressing: {kl:.5f}."])
        return self._result(choice, made, expected, kl, None if judge is None else judge.recovery(llm))

    def _write(self, choice: Choice, remarks: list[str]) -> Recipe:
        """The recipe of a choice, also as a file."""
        base, groups = self.runner.base, self.measured.groups
        entries = overrides(self.candidates, groups, choice)
        common = default_candidate(self.candidates, groups, choice)
        changes = mixed_changes(common, flat(entries))
        description = f"{base.name} with the numbers of each fused group chosen by a search for {self.target.text}."
        gates = list(base.gates) if self.target.recovery is None and self.target.kl is None else [self.target.text]
        data = {**base.source, "name": self.name, "description": description, "gates": gates}
        recipe = build(patched(data, changes), self.output.name)
        sensitivity = {(p.layer, p.name): p.options[n].sensitivity for p, n in zip(groups, choice, strict=True)}
        write_recipe(self.draft, recipe, entries, remarks, sensitivity)
        return recipe

    def _result(
        self,
        choice: Choice,
        made: CompressionResult,
        expected: float,
        kl: float,
        recovery: float | None,
    ) -> SearchResult:
        measured, target = self.measured, self.target
        summed = total(measured.options, choice)
        bits = 8 * summed.cost / measured.num_weights
        reached = target.kl is None or kl <= target.kl
        if target.recovery is not None:
            reached = recovery is not None and recovery >= target.recovery
        return SearchResult(
            model=made.model,
            recipe=str(self.output),
            base=self.runner.base.name,
            target=target.text,
            reached=reached,
            bits_per_weight=bits,
            output_bytes=made.output_bytes,
            candidates=self._candidates(),
            groups=self._groups(choice),
            data=self.data,
            num_tokens=sum(map(len, self.probed)),
            sum_kl=summed.sensitivity,
            search_kl=measured.kl(choice),
            expected_kl=expected,
            measured_kl=kl,
            recovery=recovery,
            notes=self.notes,
        )

    def _candidates(self) -> tuple[CandidateRecord, ...]:
        groups = self.measured.groups
        records = []
        for number, name in enumerate([*(candidate.name for candidate in self.candidates), SKIP]):
            sums = total(self.measured.options, (number,) * len(groups))
            bits = 8 * sums.cost / self.measured.num_weights
            records.append(CandidateRecord(name=name, bits_per_weight=bits, sum_kl=sums.sensitivity))
        return tuple(records)

    def _groups(self, choice: Choice) -> tuple[GroupChoice, ...]:
        names = [*(candidate.name for candidate in self.candidates), SKIP]
        return tuple(
            GroupChoice(
                layer=group.layer,
                group=group.name,
                modules=group.modules,
                num_weights=group.num_weights,
                choice=names[number],
                bits_per_weight=8 * group.options[number].cost / group.num_weights,
                kl=group.options[number].sensitivity,
            )
            for group, number in zip(self.measured.groups, choice, strict=True)
        )


def _candidates(model: str | None, options: SearchOptions) -> Usable:
    """What may be chosen, and why not the rest."""
    recipe, group = options.recipe, base_groups(options.recipe)
    if options.candidates:
        return usable(model, recipe, read_candidates(options.candidates, group), options.device)
    name = recipe.source["weights"]["dtype"]
    if find_dtype(name).kind == "float":
        raise RecipeError(
            f"recipe {recipe.name!r} stores {name} weights, and a search chooses among integers unless told; "
            f"give --candidates, such as {name},int8, or start from a recipe of integers such as gptq-int4"
        )
    return usable(model, recipe, default_candidates(group), options.device)


def _short(model: str | None) -> str:
    return "demo" if model is None else Path(model).name or Path(model).resolve().name


def _slug(target: SearchTarget) -> str:
    """`bits-4.5` of `bits<=4.5`."""
    return re.sub(r"[<>]=", "-", target.text)


def _windows(original: LLM, options: SearchOptions) -> tuple[str, Windows, tuple[str, ...]]:
    """Name of the text, its windows, and a note where it is one that the compression may have seen."""
    notes: tuple[str, ...] = ()
    if options.text is not None:
        name, content = options.text, read_text(options.text, ())
    elif speaks_demo(original):
        name, content = "demo", read_text("demo", ())
    else:
        name, content = "general.txt (calibration text)", GENERAL_TEXT.read_text(encoding="utf-8")
        notes = ("Sensitivities are measured on quantkit's own calibration text; give one of yours with --text.",)
    if options.max_tokens < 1:
        raise InputError(f"max_tokens {options.max_tokens} is no number of tokens; give at least one")
    windows = fixed_windows(original, content, max_tokens=2 * options.max_tokens)
    if not windows:
        raise DataError(f"text {name!r} has no window; give a longer one")
    return name, windows, notes


def _identity(recipe: Recipe, folder: Path, original: LLM, windows: Windows) -> dict[str, Any]:
    """Everything that decides the numbers that are kept."""
    source = {key: value for key, value in recipe.source.items() if key not in ("name", "weights", "overrides")}
    data = None if recipe.calibration is None else Path(recipe.calibration.data)
    return {
        "recipe": source,
        "calibration": hashlib.sha256(data.read_bytes()).hexdigest() if data is not None and data.is_file() else None,
        "source": CheckpointReader(folder).digests(),
        "windows": hashlib.sha256(repr(windows).encode()).hexdigest(),
        "versions": describe_versions(),
        "arithmetic": str(original.model.dtype).removeprefix("torch."),
        "device": original.model.device.type,
    }
