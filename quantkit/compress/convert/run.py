"""Convert a checkpoint to another format, one decoder layer in memory at a time; read the result back and compare it.

The output is written under a temporary name and renamed after all checks, so the final name never holds a partial
output.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.adapter import ADAPTER_ENTRY
from quantkit.checkpoints.folder import RUN, read_config_file
from quantkit.compress.checkpoint_writer import Shard, write_rest
from quantkit.compress.convert.gguf_writer import Written, write_gguf
from quantkit.compress.convert.source import Source, open_source
from quantkit.compress.convert.target import Target, as_written, kv_cache_scheme, target_for
from quantkit.errors import CheckpointError, SchemeError, located
from quantkit.formats import REGISTRY as FORMATS
from quantkit.formats import SECTIONS
from quantkit.inspection import merged_digests, read_manifest
from quantkit.output.staging import MANIFEST, MERGED, check_apart, check_checkpoint, check_gguf, open_stage
from quantkit.output.writer import copy_tensors, write_json, writing
from quantkit.results import SCHEMA_VERSION
from quantkit.safety.untrusted import read_object

Progress = Callable[[int, int, str], None]
_Layout = tuple[dict[str, str], dict[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Result of a conversion.

    Args:
        source: the checkpoint that was read.
        source_format: format of the source.
        output: directory or file that was written.
        format: format of the output.
        num_linears: number of quantized linears; all were compared with the source after writing.
        source_bytes, output_bytes: size of all tensors; for GGUF, `output_bytes` is the size of the file.
        stored: number of quantized linears, keyed by scheme; for GGUF, number of all matrices, keyed by block type.
        notes: remarks about the output for the user.
    """

    source: str
    source_format: str
    output: str
    format: str
    num_linears: int
    source_bytes: int
    output_bytes: int
    stored: dict[str, int]
    notes: tuple[str, ...] = ()


def convert(
    checkpoint: str | Path,
    to: str,
    output: str | Path,
    *,
    type_name: str | None = None,
    embedding: str | None = None,
    entries: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Conversion:
    """Write the codes of a checkpoint in another format.

    Args:
        checkpoint: directory or GGUF file of a quantized model; for "gguf", also the directory of an unquantized model.
        to: name of the format to write.
        output: directory to create; for "gguf", a file.
        type_name: for "gguf" and an unquantized model, the type of the matrices: a key of `formats.gguf.MATRIX_BLOCKS`.
        embedding: for "gguf", the type to which an unquantized embedding and head are rounded; None = see `write_gguf`.
        entries: for "gguf", further metadata of the file.
        overwrite: replace an existing output.
        progress: called before each layer ("gguf": see `write_gguf`) with the number of finished layers, the
            number of all layers, and a layer's name.
    Raises:
        SchemeError: the format cannot store the checkpoint exactly; the message says why, and which formats can.
        ModelError, CheckpointError: the checkpoint cannot be read.
        OutputError: the output exists already or cannot be written.
    """
    source, output, format_ = open_source(Path(checkpoint)), Path(output), FORMATS.load(to)
    check_apart(output, source.reader.path)
    write: Callable[[Path], Written]
    if format_.suffix:  # one file
        further = {**_adapter_entry(source), **(entries or {})}
        write = partial(
            write_gguf, source, type_name=type_name, embedding=embedding, entries=further, progress=progress
        )
    elif type_name is not None:
        raise SchemeError(f"--type {type_name} is only for gguf; {to} keeps the codes unchanged, so leave --type out")
    else:
        # Raises here, before anything is created, if the target cannot store the source.
        write = partial(write_checkpoint, source, target_for(source, format_), progress=progress)
    check = check_gguf if format_.suffix else check_checkpoint
    with (
        open_stage(output, "convert", overwrite=overwrite, check=check) as stage,
        torch.inference_mode(),
        writing(stage.work.path),
    ):
        draft = stage.work.path / output.name if format_.suffix else stage.work.checkpoint
        written = write(draft)
        # If a file changed while it was read, the output could mix two checkpoints.
        source.reader.check_unchanged()
        stage.promote(draft)
    return Conversion(
        source=str(checkpoint),
        source_format=source.format.name,
        output=str(output),
        format=format_.name,
        source_bytes=source.reader.num_bytes,
        **asdict(written),
    )


def _adapter_entry(source: Source) -> dict[str, str]:
    digests = merged_digests(source.reader.path)
    return {ADAPTER_ENTRY: ",".join(digests)} if digests else {}


def write_checkpoint(
    source: Source,
    target: Target,
    folder: Path,
    entries: Mapping[str, Any] | None = None,
    model: str | None = None,
    progress: Progress = lambda done, total, name: None,
) -> Written:
    """Write all files of a checkpoint, and check them.

    Args:
        source: the checkpoint to read.
        target: description of the checkpoint to write.
        folder: folder to create.
        entries: entries to add to quantkit.json; None = the format of the source.
        model: the model that the checkpoint was made from, for quantkit-run.json; None = the one that the source names.
        progress: see `convert`.
    """
    folder.mkdir()
    weight_map, digests = _write_layers(source, target, folder, progress)
    size = write_rest(folder, source.reader, weight_map, _config(source, target))
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}
    _write_manifest(source, target, folder, {"files": files, **(entries or {"converted_from": source.format.name})})
    model = model or read_manifest(source.reader.path, RUN).get("model")
    if isinstance(model, str):
        write_json(folder / RUN, {"schema_version": SCHEMA_VERSION, "model": model})
    target.format.check_config(read_config_file(folder), target.linears, target.ignored)
    stored = dict(Counter(scheme.describe() for scheme in target.linears.values()))
    return Written(num_linears=len(target.linears), output_bytes=size, stored=stored)


