"""Turn finished layers into a checkpoint.

`finish_run` writes all other tensors and files, checks the whole checkpoint, and records the result in its manifest.
`made_by` returns the entries `quantkit.*` with which a GGUF file records how it was made.
"""

import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.mtp_heads import unquantized_prefixes
from quantkit.checkpoints.reader import CheckpointReader, file_digest
from quantkit.compress.algorithms.base import reorders_groups
from quantkit.compress.checkpoint_writer import write_rest
from quantkit.compress.pipeline.data_free import write_towers
from quantkit.compress.pipeline.kv_cache import check_cache_written, with_cache
from quantkit.compress.pipeline.layers import shard_name
from quantkit.compress.pipeline.loadability import check_loads
from quantkit.compress.pipeline.plan import Plan
from quantkit.compress.pipeline.state import CompressionRun, RunState, plain_digest
from quantkit.compress.recipe import Recipe
from quantkit.demo import bundled_calibration
from quantkit.distribution import own_version
from quantkit.errors import AuditError, CheckpointError
from quantkit.formats.base import unquantized_modules
from quantkit.machine.system import peak_bytes
from quantkit.numerics.scheme import LinearScheme
from quantkit.output.staging import MANIFEST, MERGED
from quantkit.output.writer import copy_tensors, write_json
from quantkit.results import AdapterRecord, CompressionResult, LayerRecord, LinearRecord
from quantkit.safety.untrusted import read_object

_BESIDE = (".bias", "_shape")  # endings of a linear's tensors that are not part of its quantized weight


def finish_run(run: CompressionRun, started: float) -> CompressionResult:
    """Write everything outside the decoder layers, check the checkpoint, and return the result.

    Args:
        run: a run whose layers are all done; the files with all other tensors are added to its state.
        started: time at which the run started, from `time.perf_counter`.
    Raises:
        AuditError: the checkpoint differs from the plan.
        CheckpointError: a file of the source has changed during the run.
        GateFailure: transformers would load other values than were written.
    """
    finishing = time.perf_counter()
    plan, state, folder = run.plan, run.state, run.work.checkpoint
    tower, mtp = write_towers(plan, state, folder)
    beside = tuple(linear for record in (tower, mtp) if record for linear in record.linears)
    size = _write_rest(plan, state, folder, beside)
    plan.reader.check_unchanged()
    warnings = (*run.warnings, *_check_loads(plan, folder))
    phases: dict[str, float] = {}
    # The time of layers that an earlier run finished does not count.
    for name, taken in (item for record in state.records[run.resumed :] for item in record.seconds.items()):
        phases[name] = phases.get(name, 0.0) + taken
    phases["prepare"] = finishing - started - sum(phases.values())
    phases["finish"] = time.perf_counter() - finishing
    result = replace(_describe(run, warnings, size, phases, beside), tower=tower, mtp=mtp)
    _write_manifest(plan, state, folder, result)
    return result


def _write_rest(plan: Plan, state: RunState, folder: Path, towers: tuple[LinearRecord, ...]) -> int:
    """Write the tensors that are copied unchanged, and the other files. Check the whole checkpoint, and return the size
    of all its tensors in bytes.
    """
    stored, shard = plan.reader.stored_name, shard_name(plan.skeleton.num_layers, plan.skeleton.num_layers)
    state.shards[shard] = copy_tensors(plan.reader, plan.rest, folder / shard, stored)
    state.weight_map |= dict.fromkeys(map(stored, plan.rest), shard)
    described = plan.format.config(
        *_with_stored_names(plan),
        group_order=reorders_groups(plan.recipe.steps.values()),
        decode_at_load=plan.family.decode_at_load,
    )
    config = with_cache(plan.recipe, plan.reader.config, described, state.records)
    size = write_rest(folder, plan.reader, state.weight_map, config)
    audit_checkpoint(folder, plan, state.records, towers)
    check_cache_written(folder, plan.recipe, config, state.records)
    return size


def _check_loads(plan: Plan, folder: Path) -> list[str]:
    """Check that transformers loads the checkpoint, see `check_loads`. Return warnings that the plan lacks."""
    if plan.format.suffix:  # users load the file that is made from the folder, not the folder
        return []
    # Do not check the experts if the plan has already warned that they do not load. With `decode_at_load`, loaders
    # decode all weights, so no rule applies to experts alone.
    said = not plan.family.decode_at_load and bool(plan.format.check_model(plan.family, plan.layers))
    note = check_loads(folder, plan.reader, plan.format, plan.linears, experts=not said)
    return [note] if note and note not in plan.warnings else []


