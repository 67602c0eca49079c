"""Write a finished layer to a file: codes in the recipe's format, other tensors as in the source or as changed by a
step. Check each file, and then the whole checkpoint before it gets its final name; if a check fails, quantkit has a
defect.
"""

import hashlib
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.calibration.errors import row_blocks
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.checkpoint_writer import Shard
from quantkit.compress.pipeline.kv_cache import check_scales
from quantkit.compress.pipeline.plan import Plan
from quantkit.errors import AuditError
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LayerRecord, LinearRecord

_BESIDE = (".bias", "_shape")  # endings of a linear's tensors that are not part of its quantized weight


def shard_name(index: int, num_layers: int) -> str:
    """Return the file name of a layer. Index `num_layers` stands for all tensors outside the layers."""
    return f"model-{index + 1:05d}-of-{num_layers + 1:05d}.safetensors"


def write_layer(plan: Plan, index: int, layer: LayerContext, folder: Path) -> tuple[str, str, list[str]]:
    """Write and read back one layer's shard.

    Args:
        plan: plan of the run.
        index: number of the layer.
        layer: the finished layer; the bits per weight on disk are added to its records.
        folder: folder of the checkpoint.
    Returns:
        Name of the file, its SHA-256, and the names of its tensors.
    Raises:
        AuditError: the file does not hold the tensors that calibration computed.
    """
    shard = Shard(plan.format)
    scales = {f"{layer.name}.{key}": value for key, value in layer.chosen.cache_scales.items()}
    check_scales(scales)
    shard.tensors |= scales
    add_linears(plan, layer, shard)
    shard.tensors |= dict(_others(plan, layer, shard.tensors))
    return write_audited_shard(plan, shard_name(index, plan.skeleton.num_layers), shard, folder)


def add_linears(plan: Plan, layer: LayerContext, shard: Shard) -> None:
    """Encode the codes of a layer and add them to its shard.

    Args:
        plan: plan of the run.
        layer: the finished layer, or a part of it that has only some of the linears.
        shard: shard of the layer.
    Raises:
        AuditError: codes or scales are invalid, or a stored weight does not have its planned size.
    """
    for name, weight in layer.chosen.quantized.items():
        module, scheme = f"{layer.name}.{name}", layer.schemes[name]
        check_weight(module, weight)
        size = shard.add_linear(module, weight, scheme)
        if plan.format.keeps_codes:
            check_size(module, weight, scheme, size)
        record = layer.chosen.records[name]
        layer.chosen.records[name] = replace(record, bits_per_weight=8 * size / weight.codes.numel())


def write_audited_shard(plan: Plan, file: str, shard: Shard, folder: Path) -> tuple[str, str, list[str]]:
    """Write a complete shard and read it back; for the result, see `write_layer`."""
    return file, *shard.write(
        folder / file,
        layout=plan.reader.restore,
        read=lambda path: ModelReader.of(CheckpointReader.of_file(path), plan.family),
    )


