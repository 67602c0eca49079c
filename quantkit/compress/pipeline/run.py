"""The life of a weight: layer after layer from source shards to finished ones, within the memory of one layer."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.checkpoints.folder import resolve
from quantkit.compress.algorithms.base import keeps_original
from quantkit.compress.calibration.activations import ActivationStore, Mode, require_finite
from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.calibration.errors import signal_to_noise_db
from quantkit.compress.calibration.held_out import HeldOut
from quantkit.compress.calibration.input_scales import calibrate_inputs
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.layer_data import LayerData
from quantkit.compress.pipeline.data_free import round_layers
from quantkit.compress.pipeline.events import SILENT, Listener
from quantkit.compress.pipeline.finish import finish_run
from quantkit.compress.pipeline.identity import refuse_changes, run_identity, with_threads_of
from quantkit.compress.pipeline.inputs import advance, open_held_out, open_stores, read_samples
from quantkit.compress.pipeline.kept import keep_codes
from quantkit.compress.pipeline.kv_cache import check_cache, choose_cache
from quantkit.compress.pipeline.plan import Plan, build_plan, predicted_bytes
from quantkit.compress.pipeline.shard import write_layer
from quantkit.compress.pipeline.shared_layer import SharedLayer
from quantkit.compress.pipeline.state import RunState, load_state, was_completed
from quantkit.compress.recipe import Recipe
from quantkit.distributed import assign_work, barrier, broadcast, is_writer
from quantkit.errors import CheckpointError, OutputError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.machine.devices import threads_within_quota
from quantkit.machine.memory import peak_bytes, release_freed_memory
from quantkit.native.neighbours import watch_neighbours
from quantkit.numerics.products import quick_products
from quantkit.output.staging import check_apart, check_gguf, open_stage
from quantkit.output.work_folder import WorkFolder
from quantkit.output.writer import writing
from quantkit.results import CacheRecord, CompressionResult, LayerRecord
from quantkit.safety.untrusted import read_object

AskedMode = Mode | Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionRun:
    """One compression on its way to a directory.

    Args:
        plan: what is to be done.
        state: what has been done.
        work: where.
        listener: told what happens.
    """

    plan: Plan
    state: RunState
    work: WorkFolder
    listener: Listener


def quantize(
    model: str | None,
    recipe: Recipe,
    output: str | Path | None = None,
    *,
    device: str = "auto",
    activations: AskedMode = "auto",
    resume: bool = True,
    overwrite: bool = False,
    engine: str | None = None,
    listener: Listener = SILENT,
) -> CompressionResult:
    """Compress a model layer by layer and write a checkpoint.

    Args:
        model: directory or hub id; None = the bundled demo model.
        recipe: what to do.
        output: directory to write, or file for a format that is one; None = `<model>-<recipe>` in the current one.
            Written under another name and renamed when everything has been checked.
        device: "auto", "cpu", "cuda" or "cuda:<i>".
        activations: keep hidden states in memory or on disk; "auto": in memory where a GPU computes.
        resume: go on where an interrupted run stopped; False starts over.
        overwrite: replace an existing output.
        engine: that is to read the result, by its name in `quantkit.engines`: what it cannot read is refused first.
        listener: told what happens.
    Raises:
        InputError: model, recipe, data or output cannot be used.
        ResourceError: out of disk or memory; the same command resumes.
    """
    # From here on the clock runs, so that reading headers and data counts as preparing.
    compress = partial(
        _compress if is_writer() else _assist,
        activations=activations,
        resume=resume,
        listener=listener,
        started=time.perf_counter(),
    )
    if not FORMATS.load(recipe.format).suffix:
        return compress(build_plan(model, recipe, output, device, engine), overwrite=overwrite)
    if not is_writer():
        return compress(build_plan(model, recipe, output, device, engine), overwrite=overwrite)
    # One file: a run to a directory, which an interrupted run resumes from, and its conversion.
    from quantkit.compress.convert import convert
    from quantkit.compress.convert.gguf import check_model
    from quantkit.compress.convert.source import open_source

    check_cache(recipe, {})  # a file says nothing of a cache, whatever the model
    folder = resolve(model)
    name = "demo" if model is None else Path(model).name
    file = Path(output) if output else Path(f"{name}-{recipe.name}{FORMATS.load(recipe.format).suffix}")
    check_apart(file, folder)
    kind = f"quantize --format {recipe.format}"
    with open_stage(file, kind, overwrite=overwrite, check=check_gguf, resumable=True) as stage:
        # What a file cannot hold is refused before hours of work.
        check_model(open_source(folder))
        codes, whole = stage.work.path / f"{file.name}.codes", stage.work.path / file.name
        result = compress(build_plan(model, recipe, codes, device, engine), overwrite=True)
        written = convert(codes, recipe.format, whole, overwrite=True)
        stage.promote(whole)
    return replace(result, output=str(file), output_bytes=written.output_bytes)


def _compress(
    plan: Plan, *, activations: AskedMode, resume: bool, overwrite: bool, listener: Listener, started: float
) -> CompressionResult:
    """`quantize` to a directory."""
    mode = pick_mode(activations, plan)
    with open_stage(plan.output, "quantize", overwrite=overwrite, resumable=True, allow_finished=True) as stage:
        samples = read_samples(plan)
        warnings = (*plan.warnings, *(samples.warnings if samples else ()))
        for warning in warnings:
            listener.warning(warning)
        identity = run_identity(plan, samples)
        if resume and was_completed(stage, identity):
            broadcast(None)
            return broadcast(
                CompressionResult.from_dict(read_object(plan.output / "quantkit-run.json", CheckpointError))
            )
        stage.check_output()
        with writing(stage.work.path), ExitStack() as afterwards:
            state = load_state(stage.work, identity, resume=resume)
            broadcast((identity, state, stage.work))
            workers = afterwards.enter_context(computing(plan, state))
            resumed = len(state.records)
            listener.plan(_summary(plan, samples, mode, resumed))
            if samples is None:
                round_layers(plan, state, stage.work, listener, workers)
            else:
                run = CompressionRun(plan=plan, state=state, work=stage.work, listener=listener)
                calibrate_layers([run], samples, mode)
            result = finish_run(
                plan,
                state,
                stage.work.checkpoint,
                samples=samples,
                resumed=resumed,
                warnings=warnings,
                started=started,
            )
            stage.promote(stage.work.checkpoint)
            return broadcast(result)


def _assist(plan: Plan, *, activations: AskedMode, listener: Listener, **_: Any) -> CompressionResult:
    """`_compress` in a process that is not the one that writes: its share of the layers' work.

    Raises:
        ResumeError: it has read something else than the first process.
        OutputError: it cannot see what the first process writes.
    """
    samples = read_samples(plan)
    nothing: Any = None
    started = broadcast(nothing)
    if started is not None:
        identity, state, work = started
        own = with_threads_of(identity, run_identity(plan, samples))
        refuse_changes(
            with_threads_of(identity, identity),
            own,
            "the job",
            "give all processes the same files, versions and device",
        )
        if not work.checkpoint.is_dir():
            raise OutputError(f"{work.path} is not on this machine: write where all processes of the job can")
        with computing(plan, state) as workers:
            if samples is None:
                round_layers(plan, state, work, listener, workers)
            else:
                run = CompressionRun(plan=plan, state=state, work=work, listener=listener)
                calibrate_layers([run], samples, pick_mode(activations, plan))
    result: CompressionResult = broadcast(nothing)
    return result


@contextmanager
def computing(plan: Plan, state: RunState) -> Iterator[int]:
    """While open, products are computed as the run has begun with; how many threads there are otherwise."""
    before = torch.get_num_threads()
    workers = threads_within_quota()
    torch.set_num_threads(state.identity["compute"]["threads"])
    watch_neighbours(torch.get_num_threads())
    try:
        with quick_products(plan.skeleton.device):
            yield workers
    finally:
        # The caller's own number comes back, after an error too.
        torch.set_num_threads(before)


def pick_mode(asked: AskedMode, plan: Plan) -> Mode:
    """Place of hidden states; reading them from disk costs little beside a CPU's products."""
    return asked if asked != "auto" else "disk" if plan.skeleton.device.type == "cpu" else "ram"


