"""Quantize layers in order with calibration data; the outputs of a layer are the calibration data of the next."""

import copy
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.compress.algorithms.base import keeps_original
from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.calibration.errors import signal_to_noise_db
from quantkit.compress.calibration.held_out import HeldOut
from quantkit.compress.calibration.hidden_state_store import ActivationStore, Mode, require_finite
from quantkit.compress.calibration.input_scales import calibrate_inputs
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.layer_data import LayerData
from quantkit.compress.calibration.stream import Stream
from quantkit.compress.pipeline.inputs import advance, open_held_out, open_stores
from quantkit.compress.pipeline.kept_codes import keep_codes
from quantkit.compress.pipeline.kv_cache import choose_cache
from quantkit.compress.pipeline.plan import Plan
from quantkit.compress.pipeline.shard import write_layer
from quantkit.compress.pipeline.state import CompressionRun, Listener
from quantkit.distributed import assign_work, barrier, is_writer
from quantkit.machine.memory import release_freed_memory
from quantkit.machine.system import peak_bytes
from quantkit.output.writer import writing
from quantkit.results import CacheRecord, LayerRecord

_MOST_ATTEMPTS = 4  # attempts that each leave out the scales of one more set


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
        runs: one run, or several runs whose recipes differ only in how they quantize weights and use
            `calibration.inputs: original`.
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
    """Choose the codes of a layer. If scales make a linear worse than rounding to nearest, repeat without these scales.

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
        # If many sets make a linear worse, e.g. sets of experts, another attempt for each would take too long.
        unscaled |= {spoiled} if attempts < _MOST_ATTEMPTS else frozenset(layer.data.divisors)
        del layer  # before it is loaded again
    if unscaled:
        names = ", ".join(sorted(unscaled))
        layer.chosen.notes.append(
            f"inputs of {names} are not scaled, because with scales a held-out error was above that of plain rounding"
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
    """Return the process that quantizes each set of linears, keyed by the set's first linear, with balanced costs.

    The result is empty if a step needs all sets in one process.
    """
    if any(step.on_one_process for step in plan.recipe.steps.values()):
        return {}
    shapes, sets = plan.skeleton.linear_shapes(index), plan.sets(index)
    costs = [sum(shapes[name][0] * shapes[name][1] ** 2 for name in group.linears) for group in sets]
    return dict(zip([group.linears[0] for group in sets], assign_work(costs), strict=True))
