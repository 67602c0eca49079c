"""Quantize layers in order with calibration data, and write each finished layer to a file.

The outputs of a layer are the calibration data of the next layer. A layer's file holds the codes of its quantized
linears in the recipe's format. It also holds the layer's other tensors, as in the source or as a step changed them.
Each file is read back and compared with what was written. A difference means that quantkit has a defect.
"""

import copy
import time
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.algorithms.base import keeps_original
from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.calibration.errors import row_blocks, signal_to_noise_db
from quantkit.compress.calibration.held_out import HeldOut
from quantkit.compress.calibration.hidden_state_store import ActivationStore, Mode, require_finite
from quantkit.compress.calibration.input_scales import calibrate_inputs
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.layer_data import LayerData
from quantkit.compress.calibration.stream import Stream
from quantkit.compress.checkpoint_writer import Shard
from quantkit.compress.pipeline.inputs import advance, open_held_out, open_stores
from quantkit.compress.pipeline.kept_codes import keep_codes
from quantkit.compress.pipeline.kv_cache import check_scales, choose_cache
from quantkit.compress.pipeline.plan import Plan
from quantkit.compress.pipeline.state import CompressionRun, Listener
from quantkit.distributed import assign_work, barrier, is_writer
from quantkit.errors import AuditError
from quantkit.machine.memory import release_freed_memory
from quantkit.machine.system import peak_bytes
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.output.writer import writing
from quantkit.results import CacheRecord, LayerRecord

# If linears are still worse than rounding to nearest after this many attempts to quantize a layer, the next attempt
# moves no scales. After each earlier attempt, the next leaves out the scales of one more set of linears.
_MOST_ATTEMPTS = 4


@contextmanager
def _phase(listener: Listener, seconds: dict[str, float], name: str) -> Iterator[None]:
    """Run a phase of a layer in this context: tell the listener, and add the phase's duration to `seconds`."""
    listener.phase(name)
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


Phase = Callable[[str], AbstractContextManager[None]]


@torch.inference_mode()
def calibrate_layers(runs: Sequence[CompressionRun], samples: Samples, mode: Mode) -> None:
    """Quantize, check, write and record all unfinished layers. Earlier layers compute the calibration inputs.

    Args:
        runs: one run; or several runs with `calibration.inputs: original` whose recipes differ only in how they
            quantize weights.
        samples: calibration samples, the same for all runs.
        mode: see `ActivationStore`.
    """
    done = [len(run.state.records) for run in runs]
    first = runs[done.index(min(done))]
    plan, original = first.plan, first.plan.recipe.has_original_inputs
    stores = open_stores(first, samples, mode)
    held_out = open_held_out(first, samples, stores, mode) if stores else None
    for index in range(0 if original and stores else min(done), plan.skeleton.num_layers):
        shared: dict[Hashable, Any] | None = {} if runs[1:] else None
        for run in (run for run, layers in zip(runs, done, strict=True) if layers <= index):
            with writing(run.work.path):
                _run_layer(run, index, stores, held_out, shared)
            release_freed_memory()
            barrier()  # the next layer writes to a folder that is deleted here
        if original and index + 1 < plan.skeleton.num_layers:
            with _phase(first.listener, {}, "original"):
                layer = layer_context(plan, index, stores)
                for store in (stores[0], *(held_out.stores if held_out else ())):
                    store.advance(layer.advance)
                    if is_writer():
                        store.forget_previous()
            barrier()  # the old files must be deleted before the next layer writes new ones


