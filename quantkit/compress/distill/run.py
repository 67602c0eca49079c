"""Train a compressed checkpoint on the original's logits, and write it in the same format.

Some samples are held out. Every few steps, the KL divergence on them is measured, and the state is saved, so that a
killed run goes on with the same numbers. The result has the parameters with the least held-out KL.
"""

import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.folder import RUN, find_baseline
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.tokenizer import load_tokenizer
from quantkit.compress.calibration.dataset import Samples, load_samples
from quantkit.compress.convert.run import write_checkpoint
from quantkit.compress.convert.source import Source, open_source
from quantkit.compress.convert.target import target_for
from quantkit.compress.distill.options import Distillation, DistillOptions
from quantkit.compress.distill.training import Progress, Training, load_training
from quantkit.compress.pipeline.plan import pick_compute_dtype
from quantkit.compress.pipeline.run import computing
from quantkit.compress.pipeline.state import compute_identity, describe_versions
from quantkit.demo import DEMO_MODEL, bundled_calibration
from quantkit.errors import DataError, ModelError, OutputError, SchemeError
from quantkit.huggingface.skeleton import Skeleton
from quantkit.inspection import merged_digests, read_manifest, section
from quantkit.machine.devices import pick_device, threads_within_quota
from quantkit.machine.system import peak_bytes
from quantkit.models.config import NotNative
from quantkit.models.families import find
from quantkit.output.staging import check_apart, open_stage
from quantkit.output.writer import writing
from quantkit.safety.untrusted import shorten


