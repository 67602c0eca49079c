"""A plan as plain data for --json: bytes, seconds and names, without rounding."""

from dataclasses import asdict
from typing import Any

from quantkit.planning.estimate import DeviceRow, Estimate
from quantkit.planning.limits import RESERVE, STEP_TOKENS, Floor
from quantkit.planning.memory import mtp_bytes
from quantkit.planning.recipes import RecipePlan
from quantkit.planning.shape import ModelShape


def to_document(plan: Estimate) -> dict[str, Any]:
    """Convert a whole plan to plain data.

    Args:
        plan: result of `estimate`.
    """
    return {
        "computed_not_measured": True,
        "model": _model(plan.shape),
        "assumptions": {
            "context": plan.context,
            "batch": plan.batch,
            "prompt": plan.prompt,
            "kept_tokens": plan.kept,
            "step_tokens": STEP_TOKENS,
            "reserve_share": RESERVE,
        },
        "weights": [
            {
                "scheme": row.scheme.name,
                **(asdict(row.size) if row.problem is None else {}),
                "problem": row.problem,
                "mtp_bytes": mtp_bytes(plan.shape, row.scheme),
            }
            for row in plan.weights
        ],
        "kv_cache": [
            {"type": row.form.name, "bytes_per_token": row.per_token, "bytes_per_sequence": row.per_sequence}
            for row in plan.caches
        ],
        "activation_bytes": plan.activations,
        "device": _device(plan),
        "fits": [_fits(row, plan.batch) for row in plan.on_device],
        "recipe": None if plan.recipe is None else _recipe(plan.recipe, plan),
        "remarks": list(plan.remarks),
    }


def _model(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "family": shape.model_type,
        "counted_from": shape.counted_from,
        "parameters": shape.num_parameters,
        "active_parameters": shape.active_parameters,
        "embedding_parameters": shape.embedding,
        "head_parameters": shape.head,
        "mtp_heads": len(shape.mtp),
        "mtp_parameters": shape.mtp_parameters,
        "dtype": shape.dtype,
        "layers": len(shape.layers),
        "attention": shape.attention_kinds,
        "max_length": shape.max_length,
    }


def _device(plan: Estimate) -> dict[str, Any] | None:
    device = plan.device
    if device is None:
        return None
    return {
        "name": device.name,
        "title": device.title,
        "memory_bytes": device.memory_bytes,
        "bandwidth_bytes_per_s": device.bandwidth or None,
        "peak_flops": device.peaks or None,
        "source": device.source,
    }


def _fits(row: DeviceRow, batch: int) -> dict[str, Any]:
    return {
        "weights": row.scheme.name,
        "kv_cache": None if row.form is None else row.form.name,
        **asdict(row.fit),
        "decode_floor": _floor(row.decode, batch),
        "prefill_floor": _floor(row.prefill, 1),
    }


def _floor(floor: Floor | None, batch: int) -> dict[str, Any] | None:
    if floor is None:
        return None
    figures = {name: getattr(floor, name) for name in ("seconds", "bound_by", "bytes_read", "flops")}
    return {**figures, "tokens_per_s": batch / floor.seconds if floor.seconds else None}


def _recipe(recipe: RecipePlan, plan: Estimate) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "format": recipe.format,
        "schemes": [form.name for form in recipe.forms],
        "calibration_samples": recipe.samples,
        "calibration_tokens": recipe.num_tokens,
        "compression_bytes": plan.compression,
        "engines": [reading.to_dict() for reading in plan.readings],
    }
