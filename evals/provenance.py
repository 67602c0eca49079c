"""What a figure rests on, kept with it: commit, versions, machine, and digests of the recipe and of the code behind it.

The code behind a figure are the modules that decide codes (DECIDE) and are imported, one from the other, by what
quantizes a layer and by the recipe's steps; C files beside a package's __init__.py are part of it. It counts as the
parser sees it, without docstrings: a comment, a docstring or a line broken elsewhere changes no digest. Where the
recipe or one of these modules is another than it was, the figure is stale: a page shows it with MARK and says what
changed, and README does not show it.

Standard library only: what is measured begins with what its parent has in memory.
"""

from __future__ import annotations

import ast
import datetime
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DECIDE = ("quantkit.compress.algorithms", "quantkit.compress.calibration", "quantkit.numerics", "quantkit.bit_search")
LAYER = "quantkit.compress.calibration.layer"  # feeds every step, and rounds what none did
INPUTS = "quantkit.compress.calibration.input_scales"
SEARCH = "quantkit.bit_search.run"
DISTILL = "quantkit.compress.distill.training"
TRAINS = (*DECIDE, DISTILL.rpartition(".")[0])  # decide codes or what is trained after them
VERSIONS = ("quantkit", "torch", "transformers")
MARK = "†"
_DIGITS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """When, where and from what a figure was taken.

    Args:
        commit: short; with a + where files differed from it.
        date: of the run, UTC.
        versions: of what computed it, by package.
        machine: its class, see `machine_class`.
        recipe: digest; empty where the figure rests on none of ours.
        code: digest by module, likewise.
    """

    commit: str
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    recipe: str = ""
    code: dict[str, str] = field(default_factory=dict)

    def changed(self, recipe: Mapping[str, Any]) -> list[str]:
        """What is another today than when the figure was taken: nothing, or the names of modules, `recipe` first.

        Args:
            recipe: as it is today.
        """
        if not self.code:
            return ["recipe or code, of which no digests were kept"]
        now = code_digests(recipe)
        names = {name for name in self.code.keys() | now.keys() if self.code.get(name) != now.get(name)}
        said = sorted(names, key=lambda name: (not name.startswith("compress.algorithms"), "._" in name, name))
        return [*(["the recipe"] if self.recipe != recipe_digest(recipe) else []), *(f"`{name}`" for name in said)]


def read_stamp(data: Mapping[str, Any] | None) -> Stamp | None:
    """Inverse of `dataclasses.asdict`."""
    return None if data is None else Stamp(**data)