def distill(
    checkpoint: str | Path,
    original: str | Path | None,
    output: str | Path,
    options: DistillOptions | None = None,
    *,
    device: str = "auto",
    resume: bool = True,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Distillation:
    """Train the scales, norms and biases of a checkpoint on the KL divergence from the original's logits.

    The codes stay as they are. Memory holds the codes (one byte per weight), the trained numbers with the optimizer's
    state, the intermediate results of one layer, and the hidden states of the original after its last layer.

    Args:
        checkpoint: directory of a quantized model in any format that quantkit can write.
        original: directory or hub id of the unquantized model; None = the model that quantkit-run.json names.
        output: directory to create.
        options: data and training; None = the defaults.
        device: "auto", "cpu", "cuda" or "cuda:<i>".
        resume: continue an interrupted run; False = start over.
        overwrite: replace an existing output.
        progress: called with progress messages.
    Raises:
        InputError: a model, the data or the output cannot be used.
        SchemeError: the checkpoint cannot be trained; the message says why.
        ResourceError: out of disk or memory; the same command resumes.
    """
    started, options, output = time.perf_counter(), options or DistillOptions(), Path(output)
    source, target_device = open_source(Path(checkpoint)), pick_device(device)
    _, folder = find_baseline(source.reader.path, original, read_manifest(source.reader.path, RUN))
    skeletons = _open_pair(source, folder, output, target_device, progress)
    target = target_for(source, source.format)
    samples = _read(skeletons[0], options, progress)
    identity = _identity(source, skeletons[0], samples, options)
    with open_stage(output, "distill", overwrite=overwrite, resumable=True) as stage, writing(stage.work.path):
        state = load_training(stage.work, identity, resume=resume)
        with computing(state.threads, target_device):
            run = Training(source, skeletons, samples, options, progress)
            run.train(state, stage.work.path)
        run.set(state.best)
        result = Distillation(
            checkpoint=str(checkpoint),
            original=str(folder),
            output=str(output),
            kl_before=state.history[0],
            kl_after=state.history[state.best_step],
            steps=state.best_step,
            steps_run=state.step,
            trained_numbers=sum(change.numel() for change in run.parameters.values()),
            history=state.history,
        )
        shutil.rmtree(stage.work.checkpoint, ignore_errors=True)  # left by a run that was killed while it wrote
        entry, model = _entry(result, options, samples), "demo" if folder == DEMO_MODEL else str(folder)
        write_checkpoint(run.student.trained(source), target, stage.work.checkpoint, {"distilled": entry}, model)
        source.reader.check_unchanged()
        stage.promote(stage.work.checkpoint)
    return replace(result, seconds=time.perf_counter() - started, peak_bytes=peak_bytes())


def _identity(source: Source, original: Skeleton, samples: Samples, options: DistillOptions) -> dict[str, Any]:
    """Return everything that affects the output of a run."""
    return {
        "options": asdict(options),
        "source": source.reader.digests,
        "original": original.reader.digests,
        "calibration": samples.digest,
        "versions": describe_versions(),
        "compute": compute_identity(original, threads_within_quota()),
    }


def _entry(result: Distillation, options: DistillOptions, samples: Samples) -> dict[str, Any]:
    """Return the entry of quantkit.json, which names no local paths."""
    kept = ("kl_before", "kl_after", "steps", "steps_run", "trained_numbers", "history")
    settings = {name: value for name, value in asdict(options).items() if name != "data"}
    return {**{name: getattr(result, name) for name in kept}, "options": settings, "calibration": samples.digest}


def open_skeleton(path: Path, device: torch.device) -> Skeleton:
    """Open a model whose layers pass on nothing but hidden states."""
    dense = open_dense(path)
    try:
        family = find(dense.config)
    except NotNative:
        named = shorten(dense.config.get("architectures"))
        raise SchemeError(f"{path}: distill does not know the architecture {named}; see docs/distill.md") from None
    reader = ModelReader.of(dense, family)
    dtype = pick_compute_dtype(reader.info(f"{family.embedding}.weight").dtype, device)
    skeleton = Skeleton(reader, family, dtype, device)
    if family.hands_on:
        raise SchemeError(
            f"{path}: the layers of this model pass on more than hidden states, and quantkit cannot train such models"
        )
    skeleton.check_tensors()
    return skeleton


def _open_pair(
    source: Source, folder: Path, output: Path, device: torch.device, progress: Progress
) -> tuple[Skeleton, Skeleton]:
    """Open the original and the checkpoint; refuse models that do not belong together, and an output inside of one."""
    if source.dense is not None:
        raise SchemeError(f"{source.reader.path} is a GGUF file; distill a compressed folder, and convert the result")
    if folder.resolve() == source.reader.path.resolve():
        raise ModelError(f"{folder} is its own baseline; give the original model as --baseline")
    if set(merged_digests(source.reader.path)) - set(merged_digests(folder)):
        raise ModelError(
            f"an adapter was merged into {source.reader.path}; merge it into the original too, with PEFT's "
            "merge_and_unload, and give the merged model as --baseline"
        )
    if output.suffix == ".gguf":
        raise OutputError(f"output {output}: distill writes a folder; choose another name, and convert the folder")
    for path in (folder, source.reader.path):
        check_apart(output, path)
    original, own = open_skeleton(folder, device), open_skeleton(source.reader.path, device)
    for what in ("num_layers", "hidden_size", "vocab_size"):
        sizes = getattr(own, what), getattr(original, what)
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"{own.reader.path} has {what} {sizes[0]}, but {folder} has {sizes[1]}; "
                "give the model that the checkpoint was made from"
            )
    made_from = section(read_manifest(source.reader.path), "identity").get("source")
    if made_from is not None and made_from != original.reader.digests:
        progress(f"warning: {source.reader.path} was made from other files than those in {folder}")
    return original, own


def _read(original: Skeleton, options: DistillOptions, progress: Progress) -> Samples:
    """Return the samples to train on; their tokens come from the original's tokenizer."""
    path = original.reader.path
    samples = load_samples(
        bundled_calibration(path) if options.data == "bundled" else options.data,
        load_tokenizer(path),
        samples=options.samples,
        sequence_length=options.sequence_length,
        vocab_size=original.vocab_size,
        seed=options.seed,
    )
    if len(samples.token_ids) < 2:
        raise DataError(f"{options.data} has text for one sample only, and one must be held out; give more text")
    for warning in samples.warnings:
        progress(f"warning: {warning}")
    return samples
