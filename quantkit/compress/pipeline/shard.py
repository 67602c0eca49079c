"""Write a finished layer to a file: codes in the recipe's format, other tensors as in the source or as changed by a
step.
"""

from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.checkpoint_writer import Shard
from quantkit.compress.pipeline.audit import check_size, check_weight
from quantkit.compress.pipeline.kv_cache import check_scales
from quantkit.compress.pipeline.plan import Plan


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
        AuditError: codes or scales are invalid, or a stored weight has another size than planned.
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
