"""Rows of results, written the moment they exist and taken up again by the next call; standard library only.

A part is a process that fills one JSON file of `$RESULTS`. What it begins is in the file before it begins, so a process
that never comes back leaves behind on what it died; what the file has is not measured again, so a part that was stopped
or died goes on behind that. `$OUT` gets all of it as one archive, because a machine that is lent hands back few files.

    python evals/gpu/results.py close NAME CODE SECONDS   by run.sh after each process of a part: what became of it
    python evals/gpu/results.py unpack FOLDER             what an earlier call brought back: results, compiled kernels
    python evals/gpu/results.py pack                      the same, into $OUT
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import hashlib
import json
import math
import os
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

Row = dict[str, Any]

# Exit codes of a part: done, but something is wrong; time is over, the next call goes on; the device is lost.
WRONG, GO_ON, LOST = 3, 75, 76
# What they say of it, with those of `timeout`.
STATES = {0: "done", WRONG: "wrong", GO_ON: "unfinished", 124: "unfinished", 137: "unfinished"}
# After so many errors, and no success, a kind is not tried again.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python from 3.11.4 on has it
_MOST_FAILURES = 3
_ARCHIVE_EVERY_S = 5.0
# A machine that is lent hands back 8 files of 16 MiB; what comes back is carried in again with wheels and kernels that
# were compiled ahead, and all that is carried stays below 40 MiB.
_CACHE_FILES, _CACHE_FILE_BYTES = 2, 14 << 20


class Absent(Exception):
    """A peer, or a part of this machine, is not there; the message says why."""


def folder() -> Path:
    """Where parts write."""
    return Path(os.environ.get("RESULTS", "evals/results/gpu"))


class Results:
    """The rows of one part. *Mutable*: reads and rewrites its file.

    Args:
        name: of the file.
        meta: machine, versions and commit.
        seconds: no measurement is begun after these.
        row_seconds: a measurement that takes longer ends the process, with a traceback.
        is_lost: asked after an error, whether this process can measure nothing any more.
    """

    def __init__(
        self,
        name: str,
        meta: Row,
        seconds: float,
        row_seconds: float = 60.0,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path = folder() / f"{name}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        strike(self.path, "its process was ended")
        before = _read(self.path)
        self.rows: list[Row] = _taken_up(before, meta)
        self.meta = {**before["meta"], **meta}
        self.is_unfinished = False
        self._running: Row = {}
        self._unwritten = ""  # why what is in memory is not in the file
        # Of a GPU, so a rehearsal has none.
        self._predictions = [row for row in _predictions() if row["file"] == name and not meta.get("rehearsal")]
        self._writing = threading.RLock()  # some parts have rows from several threads
        self._begun, self._seconds = time.monotonic(), seconds
        self._row_seconds, self._is_lost = row_seconds, is_lost
        signal.signal(signal.SIGTERM, self._stop)

    def is_over(self) -> bool:
        """Whether the time is over, and so something is left for the next call."""
        over = time.monotonic() - self._begun > self._seconds
        self.is_unfinished |= over
        return over

    def known(self, **labels: Any) -> Row | None:
        """The row that has these labels."""
        return next((row for row in self.rows if row.items() >= labels.items()), None)

    def add(self, **row: Any) -> Row:
        """Keep a row and print it."""
        with self._writing:
            self.rows.append(row)
            print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
            self.save()
        return row

    def attempt(self, work: Callable[[], Row], **labels: Any) -> Row | None:
        """One measurement, unless the file has it; an error becomes a row of its own, an absent peer one row in all.

        Returns: its row; None where there is no figure.
        """
        known = self.known(**labels)
        if known is not None:
            return None if "error" in known else known
        if self._is_given_up(labels.get("kind")) or self.is_over():
            return None
        failed: Row | None = None
        with self._watched(labels):
            try:
                figures = work()
            except Absent as error:
                failed = {"kind": labels.get("kind", ""), "absent": f"peer not present: {first_line(error)}"}
            except Exception as error:  # whatever a kernel raises on a machine it has never seen
                failed = {**self._running, "error": f"{type(error).__name__}: {first_line(error)}"}
        if failed is None:
            odd = [key for key, value in figures.items() if isinstance(value, float) and not math.isfinite(value)]
            if not odd:
                return self.add(**labels, **self._predicted(labels), **figures)
            failed = {**labels, **figures, **dict.fromkeys(odd), "error": f"not a finite number: {', '.join(odd)}"}
        self.add(**failed)
        if "error" in failed and self._is_lost():
            print("the device is lost; a new process goes on", flush=True)
            os._exit(LOST)  # what a destructor would do now cannot succeed
        return None

    def note(self, **figures: Any) -> None:
        """Figures of the measurement that is under way, kept should its process end."""
        self._running |= figures
        self.save()

    def extend(self, row: Row, **values: Any) -> None:
        """Add to a row what follows from others."""
        row.update(values)
        self.save()

    def save(self) -> None:
        """Write everything so far; what a full disk refuses is written with the next row, if it can be."""
        with self._writing:
            data: Row = {"meta": self.meta, "rows": self.rows}
            if self._running:
                data["running"] = self._running
            try:
                _write(self.path, data)
                self._unwritten = ""
            except OSError as error:
                self._unwritten = f"{self.path.name} is not written: {error}"
                print(f"== {self._unwritten}", flush=True)
            if _is_due(_archive_path()):
                archive()

    def finish(self, *, is_wrong: bool = False) -> NoReturn:
        """Write, and end the process with the code that says how far it has come."""
        self.save()
        is_wrong |= any("error" in row for row in self.rows) or bool(self._unwritten)
        sys.exit(GO_ON if self.is_unfinished else WRONG if is_wrong else 0)

    @contextlib.contextmanager
    def _watched(self, labels: Row) -> Iterator[None]:
        """While open, the file says what is under way, and a clock runs that needs neither the GIL nor the device."""
        self._running = dict(labels)
        self.save()
        faulthandler.dump_traceback_later(self._row_seconds, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._running = {}

    def _predicted(self, labels: Row) -> Row:
        """What was said of a measurement before the first run."""
        (found, *_) = [row for row in self._predictions if row["labels"] == labels] or [{"figures": {}}]
        return {f"predicted_{key}": value for key, value in found["figures"].items()}

    def _is_given_up(self, kind: str | None) -> bool:
        rows = [row for row in self.rows if kind and row.get("kind") == kind]
        failures = sum("error" in row for row in rows)
        return any("absent" in row for row in rows) or _MOST_FAILURES <= failures == len(rows)

    def _stop(self, *_: object) -> NoReturn:
        """The part's time is over: what is under way has done nothing wrong and is begun again by the next call."""
        self._running = {}
        self.save()
        os._exit(GO_ON)


