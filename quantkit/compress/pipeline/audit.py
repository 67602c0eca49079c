"""Checks that a checkpoint must pass before it gets its final name. If one fails, quantkit has a defect."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.calibration.errors import row_blocks
from quantkit.compress.pipeline.plan import Plan
from quantkit.errors import AuditError
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LayerRecord, LinearRecord

_BESIDE = (".bias", "_shape")  # endings of a linear's tensors that are not part of its quantized weight


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
        raise AuditError(f"{prefix} takes {num_bytes} bytes, planned: {planned} and up to {padding} of padding")


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
        if stored != round(record.bits_per_weight * math.prod(record.shape) / 8):
            raise AuditError(f"{name} takes {stored} bytes on disk, not {record.bits_per_weight} bits per weight")


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
    """Return the SHA-256 of a tensor's bytes. Readers cut a tensor into different chunks."""
    digest = hashlib.sha256()
    for chunk in reader.chunks(name):
        digest.update(chunk)
    return digest.digest()
