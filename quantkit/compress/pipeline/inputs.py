"""Compute the inputs of each layer from the calibration data."""

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.tokenizer import load_tokenizer
from quantkit.compress.algorithms.base import follows_original
from quantkit.compress.calibration.dataset import NO_TEXT, Samples, load_samples, num_held_out
from quantkit.compress.calibration.held_out import HeldOut
from quantkit.compress.calibration.hidden_state_store import ActivationStore, Mode
from quantkit.compress.calibration.images import ImageSamples, load_images
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.pipeline.plan import Plan
from quantkit.compress.pipeline.state import CompressionRun
from quantkit.compress.recipe.schema import CalibrationSection
from quantkit.demo import bundled_calibration
from quantkit.distributed import barrier, is_writer
from quantkit.errors import ModelError
from quantkit.huggingface.image_inputs import ImageStem
from quantkit.huggingface.layer_call import Batch
from quantkit.huggingface.load_rules import with_tower_names

# Tokens that go through a layer at once: enough for fast products, but few enough to keep intermediate results small.
_BATCH_TOKENS, _BATCH_TOKENS_ON_CPU = 2048, 1024


def read_samples(plan: Plan) -> Samples | None:
    """Read the calibration samples of a plan; None if its recipe needs none.

    Raises:
        ModelError: the model has no usable tokenizer.
        DataError: the data cannot be used.
    """
    calibration = plan.recipe.calibration
    if calibration is None:
        return None
    images = _read_images(plan, calibration)
    number = calibration.num_samples - (len(images.chats) if images else 0)
    samples = _read_texts(plan, calibration, number) if number else NO_TEXT
    samples = samples.with_images(images) if images else samples
    limit = plan.reader.config.get("max_position_embeddings")
    if limit is None or calibration.sequence_length <= limit:
        return samples
    text = f"calibration.sequence_length is {calibration.sequence_length}, but the model has only {limit} positions"
    return replace(samples, warnings=(*samples.warnings, text))


def _read_texts(plan: Plan, calibration: CalibrationSection, number: int) -> Samples:
    return load_samples(
        bundled_calibration(plan.reader.path) if calibration.data == "bundled" else calibration.data,
        load_tokenizer(plan.reader.path),
        samples=number,
        vocab_size=plan.reader.info(f"{plan.family.embedding}.weight").shape[0],
        seed=plan.recipe.seed,
        **calibration.model_dump(include={"sequence_length", "field", "split"}),
    )


def _read_images(plan: Plan, calibration: CalibrationSection) -> ImageSamples | None:
    """Return the calibration samples with images; None if the recipe asks for none."""
    if calibration.images is None:
        return None
    if plan.discovery is None or not plan.skeleton.tower_linears():
        raise ModelError(f"{plan.reader.path}: the model does not accept images; leave calibration.images out")
    return load_images(
        calibration.images,
        plan.reader.path,
        plan.reader.config,
        samples=calibration.num_samples,
        sequence_length=calibration.sequence_length,
        seed=plan.recipe.seed,
    )


def embed(plan: Plan, samples: Samples) -> Iterator[Batch]:
    """Yield inputs of the first layer, on the CPU: hidden states (B, T, D) of several samples of equal length, or the
    `LayerCall` of one sample.

    A sample with images is a `LayerCall`. Samples with images are spread evenly among those without, because some steps
    use only the first tokens of the data.
    """
    if samples.images is None:
        yield from _embed_texts(plan, samples.texts)
        return
    texts, num_texts = _embed_texts(plan, samples.texts), len(samples.texts)
    seen = 0
    for number, call in enumerate(_embed_images(plan, samples.images)):
        yield call
        while seen * samples.num_images < (number + 1) * num_texts and (batch := next(texts, None)) is not None:
            seen += batch.shape[0]
            yield batch


def _embed_images(plan: Plan, images: ImageSamples) -> Iterator[Batch]:
    """Yield the `LayerCall` of each sample with images. Only this generator holds the towers in memory."""
    family, skeleton = with_tower_names(plan.family, plan.source), plan.skeleton
    used = {token for ids in images.token_ids for token in ids}
    reader = ModelReader.of(plan.source, family)
    stem = ImageStem.load(reader, family, used, dtype=skeleton.dtype, device=skeleton.device)
    for token_ids, inputs in images.inputs():
        yield skeleton.first_call(token_ids, stem.inputs(inputs))


