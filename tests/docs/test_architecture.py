"""docs/architecture.md against the tree: each name in it exists, each room has its line, the layers are the test's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_layers import LAYERS, parse, read_package

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
# Told in one line as a whole, file by file elsewhere.
AS_A_WHOLE = tuple(
    f"quantkit.{room}."
    for room in (
        "cli",
        "models.families",
        "kernels.cpu",
        "kernels.gpu",
        "kernels.ops",
        "kernels.reference",
    )
)
FOREIGN = {"transformers", "safetensors", "accelerate", "datasets", "gguf", "click", "rich", "pydantic"}


def section(title: str, page: str = PAGE) -> str:
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def tree(page: str = PAGE) -> Iterator[str]:
    """Paths below the repository that the tree names, folders with a slash at the end."""
    lines = section("The tree", page).split("```")[1].strip().splitlines()
    folders: list[tuple[int, str]] = []
    for line in lines:
        names, indent = re.split(r"\s{2,}", line.strip())[0].split(), len(line) - len(line.lstrip())
        folders = [(depth, path) for depth, path in folders if depth < indent]
        above = folders[-1][1] if folders else ""
        yield from (above + name for name in names)
        if len(names) == 1 and names[0].endswith("/"):
            folders.append((indent, above + names[0]))


def missing(page: str) -> list[str]:
    return [
        path
        for path in tree(page)
        if not ((ROOT / path).is_dir() if path.endswith("/") else (ROOT / f"{path}.py").exists())
    ]


def test_what_the_tree_names_exists():
    assert not missing(PAGE)


def test_a_module_that_does_not_exist_is_noticed():
    assert missing(PAGE.replace("    load schema ", "    load document ")) == ["quantkit/compress/recipe/document"]


def test_every_module_has_its_place():
    named = {path.rstrip("/").replace("/", ".") for path in tree()}
    public = [name for name in read_package() if "._" not in name and not name.endswith(".base")]
    untold = [name for name in public if name not in named and not name.startswith(AS_A_WHOLE) and name != "quantkit"]
    assert not untold, f"not in the tree of docs/architecture.md: {', '.join(untold)}"


def test_the_layers_are_those_of_the_test():
    rows = re.findall(r"^\| (-?\d+) \| ([^|]+) \|", section("Import layers"), re.MULTILINE)
    page = {room: int(number) for number, rooms in rows for room in re.findall(r"`([^`]+)`", rooms)}
    assert page == {room: number for room, number in LAYERS.items() if room}


def defined() -> set[str]:
    names = {part for name in read_package() for part in name.split(".")}
    for source in read_package().values():
        for node in ast.walk(parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.arg):
                names.add(getattr(node, "arg", "") or getattr(node.target, "id", ""))
    return names


def test_what_the_page_calls_by_name_is_defined():
    """`Engine.step`, `size_pool`: each part of a dotted name is a module, class, function, field or parameter."""
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    called = set(re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)*)(?:\([^`]*\))?`", prose))
    names = defined() | FOREIGN
    unknown = [name for name in called if not all(part in names for part in name.split("."))]
    assert not [name for name in unknown if not name.endswith((".json", ".partial", ".py")) and name not in WORDS], (
        unknown
    )


# Commands, entries of recipes and files that the page names, which are no Python.
WORDS = {"replaced", "discovered", "search", "convert", "quantize"}
