"""Check that a checkpoint and its original belong together, and that the checkpoint's files have not changed.

The checks read configs, headers, tokenizers and hashes before a model is loaded.
"""

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.adapter import adapter_digest
from quantkit.checkpoints.folder import RUN, find_baseline, resolve
from quantkit.checkpoints.reader import CheckpointReader, file_digest
from quantkit.compress.algorithms.base import moves_scales
from quantkit.compress.pipeline.state import describe_versions
from quantkit.compress.recipe.sections import build_steps
from quantkit.distribution import installed_version
from quantkit.errors import CheckpointError, GateError, ModelError, OutputError, RecipeError, ReportError, RequestError
from quantkit.evaluate.loading import check_same_language
from quantkit.inspection import inspect, merged_digests, read_manifest, section
from quantkit.machine.devices import processor_name
from quantkit.output.staging import MANIFEST, check_text, open_stage
from quantkit.output.writer import writing
from quantkit.report.files import SIGNS
from quantkit.results import CompressionResult, Environment, ModelFacts, Report
from quantkit.results.gates import parse_gate
from quantkit.runtime.config import adapter_folders
from quantkit.safety.untrusted import shorten
from quantkit.upload import card_entries


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A checkpoint and its original to compare.

    Args:
        path, baseline: directories of the checkpoint and its original.
        baseline_name: name of the original, as given.
        manifest: contents of quantkit.json; empty if there is none.
        made: contents of quantkit-run.json; empty if there is none.
        gates: gates to check.
        gates_given: whether the user named the gates; otherwise they come from the recipe.
        has_adapter: whether an adapter was merged into the checkpoint, by this run or an earlier one.
        adapter: folder of this adapter, to be merged into the original too; None = the original is used unchanged.
        hashes: SHA-256 of the checkpoint's files, keyed by name.
        notes: unusual facts, for the user.
    """

    path: Path
    baseline: Path
    baseline_name: str
    manifest: dict[str, Any]
    made: dict[str, Any]
    gates: tuple[str, ...]
    hashes: dict[str, str]
    notes: tuple[str, ...]
    gates_given: bool = False
    has_adapter: bool = False
    adapter: Path | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of linears that the recipe leaves unquantized."""
        patterns = section(self.manifest, "recipe").get("ignore")
        return tuple(map(str, patterns)) if isinstance(patterns, list) else ()

    @property
    def merging(self) -> dict[str, Any]:
        """Keywords of `LLM` that merge the adapter into the original."""
        return {} if self.adapter is None else {"merge": self.adapter}

    def check_engine(self, engine: Mapping[str, Any], *, vllm: bool, sensitivity: bool) -> None:
        """Refuse requests that are impossible with an adapter, before a model is loaded.

        Args:
            engine: keywords of `LLM` for both models.
            vllm: whether vLLM runs both models; vLLM cannot merge an adapter into the original.
            sensitivity: whether a sensitivity map is requested; models that compute with an adapter cannot have a map.
        Raises:
            RequestError: vLLM or the map is requested, and an adapter does not allow it.
        """
        if sensitivity and engine.get("adapters") and not self.has_adapter:
            raise RequestError(
                "a sensitivity map swaps parts between models, which is impossible with an adapter; leave out "
                "--adapter or --sensitivity"
            )
        if vllm and self.adapter is not None:
            raise RequestError(
                f"vLLM cannot merge the adapter {self.adapter} into the original; merge it with PEFT's "
                "merge_and_unload, and give the merged model as --baseline"
            )

    @property
    def moves_scales(self) -> bool | None:
        """Whether a step of the recipe moved scales between modules; None if quantkit.json does not say.

        Raises:
            ModelError: a step changed the whole model, so its linears cannot be used in the original.
        """
        steps = section(self.manifest, "recipe").get("steps")
        try:
            return moves_scales(build_steps(steps)) if isinstance(steps, list) else None
        except RecipeError:  # another version's step or option
            return None