def _embed_texts(plan: Plan, samples: Sequence[Sequence[int]]) -> Iterator[Batch]:
    """Yield the first layer's inputs for samples without images. Only embedding rows of tokens that occur are read."""
    if plan.family.hands_on:
        yield from (plan.skeleton.first_call(torch.tensor([ids])) for ids in samples)
        return
    if not samples:
        return
    used = torch.tensor(sorted({token for sample in samples for token in sample}))
    name = f"{plan.family.embedding}.weight"
    table = plan.reader.gather_rows(name, used)
    row_of = torch.zeros(plan.reader.info(name).shape[0], dtype=torch.int64)
    row_of[used] = torch.arange(len(used))
    ordered = sorted(samples, key=len, reverse=True)
    tokens = _BATCH_TOKENS_ON_CPU if plan.skeleton.device.type == "cpu" else _BATCH_TOKENS
    for length, group in itertools.groupby(ordered, key=len):
        ids = torch.tensor(list(group))  # (B, T)
        for batch in torch.split(ids, max(1, tokens // length)):
            yield plan.skeleton.embed(batch, table, row_of)


def open_stores(run: CompressionRun, samples: Samples, mode: Mode) -> list[ActivationStore]:
    """Return stores of the next layer's inputs: in the quantized model and, if a step needs it, in the original model.

    The list is empty if all layers are done.

    Args:
        run: the run. An interrupted run continues from its saved states; with `calibration.inputs: original`, states
            are computed again from the first layer on.
        samples: calibration samples of the run.
        mode: see `ActivationStore`; states of the original model always stay on disk.
    Raises:
        ResumeError: saved states are missing or have changed.
    """
    plan, state, folder = run.plan, run.state, run.work.path
    modes: dict[str, Mode] = {"activations": mode}
    if follows_original(plan.recipe.steps.values()):
        modes["activations-original"] = "disk"
    layer, size = len(state.records), len(state.activations) // len(modes)
    if layer == plan.skeleton.num_layers:
        return []
    if layer and not plan.recipe.has_original_inputs:
        return [
            ActivationStore.restore(folder / name, kind, layer, list(state.activations[n * size : (n + 1) * size]))
            for n, (name, kind) in enumerate(modes.items())
        ]
    # Delete states that an earlier run left; this run computes them again.
    if is_writer():
        for name in modes:
            shutil.rmtree(folder / name, ignore_errors=True)
    barrier()
    return [ActivationStore(folder / name, kind, embed(plan, samples)) for name, kind in modes.items()]


def open_held_out(run: CompressionRun, samples: Samples, stores: Sequence[ActivationStore], mode: Mode) -> HeldOut:
    """Open the next layer's inputs for the held-out texts, or for a few calibration sequences if nothing was held out.

    Args:
        run, samples, mode: see `open_stores`.
        stores: the stores that `open_stores` returned.
    """
    plan, state, folder = run.plan, run.state, run.work.path
    same = plan.recipe.has_original_inputs
    names = ["held-out-original", *([] if same else ["held-out"])]
    tokens = sum(map(len, samples.token_ids))
    layer = 0 if same else len(state.records)
    opened = []
    for number, name in enumerate(names):
        if layer:
            opened.append(ActivationStore.restore(folder / name, mode, layer, [state.held_out[number]]))
            continue
        if is_writer():
            shutil.rmtree(folder / name, ignore_errors=True)
        barrier()
        count = num_held_out(len(samples.token_ids), max(map(len, samples.token_ids)))
        batches = _embed_texts(plan, samples.held_out) if samples.held_out else iter([stores[0][0][:count]])
        opened.append(ActivationStore(folder / name, mode, itertools.islice(batches, 1)))
    return HeldOut(
        original=opened[0],
        quantized=None if same else opened[1],
        measure="held-out" if samples.held_out else "calibration",
        num_tokens=tokens,
    )


def advance(stores: Sequence[ActivationStore], layer: LayerContext, first: Tensor | None) -> list[str]:
    """Compute the next layer's inputs in the models that `stores` cover, and return the digests of the saved states.

    Args:
        stores: inputs of the layer in the quantized model and, if a step needs it, in the original model.
        layer: the quantized layer.
        first: the quantized layer's output for the first sequence, which only the first process computes; None in the
            other processes.
    """
    layer.check_runs(first)
    forwards: list[Callable[[int, Batch], Batch]] = [layer.advance]
    if layer.data.original is not None:  # otherwise the original's outputs are already stored, or not needed
        forwards.append(layer.data.original.advance)
    for store, forward in zip(stores, forwards, strict=False):
        store.advance(forward)
    return [digest for store in stores for digest in store.digests]
