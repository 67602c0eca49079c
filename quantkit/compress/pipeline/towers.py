"""Quantize linears of vision and audio towers and of MTP heads: round to nearest without data, into separate files."""

import math
from collections.abc import Iterator, Sequence
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


def write_towers(plan: Plan, state: RunState, folder: Path) -> tuple[TowerRecord | None, TowerRecord | None]:
    """Quantize and write the linears outside the decoder layers that the recipe selects.

    Args:
        plan: plan of the run.
        state: progress of the run, to which the new files are added.
        folder: folder of the checkpoint.
    Returns:
        Records of the towers and of the MTP heads; None if the model has none.
    Raises:
        AuditError: a file does not hold the expected tensors.
        CheckpointError: a weight holds NaN or infinity.
    """
    towers = [owner for owner in plan.towers if owner not in plan.heads]
    heads = [owner for owner in plan.towers if owner in plan.heads]
    counts = len(plan.skeleton.tower_linears()), sum(plan.heads.values())
    records = (_write(plan, state, folder, towers, "towers"), _write(plan, state, folder, heads, "mtp"))
    first, second = (
        TowerRecord(num_linears=count, linears=tuple(of)) if count else None
        for count, of in zip(counts, records, strict=True)
    )
    return first, second


def _write(plan: Plan, state: RunState, folder: Path, owners: Sequence[str], kind: str) -> list[LinearRecord]:
    """Quantize and write the linears of these modules; return their records, with full names."""
    records: list[LinearRecord] = []
    files = list(_files(plan, owners))
    for number, groups in enumerate(files):
        shard = Shard(plan.format)
        for owner, linears in groups:
            group = LinearSet(linears=linears, source=None, parent="")
            made = round_linears(plan, owner, group, plan.towers[owner], shard)
            records += [replace(made.records[name], name=f"{owner}.{name}") for name in linears]
        name = f"model-{kind}-{number + 1:05d}-of-{len(files):05d}.safetensors"
        _, digest, names = write_audited_shard(plan, name, shard, folder)
        state.shards[name] = digest
        state.weight_map |= dict.fromkeys(names, name)
    return records


def _files(plan: Plan, owners: Sequence[str]) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """Yield, for each file, the modules of which it contains linears, each with the names of these linears.

    A tower's module stays in one file; the linears of an MTP head, which may have hundreds of experts, may be divided.
    """
    groups: list[tuple[str, tuple[str, ...]]] = []
    size = 0
    for owner in owners:
        names = tuple(plan.towers[owner])
        for part in [(name,) for name in names] if owner in plan.heads else [names]:
            infos = [plan.reader.info(f"{owner}.{name}.weight") for name in part]
            size += sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)
            groups.append((owner, part))
            if size >= _FILE_BYTES:
                yield groups
                groups, size = [], 0
    if groups:
        yield groups
