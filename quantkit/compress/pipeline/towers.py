"""Quantize linears of vision and audio towers: round to nearest without data, module by module, into separate files."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from quantkit.compress.checkpoint_writer import Shard
from quantkit.compress.pipeline.data_free import round_linears
from quantkit.compress.pipeline.plan import Plan
from quantkit.compress.pipeline.shard import write_audited_shard
from quantkit.compress.pipeline.state import RunState
from quantkit.models.linear_sets import LinearSet
from quantkit.results import LinearRecord, TowerRecord

# A file is full when the source weights of its linears have this many bytes; its codes are in memory together.
_FILE_BYTES = 1 << 30


def write_towers(plan: Plan, state: RunState, folder: Path) -> TowerRecord | None:
    """Quantize and write the linears outside the decoder layers that the recipe selects.

    Args:
        plan: plan of the run.
        state: progress of the run, to which the new files are added.
        folder: folder of the checkpoint.
    Returns:
        Record of the towers; None if the model has none.
    Raises:
        AuditError: a file does not hold the expected tensors.
        CheckpointError: a weight holds NaN or infinity.
    """
    records: list[LinearRecord] = []
    files = list(_files(plan))
    for number, owners in enumerate(files):
        shard = Shard(plan.format)
        for owner in owners:
            schemes = plan.towers[owner]
            group = LinearSet(linears=tuple(schemes), source=None, parent="")
            made = round_linears(plan, owner, group, schemes, shard)
            records += [replace(made.records[name], name=f"{owner}.{name}") for name in schemes]
        name = f"model-towers-{number + 1:05d}-of-{len(files):05d}.safetensors"
        _, digest, names = write_audited_shard(plan, name, shard, folder)
        state.shards[name] = digest
        state.weight_map |= dict.fromkeys(names, name)
    total = len(plan.skeleton.tower_linears())
    return TowerRecord(num_linears=total, linears=tuple(records)) if total else None


def _files(plan: Plan) -> Iterator[list[str]]:
    """Yield, for each file, the modules whose linears it contains."""
    owners: list[str] = []
    size = 0
    for owner, schemes in plan.towers.items():
        infos = [plan.reader.info(f"{owner}.{name}.weight") for name in schemes]
        size += sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)
        owners.append(owner)
        if size >= _FILE_BYTES:
            yield owners
            owners, size = [], 0
    if owners:
        yield owners
