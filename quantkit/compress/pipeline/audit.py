"""What must hold of a checkpoint before it gets its final name. A breach is a defect of quantkit, not of the input."""

from __future__ import annotations

from pathlib import Path

import torch

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline.plan import Plan
from quantkit.errors import AuditError
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LayerRecord


def check_weight(prefix: str, weight: QuantizedTensor) -> None:
    """No scale is zero, NaN or infinite, and no code is outside its type."""
    scale = weight.scale.float()
    if not bool(((scale != 0) & torch.isfinite(scale)).all()):
        raise AuditError(f"{prefix}: a scale is zero or not finite")
    codes, dtype = weight.codes.float(), weight.scheme.dtype
    if not bool(((codes >= dtype.minimum) & (codes <= dtype.maximum)).all()):
        raise AuditError(f"{prefix}: a code is outside {dtype.name}")


def audit_checkpoint(folder: Path, plan: Plan, records: list[LayerRecord]) -> None:
    """Every target is quantized, everything else is as it was, and the size is what was planned.

    Args:
        folder: the assembled checkpoint.
        plan: what was to be done.
        records: of all layers.
    """
    reader = ModelReader(folder, plan.family)
    _check_targets(plan, reader, records)
    for name in plan.ignored:
        source = plan.reader.info(f"{name}.weight") if f"{name}.weight" in plan.reader else None
        kept = reader.info(f"{name}.weight") if f"{name}.weight" in reader else None
        if (source is None) != (kept is None) or (source and kept and source.dtype != kept.dtype):
            raise AuditError(f"{name} was to be ignored, but its weight is {kept and kept.dtype}")
    _check_tied(plan, reader)
    plan.format.check_config(reader.config, plan.linears, plan.ignored)


def _check_targets(plan: Plan, reader: CheckpointReader, records: list[LayerRecord]) -> None:
    wanted = set(plan.linears)
    done = {f"{layer.name}.{linear.name}": linear for layer in records for linear in layer.linears}
    if wanted != set(done):
        raise AuditError(
            f"quantized {len(done)} linears where {len(wanted)} were planned: {sorted(wanted ^ set(done))[:3]}"
        )
    for name, scheme in plan.linears.items() if plan.format.keeps_codes else ():
        shape = done[name].shape
        planned, padding = planned_bytes(scheme, shape, plan.scale_dtype[name])
        written = written_bytes(reader, name)
        if not planned <= written <= planned + padding:
            raise AuditError(f"{name} takes {written} bytes on disk, planned {planned:.0f} and {padding} of padding")


def planned_bytes(scheme: LinearScheme, shape: tuple[int, int], scale_dtype: torch.dtype) -> tuple[float, int]:
    """Bytes that a scheme implies for codes, scales and zero points, and the most that a format may add to them.

    Scales of inputs count too. What a format adds is what packing into words leaves unused, and zero points where it
    stores them though they are constant.
    """
    weight, activation, groups = scheme.weight, scheme.activation, scheme.weight.num_groups(shape[1])
    dtype = weight.dtype
    # Integers beside integer inputs lie a byte each, ready for the product.
    code_bits = 8 if activation is not None and activation.dtype.kind == "int" else dtype.bits
    scale_bits = 8 if dtype.scale != "float" else 8 * scale_dtype.itemsize
    scales = weight.num_scale_rows(shape[0]) * groups
    zeros = 0 if weight.symmetric else dtype.bits * groups * shape[0]
    constant = dtype.bits * groups * shape[0] // 8 if weight.symmetric else 0
    beside = 4 * (dtype.scale == "e4m3")
    if activation is not None and activation.is_calibrated:
        beside += 4 if activation.dtype.scale == "e4m3" else scale_dtype.itemsize
    size = (code_bits * shape[1] * shape[0] + scale_bits * scales + zeros) / 8 + beside
    return size, 4 * (shape[0] + groups) + constant


def written_bytes(reader: CheckpointReader, linear: str) -> int:
    """Bytes of a linear's codes, scales and zero points in the files."""
    beside = tuple(f"{linear}.{local}" for local in ("bias", "weight_shape", "g_idx"))
    names = [name for name in reader.names if name.startswith(f"{linear}.") and name not in beside]
    return sum(reader.info(name).num_bytes for name in names)


def _check_tied(plan: Plan, reader: CheckpointReader) -> None:
    head, embedding = f"{plan.family.head}.weight", f"{plan.family.embedding}.weight"
    for name in (head, embedding):
        if (name in plan.reader) != (name in reader):
            raise AuditError(f"{name} was {'lost' if name in plan.reader else 'added'}; tied weights would break")
    for name in plan.rest:
        if any(a != b for a, b in zip(plan.reader.chunks(name), reader.chunks(name), strict=True)):
            raise AuditError(f"{name} is not what it was in the source")
    if plan.reader.config.get("tie_word_embeddings") != reader.config.get("tie_word_embeddings"):
        raise AuditError("tie_word_embeddings changed")
