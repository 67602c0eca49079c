"""Round linears directly from the source's tensors, without calibration data and without building layers.

Recipes without calibration data round all layers in this way, several linears at once. All recipes round the linears of
towers and of MTP heads in this way.

Each linear is rounded by a single thread, so the result does not depend on the number of threads. A layer's file is
written while the next layer's linears are rounded. Layers are recorded in order, so an interrupted run can resume.
Several processes take layers in turns, and each writes the files of its own layers.
"""

import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.layer_data import LayerChoices
from quantkit.compress.calibration.stream import Stream
from quantkit.compress.checkpoint_writer import Shard
from quantkit.compress.pipeline.imatrix import read_importance
from quantkit.compress.pipeline.kept_codes import keep_codes
from quantkit.compress.pipeline.layers import add_linears, shard_name, write_audited_shard
from quantkit.compress.pipeline.plan import Plan
from quantkit.compress.pipeline.state import CompressionRun, RunState
from quantkit.distributed import gather, is_writer, rank, world
from quantkit.huggingface.experts import set_parameter
from quantkit.machine.memory import release_freed_memory
from quantkit.machine.system import peak_bytes
from quantkit.models.linear_sets import LinearSet
from quantkit.numerics.affine import search_parameters
from quantkit.numerics.kv_cache import scheme_to_dict
from quantkit.numerics.scheme import LinearScheme
from quantkit.results import CacheRecord, LayerRecord, LinearRecord, TowerRecord

# Memory of one worker, as a multiple of the bytes of the weight that it rounds: the weight, then its codes (new and
# read back) and the tensors that store them.
_COPIES = 1.5
# Memory of all workers together, in addition to two of the largest weights.
_CAPACITY_BYTES = 640 << 20
# A file of towers is full when the source weights of its linears take this many bytes. The codes of a file stay in
# memory until it is written.
_FILE_BYTES = 1 << 30


class _Rounding(NamedTuple):
    """A layer that is being quantized: the futures of its linears, and the future of its file, which is written after
    the linears are rounded.
    """

    number: int
    linears: list[Future[LayerChoices]]
    file: Future[tuple[str, str, list[str]]]


def round_layers(run: CompressionRun, threads: int) -> None:
    """Quantize, check, write and record all unfinished layers.

    Args:
        run: a run without calibration data; its state is modified and saved.
        threads: number of threads that may compute at the same time.
    """
    todo = range(len(run.state.records), run.plan.skeleton.num_layers)
    finished = _round_own(run, todo[rank() :: world()], threads)
    # In each turn, every process delivers one of its layers, until no layers are left.
    with closing(finished):
        for _ in range(0, len(todo), world()):
            for layer in gather(next(finished, None)):
                if layer is not None and is_writer():
                    run.state.add_layer(*layer)
                    run.state.save(run.work.path)
                    run.listener.layer_finished(layer[0])


def _round_own(
    run: CompressionRun, todo: Sequence[int], threads: int
) -> Generator[tuple[LayerRecord, str, str, list[str]]]:
    """Quantize the layers of this process in order. Yield the record of each layer, and the name, SHA-256 and tensor
    names of its file.
    """
    started, pending = time.perf_counter(), deque[_Rounding]()
    importance = read_importance(run.plan)
    with ThreadPoolExecutor(_num_workers(run.plan, threads)) as workers, ThreadPoolExecutor(1) as writer:
        try:
            for index in (*todo, None):
                if index is not None:
                    pending.append(_start(run, index, workers, writer, importance))
                if len(pending) > 1 or (index is None and pending):
                    layer = _finish(run, pending.popleft(), started)
                    started = time.perf_counter()
                    yield layer
        except BaseException:
            # Cancel the tasks that have not begun, and wait for the others, before the error propagates.
            workers.shutdown(cancel_futures=True)
            writer.shutdown(cancel_futures=True)
            raise


def _num_workers(plan: Plan, threads: int) -> int:
    """Return the number of workers: one per thread, or fewer if so many of the largest linears need too much memory."""
    shapes = [shape for i in range(plan.skeleton.num_layers) for shape in plan.skeleton.linear_shapes(i).values()]
    largest = max((rows * width for rows, width in shapes), default=1) * plan.source_dtype.itemsize
    return max(1, min(threads, int((_CAPACITY_BYTES + 2 * largest) / (_COPIES * largest))))


def _start(
    run: CompressionRun,
    index: int,
    workers: ThreadPoolExecutor,
    writer: ThreadPoolExecutor,
    importance: Mapping[str, Tensor],
) -> _Rounding:
    plan, shard = run.plan, Shard(run.plan.format)
    name, schemes = plan.skeleton.layer_name(index), plan.layers[index]
    linears = [
        workers.submit(round_linears, plan, name, group, schemes, shard, keep=True, importance=importance)
        for group in _parts(plan, index)
    ]

    @torch.inference_mode()
    def write() -> tuple[str, str, list[str]]:
        for linear in linears:
            linear.result()
        shard.tensors |= dict(_others(plan, index))
        return write_audited_shard(plan, shard_name(index, plan.skeleton.num_layers), shard, run.work.checkpoint)

    return _Rounding(index, linears, writer.submit(write))


