"""The recipe that a search writes: an ordinary file, with what was expected and measured in its comments."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from quantkit.allocation.candidates import Candidate
from quantkit.allocation.sensitivities import MeasuredGroup
from quantkit.allocation.solve import Choice
from quantkit.checkpoints.writer import write_text
from quantkit.compress.recipe import Recipe

_FEW = 4  # modules of a group that are listed by name; of more a pattern is looked for


def default_candidate(candidates: Sequence[Candidate], groups: Sequence[MeasuredGroup], choice: Choice) -> Candidate:
    """What most weights are given, which the recipe says once; ignoring is said of each group."""
    counts = Counter[int]()
    for group, number in zip(groups, choice, strict=True):
        if number < len(candidates):
            counts[number] += group.num_weights
    return candidates[counts.most_common(1)[0][0] if counts else 0]


def overrides(
    candidates: Sequence[Candidate], groups: Sequence[MeasuredGroup], choice: Choice
) -> list[tuple[list[tuple[MeasuredGroup, list[str]]], Candidate | None]]:
    """Groups that differ from the default, by what they are given.

    Args:
        candidates: in the order that `choice` counts in; one beyond the last is leaving alone.
        groups: the groups.
        choice: number of the candidate of each.
    Returns:
        for each candidate in use but the default: its groups, each with patterns, and the candidate or None.
    """
    common = default_candidate(candidates, groups, choice)
    every = [name for group in groups for name in group.modules]
    entries = []
    for number, candidate in enumerate([*candidates, None]):
        mine = [
            (group, _patterns(group.modules, every)) for group, n in zip(groups, choice, strict=True) if n == number
        ]
        if mine and candidate != common:
            entries.append((mine, candidate))
    return entries


def flat(
    entries: Sequence[tuple[Sequence[tuple[MeasuredGroup, list[str]]], Candidate | None]],
) -> list[tuple[list[str], Candidate | None]]:
    """Overrides without their groups, as `candidates.mixed` takes them."""
    return [([name for _, names in mine for name in names], candidate) for mine, candidate in entries]


def _patterns(modules: Sequence[str], every: Sequence[str]) -> list[str]:
    """The modules' names, or one pattern that matches these and no others where they are many."""
    if len(modules) > _FEW:
        pattern = f"{_shared([name.split('.') for name in modules])}*"
        if set(fnmatch.filter(every, pattern)) == set(modules):
            return [pattern]
    return list(modules)


def _shared(names: Sequence[Sequence[str]]) -> str:
    """The pieces that all names begin with: `model.layers.0.mlp.`."""
    count = 0
    while all(len(name) > count for name in names) and len({name[count] for name in names}) == 1:
        count += 1
    return ".".join([*names[0][:count], ""])


def write_recipe(
    path: Path,
    recipe: Recipe,
    entries: Sequence[tuple[Sequence[tuple[MeasuredGroup, list[str]]], Candidate | None]],
    remarks: Sequence[str],
    sensitivity: dict[tuple[int, str], float],
) -> None:
    """Write a recipe as YAML for people.

    Args:
        path: of the file.
        recipe: what it has to say when it is read again.
        entries: its overrides, see `overrides`.
        remarks: lines at the top.
        sensitivity: KL of each group alone in its chosen form, by layer and name.
    """
    source = recipe.source
    lines = [f"# {text}" for text in remarks]
    lines += [f"name: {_flow(recipe.name)}", f"description: {_flow(recipe.description)}"]
    lines += [f"weights: {_flow(source['weights'])}"]
    if "activations" in source:
        lines += [f"activations: {_flow(source['activations'])}"]
    if source["ignore"]:
        lines += [f"ignore: {_flow(source['ignore'])}"]
    lines += ["overrides:" if entries else "overrides: []"]
    for mine, candidate in entries:
        what = (
            "skip: true"
            if candidate is None
            else f"weights: {{dtype: {candidate.dtype}, group_size: {candidate.group_size}}}"
        )
        lines += [f"  - {what}", "    modules:"]
        for group, names in mine:
            lines += [f"      # layer {group.layer} {group.name}: KL {sensitivity[group.layer, group.name]:.2g} alone"]
            lines += [f"      - {_flow(name)}" for name in names]
    lines += ["steps:" if source["steps"] else "steps: []", *(f"  - {_flow(step)}" for step in source["steps"])]
    lines += [f"{key}: {_flow(value)}" for key, value in source.items() if key not in _SAID]
    lines += [f"gates: {_flow(list(recipe.gates))}"] if recipe.gates else []
    write_text(path, "\n".join([*lines, ""]))


_SAID = ("name", "description", "weights", "activations", "ignore", "overrides", "steps")


def _flow(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