def check_pair(
    checkpoint: str | Path,
    baseline: str | Path | None,
    gates: Iterable[str] | None = None,
    *,
    adapters: Mapping[str, str | Path] | Iterable[str] = (),
) -> Pair:
    """Find a checkpoint and its original, and check that they belong together.

    Args:
        checkpoint: directory of the compressed model.
        baseline: directory or hub id of the original; None = the model that quantkit-run.json names.
        gates: gates to check; None = the recipe's gates.
        adapters: the user's adapters, see `EngineConfig`. If one was merged into the checkpoint, it must be the first.
    Raises:
        ModelError, DataError: a model or a merged adapter does not exist, or the vocabularies differ.
        CheckpointError: a file is damaged, or has changed since it was written.
        GateError: a gate is not valid.
    """
    # Check the user's own gates first, so that a typo is reported before gigabytes are hashed.
    given = None if gates is None else check_gates(gates)
    path = resolve(str(checkpoint))
    reader = CheckpointReader(path)
    manifest, made = read_manifest(path), read_manifest(path, RUN)
    name, source = find_baseline(path, baseline, made)
    original = CheckpointReader(source)
    # Compared with itself, a checkpoint never shows a loss.
    if path.resolve() == source.resolve():
        raise ModelError(f"{path} is its own baseline; give the original model as --baseline")
    # Headers before hashes: a wrong pair is reported without reading the weights.
    _check_vocabularies(reader, original)
    merged, theirs = merged_digests(path), merged_digests(source)
    missing = [digest for digest in merged if digest not in theirs]
    adapter: Path | None = None
    of_adapter: tuple[str, ...] = ()
    if len(missing) > 1:  # `LLM` can merge only one
        of_adapter = (
            f"{len(missing)} adapters were merged into the checkpoint, but quantkit can merge only one into the "
            "original; the original is used without them.",
        )
    elif missing:
        named = next(iter(adapter_folders(adapters).values()), None) or section(made, "adapter").get("path")
        identity = section(manifest, "identity")
        # An adapter of an earlier run was not merged into the files that this run read.
        known = section(identity, "source") if identity.get("adapter") in missing else {}
        adapter, of_adapter = _adapter(path, missing[0], named, None if baseline is None else original, known)
    hashes, notes = check_files(reader, manifest)
    return Pair(
        path=path,
        baseline=source,
        baseline_name=name,
        manifest=manifest,
        made=made,
        gates=check_gates(_gates(path, manifest)) if given is None else given,
        hashes=hashes,
        notes=(*notes, *of_adapter),
        gates_given=given is not None,
        has_adapter=bool(merged),
        adapter=adapter,
    )


def _adapter(
    path: Path, digest: str, named: Any, given: CheckpointReader | None, known: Mapping[str, Any]
) -> tuple[Path | None, tuple[str, ...]]:
    """Return the folder of the adapter to merge into the original, and a note about it.

    Args:
        path: directory of the checkpoint.
        digest: digest of the adapter that was merged into it.
        named: folder of the adapter, as the user or quantkit-run.json says.
        given: reader of the original, if the user named it. If its files differ from those that the adapter was merged
            into, they are assumed to contain the adapter already, unless quantkit made them.
        known: digests of the files that the adapter was merged into, keyed by name; empty = unknown.
    Raises:
        ModelError: there is no such folder, or quantkit made the original without the adapter.
        CheckpointError: the folder holds a different adapter.
    """
    if given is not None and known and any(known.get(file.name) != file_digest(file) for file in given.files):
        if read_manifest(given.path):  # quantkit made it, and would have noted the adapter
            raise ModelError(
                f"{given.path} was made without the adapter that was merged into {path}; leave out --baseline, or give "
                "the original with the adapter merged"
            )
        note = (
            f"{given.path.name} has other weights than the model that the adapter was merged into, so quantkit assumes "
            "that the adapter is merged into it."
        )
        return None, (note,)
    if not isinstance(named, str | Path) or not named or not Path(named).is_dir():
        where = f", which is not at {shorten(named)}" if named else ""
        raise ModelError(f"{path} has a merged adapter (SHA-256 {digest[:12]}...){where}; give its folder as --adapter")
    folder = Path(named)
    if (own := adapter_digest(folder)) != digest:
        raise CheckpointError(
            f"{folder} is not the adapter that was merged into {path}: its SHA-256 is {own[:12]}... instead of "
            f"{digest[:12]}...; give the folder of that adapter as --adapter"
        )
    return folder, (f"The original is the model that the checkpoint was made from, with {folder.name} merged into it.",)


def check_gates(gates: Iterable[str]) -> tuple[str, ...]:
    """Check that gates are valid, and return them in canonical form, each once.

    Raises:
        GateError: a gate is not valid, or two gates on the same metric cannot both hold.
    """
    read = list(map(parse_gate, gates))
    for one in read:
        for other in read:
            same = (one.metric, one.subject) == (other.metric, other.subject)
            if same and one.operator[0] == ">" and other.operator[0] == "<" and one.limit > other.limit:
                raise GateError(f"gates {one.text!r} and {other.text!r} cannot both hold; remove one of them")
    return tuple(dict.fromkeys(gate.text for gate in read))