def _taken_up(before: Row, meta: Row) -> list[Row]:
    """Rows of an earlier call, with its commit where that is another; with RETRY, its errors are tried again."""
    commit = before["meta"].get("commit")
    if commit not in (None, meta.get("commit")):
        before["rows"] = [{"commit": commit, **row} for row in before["rows"]]
    return [row for row in before["rows"] if not ("error" in row and os.environ.get("RETRY"))]


def _predictions() -> list[Row]:
    """What was said of the rows before the first run."""
    path = Path(__file__).with_name("predictions.json")
    return json.loads(path.read_text())["rows"] if path.exists() else []


def first_line(error: BaseException) -> str:
    """What an error says, short."""
    return next((line.strip()[:200] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _read(path: Path) -> Row:
    return json.loads(path.read_text()) if path.exists() else {"meta": {}, "rows": []}


def _write(path: Path, data: Row) -> None:
    """All or nothing: a process may end at any moment."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(path)


def strike(path: Path, why: str) -> Row | None:
    """Make an error of what was under way when its process ended.

    Returns: its row; None if nothing was, or if it cannot be written.
    """
    data = _read(path)
    if "running" not in data:
        return None
    row = {**data.pop("running"), "error": why}
    data["rows"].append(row)
    try:
        _write(path, data)
    except OSError as error:  # a full disk: it is struck once there is space
        print(f"== {path.name} is not written: {error}", flush=True)
        return None
    return row


def close(name: str, code: int, seconds: float) -> bool:
    """Say in a line what became of a process of a part, note how far the part is, and rewrite the archive.

    Args:
        name: of the part.
        code: its exit code.
        seconds: it took.
    Returns: whether a new process should go on at once, behind what this one died over.
    """
    names = {128 + known.value: known.name for known in signal.Signals}  # as a shell says that a signal ended it
    why = f"its process ended with {names.get(code, code)}"
    struck = [row for path in sorted(folder().glob("*.json")) if (row := strike(path, why)) is not None]
    again = code == LOST or bool(struck)
    state = "unfinished" if again else STATES.get(code, "dead")
    ended = [f"{why}, at {_labels(row)}" for row in struck] or [why + _last_line(folder() / f"{name}.log")] * (
        state == "dead"
    )
    print(f"== {name}: {state} after {seconds:.0f} s{''.join(f'; {one}' for one in ended)}", flush=True)
    try:
        with (folder() / "state").open("a") as states:
            states.write(f"{name} {state} {'; '.join(ended)}".strip() + "\n")
    except OSError as error:
        print(f"== {name}: its state is not written: {error}", flush=True)
        again = False
    archive()
    return again


def _last_line(path: Path) -> str:
    """What a process said last."""
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return f": {lines[-1][:200]}" if lines else ""


def _labels(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items() if key != "error")


def _archive_path() -> Path | None:
    return Path(os.environ["OUT"]) / "results.tar.gz" if "OUT" in os.environ else None


def _is_due(path: Path | None) -> bool:
    """Whether an archive is wanted, and not fresh."""
    return path is not None and (not path.exists() or time.time() - path.stat().st_mtime > _ARCHIVE_EVERY_S)


def archive() -> None:
    """All results, also those that were brought from another GPU, as one file of `$OUT`."""
    path = _archive_path()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _whole(path) as (tar, _):
            for one in sorted(folder().parent.glob("*/*")):
                if one.suffix != ".tmp":
                    tar.add(one, one.relative_to(folder().parent))
    except OSError as error:  # the one before it is still there
        print(f"== {path.name} is not written: {error}", flush=True)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[tuple[tarfile.TarFile, BinaryIO]]:
    """An archive that is there as a whole or not at all, and the file that it becomes."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as raw, tarfile.open(fileobj=raw, mode="w:gz", compresslevel=6) as tar:
        yield tar, raw
    temporary.replace(path)


def _cache() -> Path:
    return Path(os.environ["TRITON_CACHE_DIR"])


def pack() -> None:
    """Results, and compiled kernels, newest first, in as many files as may come back."""
    archive()
    out = _archive_path()
    if out is None:
        return
    left = pack_kernels(_cache(), [out.parent / f"kernels-{number}.tar.gz" for number in range(_CACHE_FILES)])
    if left:
        print(f"== {left} compiled kernels do not fit and stay here", flush=True)


def pack_kernels(cache: Path, archives: list[Path]) -> int:
    """Write compiled kernels, newest first, into archives of the size that may come back; return how many are left."""
    # A kernel is a folder, of use only as a whole.
    kernels = sorted((path for path in cache.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for archive in archives:
        if not kernels:
            break
        try:
            with _whole(archive) as (tar, raw):
                while kernels and raw.tell() < _CACHE_FILE_BYTES:
                    kernel = kernels.pop()
                    tar.add(kernel, kernel.name)
        except OSError as error:
            print(f"== {archive.name} is not written: {error}", flush=True)
    return len(kernels)


def unpack(source: Path) -> None:
    """What `pack` wrote, where it was; folders that are here already are newer."""
    brought = {path: folder().parent for path in source.glob("results.tar.gz")}
    brought |= {path: _cache() for path in sorted(source.glob("kernels-*.tar.gz"))}
    for path, target in brought.items():
        target.mkdir(parents=True, exist_ok=True)
        # A kernel's group file comes last: a folder without it is left of a compilation that ended early.
        here = {one.name for one in target.iterdir() if target != _cache() or any(one.glob("__grp__*"))}
        try:
            with tarfile.open(path) as tar:
                new = [member for member in tar if member.name.partition("/")[0] not in here]
                tar.extractall(target, new, **SAFELY)
            if target == _cache():
                adopt({target / member.name.partition("/")[0] for member in new})
            print(f"== taken up: {path}", flush=True)
        except (OSError, EOFError, tarfile.TarError) as error:  # it did not come back whole
            print(f"== not taken up: {path}: {error}", flush=True)


def adopt(kernels: Iterable[Path]) -> None:
    """Give kernels that were compiled elsewhere the paths of this machine, and the names of its build of Triton."""
    here: tuple[str, str] | None = None
    for folder in kernels:
        if (folder / "key.json").exists():
            here = here or _triton()
            there = json.loads((folder / "key.json").read_text())
            if here[0] == there["triton"]:
                name = base64.b32encode(hashlib.sha256((here[1] + there["key"]).encode()).digest()).decode().rstrip("=")
                folder = folder.replace(folder.with_name(name)) if name != folder.name else folder
        for group in folder.glob("__grp__*"):
            names = json.loads(group.read_text())["child_paths"]  # without what stayed behind Triton would find nothing
            paths = {name: str(folder / name) for name in names if (folder / name).exists()}
            group.write_text(json.dumps({"child_paths": paths}))


def _triton() -> tuple[str, str]:
    """Version of Triton, and what names every kernel that this build of it compiles; empty if there is none."""
    try:
        from triton import __version__
        from triton.runtime.cache import triton_key
    except ImportError:
        return "", ""
    return __version__, triton_key()


def main(command: str, *words: str) -> int:
    """See the module; `close` exits with 0 if a new process should go on."""
    if command == "close":
        return 0 if close(words[0], int(words[1]), float(words[2])) else 1
    {"pack": pack, "unpack": lambda: unpack(Path(words[0]))}[command]()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
