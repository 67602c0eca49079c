"""The architecture as a test: who may import whom, no cycles, small files and functions, documented names.

Every import statement counts, also those inside functions; those under TYPE_CHECKING do not.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "quantkit"

# The room of a module is the longest of these names that it begins with.
LAYERS = {
    "__main__": 14,  # python -m quantkit
    "cli": 13,
    "api": 13,
    "sweep": 12,  # recipes times models
    "sweep.trials": 10,  # commands as children, here or on Ray
    "bit_search": 12,  # compresses and runs to find what to compress to
    "evaluate.verify": 12,  # asks everything below what a checkpoint is worth
    "server": 12,  # HTTP around the engine
    "": 11,  # the public surface: lazy, so it imports nothing; the doors above may ask it for its version
    "evaluate": 11,
    "benchmark": 11,
    "runtime": 10,
    "planning": 9,
    "compress": 9,  # nothing but its rooms
    "compress.pipeline": 9,
    "compress.distill": 10,  # trains what the pipeline has written
    "compress.recipe": 8,
    "compress.discovery": 7,
    "compress.algorithms": 7,
    "compress.calibration": 6,
    "compress.checkpoint_writer": 6,  # what quantize and convert share
    "compress.rotated_reader": 6,  # read by the step `rotate`
    "compress.convert": 7,  # below the pipeline, which ends in it when the output is one file
    "runtime.engine": 9,
    "runtime.model": 8,
    "runtime.cache": 7,
    "runtime.sampling": 7,
    "runtime.sequence": 5,
    "runtime.prompts": 6,  # a tokenizer, whoever computes
    "runtime.types": 2,
    "runtime.dialects": 1,  # how models write tool calls, as data
    "runtime.config": 2,
    "runtime.detokenizer": 2,
    "runtime.json_output": 2,
    "server.client": 1,
    "upload": 7,  # a card says what inspection saw
    "inspection": 6,
    "report": 6,
    "kernels.ops": 6,  # picks among the two below, which do not know each other
    "kernels.cpu": 5,
    "kernels.gpu": 5,
    "kernels": 2,  # types, page layouts and the reference, which all of them agree with
    "formats": 3,
    "checkpoints": 4,
    "huggingface": 5,  # a transformers model, one layer at a time
    "output": 5,
    "results.gates": 5,
    "results.statistics": 2,
    "models.families": 2,
    "engine_rules": 2,  # what engines read, as data
    "numerics": 1,
    "models": 1,
    "results": 1,
    "runtime.cache.policies": 1,  # their names are choices of an option
    "errors": 0,
    "registry": 0,
    "distribution": 0,
    "settings": 0,
    "machine": 0,  # its cores, devices and memory
    "machine.system": -1,  # calls that differ between systems; asked by the rooms of layer 0 too
    "safety": 0,  # bounds on what other people's files cause
    "native": 0,  # C libraries
    "distributed": 1,  # work that several processes share
    "quantities": 0,
    "demo": 0,  # data
}
TORCH_FREE = (
    *("models", "engine_rules", "results", "report", "errors", "registry", "quantities", "settings", "cli"),
    *("planning", "demo", "distribution"),
)
HEAVY = ("torch", "transformers", "numpy", "safetensors", "compressed_tensors", "datasets")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

Sources = dict[str, str]


def read_package(root: Path = ROOT) -> Sources:
    """Source by dotted module name; a package has the name of its folder."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


