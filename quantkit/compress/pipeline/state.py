"""The folder of an unfinished run: what it was started with, which layers are done, and who is writing.

`<output>.partial/` holds `checkpoint/`, which becomes the output, the hidden states before the next layer,
`progress.json`, and a lock. A layer counts as done once `progress.json` names it, and that file is replaced atomically
after everything it names is on disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoints.writer import translate_os_error, write_json
from quantkit.errors import OutputError, ResumeError
from quantkit.results import LayerRecord, to_dict


@dataclass(kw_only=True, slots=True)
class RunState:
    """Progress of one run. Modified by `finish_layer`, which also saves it.

    Args:
        folder: the `.partial` folder.
        identity: everything that decides the result, as plain data.
        records: of the finished layers.
        shards: SHA-256 by file name of the finished shards.
        weight_map: tensor name to file name.
        activations: digests of the saved hidden states, see `ActivationStore`.
    """

    folder: Path
    identity: dict[str, Any]
    records: list[LayerRecord] = field(default_factory=list)
    shards: dict[str, str] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    activations: list[str] = field(default_factory=list)

    @property
    def checkpoint(self) -> Path:
        """Where the files of the output are written."""
        return self.folder / "checkpoint"

    def finish_layer(self, record: LayerRecord, shard: str, digest: str, names: list[str], states: list[str]) -> None:
        """Count a layer as done; its shard and the states after it must be on disk already."""
        self.records.append(record)
        self.shards[shard] = digest
        self.weight_map.update(dict.fromkeys(names, shard))
        self.activations = states
        self.save()

    def save(self) -> None:
        """Write `progress.json` atomically."""
        content = {
            "identity": self.identity,
            "records": [to_dict(record) for record in self.records],
            "shards": self.shards,
            "weight_map": self.weight_map,
            "activations": self.activations,
        }
        write_json(self.folder / "progress.json", content)


@contextmanager
def open_state(output: Path, identity: dict[str, Any], *, resume: bool, overwrite: bool) -> Iterator[RunState]:
    """The state of a new or interrupted run, locked against a second writer while open.

    Args:
        output: where the finished checkpoint goes.
        identity: of this run; an interrupted run with another one is refused.
        resume: go on with an interrupted run; otherwise it is deleted.
        overwrite: an existing output is allowed.
    Raises:
        OutputError: the output exists, cannot be written to, or another process is writing it.
        ResumeError: the interrupted run was started from something else; the message names what.
    """
    if output.exists() and not overwrite:
        raise OutputError(f"output {output} exists already; choose another --output or pass --overwrite")
    if output.exists() and not _replaceable(output):
        raise OutputError(
            f"output {output} exists and is not a checkpoint, so it is not overwritten; move it away first"
        )
    folder = partial_folder(output)
    try:
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise translate_os_error(error, folder) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"another run is writing {folder}; wait for it or choose another --output") from None
        if not resume:
            _clear(folder)
        yield _load(folder, identity)


def _replaceable(output: Path) -> bool:
    """Whether an existing output is empty or a checkpoint; anything else is not for us to delete."""
    if not output.is_dir():
        return False
    names = {path.name for path in output.iterdir()}
    return not names or ("config.json" in names and any(name.endswith(".safetensors") for name in names))


def partial_folder(output: Path) -> Path:
    """Where a run works until `output` gets its name."""
    return output.with_name(output.name + ".partial")


def was_completed(output: Path, identity: dict[str, Any]) -> bool:
    """Whether an earlier run gave `output` its name but was killed before it could tidy up; that is done now.

    Args:
        output: where the finished checkpoint goes.
        identity: of this run; true only if that run had the same.
    """
    folder = partial_folder(output)
    if not (output.exists() and folder.exists()) or (folder / "checkpoint").exists():
        return False
    shutil.rmtree(folder)
    shutil.rmtree(output.with_name(f".{output.name}.old"), ignore_errors=True)
    try:
        made_from = json.loads((output / "quantkit.json").read_text())["identity"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(made_from == json.loads(json.dumps(identity)))


def identity_digest(identity: dict[str, Any]) -> str:
    """SHA-256 of an identity, for the manifest."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """`path: old -> new` for every leaf in which two nests of dicts and lists differ."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield f"{path}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _load(folder: Path, identity: dict[str, Any]) -> RunState:
    path = folder / "progress.json"
    if not path.exists():
        _clear(folder)  # of a run that was killed before it knew what it was
        state = RunState(folder=folder, identity=identity)
        state.save()
        return state
    try:
        saved = json.loads(path.read_text())
        records = [LayerRecord.from_dict(record) for record in saved["records"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ResumeError(f"{path} is damaged ({error}); start over with --no-resume") from error
    found = list(differences(saved["identity"], json.loads(json.dumps(identity))))
    if found:
        raise ResumeError(
            f"the interrupted run in {folder} was started from something else ({'; '.join(found[:3])}); "
            "run the old command, or start over with --no-resume"
        )
    for name, digest in saved["shards"].items():
        check_digest(folder / "checkpoint" / name, digest)
    return RunState(
        folder=folder,
        identity=identity,
        records=records,
        shards=saved["shards"],
        weight_map=saved["weight_map"],
        activations=saved["activations"],
    )


def check_digest(path: Path, digest: str) -> None:
    """Raise ResumeError if a file is not byte for byte what was written."""
    try:
        with path.open("rb") as file:
            found = _digest(file)
    except FileNotFoundError:
        raise ResumeError(f"{path} is missing; start over with --no-resume") from None
    if found != digest:
        raise ResumeError(f"{path} is not what was written; start over with --no-resume")


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()
    (folder / "checkpoint").mkdir()