def _parts(plan: Plan, index: int) -> Iterator[LinearSet]:
    """Yield groups of linears to round together: linears that share a tensor-wide scale, or else a single linear."""
    schemes = plan.layers[index]
    for group in plan.sets(index):
        parts: dict[object, list[str]] = {}
        for name in (name for name in group.linears if name in schemes):
            scheme = schemes[name].weight
            key = (name.rpartition(".")[0], scheme) if scheme.has_tensor_scale else name
            parts.setdefault(key, []).append(name)
        for names in parts.values():
            yield replace(group, linears=tuple(names))


@torch.inference_mode()
def round_linears(
    plan: Plan, owner: str, group: LinearSet, schemes: Mapping[str, LinearScheme], shard: Shard, *, keep: bool = False,
    importance: Mapping[str, Tensor] | None = None,
) -> LayerChoices:  # fmt: skip
    """Round linears to nearest and put their codes into a shard.

    Args:
        plan: plan of the run.
        owner: full name of the module that contains the linears.
        group: linears to round. If a scheme has a tensor-wide scale, the linears with that scheme share the scale.
        schemes: scheme of each linear, keyed by relative name; linears outside `group` are ignored.
        shard: receives the codes.
        keep: whether to apply the recipe's `keep: source` rules.
        importance: weights (K,) of the squared rounding errors, one per input, keyed by the linear's full name. Linears
            without an entry weight all errors equally.
    Returns:
        The choices made for the linears, with their records and notes for the user.
    """
    read = plan.skeleton.read_finite
    weights = {name: read(f"{owner}.{name}.weight").to(plan.skeleton.device) for name in group.linears}
    layer = LayerContext(
        name=owner,
        stream=Stream(_block(weights)),
        sets=(group,),
        schemes={name: schemes[name] for name in group.linears},
        scale_dtype={name: plan.scale_dtype(f"{owner}.{name}") for name in group.linears},
        head_dim=plan.skeleton.head_dim(0),  # has no effect here, because no step runs
    )
    if keep:
        keep_codes(plan.recipe, plan.reader, layer)
    for name in (name for name in group.linears if name not in layer.chosen.quantized):
        given = (importance or {}).get(f"{owner}.{name}")
        if given is not None:
            given = given.to(plan.skeleton.device)
            layer.chosen.ranges[name] = search_parameters(layer.weight(name), layer.grid(name), importance=given)
    layer.finish()
    layer.stream.block = nn.Module()  # frees the weights, which nothing needs any more
    del weights
    add_linears(plan, layer, shard)
    return layer.chosen


def _block(weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that contains only linears with these weights, keyed by the linears' relative names."""
    block = nn.Module()
    for name, weight in weights.items():
        owner, (*parents, leaf) = block, name.split(".")
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(leaf, nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
        set_parameter(block, f"{name}.weight", weight)
    return block


def _others(plan: Plan, index: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the unquantized tensors of a layer, as the source stores them."""
    prefix, known = f"{plan.skeleton.layer_name(index)}.", plan.skeleton.layer_tensors(index)
    quantized = {f"{name}.weight" for name in plan.layers[index]}
    for name in plan.reader.names:
        local = name.removeprefix(prefix)
        if name.startswith(prefix) and local not in quantized:
            yield name, plan.skeleton.read_finite(name) if local in known else plan.reader.tensor(name)


def _finish(run: CompressionRun, layer: _Rounding, started: float) -> tuple[LayerRecord, str, str, list[str]]:
    """Wait until a layer is on disk. Return its record, and the name, SHA-256 and tensor names of its file."""
    plan, listener = run.plan, run.listener
    name, goal = plan.skeleton.layer_name(layer.number), plan.recipe.kv_cache
    listener.layer_started(layer.number, name)
    listener.phase("round")
    parts = [part.result() for part in layer.linears]
    linears = {name: record for part in parts for name, record in part.records.items()}
    rounded = time.perf_counter()
    listener.phase("write")
    file = layer.file.result()
    release_freed_memory()  # glibc would otherwise keep the memory that workers freed
    ended = time.perf_counter()
    record = LayerRecord(
        index=layer.number,
        name=name,
        linears=tuple(linears[linear] for linear in plan.layers[layer.number]),
        output_snr_db=None,
        notes=tuple(note for part in parts for note in part.notes),
        seconds={"round": round(rounded - started, 3), "write": round(ended - rounded, 3)},
        peak_bytes=peak_bytes(),
        kv_cache=None if goal is None else CacheRecord(scheme=scheme_to_dict(goal.of_layer(layer.number).scheme)),
    )
    return record, *file


def write_towers(plan: Plan, state: RunState, folder: Path) -> tuple[TowerRecord | None, TowerRecord | None]:
    """Quantize and write the linears that the recipe selects outside the decoder layers.

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
    records = (_write_beside(plan, state, folder, towers, "towers"), _write_beside(plan, state, folder, heads, "mtp"))
    first, second = (
        TowerRecord(num_linears=count, linears=tuple(of)) if count else None
        for count, of in zip(counts, records, strict=True)
    )
    return first, second


def _write_beside(plan: Plan, state: RunState, folder: Path, owners: Sequence[str], kind: str) -> list[LinearRecord]:
    """Quantize the linears of these modules, and write them to files whose names contain `kind`. Return the linears'
    records, with full names.
    """
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
    """Yield, for each file to write, the modules whose linears it gets, each with the names of these linears.

    The linears of one tower module go into one file. Those of an MTP head, which may have hundreds of experts, may be
    divided among several files.
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