def _summary(plan: Plan, samples: Samples | None, mode: Mode, resumed: int) -> dict[str, Any]:
    """Facts for a listener; see `Listener.plan`."""
    tokens = sum(map(len, samples.token_ids)) if samples and mode == "ram" else 0
    return {
        "num_layers": plan.skeleton.num_layers,
        "resumed_layers": resumed,
        "samples": len(samples.token_ids) if samples else 0,
        "predicted_bytes": peak_bytes() + sum(predicted_bytes(plan, tokens).values()),
    }


@contextmanager
def _phase(listener: Listener, seconds: dict[str, float], name: str) -> Iterator[None]:
    """Tell who listens, and measure how long it takes."""
    listener.phase(name)
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


Phase = Callable[[str], AbstractContextManager[None]]


@torch.inference_mode()
def calibrate_layers(runs: Sequence[CompressionRun], samples: Samples, mode: Mode) -> None:
    """Quantize, check, write and record all layers that are not done, each on what the layers before it hand on.

    Args:
        runs: one, or several that differ in their weights alone and feed each layer what it is fed in the original.
        samples: of all of them.
        mode: see `ActivationStore`.
    """
    done = [len(run.state.records) for run in runs]
    first = runs[done.index(min(done))]
    plan, original = first.plan, first.plan.recipe.has_original_inputs
    stores = open_stores(plan, samples, first.state, mode, first.work.path)
    held_out = open_held_out(plan, samples, first.state, stores, mode, first.work.path) if stores else None
    for index in range(0 if original and stores else min(done), plan.skeleton.num_layers):
        kind: Callable[..., LayerContext] = partial(SharedLayer, shared={}) if runs[1:] else LayerContext
        for run in (run for run, layers in zip(runs, done, strict=True) if layers <= index):
            with writing(run.work.path):
                _run_layer(run, index, stores, held_out, kind)
            release_freed_memory()
            barrier()  # what is forgotten lies where the next layer keeps things too
        if original and index + 1 < plan.skeleton.num_layers:
            with _phase(first.listener, {}, "original"):
                layer = _layer_context(plan, index, stores)
                for store in (stores[0], *(held_out.stores if held_out else ())):
                    store.advance(layer.advance)
                    if is_writer():
                        store.forget_previous()
            barrier()  # before a layer that asks for more of the original opens streams there


