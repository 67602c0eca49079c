"""Run a search: measure fused groups, choose, write the recipe, compress the model with it, and measure the result.

Alternate windows of the text are used to measure sensitivities and choose. The remaining windows are reserved for the
predicted and measured final results, since a choice looks better on the tokens that it was made with.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.bit_search.cache_types import (
    CacheSearch,
    cache_remark,
    cache_section,
    cached_as,
    check_cache_search,
    recipe_with_cache,
)
from quantkit.bit_search.candidates import (
    SKIP,
    Candidate,
    base_groups,
    changed,
    default_candidates,
    gguf_candidates,
    read_candidates,
    trial,
    usable,
)
from quantkit.bit_search.choose import Judge, Progress, within_budget, within_kl
from quantkit.bit_search.gguf_parts import EMBEDDING, embedding_type, makes_gguf
from quantkit.bit_search.options import SearchOptions, SearchTarget
from quantkit.bit_search.outputs import Outputs, open_outputs
from quantkit.bit_search.recipe_file import default_candidate, overrides, remarks_on, write_recipe
from quantkit.bit_search.sensitivities import TrialRunner, measure_groups
from quantkit.bit_search.setup import describe_recipe, set_up
from quantkit.bit_search.solve import Choice
from quantkit.checkpoints.folder import resolve
from quantkit.compress.algorithms.base import moves_scales
from quantkit.compress.convert.gguf_writer import check_model
from quantkit.compress.convert.source import open_source
from quantkit.compress.pipeline.finish import measured_entries
from quantkit.compress.recipe import Recipe
from quantkit.errors import GateFailure, RecipeError
from quantkit.evaluate.sensitivity import Probe
from quantkit.formats import REGISTRY as FORMATS
from quantkit.formats.ggml.gguf_file import copy_with_entries
from quantkit.numerics.dtype import find_dtype
from quantkit.output.writer import write_json
from quantkit.quantities import byte_size
from quantkit.results import CandidateRecord, GroupChoice, SearchResult
from quantkit.runtime.llm import LLM
from quantkit.sweep.trials import Trial, check_place, planned_bytes, quantize_command, run_trials

_TRIES = 3  # recipes to compress and measure before the search gives up on a target


def search_recipe(
    model: str | None, target: SearchTarget, options: SearchOptions, *, progress: Progress = lambda _: None
) -> SearchResult:
    """Find the best number type for each fused group of a model, and write a recipe.

    Args:
        model: directory or hub id; None = the demo model.
        target: target of the search.
        options: options of the search.
        progress: called with one line per event.
    Returns:
        The choice with its expected and measured KL; `reached` tells whether the target is met.
    Raises:
        InputError: the model, recipe, text or output cannot be used.
        GateFailure: no choice can meet the target.
    """
    started = time.perf_counter()
    check_place(options.on)
    with open_outputs(model, target, options) as outputs:
        search = _Search(model, target, options, outputs, progress)
        result = search.reach_target()
        outputs.hand_over(search.trial)
    return replace(result, seconds=time.perf_counter() - started)


class _Search:
    """One search. The constructor measures all groups; `reach_target` then chooses and verifies.

    Args:
        model, target, options, progress: see `search_recipe`.
        outputs: locked output paths.
    Attributes:
        setup: the original model and the text.
        cache: the chosen KV cache; None = the cache of the recipe.
        notes: remarks for the user.
        trial: folder or GGUF file of the model that was compressed with the last choice.
    """

    def __init__(
        self, model: str | None, target: SearchTarget, options: SearchOptions, outputs: Outputs, progress: Progress
    ) -> None:
        self.target, self.outputs, self.trial, self._rounds = target, outputs, Path(), options.rounds
        if makes_gguf(options.recipe):  # refuse a model that the file cannot store, before hours of work
            if options.recipe.calibration is None:
                raise RecipeError(
                    f"recipe {options.recipe.name!r} has no calibration, which a search for a GGUF file needs; leave "
                    "out --recipe to start from gguf-q4_k"
                )
            check_model(open_source(resolve(model)))
        if target.kv_bits is not None:
            check_cache_search(model, options)
        moved = moves_scales(options.recipe.steps)  # raises for steps whose groups cannot be tried one at a time
        self.candidates, notes = _candidates(model, options, target)
        self.setup = setup = set_up(model, options, progress)
        self.notes = (*notes, *setup.notes)
        self.cache = None
        if target.kv_bits is not None:
            self.cache = CacheSearch(setup, outputs.work.path, progress).find(target.kv_bits)
            if target.kl is not None and self.cache.measured_kl >= target.kl:  # before hours of work
                raise GateFailure(
                    f"{target.text} cannot be reached: the KV cache alone has a KL of {self.cache.measured_kl:.5f}; "
                    "raise --kl or --kv-bits"
                )
        state = setup.open_state(outputs.work.path / "state.json", describe_recipe(options.recipe), progress)
        self.runner = TrialRunner(
            model=model,
            source=setup.source,
            base=options.recipe,
            folder=outputs.work.path,
            device=options.device,
            engine=setup.engine,
            progress=progress,
        )
        if (options.on, options.jobs) != ("local", 1) and not makes_gguf(options.recipe):
            _compress_ahead(self.runner, self.candidates, state.threads, options)
        probe = Probe(setup.original, setup.windows)
        self.measured = measure_groups(self.runner, self.candidates, setup.original, probe, state, moved)

    def reach_target(self) -> SearchResult:
        """Choose, write, compress and measure; repeat with a smaller KL if the model missed the target."""
        target, measured = self.target, self.measured
        if target.bits is not None:
            return self.verify(self._choose(target.bits * measured.num_weights / 8))
        if target.num_bytes is not None:
            return self.verify(self._choose(self._budget(target.num_bytes)))
        judge = None if target.recovery is None else Judge(original=self.setup.original, goal=target.recovery)
        of_cache = self.cache.measured_kl if self.cache else 0.0
        kl = target.kl if target.kl is not None else judge.first_kl(*self._coarsest()) if judge else 0.0
        goal = kl - of_cache  # limit for the KL of the weights
        for attempt in range(_TRIES):
            result = self.verify(self._within_kl(kl, of_cache), judge)
            if result.reached or attempt == _TRIES - 1:
                break
            # The KL of the cache stays the same: only the rest of the measured KL shrinks with the limit.
            shrunk = (kl - of_cache) * 0.97 * goal / max(result.measured_kl - of_cache, goal)
            kl = of_cache + shrunk if judge is None else judge.next_kl(result)
        return result

    def _within_kl(self, kl: float, of_cache: float) -> Choice:
        """Return the smallest choice for the weights with which the model and its cache have at most this KL.

        Raises:
            GateFailure: there is no such choice.
        """
        if self.cache and kl <= of_cache:
            raise GateFailure(
                f"{self.target.text} cannot be reached: it takes a KL of about {kl:.5f}, but the KV cache alone has "
                f"{of_cache:.5f}; raise --kv-bits, or relax the target for the weights"
            )
        return within_kl(self.measured, kl - of_cache, progress=self.runner.progress)

    def _budget(self, num_bytes: int) -> int:
        """Return how many of `num_bytes`, the size of a file, are left for the tensors whose types the search chooses.

        Raises:
            GateFailure: even the smallest choice exceeds `num_bytes`.
        """
        costs, rest = [[round(o.cost) for o in group] for group in self.measured.options], self.measured.rest_bytes
        least, most = (rest + sum(map(extreme, costs)) for extreme in (min, max))
        if num_bytes < least:
            raise GateFailure(
                f"bytes<={num_bytes} cannot be reached: the smallest choice takes {least} bytes, and {rest} of "
                "these bytes are never compressed; raise --size, or give smaller --candidates"
            )
        if num_bytes > most:
            text = f"--size allows {byte_size(num_bytes)}, but the largest choice takes {byte_size(most)}."
            self.notes = (*self.notes, text)
        return num_bytes - rest

    def _choose(self, budget: float) -> Choice:
        """Return the choice with the smallest KL within a budget of bytes."""
        return within_budget(self.measured, budget, rounds=self._rounds, progress=self.runner.progress)

    def _coarsest(self) -> tuple[LLM, float]:
        """Return the coarsest model that still works, and its KL, for a first estimate of the accuracy loss."""
        choices = [(n,) * len(self.measured.groups) for n in range(len(self.candidates))]
        known = sorted((self.measured.kl(choice), choice[0]) for choice in choices)
        # Above a KL of 0.2 most answers are wrong, and the loss says nothing about smaller losses.
        kl, number = next(((kl, n) for kl, n in reversed(known) if kl < 0.2), known[0])
        return self.runner.load(self.runner.folder / self.candidates[number].file_name), kl

    def verify(self, choice: Choice, judge: Judge | None = None) -> SearchResult:
        """Write the recipe of a choice, compress the model with it, measure the KL, and add the KL to the recipe."""
        measured, runner, fresh = self.measured, self.runner, Probe(self.setup.original, self.setup.held_out)
        bits, added = measured.bits_per_weight(choice), measured.total(choice).sensitivity
        with cached_as(self.setup.original, self.cache, self.setup.held_out):
            expected = measured.kl_on(fresh, choice)
        remarks = [
            f"Written by `quantkit search` for {self.target.text} from {runner.base.name}: {bits:.3f} bits per weight.",
            f"Expected KL to the original {expected:.5f} nats per token, on {self.setup.data}.",
            f"KL on the tokens used to choose {measured.kl(choice):.5f}; sum of single groups {added:.5f}.",
            *([] if self.cache is None else [cache_remark(self.cache)]),
        ]
        recipe = self._write(choice, remarks)
        runner.progress(f"expecting a KL of {expected:.6f} at {bits:.3f} bits")
        # Named after the recipe, not the choice: the indices of a choice refer to candidates, which may change.
        text = json.dumps([recipe.source, recipe.gates])
        name = f"result-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.trial = runner.folder / f"{name}{FORMATS.load(recipe.format).suffix}"
        made = runner.compress(recipe, self.trial)
        llm = runner.load(self.trial)
        kl = fresh.compare(llm).mean
        final = self._write(
            choice,
            [*remarks, f"Measured after compressing: {kl:.5f}."],
            self.setup.measurement(kl, self.setup.held_out),
        )
        num_bytes = self._noted_in_file(final) if makes_gguf(final) else made.output_bytes
        recovery = None if judge is None else judge.recovery(llm)
        return SearchResult(
            model=made.model,
            recipe=str(self.outputs.recipe.output),
            base=runner.base.name,
            target=self.target.text,
            reached=self._is_reached(kl, recovery, num_bytes),
            bits_per_weight=bits,
            output_bytes=num_bytes,
            candidates=self._candidate_records(),
            groups=self._group_choices(choice),
            data=self.setup.data,
            num_tokens=self.setup.num_tokens,
            sum_kl=added,
            search_kl=measured.kl(choice),
            expected_kl=expected,
            measured_kl=kl,
            recovery=recovery,
            kv_cache=self.cache,
            notes=self.notes,
        )

    def _noted_in_file(self, recipe: Recipe) -> int:
        """Write the figures `measured` of a recipe into the GGUF file, as `quantize` does; return the file's size."""
        copy = self.trial.with_name(f"measured-{self.trial.name}")
        copy_with_entries(self.trial, copy, measured_entries(recipe))
        copy.replace(self.trial)
        return self.trial.stat().st_size

    def _is_reached(self, kl: float, recovery: float | None, num_bytes: int) -> bool:
        """Whether a model meets the target. For a target in bits this is always true, because the choice already meets
        it.
        """
        if self.target.num_bytes is not None:
            return num_bytes <= self.target.num_bytes
        if self.target.recovery is not None:
            return recovery is not None and recovery >= self.target.recovery
        return self.target.kl is None or kl <= self.target.kl

    def _write(self, choice: Choice, remarks: list[str], measured: Mapping[str, Any] | None = None) -> Recipe:
        """Write the recipe of a choice to a file, and return it.

        Args:
            choice: the choice.
            remarks: comments at the top of the file.
            measured: section `measured` of the recipe; None = nothing was measured yet.
        """
        base, target, fields = self.runner.base, self.target, dict[str, Any](measured=measured)
        gates = list(base.gates) if target.recovery is None and target.kl is None else [target.of_weights]
        linears = [pair for pair in zip(self.measured.groups, choice, strict=True) if pair[0].name != EMBEDDING]
        groups, numbers = [group for group, _ in linears], tuple(number for _, number in linears)
        for group, number in zip(self.measured.groups, choice, strict=True):
            if group.name == EMBEDDING:
                fields["embedding"] = embedding_type(self.candidates[number])
        if self.cache is not None:
            base = recipe_with_cache(base, cache_section(self.cache))
        recipe = changed(
            base,
            default_candidate(self.candidates, groups, numbers),
            name=self.outputs.recipe_name,
            description=f"{base.name} with the number type of each fused group chosen by a search for {target.text}.",
            gates=gates,
            overrides=overrides(self.candidates, groups, numbers),
            **fields,
        )
        write_recipe(self.outputs.draft, recipe, remarks, remarks_on(groups, numbers))
        return recipe

    @property
    def _names(self) -> list[str]:
        """Names of the options of a group, in the order that a choice indexes."""
        skip = [] if makes_gguf(self.runner.base) else [SKIP]
        return [*(candidate.name for candidate in self.candidates), *skip]

    def _candidate_records(self) -> tuple[CandidateRecord, ...]:
        measured = self.measured
        everywhere = {name: (number,) * len(measured.groups) for number, name in enumerate(self._names)}
        return tuple(
            CandidateRecord(
                name=name, bits_per_weight=measured.bits_per_weight(choice), sum_kl=measured.total(choice).sensitivity
            )
            for name, choice in everywhere.items()
        )

    def _group_choices(self, choice: Choice) -> tuple[GroupChoice, ...]:
        return tuple(
            GroupChoice(
                layer=group.layer,
                group=group.name,
                modules=group.modules,
                num_weights=group.num_weights,
                choice=self._names[number],
                bits_per_weight=8 * group.options[number].cost / group.num_weights,
                kl=group.options[number].sensitivity,
            )
            for group, number in zip(self.measured.groups, choice, strict=True)
        )


