"""Write the recipe of a search as an ordinary YAML file, with the expected and measured KL in comments."""

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from quantkit.bit_search.candidates import Candidate, override
from quantkit.bit_search.sensitivities import MeasuredGroup
from quantkit.bit_search.solve import Choice
from quantkit.compress.recipe import Recipe
from quantkit.compress.recipe.load import build
from quantkit.errors import RecipeError
from quantkit.models.linear_sets import common_owner
from quantkit.output.writer import write_text
from quantkit.safety.untrusted import parse_yaml

_FEW = 4  # maximum number of modules of a group to list by name; larger groups get a pattern if one fits


def default_candidate(candidates: Sequence[Candidate], groups: Sequence[MeasuredGroup], choice: Choice) -> Candidate:
    """Return the candidate that is chosen for the most weights, for use as the recipe's default.

    Unquantized groups do not count. If all groups are unquantized, return the first candidate.
    """
    counts = Counter[int]()
    for group, number in zip(groups, choice, strict=True):
        if number < len(candidates):
            counts[number] += group.num_weights
    return candidates[counts.most_common(1)[0][0] if counts else 0]


def overrides(candidates: Sequence[Candidate], groups: Sequence[MeasuredGroup], choice: Choice) -> list[dict[str, Any]]:
    """Return the overrides of the recipe: one entry for each chosen candidate other than the default.

    All groups that stay unquantized share one entry.

    Args:
        candidates: the candidates that `choice` indexes; an index past the last one means "skip".
        groups: the fused groups.
        choice: index of the candidate chosen for each group.
    """
    common = default_candidate(candidates, groups, choice)
    every = [name for group in groups for name in group.modules]
    entries = []
    for number, candidate in enumerate([*candidates, None]):
        chosen = [group for group, n in zip(groups, choice, strict=True) if n == number]
        if chosen and candidate != common:
            entries.append(override([name for group in chosen for name in _patterns(group.modules, every)], candidate))
    return entries


def remarks_on(groups: Sequence[MeasuredGroup], choice: Choice) -> dict[str, str]:
    """Return a comment about each group, keyed by the first pattern of the group in an override."""
    every = [name for group in groups for name in group.modules]
    return {
        _patterns(group.modules, every)[0]: f"layer {group.layer} {group.name}: "
        f"KL {group.options[number].sensitivity:.2g} alone"
        for group, number in zip(groups, choice, strict=True)
    }


def _patterns(modules: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return the modules' names, or for many modules one pattern that matches them and nothing else in `every`."""
    if len(modules) > _FEW:  # nobody reads a recipe that lists hundreds of experts
        pattern = f"{common_owner(modules)}.*"
        if set(fnmatch.filter(every, pattern)) == set(modules):
            return [pattern]
    return list(modules)


def write_recipe(path: Path, recipe: Recipe, remarks: Sequence[str], of_patterns: Mapping[str, str]) -> None:
    """Write a recipe as readable YAML with comments.

    Args:
        path: path of the file.
        recipe: the recipe; reading the file gives an equal recipe.
        remarks: comment lines at the top.
        of_patterns: comment lines, keyed by the override pattern above which they are written.
    """
    source = recipe.source
    lines = [f"# {text}" for text in remarks]
    lines += [f"name: {_flow(recipe.name)}", f"description: {_flow(recipe.description)}"]
    lines += [f"weights: {_flow(source['weights'])}"] if "weights" in source else []
    lines += [f"{key}: {_flow(source[key])}" for key in ("activations", "ignore") if source.get(key)]
    lines += ["overrides:" if source["overrides"] else "overrides: []"]
    for entry in source["overrides"]:
        weights = {
            key: value
            for key, value in entry.get("weights", {}).items()
            if key in ("dtype", "group_size") or value != source["weights"][key]
        }
        others = {key: value for key, value in entry.items() if key not in ("weights", "modules") and value is not None}
        said = [*([f"weights: {_flow(weights)}"] if weights else []), *(f"{k}: {_flow(v)}" for k, v in others.items())]
        lines += [f"  - {said[0]}", *(f"    {text}" for text in said[1:]), "    modules:"]
        for pattern in entry["modules"]:
            lines += [f"      # {of_patterns[pattern]}"] if pattern in of_patterns else []
            lines += [f"      - {_flow(pattern)}"]
    lines += _cache_lines(source["kv_cache"]) if "kv_cache" in source else []
    lines += ["steps:" if source["steps"] else "steps: []", *(f"  - {_flow(step)}" for step in source["steps"])]
    lines += [f"{key}: {_flow(value)}" for key, value in source.items() if key not in _WRITTEN]
    lines += [f"gates: {_flow(list(recipe.gates))}"] if recipe.gates else []
    lines += [f"measured: {_flow(dict(recipe.measured))}"] if recipe.measured else []
    text = "\n".join([*lines, ""])
    again = build(parse_yaml(text, path.name, RecipeError), path.name)
    assert again.source == recipe.source, "the written file reads as a different recipe"
    write_text(path, text)


_WRITTEN = ("name", "description", "weights", "activations", "ignore", "overrides", "kv_cache", "steps")


def _cache_lines(section: Mapping[str, Any]) -> list[str]:
    """Return `kv_cache:` with one line per field, and one per entry of `layers`."""
    fields = {key: value for key, value in section.items() if key != "layers" and value is not None}
    lines = ["kv_cache:", *(f"  {key}: {_flow(value)}" for key, value in fields.items())]
    if "layers" in section:
        lines += ["  layers:", *(f"    - {_flow(entry)}" for entry in section["layers"])]
    return lines


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