def _others(plan: Plan, layer: LayerContext, written: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the unquantized tensors of a layer in the source's dtype."""
    parameters = {f"{layer.name}.{key}": value for key, value in layer.block.named_parameters()}
    quantized = {f"{layer.name}.{name}.weight" for name in layer.chosen.quantized}
    for name in plan.reader.names:
        if not name.startswith(f"{layer.name}.") or name in quantized or name in written:
            continue
        stored, present = plan.reader.tensor(name), parameters.get(name)
        # Compare in the compute dtype: a tensor that no step has changed is written bit for bit as in the source.
        if present is not None and not torch.equal(stored.to(present.dtype), present.cpu()):
            stored = present.to(stored.dtype).cpu()  # changed by a step
        yield name, stored


def check_weight(prefix: str, weight: QuantizedTensor) -> None:
    """Check that no scale is zero, NaN or infinite, and that no code is outside its type."""
    scale = weight.scale.float()
    if not bool(((scale != 0) & torch.isfinite(scale)).all()):
        raise AuditError(f"{prefix}: a scale is zero or not finite")
    dtype = weight.scheme.dtype
    for rows in row_blocks(*weight.codes.shape):
        low, high = weight.codes[rows].float().aminmax()
        if not dtype.minimum <= low <= high <= dtype.maximum:  # also true for NaN
            raise AuditError(f"{prefix}: a code is outside {dtype.name}")


def check_size(prefix: str, weight: QuantizedTensor, scheme: LinearScheme, num_bytes: int) -> None:
    """Check that a stored weight has its densely packed size plus at most a small overhead.

    The overhead allows for partly filled words, a group index, and constant zero points that the format stores.
    """
    (rows, width), groups, bits = weight.shape, weight.scale.shape[1], weight.scheme.dtype.bits
    planned = weight.stored_bytes + (0 if weight.input_scale is None else weight.input_scale.nbytes)
    if scheme.activation is not None and scheme.activation.dtype.kind == "int":
        planned += rows * width * (8 - bits) // 8  # with integer activations, each code is stored in a byte
    padding = 4 * (rows + groups + width) + (bits * groups * rows // 8 if weight.zero_point is None else 0)
    if not planned <= num_bytes <= planned + padding:
        raise AuditError(f"{prefix} takes {num_bytes} bytes, but {planned} to {planned + padding} were planned")


def audit_checkpoint(
    folder: Path, plan: Plan, records: Sequence[LayerRecord], towers: Sequence[LinearRecord] = ()
) -> None:
    """Check that every planned linear is quantized, everything else is unchanged, and sizes are as planned.

    Args:
        folder: the assembled checkpoint.
        plan: the run's plan.
        records: records of all layers.
        towers: records of the linears quantized outside the layers, with full names.
    """
    reader = ModelReader(folder, plan.family)
    done = {f"{layer.name}.{linear.name}": linear for layer in records for linear in layer.linears}
    _check_targets(plan, reader, done | {linear.name: linear for linear in towers})
    for name in plan.ignored:
        weight = f"{name}.weight"
        source, kept = (one.info(weight).dtype if weight in one else None for one in (plan.reader, reader))
        if source != kept:
            raise AuditError(f"{name} should have stayed unquantized, but its weight is {kept}")
    _check_tied(plan, reader)
    plan.format.check_config(reader.config, plan.linears, plan.ignored)


def _check_targets(plan: Plan, reader: CheckpointReader, done: Mapping[str, LinearRecord]) -> None:
    planned = set(plan.linears)
    if planned != set(done):
        raise AuditError(
            f"quantized {len(done)} linears, planned {len(planned)}; they differ in {sorted(planned ^ set(done))[:3]}"
        )
    for name, record in done.items() if plan.format.keeps_codes else ():
        names = [other for other in reader.names if other.startswith(f"{name}.") and not other.endswith(_BESIDE)]
        stored = sum(reader.info(other).num_bytes for other in names)
        expected = round(record.bits_per_weight * math.prod(record.shape) / 8)
        if stored != expected:
            raise AuditError(
                f"{name} takes {stored} bytes on disk, but {record.bits_per_weight} bits per weight take {expected}"
            )


def _check_tied(plan: Plan, reader: CheckpointReader) -> None:
    head, embedding = f"{plan.family.head}.weight", f"{plan.family.embedding}.weight"
    for name in (head, embedding):
        if (name in plan.reader) != (name in reader):
            has, lacks = ("source", "checkpoint") if name in plan.reader else ("checkpoint", "source")
            raise AuditError(f"the {lacks} lacks {name}, which the {has} has; tied weights would break")
    for name in plan.rest:
        if _digest(plan.reader, name) != _digest(reader, name):
            raise AuditError(f"{name} differs from the source")
    if plan.reader.config.get("tie_word_embeddings") != reader.config.get("tie_word_embeddings"):
        raise AuditError("tie_word_embeddings changed")


def _digest(reader: CheckpointReader, name: str) -> bytes:
    """Return the SHA-256 of a tensor's bytes. It does not depend on how a reader cuts the tensor into chunks."""
    digest = hashlib.sha256()
    for chunk in reader.chunks(name):
        digest.update(chunk)
    return digest.digest()