def check_files(reader: CheckpointReader, manifest: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Hash a checkpoint's weight files and compare them with the hashes in quantkit.json.

    Returns:
        SHA-256 of each file, keyed by file name; and notes: one if quantkit.json has no hashes, otherwise none.
    Raises:
        CheckpointError: a file has changed since it was written.
    """
    known = section(manifest, "files")
    if not known:
        note = f"{reader.path.name} has no {MANIFEST} with hashes, so quantkit cannot tell whether its files changed."
        # Hash the files nevertheless, so that the report identifies the files that it is about.
        return {file.name: file_digest(file) for file in reader.files}, (note,)
    return {file.name: _checked_digest(file, section(known, file.name)) for file in reader.files}, ()


def _checked_digest(file: Path, written: Mapping[str, Any]) -> str:
    size = file.stat().st_size
    if not written:
        raise _changed(file, f"{MANIFEST} does not name it")
    if written.get("bytes") != size:  # costs nothing, so it comes first
        raise _changed(file, f"it has {size} bytes instead of {shorten(written.get('bytes'))}")
    digest = file_digest(file)
    if written.get("sha256") != digest:
        raise _changed(file, f"its SHA-256 is {digest[:12]}... instead of {shorten(written.get('sha256'), 15)}")
    return digest


def _gates(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the gates of the recipe."""
    gates = manifest.get("gates") or []
    if not isinstance(gates, list) or not all(isinstance(gate, str) for gate in gates):
        raise GateError(f"{path / MANIFEST}: 'gates' must be a list of texts, not {shorten(gates)}; give --gate")
    return gates


def _changed(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file} has changed since the checkpoint was made: {what}; copy it again or compress again")


def _check_vocabularies(reader: CheckpointReader, original: CheckpointReader) -> None:
    """Refuse models whose token ids have different meanings."""
    sizes = reader.config.get("vocab_size"), original.config.get("vocab_size")
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"baseline {original.path} has a vocabulary of {sizes[1]} tokens, but {reader.path} has {sizes[0]}; "
            "give the model that the checkpoint was made from"
        )
    check_same_language(str(reader.path), str(original.path))


def check_output(path: Path) -> None:
    """Check that a report can be written to a path.

    Raises:
        OutputError: the path is a file, or a directory with a report file that quantkit did not write.
    """
    if path.exists() and not path.is_dir():
        raise OutputError(f"output {path} is a file; give a directory for the report")
    for name, sign in SIGNS.items():
        # lexists: a dangling link of that name belongs to somebody too, and must not be followed.
        if os.path.lexists(path / name):
            with writing(path):
                check_text(path / name, sign)


def model_facts(path: Path, name: str) -> ModelFacts:
    """Return sizes and number types of a model.

    Args:
        path: directory of the model.
        name: name for the report: the hub id, if the model has one.
    """
    summary = inspect(path)
    # The scheme is named after the largest kind of linear; embedding and head may be stored otherwise.
    linears = [row for row in summary.modules if row.kind not in ("embedding", "norms", "head")]
    largest = max(linears, key=lambda row: row.num_parameters, default=None)
    alike = ("format", "num_parameters", "num_bytes", "bits_per_weight", "architecture", "engines")
    return ModelFacts(
        name=name,
        path=str(path),
        **{fact: getattr(summary, fact) for fact in alike},
        scheme="" if largest is None else largest.stored_as,
        hub_id=name if "/" in name and not Path(name).exists() else None,
        license=_license(path),
    )


def compression(pair: Pair) -> CompressionResult | None:
    """Return the record of the compression; None if there is no record or another version of quantkit wrote it."""
    try:
        return CompressionResult.from_dict(pair.made)
    except ReportError:
        return None


def environment(pair: Pair, text: str, **said: Any) -> Environment:
    """Return the environment of the measurements.

    Args:
        pair: the pair; its checkpoint's hashes are combined into one.
        text: content of the text on which fidelity was measured; it is hashed too.
        said: the other fields of `Environment`.
    """
    # Sorted: the hash must not depend on the order in which shards are listed.
    files = "".join(f"{name} {pair.hashes[name]}\n" for name in sorted(pair.hashes))
    hashed = {"checkpoint": files, "text": text}
    hashes = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in hashed.items()}
    if isinstance(pair.manifest.get("identity_sha256"), str):
        hashes["made from"] = pair.manifest["identity_sha256"]
    tasks = installed_version("lm-eval", "")
    return Environment(
        versions={"python": platform.python_version(), **describe_versions(), **({"lm-eval": tasks} if tasks else {})},
        platform=f"{platform.system()} {platform.machine()}",
        cpu=processor_name(),
        num_threads=torch.get_num_threads(),
        hashes=hashes,
        **said,
    )


def _license(path: Path) -> str | None:
    """Return the license that the model's card names; None if there is no card or it names none."""
    with contextlib.suppress(ModelError, OSError):
        name = card_entries(path).get("license")
        return name if isinstance(name, str) and name else None
    return None


def set_aside(report: Report, path: Path) -> tuple[Report, Path]:
    """Rename a checkpoint that did not pass verification: append `.failed`, and replace any checkpoint of that name.

    Args:
        report: report about the checkpoint.
        path: directory of the checkpoint.
    Returns:
        The report with the new name, and the new directory.
    Raises:
        OutputError: `<path>.failed` exists but is not a checkpoint, or renaming fails.
    """
    target = path.with_name(f"{path.name}.failed")
    try:
        with open_stage(target, "quantize --verify", overwrite=True) as stage:
            stage.promote(path)
    except OutputError as error:
        raise OutputError(f"{path} failed verification but cannot be renamed to {target}: {error}") from error
    return replace(report, model=replace(report.model, name=target.name, path=str(target))), target
