"""Measure how each candidate for each fused group changes the model, with the base recipe's own steps.

The search compresses the whole model with every candidate, in one pass over the calibration data if the steps allow it.
It then replaces one group at a time in the original model; the KL to the original is the sensitivity of that group.
The expected KL of a choice is measured the same way, with all chosen groups replaced. The final compressed model
differs from that modified original: its linears were calibrated on other inputs and, after AWQ or SmoothQuant, other
scales were moved between linears.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.bit_search.candidates import Candidate, trial
from quantkit.bit_search.gguf_parts import CandidateForm, Ends, embedding_type, makes_gguf, rest_bytes
from quantkit.bit_search.outputs import SearchState
from quantkit.bit_search.solve import Choice, Option, total
from quantkit.compress.pipeline import quantize
from quantkit.compress.pipeline.run import quantize_together
from quantkit.compress.recipe import Recipe
from quantkit.errors import ModelError, ResumeError
from quantkit.evaluate.group_swaps import FusedGroup, find_fused_groups
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.sensitivity import Probe
from quantkit.machine.memory import free_models
from quantkit.results import CompressionResult
from quantkit.runtime.llm import LLM
from quantkit.safety.untrusted import read_object


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRunner:
    """Settings for compressing and loading trials.

    Args:
        model: directory or hub id; None = the demo model.
        source: digests of the model's files.
        base: recipe that the search starts from.
        folder: folder of the trials.
        device: where to compute.
        engine: keyword arguments of `LLM`, the same as for the original.
        progress: called with one line per event.
    """

    model: str | None
    source: dict[str, str]
    base: Recipe
    folder: Path
    device: str
    engine: dict[str, object]
    progress: Callable[[str], None]

    def compress_trials(self, recipes: Sequence[Recipe]) -> None:
        """Compress the model with the recipes that can share a calibration pass and have no output yet."""
        missing = {self.folder / recipe.name: recipe for recipe in recipes if recipe.has_original_inputs}
        missing = {output: recipe for output, recipe in missing.items() if not output.exists()}
        if missing:
            self.progress(f"compressing with {', '.join(recipe.name for recipe in missing.values())}")
            quantize_together(self.model, missing, device=self.device)

    def compress(self, recipe: Recipe, output: Path) -> CompressionResult:
        """Compress to a directory, or reuse the output of an earlier search for the same model and recipe.

        A GGUF file is always made again.

        Raises:
            ResumeError: the directory holds the output of a different model or recipe, or something else.
        """
        if output.is_file():  # a GGUF file does not say from which model it was made
            output.unlink()
        if not output.exists():
            self.progress(f"compressing with {recipe.name}")
            return quantize(self.model, recipe, output, device=self.device)
        try:
            manifest, made = (
                read_object(output / f"{name}.json", ResumeError) for name in ("quantkit", "quantkit-run")
            )
            sizes = {name: file["bytes"] for name, file in manifest["files"].items()}
            present = {name: (output / name).stat().st_size for name in sizes}
            # Convert tuples to lists, as in the manifest.
            asked = json.loads(json.dumps(recipe.source))
            same = (manifest["recipe"], manifest["identity"]["source"], sizes) == (asked, self.source, present)
        except (OSError, ResumeError, KeyError, TypeError, AttributeError):
            same = False
        if not same:
            raise ResumeError(
                f"{output} is not the output of recipe {recipe.name!r} for this model; give another --work, "
                "or start over with --no-resume"
            )
        return CompressionResult.from_dict(made)

    def load(self, path: Path) -> LLM:
        """Load a compressed model with the settings of the original."""
        return load_llm(str(path), **self.engine)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredGroup:
    """One fused group of the model and its options.

    Args:
        layer, name, modules: see `evaluate.group_swaps.FusedGroup`.
        num_weights: number of weights in the group.
        options: bytes and KL of each candidate, in order. Except in a search for a GGUF file, one more option at the
            end leaves the group unquantized.
        forms: the group as compressed with each candidate.
    """

    layer: int
    name: str
    modules: tuple[str, ...]
    num_weights: int
    options: tuple[Option, ...]
    forms: tuple[FusedGroup, ...]


@dataclass(kw_only=True, slots=True)
class MeasuredGroups:
    """All groups with their options; measures the KL of a choice.

    Args:
        groups: the groups, in the order in which the model runs them.
        rest_bytes: bytes of the tensors that no choice changes.
    """

    groups: list[MeasuredGroup]
    rest_bytes: int
    _probe: Probe
    _state: SearchState
    _names: tuple[str, ...]

    @property
    def options(self) -> list[tuple[Option, ...]]:
        """Options of every group."""
        return [group.options for group in self.groups]

    @property
    def num_weights(self) -> int:
        """Number of weights of all groups."""
        return sum(group.num_weights for group in self.groups)

    def total(self, choice: Choice) -> Option:
        """Return the bytes of a choice, and the sum of the sensitivities of its groups."""
        return total(self.options, choice)

    def bits_per_weight(self, choice: Choice) -> float:
        """Return the stored bits per weight of a choice, scales included."""
        return 8 * self.total(choice).cost / self.num_weights

    def kl(self, choice: Choice) -> float:
        """Return the KL of the original model with all groups replaced by the chosen options. It is measured once."""
        key = "choice " + ",".join(map(str, choice)) + " of " + " ".join(self._names)
        return self._state.get(key, lambda: self.kl_on(self._probe, choice))

    def kl_on(self, probe: Probe, choice: Choice) -> float:
        """Measure the KL of a choice on the text of a probe."""
        chosen = [group.forms[n] for group, n in zip(self.groups, choice, strict=True) if n < len(group.forms)]
        return probe.measure(chosen).mean


def measure_groups(
    runner: TrialRunner, candidates: Sequence[Candidate], original: LLM, probe: Probe, state: SearchState, moved: bool
) -> MeasuredGroups:
    """Compress the model with every candidate, and measure every group with every candidate.

    Args:
        runner: settings for compressing and loading.
        candidates: the candidates.
        original: the loaded original model; this function may split its fused linears.
        probe: the original's outputs on the text.
        state: numbers that were measured before.
        moved: see `find_fused_groups`.
    Raises:
        ModelError: quantkit runs the model through transformers, or the candidates do not have the same groups.
    """
    forms: list[list[FusedGroup]] = []
    options: list[list[Option]] = []
    stored: dict[str, CandidateForm] = {}
    rest = 0
    ends = Ends(original) if makes_gguf(runner.base) else None
    recipes = [trial(runner.base, candidate) for candidate in candidates]
    runner.compress_trials(recipes)
    for candidate, recipe in zip(candidates, recipes, strict=True):
        folder = runner.folder / recipe.name
        made = runner.compress(recipe, folder)
        groups = find_fused_groups(runner.load(folder), original, moved=moved, apart=ends is not None)
        stored = _stored_linears(made)
        rest = made.output_bytes - sum(linear.num_bytes for linear in stored.values())
        if ends is not None:
            groups.insert(0, ends.group(candidate))
            stored |= ends.stored(candidate)
        measured = _sensitivities(runner, candidate, groups, stored, probe, state)
        costs = [sum(stored[module].num_bytes for module in group.modules) for group in groups]
        forms.append(groups)
        options.append([Option(cost=cost, sensitivity=kl) for cost, kl in zip(costs, measured, strict=True)])
        if ends is not None and candidate is candidates[-1]:
            rest = rest_bytes(folder, runner.base, stored, embedding_type(candidate))
        free_models()  # free the candidate's model before the next one is loaded
    if not forms[0] or len({tuple(group.modules for group in groups) for groups in forms}) != 1:
        raise ModelError(
            f"{original.path}: not all candidates can quantize the same fused groups, or none can quantize any; "
            "check ignore in the recipe"
        )
    measured_groups = [
        MeasuredGroup(
            layer=group[0].layer,
            name=group[0].name,
            modules=group[0].modules,
            num_weights=sum(stored[module].num_weights for module in group[0].modules),
            # An unquantized group equals the original.
            options=of_group if ends else (*of_group, Option(cost=group[0].stored_bytes, sensitivity=0.0)),
            forms=group,
        )
        for group, of_group in zip(zip(*forms, strict=True), zip(*options, strict=True), strict=True)
    ]
    names = tuple(candidate.name for candidate in candidates)
    return MeasuredGroups(groups=measured_groups, rest_bytes=rest, _probe=probe, _state=state, _names=names)


def _sensitivities(
    runner: TrialRunner,
    candidate: Candidate,
    groups: list[FusedGroup],
    stored: Mapping[str, CandidateForm],
    probe: Probe,
    state: SearchState,
) -> list[float]:
    def measure(number: int, group: FusedGroup) -> float:
        runner.progress(f"{candidate.name}: group {number} of {len(groups)}, layer {group.layer} {group.name}")
        return probe.measure([group]).mean

    def key(group: FusedGroup) -> str:
        # Several candidates may give a linear the same fallback type, which is measured only once.
        return "/".join(dict.fromkeys(stored[module].scheme for module in group.modules))

    name = key if makes_gguf(runner.base) else lambda _: candidate.name
    return [
        state.get(f"{name(group)} {group.layer} {group.name}", partial(measure, number, group))
        for number, group in enumerate(groups, start=1)
    ]


def _stored_linears(made: CompressionResult) -> dict[str, CandidateForm]:
    """Return how the linears of a compressed model are stored, keyed by full name."""
    return {
        f"{layer.name}.{linear.name}": CandidateForm(
            num_weights=math.prod(linear.shape),
            # bits_per_weight is bytes * 8 / weights: rounding recovers the whole number of bytes.
            num_bytes=round(linear.bits_per_weight * math.prod(linear.shape) / 8),
            scheme=linear.scheme,
        )
        for layer in made.layers
        for linear in layer.linears
    }