def _write_layers(source: Source, target: Target, folder: Path, progress: Progress) -> _Layout:
    """Write one file per layer, and one file for all other modules.

    Returns:
        The file name of each tensor, and the SHA-256 of each file.
    """
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    layers = list(source.layers())
    for number, (layer, modules) in enumerate(layers):
        progress(number, len(layers), layer or "the rest")
        file = f"model-{number + 1:05d}-of-{len(layers):05d}.safetensors"
        names = [name for module in modules for name in source.names(module)]
        if any(module in target.linears for module in modules) or any(name in source.changed for name in names):
            digests[file], names = _shard(source, target, modules).write(folder / file)
        else:
            digests[file] = copy_tensors(source.reader, names, folder / file)
        weight_map |= dict.fromkeys(names, file)
    progress(len(layers), len(layers), "done")
    return weight_map, digests


def _shard(source: Source, target: Target, modules: list[str]) -> Shard:
    """Return the shard of one layer, with its linears encoded in the target's format."""
    shard = Shard(target.format)
    for module in modules:
        if module not in target.linears:
            shard.tensors |= {name: source.tensor(name) for name in source.names(module)}
            continue
        if "bias" in source.modules[module]:
            shard.tensors[f"{module}.bias"] = source.tensor(f"{module}.bias")
        if source.dense is not None and not target.format.keeps_codes:
            shard.tensors[f"{module}.weight"] = source.dense.tensor(f"{module}.weight")
            continue
        scheme, decoded = target.linears[module], source.weight(module)
        with located(module):
            weight = as_written(decoded, scheme, target.format)
            target.format.check(replace(scheme, weight=weight.scheme), weight.shape)
            if not target.format.keeps_codes:  # round the exact float32 values once, to the model's own dtype
                weight = replace(weight, value_dtype=_model_dtype(source))
            shard.add_linear(module, weight, scheme)
    return shard


def _model_dtype(source: Source) -> torch.dtype | None:
    name = source.reader.config.get("dtype") or source.reader.config.get("torch_dtype")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _config(source: Source, target: Target) -> dict[str, Any]:
    kept = {key: value for key, value in source.reader.config.items() if key not in SECTIONS}
    described = target.format.config(target.linears, target.ignored, group_order=target.group_order)
    scales = kv_cache_scheme(source)
    if scales is not None and "quantization_config" in described:
        described["quantization_config"]["kv_cache_scheme"] = scales
    return {**kept, **target.format.model_config(kept), **described}


def _write_manifest(source: Source, target: Target, folder: Path, entries: Mapping[str, Any]) -> None:
    """Write quantkit.json: the source's manifest with the new format, or a new one if the source's is unreadable."""
    try:
        manifest = read_object(source.reader.path / MANIFEST, CheckpointError)
        manifest["result"]["format"] = target.format.name
    except (CheckpointError, KeyError, TypeError):
        manifest = {"result": {"format": target.format.name}}
    if digests := merged_digests(source.reader.path):  # of a GGUF file too
        manifest[MERGED] = list(digests)
    if type(manifest.get("schema_version")) is not int:
        manifest["schema_version"] = SCHEMA_VERSION
    write_json(folder / MANIFEST, {**manifest, **entries})
