"""Tables of README and docs against what they list: recipes, fields, steps, families, formats; links and paths."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from pydantic import BaseModel

from quantkit.cli import REGISTRY as COMMANDS
from quantkit.compress.algorithms import REGISTRY as STEPS
from quantkit.compress.recipe import load, shipped
from quantkit.compress.recipe.schema import Document
from quantkit.formats import REGISTRY as FORMATS
from quantkit.models.families import known
from quantkit.runtime.cache.policies import REGISTRY as POLICIES
from tests.models.test_new_family import FILE

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str, title: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    lines = text.split(f"{title}\n", 1)[1].partition("\n|")[2].splitlines()
    table = ["|" + lines[0], *lines[1:]]
    end = next((number for number, line in enumerate(table) if not line.startswith("|")), len(table))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:end]]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_recipes_md_has_every_shipped_recipe_as_it_is():
    table = {codes(cells[0])[0]: cells[1:4] for cells in rows(page("docs/recipes.md"), "## The shipped recipes")}
    expected = {}
    for name in shipped():
        recipe = load(name)
        linears, cache = recipe.scheme.default, recipe.kv_cache
        steps = [step if isinstance(step, str) else next(iter(step)) for step in recipe.source["steps"]]
        expected[name] = [
            "unchanged" if linears is None else linears.describe(),
            "" if cache is None else cache.scheme.describe(),
            " ".join(f"`{step}`" for step in steps) or "none",
        ]
    assert table == expected


def test_descriptions_name_the_real_models_that_miss_the_gates():
    """As measured by evals/accuracy/every_recipe.py with the recipes' own calibration."""
    missed = [
        (file.stem, row["recipe"])
        for file in sorted((ROOT / "evals/results/recipes").glob("*.json"))
        for row in json.loads(file.read_text())["rows"]
        if row.get("missed") and not re.search(r"-[0-9]+x[0-9]+$", file.stem)
    ]
    assert missed
    for model, recipe in missed:
        name = "".join(model.split("-")[:2])  # smollm2135m
        assert name in re.sub(r"[-\s]", "", load(recipe).description).lower(), (model, recipe)


def test_the_readme_names_shipped_recipes_only():
    named = [name for cells in rows(page("README.md"), "## Which recipe") for name in codes(cells[0])]
    assert len(named) >= 6
    assert set(named) <= set(shipped())


def fields(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of a section's fields, those of its sections in their place."""
    names = []
    for name, field in section.model_fields.items():
        inner = [
            kind
            for kind in getattr(field.annotation, "__args__", ())
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        names += fields(inner[0], f"{name}.") if inner and name not in ("overrides", "layers") else [f"{prefix}{name}"]
    return names


def test_every_field_of_a_recipe_is_explained():
    assert [codes(cells[0])[0] for cells in rows(page("docs/recipes.md"), "## All fields")] == fields(Document)


def test_every_step_is_explained_with_its_options_and_defaults():
    table = {codes(cells[0])[0]: cells[2] for cells in rows(page("docs/recipes.md"), "## Steps")}
    assert sorted(table) == STEPS.names()
    for name, step in STEPS.all().items():
        for option in dataclasses.fields(step):
            default = option.default if isinstance(option.default, str) else str(option.default).lower()
            assert re.search(rf"`{option.name}` \(`?{re.escape(default)}", table[name]), (
                f"{name}: {option.name} ({default})"
            )


def test_every_family_that_is_compressed_is_listed():
    native, others, gguf = (codes(cells[1]) for cells in rows(page("docs/recipes.md"), "## Families"))
    families = {name: family for name, family in known().items() if family.hf_names}
    assert native == [name for name, family in families.items() if family.native]
    assert others == [name for name, family in families.items() if not family.native]
    assert gguf == [name for name, family in families.items() if family.gguf and family.gguf.is_written]


def test_every_policy_of_the_cache_is_listed():
    table = rows(page("docs/runtime.md"), "## A budget for the KV cache")
    assert sorted(codes(cells[0])[0] for cells in table) == POLICIES.names()


def test_every_format_is_listed_with_its_facts():
    text = page("docs/formats.md")
    table = {codes(cells[0])[0]: cells[2] == "yes" for cells in rows(text, "## The formats")}
    assert table == {name: known.is_written for name, known in FORMATS.all().items()}
    names, facts = [name for name, written in table.items() if written], rows(text, "## What they hold")
    facts = {cells[0].partition(" (")[0]: [cell.startswith("yes") for cell in cells[1:]] for cells in facts}
    for row, fact in {
        "activations": "holds_activations",
        "groups in activation order": "holds_group_index",
        "linears stored transposed": "holds_transposed",
    }.items():
        assert facts[row] == [getattr(FORMATS.load(name), fact) for name in names], row
    cache = next(cells[1:] for cells in rows(text, "## What they hold") if cells[0].startswith("KV cache"))
    said = {True: "yes", False: "no"}
    known = [FORMATS.load(name) for name in names]
    assert cache == [f"{said[each.holds_cache_scales]} / {said[each.describes_cache]}" for each in known]
    fields = {codes(cells[0])[0]: cells[1] for cells in rows(page("docs/recipes.md"), "## All fields")}
    assert set(codes(fields["format"])) == set(names)


def test_the_worked_example_is_the_one_that_is_tested():
    assert f"```yaml{FILE}```" in page("CONTRIBUTING.md")


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        file = (path.parent / target) if target else path
        if not link.startswith("http") and not (file.exists() and (not anchor or anchor in anchors(file.read_text()))):
            broken.append(link)
    for name in re.findall(r"`((?:tests|evals|docs|quantkit|recipes)/[\w./-]+)`", text):
        if not (ROOT / name).exists():
            broken.append(name)
    assert not broken, f"{path.name}: {broken}"


def command_lines(text: str) -> list[list[str]]:
    """Arguments of the `quantkit ...` lines in code blocks, fenced or indented, without their comments."""
    blocks = "\n".join(
        [*re.findall(r"```\w*\n(.*?)```", text, re.DOTALL), *re.findall(r"^ {4}(.*)$", text, re.MULTILINE)]
    )
    lines = re.findall(r"^(?:\$ |.*&& \S*/)?quantkit (.*)$", blocks, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_command_lines_are_seen():
    assert command_lines("quantkit no\n```bash\na && .venv/bin/quantkit b -c  # d\n```\n    quantkit e\n") == [
        ["b", "-c"],
        ["e"],
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_and_options_are_those_of_the_command_line(path):
    unknown = []
    for command, *arguments in command_lines(path.read_text(encoding="utf-8")):
        if command not in COMMANDS.names():
            unknown.append(command)
            continue
        options = {name for option in COMMANDS.load(command).params for name in (*option.opts, *option.secondary_opts)}
        given = [argument.partition("=")[0] for argument in arguments if re.match(r"--?[a-z]", argument)]
        unknown += [f"{command} {argument}" for argument in given if argument not in options]
    assert not unknown


def test_every_option_is_documented():
    docs = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    flags = {flag for command in COMMANDS.all().values() for option in command.params for flag in option.opts}
    assert not [flag for flag in sorted(flags) if flag.startswith("--") and not re.search(rf"{flag}(?![\w-])", docs)]
