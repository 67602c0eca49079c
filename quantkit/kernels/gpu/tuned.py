"""Choices measured on a GPU, as files: one per GPU, shipped in `tuned_files/` or in the user's cache folder.

    {"schema": 3,
     "device": {"name": "NVIDIA H200", "capability": 90},
     "versions": {"quantkit": "0.1.0", "torch": "2.13.0", "triton": "3.9.0"},
     "entries": [{"kernel": "product", "kind": "4 bits, groups of 128, span 32",
                  "sizes": {"rows": 1, "outputs": 8192, "inputs": 8192},
                  "choice": {"method": "tile", "block_m": 8, "block_n": 128, "warps": 4, "stages": 3, "programs": 2},
                  "microseconds": ..., "default_microseconds": ..., "ratio": ...}]}

Where the default was not beaten the entry has it as its choice, so that a further run need not ask again. A file that
cannot be used is named in one warning and is not used; none of it is guessed. It is not said here what a choice means
(`choices`) and who asks (`configs`).
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, OutputError
from quantkit.kernels.gpu.choices import Choice, Cublas, Decode, Prefill, Tile
from quantkit.untrusted import read_object

SCHEMA = 3
CHOICES: dict[str, tuple[type[Choice], ...]] = {
    "product": (Tile, Cublas),
    "decode": (Decode,),
    "prefill": (Prefill,),
}
"""By kernel: what can be chosen for it. A file calls a choice by the name of its class, in lower case."""

NEAR = {"rows": 1.0, "outputs": 2.0, "inputs": 2.0, "heads": 4.0}
"""By size: the factor up to which one that was measured stands for another; rows are buckets, and exact."""

# By number of a choice: the least, the most. Tensor cores take no fewer rows than 8, and those of attention 16.
_POWERS = {"block_m": (8, 256), "block_n": (1, 1024), "warps": (1, 16), "tile": (16, 256), "rows": (16, 128)}
_POWERS |= {"most_splits": (1, 256)}
_COUNTS = {"stages": (1, 8), "programs": (1, 64), "least_tiles": (1, 64)}
_SHIPPED = Path(__file__).parent / "tuned_files"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a choice is for.

    Args:
        kernel: one of CHOICES.
        kind: what must be equal; `Packing.name` or `configs.pages_name`.
        sizes: by name, those of NEAR.
    """

    kernel: str
    kind: str
    sizes: Mapping[str, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a file has once."""
        return self.kernel, self.kind, tuple(sorted(self.sizes.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedChoice(Launch):
    """What was measured for one launch.

    Args:
        choice: what to run with.
        microseconds, default_microseconds: medians of it and of the default, measured in turns.
        ratio: median over the turns of default to choice; 1 where the choice is the default.
    """

    choice: Choice
    microseconds: float
    default_microseconds: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedTable:
    """One file.

    Args:
        device: name of the GPU.
        capability: of it, 90 for Hopper.
        versions: of quantkit, torch and triton when it was written.
        entries: one for each key.
        path: of it.
    """

    device: str
    capability: int
    versions: Mapping[str, str]
    entries: tuple[TunedChoice, ...]
    path: Path = field(default=Path(), compare=False)

    def find(self, kernel: str, kind: str, sizes: Mapping[str, int]) -> Choice | None:
        """The choice of the nearest entry that is near enough by NEAR; of two as near the smaller one."""
        near: list[tuple[float, tuple[Any, ...], Choice]] = []
        for entry in self.entries:
            if (entry.kernel, entry.kind) == (kernel, kind) and entry.sizes.keys() == sizes.keys():
                away = {name: abs(math.log2(size / entry.sizes[name])) for name, size in sizes.items()}
                if all(distance <= math.log2(NEAR[name]) for name, distance in away.items()):
                    near.append((sum(away.values()), entry.key, entry.choice))
        # By distance and key alone, as choices have no order.
        return min(near, key=lambda candidate: candidate[:2])[2] if near else None


def slug(device: str) -> str:
    """A GPU's name as a file's: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def user_folder() -> Path:
    """Where a user's files lie: $QUANTKIT_TUNE_DIR, or quantkit/tune in the cache folder of the system."""
    given = os.environ.get("QUANTKIT_TUNE_DIR")
    # A variable that is empty counts as not set, in the XDG specification too.
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(cache) / "quantkit" / "tune"


def user_file(device: str) -> Path:
    """The user's file for a GPU, there or not."""
    return user_folder() / f"{slug(device)}.json"


def shipped_folder() -> Path:
    """Where the files that come with quantkit lie."""
    return _SHIPPED


def shipped_file(device: str) -> Path:
    """The file that comes with quantkit for a GPU, there or not."""
    return _SHIPPED / f"{slug(device)}.json"


def tables_of(device: str) -> tuple[TunedTable, ...]:
    """What files say about a GPU, the user's first; one that cannot be used is warned about and left out."""
    tables = []
    for path in (user_file(device), shipped_file(device)):
        try:
            if path.exists():
                tables.append(read(path, device))
        except (InputError, OSError) as error:
            _LOG.warning("%s; the defaults are used in its place", error)
    return tuple(tables)


def read(path: Path, device: str | None = None) -> TunedTable:
    """A file.

    Args:
        path: of it.
        device: the GPU that it must be for, if any.
    Raises:
        InputError: it is no such file, of another schema, for another GPU, or has a choice that no kernel takes.
    """
    try:
        data = read_object(path, InputError, _AGAIN)
        if data.get("schema") != SCHEMA:
            raise InputError(f"{path}: has schema {data.get('schema')!r}, this quantkit reads {SCHEMA}; {_AGAIN}")
        table = TunedTable(
            device=str(data["device"]["name"]),
            capability=int(data["device"]["capability"]),
            versions={str(name): str(version) for name, version in data["versions"].items()},
            entries=tuple(_read_entry(entry) for entry in data["entries"]),
            path=path,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: no file of tuned choices: {reason}; {_AGAIN}") from error
    if device is not None and table.device != device:
        raise InputError(f"{path}: was measured on {table.device!r}, this is {device!r}; {_AGAIN}")
    return table


_AGAIN = "delete it or run `quantkit tune --again`"


def write(path: Path, table: TunedTable) -> None:
    """Put a file where it belongs, whole or not at all.

    Raises:
        OutputError: it cannot be written there.
    """
    data = {
        "schema": SCHEMA,
        "device": {"name": table.device, "capability": table.capability},
        "versions": dict(table.versions),
        "entries": [to_entry(entry) for entry in sorted(table.entries, key=lambda entry: entry.key)],
    }
    # Named by the process: two that tune at once do not write into one file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}; give another --output") from error


def merged(old: Iterable[TunedChoice], new: Iterable[TunedChoice]) -> tuple[TunedChoice, ...]:
    """Entries of both, the new one where both have a key."""
    return tuple({entry.key: entry for entry in (*old, *new)}.values())


def to_json(choice: Choice) -> dict[str, Any]:
    """A choice as files have it."""
    return {"method": type(choice).__name__.lower(), **asdict(choice)}


def to_entry(entry: TunedChoice) -> dict[str, Any]:
    """An entry as files have it."""
    return {**asdict(entry), "choice": to_json(entry.choice)}


def _read_entry(data: dict[str, Any]) -> TunedChoice:
    kernel, given = data["kernel"], dict(data["choice"])
    method = given.pop("method")
    kind = next((kind for kind in CHOICES.get(kernel, ()) if kind.__name__.lower() == method), None)
    if kind is None:
        raise ValueError(f"kernel {kernel!r} has no method {method!r}")
    if given.keys() != (names := {item.name for item in fields(kind)}):
        raise ValueError(f"{method} takes {sorted(names)}, not {sorted(given)}")
    for name, value in given.items():
        _check(name, value)
    sizes = {str(name): int(size) for name, size in data["sizes"].items()}
    if not all(name in NEAR and size > 0 for name, size in sizes.items()):
        raise ValueError(f"sizes are {sizes}")
    numbers = {name: float(data[name]) for name in ("microseconds", "default_microseconds", "ratio")}
    return TunedChoice(kernel=kernel, kind=str(data["kind"]), sizes=sizes, choice=kind(**given), **numbers)


def _check(name: str, value: Any) -> None:
    least, most = _POWERS.get(name) or _COUNTS[name]
    # By its type, as true and false are integers to Python.
    if type(value) is not int or not least <= value <= most or (name in _POWERS and value & (value - 1)):
        form = "a power of two" if name in _POWERS else "a whole number"
        raise ValueError(f"{name} is {value!r}, must be {form} from {least} to {most}")
