"""Compress a model layer by layer, from source shards to finished ones, with one layer in memory at a time."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from quantkit.checkpoints.adapter import merge_note
from quantkit.checkpoints.folder import resolve
from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.calibration.hidden_state_store import Mode
from quantkit.compress.pipeline.data_free import round_layers
from quantkit.compress.pipeline.finish import finish_run, made_by
from quantkit.compress.pipeline.imatrix import read_importance
from quantkit.compress.pipeline.inputs import read_samples
from quantkit.compress.pipeline.kv_cache import check_cache
from quantkit.compress.pipeline.layers import calibrate_layers
from quantkit.compress.pipeline.plan import Plan, build_plan, predicted_bytes
from quantkit.compress.pipeline.state import (
    SILENT,
    CompressionRun,
    Listener,
    RunState,
    load_state,
    refuse_changes,
    run_identity,
    was_completed,
    with_threads_of,
)
from quantkit.compress.recipe import Recipe
from quantkit.distributed import broadcast, is_writer
from quantkit.errors import CheckpointError, OutputError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.machine.devices import threads_within_quota
from quantkit.machine.system import peak_bytes
from quantkit.native import watch_neighbours
from quantkit.numerics.matmul import quick_products
from quantkit.output.staging import Stage, check_apart, check_gguf, open_stage
from quantkit.output.work_folder import WorkFolder
from quantkit.output.writer import writing
from quantkit.results import CompressionResult
from quantkit.safety.untrusted import read_object

AskedMode = Mode | Literal["auto"]


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
    adapter: str | Path | None = None,
    listener: Listener = SILENT,
) -> CompressionResult:
    """Compress a model layer by layer and write a checkpoint.

    Args:
        model: directory or hub id; None = the bundled demo model.
        recipe: the recipe.
        output: directory to write, or a file if the format is a single file; None = `<model>-<recipe>` in the current
            directory. The output is written under a temporary name, and renamed after all checks.
        device: "auto", "cpu", "cuda" or "cuda:<i>".
        activations: where to keep hidden states between layers, "ram" or "disk"; "auto" = "ram" on a GPU, else "disk".
        resume: continue an interrupted run; False = start over.
        overwrite: replace an existing output.
        engine: name of an engine in `quantkit.engine_rules` that must be able to read the result. If it cannot, the
            recipe is refused before the work starts. None = no particular engine.
        adapter: folder of a LoRA adapter to merge into the model before anything else; None = no adapter.
        listener: receives progress events.
    Raises:
        InputError: model, recipe, data or output cannot be used.
        ResourceError: out of disk or memory; the same command resumes.
    """
    started = time.perf_counter()  # reading headers and data counts as preparing

    def compress(output: str | Path | None, overwrite: bool) -> CompressionResult:
        plan = build_plan(model, recipe, output, device, engine, adapter)
        return _compress([plan], started, activations, resume=resume, overwrite=overwrite, listener=listener)[0]

    suffix = FORMATS.load(recipe.format).suffix
    if not suffix or not is_writer():
        return compress(output, overwrite)
    # A single file: quantize to a directory, from which an interrupted run can resume, and convert that directory.
    from quantkit.compress.convert import convert, gguf_writer, source

    check_cache(recipe, {})  # a single file cannot describe a KV cache, whatever the model
    folder = resolve(model)
    name = "demo" if model is None else Path(model).name
    file = Path(output) if output else Path(f"{name}-{recipe.name}{suffix}")
    check_apart(file, folder)
    kind = f"quantize --format {recipe.format}"
    with open_stage(file, kind, overwrite=overwrite, check=check_gguf, resumable=True) as stage:
        # Refuse a model that the file cannot hold, before hours of work.
        gguf_writer.check_model(source.open_source(folder))
        codes, whole = stage.work.path / f"{file.name}.codes", stage.work.path / file.name
        result = compress(codes, overwrite=True)
        entries = {"general.name": name, **made_by(recipe, folder, codes)}
        written = convert(codes, recipe.format, whole, embedding=recipe.embedding, entries=entries, overwrite=True)
        stage.promote(whole)
    bits = _stored_bits(file) or result.bits_per_weight  # the file's blocks may be smaller than the groups
    return replace(result, output=str(file), output_bytes=written.output_bytes, bits_per_weight=bits)


def _stored_bits(file: Path) -> float | None:
    """Return the bits per weight of a GGUF file; None if unknown."""
    from quantkit.inspection import inspect  # imports the gguf package

    return inspect(file).bits_per_weight


def quantize_together(model: str | None, recipes: Mapping[Path, Recipe], *, device: str) -> None:
    """Compress a model with several recipes in one pass over the calibration data; results equal those of `quantize`
    byte for byte.

    The recipes differ only in how they quantize weights, and have `calibration.inputs: original`. So the inputs of a
    layer are equal for all recipes. `quantize` can resume an interrupted run of this function, and vice versa.

    Args:
        model: directory or hub id; None = the bundled demo model.
        recipes: recipes, keyed by output directory; no directory may exist yet.
        device: "auto", "cpu", "cuda" or "cuda:<i>".
    Raises:
        InputError, ResourceError: see `quantize`.
    """
    started = time.perf_counter()
    _compress([build_plan(model, recipe, output, device) for output, recipe in recipes.items()], started)


def _compress(
    plans: Sequence[Plan],
    started: float,
    activations: AskedMode = "auto",
    *,
    resume: bool = True,
    overwrite: bool = False,
    listener: Listener = SILENT,
) -> list[CompressionResult]:
    """Do what `quantize` does, for one or several directories. In a job of several processes, each computes its share
    of the layers, but only one writes the other files.
    """
    for plan in plans:  # report a bad importance matrix before anything is written
        read_importance(plan)
    with ExitStack() as stack:
        opened = partial(open_stage, kind="quantize", overwrite=overwrite, resumable=True, allow_finished=True)
        stages = [stack.enter_context(opened(plan.output)) if is_writer() else None for plan in plans]
        samples = read_samples(plans[0])
        begun = [
            _begin(plan, stage, samples, listener, resume=resume) for plan, stage in zip(plans, stages, strict=True)
        ]
        runs = [run for run in begun if run is not None]
        mode = activations
        if mode == "auto":  # on a CPU, reading states from disk takes little time compared with matrix products
            mode = "disk" if plans[0].skeleton.device.type == "cpu" else "ram"
        # Sums depend on the number of threads, and an interrupted run must keep the number that it started with.
        for threads in dict.fromkeys(run.state.threads for run in runs):
            alike = [run for run in runs if run.state.threads == threads]
            with writing(alike[0].work.path), computing(threads, alike[0].plan.skeleton.device) as workers:
                for run in alike if is_writer() else ():
                    run.listener.plan(_summary(run, mode))
                if samples is not None:
                    calibrate_layers(alike, samples, mode)
                for run in alike if samples is None else ():
                    round_layers(run, workers)
        ends = zip(plans, begun, stages, strict=True)
        return broadcast([_finish(*end, started) for end in ends] if is_writer() else [])


def _begin(
    plan: Plan, stage: Stage | None, samples: Samples | None, listener: Listener, *, resume: bool
) -> CompressionRun | None:
    """Start a run, or resume an interrupted one. Return None if nothing is left to do, because an earlier run was
    killed only after it had completed and renamed its output.

    Args:
        plan: plan of the run.
        stage: work folder of the output; None in processes that do not write.
        samples: calibration samples.
        listener: receives progress events.
        resume: see `quantize`.
    Raises:
        ResumeError: this process has not read the same data as the first process.
        OutputError: this process cannot see the files that the first process writes.
    """
    identity = run_identity(plan, samples)
    begun: tuple[RunState, WorkFolder] | None = None
    if stage is not None and not (resume and was_completed(stage, identity)):
        stage.check_output()
        with writing(stage.work.path):
            begun = load_state(stage.work, identity, resume=resume), stage.work
    begun = broadcast(begun)
    if begun is None:
        return None
    state, work = begun
    if stage is None:
        refuse_changes(
            with_threads_of(state.identity, state.identity),
            with_threads_of(state.identity, identity),
            "the job",
            "give all processes the same files, versions and device",
        )
        if not work.checkpoint.is_dir():
            raise OutputError(
                f"{work.path} is not visible on this machine; write to a folder that all processes of the job share"
            )
    run = CompressionRun(
        plan=plan, samples=samples, state=state, work=work, listener=listener, resumed=len(state.records)
    )
    if is_writer():
        if plan.adapter is not None:
            listener.note(merge_note(plan.adapter))
        for warning in run.warnings:
            listener.warning(warning)
    return run


def _finish(plan: Plan, run: CompressionRun | None, stage: Stage | None, started: float) -> CompressionResult:
    """Write the rest of the output and rename it, unless an earlier run has done so. Return the result."""
    if run is None or stage is None:
        return CompressionResult.from_dict(read_object(plan.output / "quantkit-run.json", CheckpointError))
    with writing(run.work.path), computing(run.state.threads, run.plan.skeleton.device):
        result = finish_run(run, started)
        stage.promote(run.work.checkpoint)
    return result


@contextmanager
def computing(threads: int, device: torch.device) -> Iterator[int]:
    """Compute with this number of threads in this context. Yield the number of threads within the CPU quota."""
    before = torch.get_num_threads()
    workers = threads_within_quota()
    torch.set_num_threads(threads)
    watch_neighbours(torch.get_num_threads())
    try:
        with quick_products(device):
            yield workers
    finally:
        # Restore the caller's number of threads, even after an error.
        torch.set_num_threads(before)


def _summary(run: CompressionRun, mode: Mode) -> dict[str, Any]:
    """Return facts about the run for a listener; see `Listener.plan`."""
    token_ids = run.samples.token_ids if run.samples else ()
    tokens = sum(map(len, token_ids)) if mode == "ram" else 0
    return {
        "num_layers": run.plan.skeleton.num_layers,
        "resumed_layers": run.resumed,
        "samples": len(token_ids),
        "predicted_bytes": peak_bytes() + sum(predicted_bytes(run.plan, tokens).values()),
    }
