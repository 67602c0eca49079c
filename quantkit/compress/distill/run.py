"""Train a compressed checkpoint on the original's logits, and write it in the same format.

Some samples are held out. Every few steps, the KL divergence on them is measured, and the state is saved, so that a
killed run goes on with the same numbers. The result has the parameters with the least held-out KL.
"""

import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.tokenizer import load_tokenizer
from quantkit.compress.calibration.dataset import Samples, load_samples
from quantkit.compress.convert.run import write_checkpoint
from quantkit.compress.convert.source import open_source
from quantkit.compress.convert.target import target_for
from quantkit.compress.distill.options import Distillation, DistillOptions
from quantkit.compress.distill.training import Progress, Training, load_training
from quantkit.compress.pipeline.plan import pick_compute_dtype
from quantkit.compress.pipeline.run import computing
from quantkit.compress.pipeline.state import compute_identity, describe_versions
from quantkit.demo import bundled_calibration
from quantkit.errors import ModelError, SchemeError
from quantkit.huggingface.skeleton import Skeleton
from quantkit.machine.devices import pick_device, threads_within_quota
from quantkit.machine.system import peak_bytes
from quantkit.models.families import find
from quantkit.output.staging import check_apart, open_stage
from quantkit.output.writer import writing


def distill(
    checkpoint: str | Path,
    original: str | Path,
    output: str | Path,
    options: DistillOptions | None = None,
    *,
    device: str = "auto",
    resume: bool = True,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Distillation:
    """Train the scales, norms and biases of a checkpoint on the KL divergence from the original's logits.

    The codes stay as they are. Memory holds the codes (one byte per weight), one decoded layer, and the hidden states
    of the original after its last layer.

    Args:
        checkpoint: directory of a quantized model in any format that quantkit can write.
        original: directory or hub id of the unquantized model.
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
    folder = resolve(str(original))
    for path in (source.reader.path, folder):
        check_apart(output, path)
    target = target_for(source, source.format)
    skeletons = [open_skeleton(path, target_device) for path in (folder, source.reader.path)]
    _check_pair(*skeletons)
    samples = _read(skeletons[0], options)
    identity = {
        "options": asdict(options),
        "source": source.reader.digests,
        "original": skeletons[0].reader.digests,
        "calibration": samples.digest,
        "versions": describe_versions(),
        "compute": compute_identity(skeletons[0], threads_within_quota()),
    }
    with open_stage(output, "distill", overwrite=overwrite, resumable=True) as stage, writing(stage.work.path):
        state = load_training(stage.work, identity, resume=resume)
        with computing(state.threads, target_device):
            run = Training(source, skeletons, samples, options, progress)
            run.train(state, stage.work.path)
        run.set(state.best)
        found = Distillation(
            checkpoint=str(checkpoint),
            original=str(original),
            output=str(output),
            kl_before=state.history[0],
            kl_after=min(state.history.values()),
            steps=state.best_step,
            steps_run=state.step,
            trained_numbers=sum(change.numel() for change in run.parameters.values()),
            history=state.history,
        )
        trained = replace(
            source,
            weights={name: linear.result() for name, linear in run.student.linears.items()},
            changed={name: vector.result() for name, vector in run.student.vectors.items()},
        )
        shutil.rmtree(stage.work.checkpoint, ignore_errors=True)  # left by a run that was killed while it wrote
        entry = {"distilled": {**asdict(found), "options": asdict(options), "calibration": samples.digest}}
        write_checkpoint(trained, target, stage.work.checkpoint, entry)
        source.reader.check_unchanged()
        stage.promote(stage.work.checkpoint)
    return replace(found, seconds=time.perf_counter() - started, peak_bytes=peak_bytes())


def open_skeleton(path: Path, device: torch.device) -> Skeleton:
    """Open a model whose layers pass on nothing but hidden states."""
    dense = open_dense(path)
    family = find(dense.config)
    reader = ModelReader.of(dense, family)
    skeleton = Skeleton(reader, family, torch.float32, device)
    skeleton.dtype = pick_compute_dtype(reader.info(f"{family.embedding}.weight").dtype, device)
    if family.hands_on:
        raise SchemeError(
            f"{path}: the layers of this model pass on more than hidden states, and quantkit cannot train such models"
        )
    skeleton.check_tensors()
    return skeleton


def _check_pair(original: Skeleton, own: Skeleton) -> None:
    """Refuse two models of different shapes."""
    for what in ("num_layers", "hidden_size", "vocab_size"):
        expected, found = getattr(original, what), getattr(own, what)
        if expected != found:
            raise ModelError(
                f"{own.reader.path} has {what} {found}, but {original.reader.path} has {expected}; "
                "give the model that the checkpoint was made from"
            )


def _read(original: Skeleton, options: DistillOptions) -> Samples:
    """Return the samples to train on; their tokens come from the original's tokenizer."""
    path = original.reader.path
    return load_samples(
        bundled_calibration(path) if options.data == "bundled" else options.data,
        load_tokenizer(path),
        samples=options.samples,
        sequence_length=options.sequence_length,
        vocab_size=original.vocab_size,
        seed=options.seed,
    )