def _run_layer(
    run: CompressionRun,
    index: int,
    stores: Sequence[ActivationStore],
    held_out: HeldOut | None,
    kind: Callable[..., LayerContext],
) -> None:
    """Quantize, check, write and record one layer, and advance the hidden states past it, unless others need them."""
    assert held_out is not None, "layers are left to be done"
    is_last = index + 1 == run.plan.skeleton.num_layers
    plan, state, work, listener = run.plan, run.state, run.work, run.listener
    moved: Sequence[ActivationStore] = () if plan.recipe.has_original_inputs else stores
    tested: Sequence[ActivationStore] = () if plan.recipe.has_original_inputs else held_out.stores
    name = plan.skeleton.layer_name(index)
    listener.layer_started(index, name)
    seconds: dict[str, float] = {}
    phase = partial(_phase, listener, seconds)
    with phase("load"):
        layer = _layer_context(plan, index, stores, kind)
        if layer.data.targets is not None:  # as long as the layer is the original's
            layer.data.targets.advance(layer.advance)
        held_out.aim(layer, is_last=is_last)
        keep_codes(plan.recipe, plan.reader, layer)
        layer.count_tokens()
        # One sequence is enough to measure the layer's noise on, before any step spends time on one that is broken.
        reference = _first_output(layer, name)
    cache = _choose(plan, layer, phase)
    with phase("errors"):
        held_out.judge(layer, lambda linear: plan.skeleton.read_finite(f"{name}.{linear}.weight"), is_last=is_last)
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
        # Only now: a run that is killed before progress is recorded needs the states before this layer.
        for store in (*moved, *tested):
            store.forget_previous()
        listener.layer_finished(record)


def _first_output(layer: LayerContext, name: str) -> Tensor | None:
    """First output of the layer, of the first sequence, in the process that writes."""
    return require_finite(layer.forward(layer.store[0][:1]), name) if is_writer() else None


def _choose(plan: Plan, layer: LayerContext, phase: Phase) -> CacheRecord | None:
    """Codes of every linear, then scales of its input and of the KV cache, which depend on the codes."""
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
        return choose_cache(recipe.kv_cache, plan.family, layer)


def _layer_context(
    plan: Plan, index: int, stores: Sequence[ActivationStore], kind: Callable[..., LayerContext] = LayerContext
) -> LayerContext:
    name, block = plan.skeleton.layer_name(index), plan.skeleton.layer(index)
    store, *others = stores
    original = others[0] if others else None
    ahead = not keeps_original(plan.recipe.steps.values(), hands_on=not isinstance(store[0], Tensor))
    stored = [key for key in plan.reader.names if key.startswith(f"{name}.")]
    return kind(
        name=name,
        block=block,
        sets=plan.sets(index),
        schemes=plan.layers[index],
        scale_dtype={linear: plan.scale_dtype(f"{name}.{linear}") for linear in plan.layers[index]},
        head_dim=plan.skeleton.head_dim(index),
        arguments=partial(plan.skeleton.arguments, index),
        next_call=partial(plan.skeleton.next_call, index),
        stored_dtype={key.removeprefix(f"{name}."): plan.reader.info(key).dtype for key in stored},
        seed=plan.recipe.seed,
        owners=_owners(plan, index),
        data=LayerData(
            store=store,
            original_store=None if ahead else original,
            original=None if ahead or original is None else copy.deepcopy(block),
            targets=original if ahead else None,
            all_tokens=plan.all_tokens,
        ),
    )


def _owners(plan: Plan, index: int) -> dict[str, int]:
    """The process of each set of a layer, by what it costs to solve it, unless a step needs all in one."""
    if any(step.on_one_process for step in plan.recipe.steps.values()):
        return {}
    shapes, sets = plan.skeleton.linear_shapes(index), plan.sets(index)
    costs = [sum(shapes[name][0] * shapes[name][1] ** 2 for name in group.linears) for group in sets]
    return dict(zip([group.linears[0] for group in sets], assign_work(costs), strict=True))
