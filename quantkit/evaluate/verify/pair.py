"""A checkpoint and its original: that they belong together, and that the files are those that were written.

Everything here is found out from configs, headers, tokenizers and hashes, before a model is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.checkpoints.replaceable import MANIFEST
from quantkit.checkpoints.source import resolve
from quantkit.demo import DEMO_MODEL
from quantkit.errors import CheckpointError, GateError, ModelError, OutputError
from quantkit.evaluate.pairing import check_same_language
from quantkit.results.gates import parse_gates
from quantkit.untrusted import read_json, shorten

RUN = "quantkit-run.json"
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """What is to be compared.

    Args:
        path, baseline: directories of the checkpoint and its original.
        baseline_name: of the original, as it was given.
        manifest: what quantkit.json says; empty when there is none.
        made: what quantkit-run.json says; empty when there is none.
        gates: to be held.
        hashes: of the checkpoint's files, SHA-256 by name.
        notes: what is out of the ordinary.
    """

    path: Path
    baseline: Path
    baseline_name: str
    manifest: dict[str, Any]
    made: dict[str, Any]
    gates: tuple[str, ...]
    hashes: dict[str, str]
    notes: tuple[str, ...]

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns that the recipe ignores."""
        patterns = _section(self.manifest, "recipe").get("ignore")
        return tuple(map(str, patterns)) if isinstance(patterns, list) else ()


def check_pair(checkpoint: str | Path, baseline: str | Path | None, gates: Iterable[str] | None = None) -> Pair:
    """Find both models and check that they belong together.

    Args:
        checkpoint: directory of the compressed model.
        baseline: directory or hub id of the original; None = what quantkit-run.json says it was made from.
        gates: to be held; None = those of the recipe.
    Raises:
        ModelError, DataError: one of them is not there, or their vocabularies differ.
        CheckpointError: a file is damaged, or not the one that was written.
        GateError: a gate that cannot be read.
    """
    wanted = None if gates is None else check_gates(gates)
    path = resolve(str(checkpoint))
    reader = CheckpointReader(path)
    manifest, made = _read(path / MANIFEST), _read(path / RUN)
    name, source = _baseline(path, baseline, made)
    original = CheckpointReader(source)
    if path.resolve() == source.resolve():
        raise ModelError(f"{path} is its own baseline; give the model that it was made from")
    _check_vocabularies(reader, original)
    hashes, notes = check_files(reader, manifest)
    return Pair(
        path=path,
        baseline=source,
        baseline_name=name,
        manifest=manifest,
        made=made,
        gates=check_gates(_gates(path, manifest)) if wanted is None else wanted,
        hashes=hashes,
        notes=notes,
    )


def check_gates(gates: Iterable[str]) -> tuple[str, ...]:
    """Gates as they will be judged.

    Raises:
        GateError: one that cannot be read, or two of the same number that cannot both hold.
    """
    read = parse_gates(gates)
    for one in read:
        for other in read:
            same = (one.metric, one.subject) == (other.metric, other.subject)
            if same and one.operator[0] == ">" and other.operator[0] == "<" and one.limit > other.limit:
                raise GateError(f"gates {one.text!r} and {other.text!r} cannot both hold; drop one of them")
    return tuple(dict.fromkeys(gate.text for gate in read))


def check_files(reader: CheckpointReader, manifest: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Hashes of a checkpoint's weight files, compared with those that quantkit.json has of them.

    Returns:
        SHA-256 by file name, and a note where there was nothing to compare with.
    Raises:
        CheckpointError: a file is not the one that was written.
    """
    written = manifest.get("files")
    known: dict[str, Any] = written if isinstance(written, dict) else {}
    hashes = {}
    for file in reader.files:
        entry = known.get(file.name)
        size = file.stat().st_size
        if isinstance(entry, dict) and entry.get("bytes") != size:
            raise _changed(file, f"it has {size} bytes, {shorten(entry.get('bytes'))} were written")
        hashes[file.name] = _digest(file)
        if isinstance(entry, dict) and entry.get("sha256") != hashes[file.name]:
            raise _changed(
                file, f"its SHA-256 is {hashes[file.name][:12]}..., {shorten(entry.get('sha256'), 15)} was written"
            )
        if known and not isinstance(entry, dict):
            raise _changed(file, "quantkit.json does not name it")
    if known:
        return hashes, ()
    return hashes, (f"{reader.path.name} has no {MANIFEST} with hashes, so its files could not be checked.",)


def _gates(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Those of the recipe."""
    gates = manifest.get("gates") or []
    if not isinstance(gates, list) or not all(isinstance(gate, str) for gate in gates):
        raise GateError(f"{path / MANIFEST}: gates is {shorten(gates)}, not a list of texts; give --gate")
    return gates


def _changed(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file} changed since the checkpoint was made: {what}; copy it again or compress anew")


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _baseline(path: Path, given: str | Path | None, made: Mapping[str, Any]) -> tuple[str, Path]:
    """Name and directory of the original."""
    if given is not None:
        folder = resolve(str(given))
        return "demo model" if folder == DEMO_MODEL else str(given), folder
    model = made.get("model")
    if model == "demo":
        return "demo model", DEMO_MODEL
    if not isinstance(model, str):
        raise ModelError(f"{path} does not say what it was made from; give the original as --baseline")
    if not Path(model).is_dir():  # and what a file names is not fetched from the hub without the user's word
        raise ModelError(f"{path} was made from {shorten(model)}, which is not here; give it as --baseline")
    return model, resolve(model)


def _check_vocabularies(reader: CheckpointReader, original: CheckpointReader) -> None:
    """Refuse models whose token ids mean different things."""
    sizes = reader.config.get("vocab_size"), original.config.get("vocab_size")
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"baseline {original.path} has a vocabulary of {sizes[1]} tokens, {reader.path} one of {sizes[0]}; "
            "give the model that the checkpoint was made from"
        )
    check_same_language(str(reader.path), str(original.path))


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    return read_json(file, CheckpointError, "copy or delete it") if file.exists() else {}


def _section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name)
    return section if isinstance(section, dict) else {}


def check_output(path: Path) -> None:
    """Refuse a place for reports that is a file.

    Raises:
        OutputError: it is.
    """
    if path.exists() and not path.is_dir():
        raise OutputError(f"output {path} is a file; give a directory for the report")