parse = functools.cache(ast.parse)  # of the same text each check asks again


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk_running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:` (its else branch runs)."""
    yield node
    children = node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from walk_running(child)


@functools.cache
def import_statements(text: str) -> list[ast.AST]:
    """Those that run; each check asks again."""
    return [node for node in walk_running(parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(name: str, sources: Sources) -> set[str]:
    """Modules that module `name` imports: ours by their exact name, foreign ones as written."""
    base = name.split(".") if any(other.startswith(f"{name}.") for other in sources) else name.split(".")[:-1]
    found = set()
    for node in import_statements(sources[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = base[: len(base) - node.level + 1] if node.level else []
            target = ".".join([*above, *filter(None, [node.module])])
            inside = {f"{target}.{alias.name}" for alias in node.names}
            found |= {full if full in sources else target for full in inside}
    return found


def part(name: str) -> str:
    """`formats` of `quantkit.formats.base`, `runtime.cache` of `quantkit.runtime.cache.pages`; empty for `quantkit`."""
    path = name.split(".")[1:]
    rooms = (".".join(path[:end]) for end in range(len(path), 0, -1))
    return next((room for room in rooms if room in LAYERS), path[0] if path else "")


def room(name: str) -> str:
    """`runtime` of `quantkit.runtime.cache.pages`."""
    return part(name).partition(".")[0]


def layer_breaches(sources: Sources) -> list[str]:
    breaches = []
    for name in sources:
        here = part(name)
        if here not in LAYERS:
            breaches.append(f"{name} is in no layer: add {here!r} to LAYERS and to docs/architecture.md")
            continue
        for target in sorted(imported(name, sources)):
            there = part(target)
            if target.split(".")[0] != "quantkit" or here == there or there == "errors":
                continue  # errors is below everything, registry included
            if LAYERS.get(there, 99) >= LAYERS[here]:
                breaches.append(f"{name} ({LAYERS[here]}) imports {target} ({LAYERS.get(there, 'no layer')})")
    return breaches


COMPRESS = ("compress",)
RUN = ("kernels", "runtime", "benchmark", "evaluate")
ABOVE = ("evaluate.verify",)  # both


def half_breaches(sources: Sources) -> list[str]:
    """Imports between the half that compresses and the half that runs."""
    return [
        f"{name} imports {target}"
        for name in sources
        for target in sorted(imported(name, sources))
        for one, other in ((COMPRESS, RUN), (RUN, COMPRESS))
        if part(name) not in ABOVE and room(name) in one and room(target) in other
    ]


def private_breaches(sources: Sources) -> list[str]:
    """Imports of a module whose name begins with `_` from outside its folder."""
    found = []
    for name in sources:
        for target in sorted(imported(name, sources)):
            folder, _, _ = target.partition("._")
            if target.startswith("quantkit.") and folder != target and not f"{name}.".startswith(f"{folder}."):
                found.append(f"{name} imports {target}")
    return found


def cycles(sources: Sources) -> list[str]:
    """One path per cycle between modules, found by depth-first search."""
    graph = {name: sorted(imported(name, sources) & sources.keys() - {name}) for name in sources}
    done: set[str] = set()
    found = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in graph[name]:
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


def heavy_imports(sources: Sources) -> list[str]:
    """Heavy libraries in parts that promise to be light."""
    return [
        f"{name} imports {target}"
        for name in sources
        if room(name) in TORCH_FREE
        for target in sorted(imported(name, sources))
        if target.split(".")[0] in HEAVY
    ]


def too_long(sources: Sources) -> list[str]:
    found = [
        f"{name} has {len(text.splitlines())} lines"
        for name, text in sources.items()
        if len(text.splitlines()) > MAX_FILE_LINES
    ]
    for name, text in sources.items():
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                lines = (node.end_lineno or 0) - start + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{name}.{node.name} has {lines} lines")
    return found


def undocumented(sources: Sources) -> list[str]:
    """Modules, public classes, and functions that another module imports, that have no docstring.

    These are the seams. A method, a property and a helper of one module may have a telling name instead.
    """
    used = {name for module in sources for name in imported_names(module, sources)}
    found = []
    for name, text in sources.items():
        tree = parse(text)
        if text.strip() and not ast.get_docstring(tree):
            found.append(name)
        for node in public_definitions(tree):
            at_a_seam = isinstance(node, ast.ClassDef) or f"{name}.{node.name}" in used
            if at_a_seam and not ast.get_docstring(node):
                found.append(f"{name}.{node.name}")
    return found


def imported_names(name: str, sources: Sources) -> set[str]:
    """Full names of what a module takes from others with `from ... import`."""
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(parse(sources[name]))
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }


def public_definitions(node: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [child for child in node.body if isinstance(child, kinds) and not child.name.startswith("_")]


CHECKS = [layer_breaches, half_breaches, private_breaches, cycles, heavy_imports, too_long, undocumented]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_the_rules(check):
    found = check(read_package())
    assert not found, "\n".join(found)


def test_every_layer_exists_and_every_module_is_seen():
    parts = {part(name) for name in read_package()}
    assert LAYERS.keys() - {"demo"} == parts - {"demo"}
    assert {"quantkit", "quantkit.cli.quantize", "quantkit.numerics.dtype"} <= read_package().keys()


PLANTED = [
    (layer_breaches, {"quantkit.numerics.x": "def f():\n    from quantkit.formats import base"}, "x (1) imports"),
    (layer_breaches, {"quantkit.errors": "import quantkit.registry"}, "errors (0) imports quantkit.registry (0)"),
    (layer_breaches, {"quantkit.formats.x": "import quantkit"}, "x (3) imports quantkit (11)"),
    (
        layer_breaches,
        {"quantkit.formats.x": "from ..compress.recipe import load"},
        "imports quantkit.compress.recipe (8)",
    ),
    (layer_breaches, {"quantkit.novel.x": ""}, "add 'novel' to LAYERS"),
    (
        half_breaches,
        {"quantkit.runtime.x": "from quantkit.compress.recipe import load"},
        "x imports quantkit.compress.recipe",
    ),
    (
        private_breaches,
        {"quantkit.checkpoints.x": "from quantkit.formats import _layout", "quantkit.formats._layout": ""},
        "quantkit.checkpoints.x imports quantkit.formats._layout",
    ),
    (
        cycles,
        {"quantkit.formats.a": "from quantkit.formats import b", "quantkit.formats.b": "def f():\n  from . import a"},
        "quantkit.formats.a -> quantkit.formats.b -> quantkit.formats.a",
    ),
    (heavy_imports, {"quantkit.results": "def f():\n    import torch.nn"}, "quantkit.results imports torch.nn"),
    (too_long, {"quantkit.api": "\n" * 401}, "quantkit.api has 401 lines"),
    (too_long, {"quantkit.api": "class A:\n  @d\n  def f(self):\n" + "    x = 1\n" * 59}, "f has 61 lines"),
    (undocumented, {"quantkit.api": '"""Doc."""\nclass A: ...'}, "quantkit.api.A"),
    (
        undocumented,
        {"quantkit.api": '"""Doc."""\ndef f(): ...', "quantkit.upload": '"""Doc."""\nfrom quantkit.api import f'},
        "quantkit.api.f",
    ),
    (undocumented, {"quantkit.api": "x = 1"}, "quantkit.api"),
]


@pytest.mark.parametrize(("check", "sources", "expected"), PLANTED, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_breach_is_found(check, sources, expected):
    around = {
        "quantkit": '"""Top."""',
        "quantkit.formats": "",
        "quantkit.registry": "",
        "quantkit.formats.base": "",
        "quantkit.compress.recipe": "",
    }
    found = check({**around, **sources})
    assert len(found) == 1, found
    assert expected in found[0]


INNOCENT = [
    (layer_breaches, {"quantkit.formats.x": "from quantkit.numerics import dtype\nfrom quantkit.formats import base"}),
    (layer_breaches, {"quantkit.errors": "if TYPE_CHECKING:\n    import quantkit.compress.recipe"}),
    (cycles, {"quantkit.api": "from quantkit.formats import base", "quantkit.formats.base": "import quantkit.errors"}),
    (
        private_breaches,
        {"quantkit.formats.x": "from quantkit.formats._layout import a", "quantkit.formats._layout": ""},
    ),
    (heavy_imports, {"quantkit.formats.x": "import torch"}),
    (undocumented, {"quantkit.api": '"""Doc."""\ndef f(): ...\nclass A:\n  """Doc."""\n  def f(self): ...'}),
]


@pytest.mark.parametrize(("check", "sources"), INNOCENT, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_allowed_is_not_reported(check, sources):
    assert check({"quantkit.formats.base": "", "quantkit.errors": "", **sources}) == []