def audit_checkpoint(
    folder: Path, plan: Plan, records: Sequence[LayerRecord], towers: Sequence[LinearRecord] = ()
) -> None:
    """Check that a complete checkpoint matches the plan and the records.

    The quantized linears must be the planned ones, with their recorded sizes. Ignored linears must keep their dtype,
    and tensors that are copied unchanged must equal those of the source.

    Args:
        folder: folder of the checkpoint.
        plan: plan of the run.
        records: records of all layers.
        towers: records of the linears that are quantized outside the layers, with full names.
    Raises:
        AuditError: the checkpoint differs; the message says where.
    """
    reader = ModelReader(folder, plan.family)
    done = {f"{layer.name}.{linear.name}": linear for layer in records for linear in layer.linears}
    _check_targets(plan, reader, done | {linear.name: linear for linear in towers})
    for name in plan.ignored:
        weight = f"{name}.weight"
        source, kept = (one.info(weight).dtype if weight in one else None for one in (plan.reader, reader))
        if source != kept:
            raise AuditError(
                f"{name} must stay unquantized, but its weight is {kept or 'missing'} instead of {source}; "
                "please report this defect of quantkit"
            )
    _check_tied(plan, reader)
    plan.format.check_config(reader.config, plan.linears, plan.ignored)


def _check_targets(plan: Plan, reader: CheckpointReader, done: Mapping[str, LinearRecord]) -> None:
    planned = set(plan.linears)
    if planned != set(done):
        raise AuditError(
            f"{len(done)} linears were quantized, but {len(planned)} were planned; the differences include "
            f"{', '.join(sorted(planned ^ set(done))[:3])}; please report this defect of quantkit"
        )
    for name, record in done.items() if plan.format.keeps_codes else ():
        names = [other for other in reader.names if other.startswith(f"{name}.") and not other.endswith(_BESIDE)]
        stored = sum(reader.info(other).num_bytes for other in names)
        expected = round(record.bits_per_weight * math.prod(record.shape) / 8)
        if stored != expected:
            raise AuditError(
                f"{name} takes {stored} bytes on disk, but its recorded {record.bits_per_weight} bits per weight take "
                f"{expected}; please report this defect of quantkit"
            )


def _check_tied(plan: Plan, reader: CheckpointReader) -> None:
    head, embedding = f"{plan.family.head}.weight", f"{plan.family.embedding}.weight"
    for name in (head, embedding):
        if (name in plan.reader) != (name in reader):
            has, lacks = ("source", "checkpoint") if name in plan.reader else ("checkpoint", "source")
            raise AuditError(
                f"the {lacks} lacks {name}, which the {has} has, so loaders would tie weights differently; "
                "please report this defect of quantkit"
            )
    for name in plan.rest:
        if _digest(plan.reader, name) != _digest(reader, name):
            raise AuditError(f"tensor {name} differs from the source; please report this defect of quantkit")
    if plan.reader.config.get("tie_word_embeddings") != reader.config.get("tie_word_embeddings"):
        raise AuditError(
            "tie_word_embeddings in config.json differs from the source; please report this defect of quantkit"
        )


def _digest(reader: CheckpointReader, name: str) -> bytes:
    """Return the SHA-256 of a tensor's bytes, whatever the chunks in which the reader yields them."""
    digest = hashlib.sha256()
    for chunk in reader.chunks(name):
        digest.update(chunk)
    return digest.digest()


def _with_stored_names(plan: Plan) -> tuple[dict[str, LinearScheme], tuple[str, ...]]:
    """Return the plan's schemes and ignored modules, under module names and, if these differ, under the files' names.

    transformers, and loaders that copy transformers' modules, use module names. Other loaders use the names in the
    files, which may follow an older naming.

    Returns:
        Scheme of each quantized linear, and the names of the unquantized linears; see `Format.config`.
    """
    reader = plan.reader
    schemes = plan.linears | {reader.stored_name(f"{name}.")[:-1]: scheme for name, scheme in plan.linears.items()}
    others = [*plan.ignored, *(reader.stored_name(f"{name}.")[:-1] for name in plan.ignored)]
    for name in reader.names:
        if not plan.skeleton.has_parameter(name):  # e.g. MTP: the model lacks the part or names it differently
            others += unquantized_modules(name, reader.info(name).shape)
    others += unquantized_prefixes(reader.config, reader.names, schemes)
    return schemes, tuple(dict.fromkeys(name for name in others if name not in schemes))


def _describe(
    run: CompressionRun,
    warnings: tuple[str, ...],
    size: int,
    seconds: Mapping[str, float],
    beside: tuple[LinearRecord, ...],
) -> CompressionResult:
    plan, state = run.plan, run.state
    inside = [linear for record in state.records for linear in record.linears]
    linears = [*inside, *beside]
    weights, decoder = (sum(math.prod(linear.shape) for linear in group) for group in (linears, inside))
    bits = sum(linear.bits_per_weight * math.prod(linear.shape) for linear in linears)
    others = _unquantized(plan)
    return CompressionResult(
        model=plan.model,
        output=str(plan.output),
        recipe=plan.recipe.name,
        format=plan.recipe.format,
        num_layers=len(state.records),
        num_quantized=len(linears),
        ignored=plan.ignored,
        bits_per_weight=bits / weights if weights else 8.0 * plan.source_dtype.itemsize,
        source_bytes=plan.reader.num_bytes,
        output_bytes=size,
        layers=state.records,
        warnings=warnings,
        seconds={phase: round(value, 3) for phase, value in seconds.items()},
        peak_bytes=peak_bytes(),
        resumed_layers=run.resumed,
        calibration=run.samples.record if run.samples else None,
        quantized_share=round(decoder / (decoder + sum(others.values())), 4) if decoder else 0.0,
        unquantized=others,
        adapter=_adapter_record(plan),
    )