def _run_layer(
    run: CompressionRun,
    index: int,
    stores: Sequence[ActivationStore],
    held_out: HeldOut | None,
    shared: dict[Hashable, Any] | None,
) -> None:
    """Quantize, check, write and record one layer. Then advance the hidden states past the layer. With
    `calibration.inputs: original`, leave that to `calibrate_layers`, because other runs still need the states.
    """
    assert held_out is not None, "held-out inputs exist as long as layers are left"
    is_last = index + 1 == run.plan.skeleton.num_layers
    plan, state, work, listener = run.plan, run.state, run.work, run.listener
    moved: Sequence[ActivationStore] = () if plan.recipe.has_original_inputs else stores
    tested: Sequence[ActivationStore] = () if plan.recipe.has_original_inputs else held_out.stores
    name = plan.skeleton.layer_name(index)
    listener.layer_started(index, name)
    seconds: dict[str, float] = {}
    phase = partial(_phase, listener, seconds)
    layer, reference, cache = _compress_layer(run, index, stores, held_out, shared, phase)
    with phase("write"):
        written = write_layer(plan, index, layer, work.checkpoint) if is_writer() else None
    with phase("advance"):
        output = _first_output(layer, f"{name}, quantized")
        states = [] if is_last else advance(moved, layer, output)
    if written is not None and reference is not None and output is not None:
        record = LayerRecord(
            index=index,
            name=name,
            linears=tuple(layer.chosen.records[linear] for linear in plan.layers[index]),
            output_snr_db=signal_to_noise_db(reference, output),
            notes=tuple(layer.chosen.notes),
            seconds={label: round(value, 3) for label, value in seconds.items()},
            peak_bytes=peak_bytes(),
            kv_cache=cache,
            tokens_per_expert=layer.data.tokens_per_expert,
        )
        state.add_layer(record, *written, states, [digest for store in tested for digest in store.digests])
        state.save(work.path)
        # Delete only now: a run that is killed before progress is recorded needs the states before this layer.
        for store in (*moved, *tested):
            store.forget_previous()
        listener.layer_finished(record)


def _compress_layer(
    run: CompressionRun,
    index: int,
    stores: Sequence[ActivationStore],
    held_out: HeldOut,
    shared: dict[Hashable, Any] | None,
    phase: Phase,
) -> tuple[LayerContext, Tensor | None, CacheRecord | None]:
    """Choose the codes of a layer. If scales that a step moved into a linear make it worse than rounding to nearest,
    choose again without these scales.

    Return the finished layer, the original layer's output for the first sequence (None in processes that do not write),
    and the record of the KV cache (None if the recipe does not set one).
    """
    plan, is_last = run.plan, index + 1 == run.plan.skeleton.num_layers
    name = plan.skeleton.layer_name(index)
    read, unscaled, attempts = plan.skeleton.read_finite, frozenset[str](), 0
    while True:
        with phase("load"):
            layer = layer_context(plan, index, stores, shared)
            layer.data.unscaled = unscaled
            if layer.data.targets is not None and not unscaled:  # once, while the layer has the original weights
                layer.data.targets.advance(layer.advance)
            held_out.aim(layer, is_last=is_last)
            keep_codes(plan.recipe, plan.reader, layer)
            layer.count_tokens()
            # One sequence is enough to measure the layer's noise, and to find a broken layer before any step begins.
            reference = _first_output(layer, name)
        cache = _choose(plan, index, layer, phase)
        with phase("errors"):
            spoiled = held_out.judge(layer, lambda linear: read(f"{name}.{linear}.weight"), is_last=is_last)
        if not spoiled:
            break
        attempts += 1
        # If the scales of many sets make linears worse, e.g. in experts, an attempt for each set would take too long.
        unscaled |= {spoiled} if attempts < _MOST_ATTEMPTS else frozenset(layer.data.divisors)
        del layer  # frees its memory before the layer is loaded again
    if unscaled:
        names = ", ".join(sorted(unscaled))
        layer.chosen.notes.append(
            f"inputs of {names} are not scaled, because with scales the error on held-out tokens was larger than with "
            "rounding to nearest"
        )
    return layer, reference, cache


def _first_output(layer: LayerContext, name: str) -> Tensor | None:
    """Return the layer's output for the first sequence; None in processes that do not write."""
    return require_finite(layer.forward(layer.store[0][:1]), name) if is_writer() else None