def stamp(recipe: Mapping[str, Any] | None = None, versions: Mapping[str, str] | None = None) -> Stamp:
    """Of a figure that is taken now.

    Args:
        recipe: that it rests on; None = a peer's.
        versions: of the peer; None = of ours.
    """
    return Stamp(
        commit=commit(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        versions=dict(versions or {name: version(name) for name in VERSIONS}),
        machine=machine_class(),
        recipe="" if recipe is None else recipe_digest(recipe),
        code={} if recipe is None else code_digests(recipe),
    )


def plain(value: Stamp | None) -> dict[str, Any] | None:
    """As JSON has it."""
    return None if value is None else asdict(value)


def digest(recipe: Mapping[str, Any]) -> str:
    """One digest of a recipe and of the code behind it."""
    return _digest(json.dumps([recipe_digest(recipe), code_digests(recipe)], sort_keys=True))


def recipe_digest(recipe: Mapping[str, Any]) -> str:
    """Of all that decides codes: not of names, words, gates, or where a calibration file was."""
    kept = {key: value for key, value in recipe.items() if key not in ("name", "description", "gates")}
    calibration = dict(kept.get("calibration") or {})
    if str(calibration.get("data", "")).endswith(".jsonl"):
        calibration["data"] = Path(calibration["data"]).name
    return _digest(json.dumps({**kept, "calibration": calibration}, sort_keys=True))


def code_digests(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Digest by module, names without `quantkit.`, of the code behind a recipe; `search` in it = of a search too."""
    steps = [step if isinstance(step, str) else next(iter(step)) for step in recipe.get("steps") or []]
    roots = [LAYER, *(f"quantkit.compress.algorithms.{name}" for name in steps)]
    roots += [INPUTS] if recipe.get("activations") else []
    roots += [SEARCH] if recipe.get("search") else []
    roots += [DISTILL] if recipe.get("distill") else []
    return {name.removeprefix("quantkit."): _parsed(name)[0] for name in sorted(closure(roots))}


def closure(roots: Iterable[str]) -> set[str]:
    """Modules of TRAINS that these import, directly or through one another, themselves included."""
    known: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in known and name.startswith(TRAINS) and source(name) is not None:
            known.add(name)
            waiting += _parsed(name)[1]
    return known


def source(name: str) -> Path | None:
    """File of a module of this repository."""
    path = ROOT.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def _parsed(name: str) -> tuple[str, tuple[str, ...]]:
    """Digest of a module, and what it imports."""
    file = source(name)
    assert file is not None, name
    return module_digest(file), tuple(_imports(ast.parse(file.read_text(encoding="utf-8"))))


def module_digest(file: Path) -> str:
    """Of what a module does, and of the C files beside a package's __init__.py."""
    own = code_digest(ast.parse(file.read_text(encoding="utf-8")))
    in_c = sorted(file.parent.glob("*.[ch]")) if file.name == "__init__.py" else []
    digests = [own, *(_digest(_plain_c(path.read_text(encoding="utf-8"))) for path in in_c)]
    return _digest(" ".join(digests)) if in_c else own


def _plain_c(text: str) -> str:
    """C without comments and lines."""
    return " ".join(re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL).split())


def _imports(tree: ast.AST) -> Iterator[str]:
    """Absolute names; of `from a import b` both a and a.b, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def code_digest(tree: ast.AST) -> str:
    """Of what a module does: its syntax tree without docstrings and positions."""
    return _digest(json.dumps(_plain(tree)))


def _plain(node: Any) -> Any:
    """A syntax tree as lists; entries that are empty are left out, since newer versions of Python add such."""
    if isinstance(node, list):
        return [_plain(child) for child in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    entries = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _is_text(node.body[:1]):
        entries["body"] = node.body[1:]
    return [type(node).__name__, {name: _plain(value) for name, value in entries.items()}]


def _is_text(body: list[ast.stmt]) -> bool:
    """Whether the first statement is a docstring."""
    return bool(
        body
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def version(name: str) -> str:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "source"


def known_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of results, if it is there, each with the commit it was taken at: its own, else the file's."""
    if not file.exists():
        return []
    data = json.loads(file.read_text(encoding="utf-8"))
    return [{"commit": data["about"]["commit"], **row} for row in data["rows"]]


def commit(folder: Path = ROOT) -> str:
    """Short name of a repository's commit, with a + where code, recipes or scripts differ; empty without one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
        return done.stdout.strip()

    watched = ("quantkit", "recipes", "evals", ":!evals/results")
    return git("rev-parse", "--short=7", "HEAD") + ("+" if git("status", "--short", "--", *watched) else "")


def machine_class() -> str:
    """What seconds depend on most: how many cores of which kind, their widest instructions, memory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        memory = int(Path("/proc/meminfo").read_text(encoding="utf-8").split()[1]) / 2**20
    except OSError:
        return f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, {platform.system()}"
    entries = dict(line.split(":", 1) for line in lines if ":" in line)
    known = {key.strip(): value.strip() for key, value in entries.items()}
    flags = known.get("flags", "").split()
    best = next((name for name in ("amx_tile", "avx512_bf16", "avx512f", "avx2") if name in flags), "")
    kind = known.get("model name", platform.machine())
    # The name alone may be that of several generations, of which one multiplies twice as fast as the other.
    kind += f" {known['cpu family']}/{known['model']}" if {"cpu family", "model"} <= known.keys() else ""
    return f"{len(os.sched_getaffinity(0))} cores, {kind}, {best or 'no AVX2'}, {memory:.0f} GiB"


def table_line(cells: Iterable[object]) -> str:
    """One row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    return "\n".join([table_line(head), "|---" * len(head) + "|", *map(table_line, rows)])


def write_whole(file: Path, text: str) -> None:
    """Write a file in one piece: a process that ends meanwhile leaves what was there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def write_json(file: Path, data: Any) -> None:
    """Write results."""
    write_whole(file, json.dumps(data, indent=1) + "\n")


def write_rows(file: Path, rows: Mapping[str, Any]) -> None:
    """Write rows by their keys, one a line."""
    lines = [f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows)]
    write_whole(file, "{\n" + ",\n".join(lines) + "\n}\n")


def file_digests(**files: Path) -> dict[str, str]:
    """SHA-256 of files, by the names they are given."""
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def read_results(folder: Path, pattern: str = "*.json") -> dict[str, Any]:
    """What the files of a folder hold, by their names without the end."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(pattern))}