def _adapter_record(plan: Plan) -> AdapterRecord | None:
    """Return the record of the adapter that this run merged, or else of the adapter that was merged into the source.

    None if neither exists.
    """
    from quantkit.inspection import merged_record  # imports the gguf package

    if (adapter := plan.adapter) is None:
        return merged_record(plan.source.path)
    return AdapterRecord(
        sha256=adapter.digest,
        rank=adapter.rank,
        num_linears=len(adapter.updates),
        base=adapter.base,
        path=str(adapter.path.absolute()),
    )


def _unquantized(plan: Plan) -> dict[str, int]:
    """Count the elements of unquantized matrices over all layers, keyed by name in the layer; largest first.

    A number inside a name, such as an expert's, becomes `*`, so all experts count together.
    """
    counts: Counter[str] = Counter()
    prefixes = tuple(f"{plan.skeleton.layer_name(i)}." for i in range(plan.skeleton.num_layers))
    for name in plan.reader.names:
        shape = plan.reader.info(name).shape
        if name.startswith(prefixes) and len(shape) > 1 and name.removesuffix(".weight") not in plan.linears:
            local = name.removeprefix(f"{plan.family.layers}.").partition(".")[2].removesuffix(".weight")
            counts[re.sub(r"\.\d+(?=\.|$)", ".*", local)] += math.prod(shape)
    return dict(counts.most_common())


def _write_manifest(plan: Plan, state: RunState, folder: Path, result: CompressionResult) -> None:
    """Write `quantkit.json`, which describes the result and is equal in equal runs, and `quantkit-run.json`, which adds
    folder names, times and memory.
    """
    from quantkit.inspection import merged_digests  # imports the gguf package

    write_json(folder / "quantkit-run.json", result.to_dict())
    steady = result.to_dict()  # without folder names and times, so that it is equal in all runs with the same identity
    for key in ("model", "output", "seconds", "peak_bytes", "resumed_layers"):
        del steady[key]
    if result.adapter is not None:
        del steady["adapter"]["path"]
    for layer in steady["layers"]:
        del layer["seconds"], layer["peak_bytes"]
    manifest: dict[str, Any] = {
        "schema_version": result.schema_version,
        "recipe": plan.recipe.source,
        "gates": list(plan.recipe.gates),
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
            for name, digest in sorted(state.shards.items())
        },
        "identity": state.identity,
        "identity_sha256": plain_digest(state.identity),
        "result": steady,
    }
    own = () if plan.adapter is None else (plan.adapter.digest,)
    if digests := (*merged_digests(plan.source.path), *own):
        manifest[MERGED] = list(digests)
    if plan.discovery is not None:
        manifest["discovered"] = plan.discovery.record
    write_json(folder / MANIFEST, manifest)


def made_by(recipe: Recipe, model: Path, codes: Path) -> dict[str, str | int | float]:
    """Return the `quantkit.*` entries with which a GGUF file records how it was made.

    Args:
        recipe: the recipe that made the file. Its entry names other files without their folders.
        model: folder of the original model.
        codes: finished folder of the run, whose manifest has the digest of the calibration tokens.
    Returns:
        `quantkit.version` and `quantkit.recipe` (YAML that `quantkit quantize` reads). With calibration data, also
        `quantkit.calibration.sha256` (of the text file) and `quantkit.calibration.tokens_sha256`. If a search
        wrote the recipe, also `quantkit.measured.*`; see `recipe.schema.Measured`. `convert` adds entries about
        adapters.
    """
    entries: dict[str, str | int | float] = {
        "quantkit.version": own_version("unknown"),
        "quantkit.recipe": _yaml_of(recipe),
    }
    identity = read_object(codes / MANIFEST, CheckpointError)["identity"]
    if recipe.calibration is not None:
        data = recipe.calibration.data
        file = bundled_calibration(model) if data == "bundled" else Path(data)
        if file.is_file():
            entries["quantkit.calibration.sha256"] = file_digest(file)
        entries["quantkit.calibration.tokens_sha256"] = str(identity["calibration"])
    return entries | measured_entries(recipe)


def measured_entries(recipe: Recipe) -> dict[str, str | int | float]:
    """Return the entries `quantkit.measured.*`, see `made_by`; none if no search wrote the recipe."""
    return {f"quantkit.measured.{key}": value for key, value in (recipe.measured or {}).items()}


def _yaml_of(recipe: Recipe) -> str:
    """Return a recipe as YAML. File names are written without their folders, which are private."""
    source: dict[str, Any] = dict(recipe.source)
    if recipe.calibration is not None and Path(recipe.calibration.data).is_file():
        source["calibration"] = {**source["calibration"], "data": Path(recipe.calibration.data).name}
    if recipe.imatrix is not None:
        source["imatrix"] = Path(recipe.imatrix).name
    text: str = yaml.safe_dump(source, sort_keys=False, width=10**6, allow_unicode=True)
    return text