def _compress_ahead(runner: TrialRunner, candidates: Sequence[Candidate], threads: int, options: SearchOptions) -> None:
    """Compress the model with each candidate that has no trial yet, several at a time, and keep the results."""
    trials = []
    for recipe in (trial(runner.base, candidate) for candidate in candidates):
        made = (runner.folder / recipe.name).resolve()
        if made.exists():
            continue
        file = made.with_name(f"{recipe.name}.yaml")
        write_json(file, recipe.source)  # JSON is YAML
        trials.append(
            Trial(
                name=recipe.name,
                commands=(quantize_command(runner.model, file, made, runner.device),),
                log=made.with_name(f"{recipe.name}.log"),
                threads=threads,
                device=runner.device,
                num_bytes=planned_bytes(runner.model, file),
            )
        )
    with closing(run_trials(trials, options.on, options.jobs)) as outcomes:
        for outcome in outcomes:
            if outcome.exit_code:
                raise outcome.error
            runner.progress(f"compressed with {outcome.name}")


def _candidates(
    model: str | None, options: SearchOptions, target: SearchTarget
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """Return the usable candidates, and one line with the reason for each candidate that was left out."""
    recipe, group = options.recipe, base_groups(options.recipe)
    name = recipe.source["weights"]["dtype"]
    if options.candidates:
        candidates = read_candidates(options.candidates, group)
    elif makes_gguf(recipe):
        candidates = gguf_candidates()
    elif find_dtype(name).kind == "float":
        raise RecipeError(
            f"recipe {recipe.name!r} stores {name} weights, but the default candidates are integer types; "
            f"give --candidates, such as {name},int8, or start from an integer recipe such as gptq-int4"
        )
    else:
        candidates = default_candidates(group)
    return usable(model, recipe, candidates, options.device, target.bits, target.num_bytes)