def _choose(plan: Plan, index: int, layer: LayerContext, phase: Phase) -> CacheRecord | None:
    """Choose the codes of every linear, then the scales of inputs and of the KV cache, which depend on the codes.

    Return the record of the KV cache; None if the recipe does not set one.
    """
    recipe = plan.recipe
    for label, step in recipe.steps.items():
        with phase(label):
            step.apply(layer)
    with phase("round"):
        layer.finish()
    if any(scheme.activation and scheme.activation.is_calibrated for scheme in layer.schemes.values()):
        with phase("inputs"):
            calibrate_inputs(layer, recipe.input_clip)
    if recipe.kv_cache is None:
        return None
    with phase("kv cache"):
        return choose_cache(recipe.kv_cache.of_layer(index), plan.family, layer)


def layer_context(
    plan: Plan, index: int, stores: Sequence[ActivationStore], shared: dict[Hashable, Any] | None = None
) -> LayerContext:
    """Load a layer, and return it with its calibration inputs.

    Args:
        plan: plan of the run.
        index: number of the layer.
        stores: inputs of the layer, see `open_stores`.
        shared: see `LayerContext`.
    """
    name, block = plan.skeleton.layer_name(index), plan.skeleton.layer(index)
    store, *others = stores
    original = others[0] if others else None
    calls = partial(plan.skeleton.arguments, index), partial(plan.skeleton.next_call, index)
    ahead = not keeps_original(plan.recipe.steps.values(), hands_on=not isinstance(store[0], Tensor))
    stored = [key for key in plan.reader.names if key.startswith(f"{name}.")]
    return LayerContext(
        name=name,
        stream=Stream(block, store, *calls),
        sets=plan.sets(index),
        schemes=plan.layers[index],
        scale_dtype={linear: plan.scale_dtype(f"{name}.{linear}") for linear in plan.layers[index]},
        head_dim=plan.skeleton.head_dim(index),
        stored_dtype={key.removeprefix(f"{name}."): plan.reader.info(key).dtype for key in stored},
        seed=plan.recipe.seed,
        owners=_owners(plan, index),
        data=LayerData(
            original=None if ahead or original is None else Stream(copy.deepcopy(block), original, *calls),
            targets=original if ahead else None,
            all_tokens=plan.all_tokens,
        ),
        shared=shared,
    )


def _owners(plan: Plan, index: int) -> dict[str, int]:
    """Assign each set of linears to the process that quantizes it, with balanced costs; keyed by the set's first
    linear.

    The result is empty if a step needs all sets in one process.
    """
    if any(step.on_one_process for step in plan.recipe.steps.values()):
        return {}
    shapes, sets = plan.skeleton.linear_shapes(index), plan.sets(index)
    costs = [sum(shapes[name][0] * shapes[name][1] ** 2 for name in group.linears) for group in sets]
    return dict(zip([group.linears[0] for group in sets], assign_work(costs), strict=True))


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
    """Encode the codes of a layer, add them to its shard, and record the bits per weight that they take.

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
    """Yield the tensors of a layer that are neither quantized nor among `written`, in the source's dtype."""
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
    """Check that no scale of a weight is zero, NaN or infinite, and that no code is outside the range of its type."""
    scale = weight.scale.float()
    if not bool(((scale != 0) & torch.isfinite(scale)).all()):
        raise AuditError(f"{prefix}: a scale is zero or not finite; please report this defect of quantkit")
    dtype = weight.scheme.dtype
    for rows in row_blocks(*weight.codes.shape):
        low, high = weight.codes[rows].float().aminmax()
        if not dtype.minimum <= low <= high <= dtype.maximum:  # also true for NaN
            raise AuditError(
                f"{prefix}: a code is outside the range of {dtype.name}; please report this defect of quantkit"
            )


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
        raise AuditError(
            f"{prefix} takes {num_bytes} bytes, but {planned} to {planned + padding} were planned; please report this "
            "defect of quantkit"
        )
