"""The field's words, always: what the package names, and what its users read, holds none of ours in their place.

Names that the package itself binds count (`path.parts` is Python's), modules included. A word that is English too is
wrong in one sense only: there it counts in the rooms that have this sense, and ALLOWED lists the other uses.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "quantkit"

# As parts of names, in lower case and the singular: what is said instead, and in which rooms (all, if there is none).
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "damage": ("sensitivity", ()),
    "unit": ("fused group", ("bit_search", "compress", "evaluate", "models", "results", "planning")),
    "upstream": ("asymmetric calibration", ()),
    "left_alone": ("ignored", ()),
    "starved": ("under-calibrated expert", ()),
    "piece": ("scheduled chunk", ("runtime", "benchmark", "compress", "formats", "evaluate", "checkpoints")),
    "tabled": ("num_table_entries", ()),
    "flight": ("in-flight step", ()),
    "land": ("commit", ()),
    "reading": ("async copy", ("runtime", "kernels")),
    "governor": ("speculation controller", ()),
    "room": ("capacity", ()),
    "tail": ("residual window", ("runtime", "kernels", "models", "planning", "numerics")),
    "part": ("split-K or split-KV partials", ("kernels",)),
    "maxima": ("partial argmax", ()),
    "vendor": ("cuBLAS path", ()),
    "natural": ("unpacked layout", ("kernels",)),
    "row_race": ("sampling kernel", ()),
    "rounded_rows": ("quantized activations", ()),
    "rounding": ("activation quantization", ("kernels", "runtime")),
    "workshop": ("trial runner", ()),
    "decode": (
        "dequantize (weights), detokenize (text)",
        ("compress", "numerics", "runtime.detokenizer", "checkpoints"),
    ),
    "prove": ("evaluate, verify", ()),
}
# Whole names that name nothing, whatever they are of.
EMPTY = ("found", "more", "place", "make", "look", "told", "wanted")
# In texts: docs, recipes, help, messages, docstrings.
TEXTS = {
    r"damages?": "sensitivity",
    r"upstream": "asymmetric calibration; before",
    r"(left|leave|leaves) alone": "ignored",
    r"starved": "under-calibrated",
    r"tabled": "num_table_entries",
    r"(?<!in )(?<!in-)flights?": "in-flight step",
    r"landed|lands": "commit",
    r"governors?": "speculation controller",
    r"maxima": "partial argmax",
    r"vendors?": "cuBLAS path",
    r"row race": "sampling kernel",
    r"rounded rows": "quantized activations",
    r"workshops?": "trial runner",
    r"proves?|proved|proven|proof": "evaluate, verify, show",
    r"ridden|rides?|loud channels?": "outlier channels",
    r"until a GPU has been had": "not yet run on a GPU",
}
# Other senses of a word that counts: where, and which name or text.
ALLOWED = {
    ("results/_record.py", "damage"): "a key of schema version 1, which is read",
    ("results/_record.py", "leave alone"): "an action of schema version 1, which is read",
    ("results/gates.py", "unit"): "of measurement",
}


def name_parts(name: str) -> str:
    """`_left_alone_` of `LeftAlone` or `left_alone`: parts in lower case, each between underscores."""
    return f"_{re.sub('(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])', '_', name).lower().strip('_')}_"


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a module names itself, with lines: functions, classes, parameters, variables, attributes, aliases."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, 0


def texts(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno


def name_offence(name: str, module: str) -> tuple[str, str] | None:
    """The word that a name should not say in a module such as `runtime.cache.pages`, and what it should."""
    parts = name_parts(name)
    for word, (say, rooms) in NAMES.items():
        here = not rooms or any(f"{module}.".startswith(f"{room}.") for room in rooms)
        if here and re.search(f"_{word}s?_", parts.replace("_in_flight_", "_")):
            return word, say
    bare = parts.strip("_").removesuffix("s")
    return (bare, "what the value is") if bare in EMPTY else None


def text_offences(text: str) -> Iterator[tuple[str, str]]:
    for pattern, say in TEXTS.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            yield match[0], say


def offences(sources: Iterable[tuple[str, str]]) -> Iterator[tuple[str, int, str, str, str]]:
    """File, line, word, where it stands, what to say, in modules of the package given as (path below it, source)."""
    for path, source in sources:
        tree = ast.parse(source)
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name, line in [(module.rpartition(".")[2], 1), *bound_names(tree)]:
            if (offence := name_offence(name, module)) and (path, offence[0]) not in ALLOWED:
                yield path, line, offence[0], name, offence[1]
        for text, line in texts(tree):
            for word, say in text_offences(text):
                if (path, word.lower()) not in ALLOWED:
                    yield path, line, word.lower(), "text", say


def package() -> list[tuple[str, str]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")) for path in paths]


def by_room(lines: Iterable[tuple[str, str]]) -> str:
    rooms: dict[str, list[str]] = defaultdict(list)
    for room, line in lines:
        rooms[room].append(line)
    return "\n".join(f"{room}:\n    " + "\n    ".join(rooms[room]) for room in sorted(rooms))


def room_of(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def test_the_package_speaks_the_vocabulary():
    lines = [
        (room_of(path), f"{path}:{line} {name}: {word!r} -> {say}")
        for path, line, word, name, say in offences(package())
    ]
    assert not lines, f"{len(lines)} names and texts\n{by_room(lines)}"


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("recipes/*.yaml")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_speak_the_vocabulary(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    wrong = [
        f"{number}: {word!r} -> {say}" for number, line in enumerate(lines, 1) for word, say in text_offences(line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("evaluate/x.py", "def damage_map(): ..."),
        ("evaluate/x.py", "for unit in groups: ..."),
        ("cli/x.py", "class LeftAlone: ..."),
        ("runtime/cache/x.py", "self.key_tail = 1"),
        ("kernels/gpu/x.py", "from .a import b as NATURAL"),
        ("runtime/x.py", "flight = 1"),
        ("models/x.py", "found = 1"),
        ("models/x.py", "def f(_places): ..."),
        ("models/governor.py", "x = 1"),
        ("report/x.py", "print('the upstream share')"),
        ("compress/x.py", "decode = 1"),
    ],
)
def test_a_word_is_noticed(path, source):
    assert list(offences([(path, source)]))


def test_the_words_other_senses_are_not():
    good = "in_flight = 1; preflight = 2; in_place = 3; lookup = Path().parts; make_linear = 'requests in flight'"
    assert not list(
        offences([("runtime/x.py", good), ("formats/x.py", "def decode(part): ..."), ("quantities.py", "unit = 1")])
    )
