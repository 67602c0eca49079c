"""From calibration data to the hidden states before each layer."""

import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from quantkit.checkpoints.layer_call import Batch
from quantkit.checkpoints.tokenizer import load_tokenizer
from quantkit.compress.algorithms.base import needs_original
from quantkit.compress.calibration.activations import ActivationStore, Mode
from quantkit.compress.calibration.dataset import Samples, load_samples
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.pipeline.plan import Plan
from quantkit.compress.pipeline.state import RunState
from quantkit.demo import DEMO_MODEL, DEMO_TEXT, GENERAL_TEXT

# Tokens that go through a layer at once; enough for fast products, few enough that their intermediates stay small.
_BATCH_TOKENS = 2048


def read_samples(plan: Plan) -> Samples | None:
    """Calibration samples of a plan; None when its recipe needs none.

    Raises:
        ModelError: the model has no usable tokenizer.
        DataError: the data cannot be used.
    """
    calibration = plan.recipe.calibration
    if calibration is None:
        return None
    bundled = DEMO_TEXT if plan.reader.path.resolve() == DEMO_MODEL.resolve() else GENERAL_TEXT
    samples = load_samples(
        bundled if calibration.data == "bundled" else calibration.data,
        load_tokenizer(plan.reader.path),
        vocab_size=plan.reader.info(f"{plan.family.embedding}.weight").shape[0],
        seed=plan.recipe.seed,
        **calibration.model_dump(include={"samples", "sequence_length", "field", "split"}),
    )
    limit = plan.reader.config.get("max_position_embeddings")
    if limit is None or calibration.sequence_length <= limit:
        return samples
    text = f"sequence_length {calibration.sequence_length} is beyond the {limit} positions that the model was made for"
    return replace(samples, warnings=(*samples.warnings, text))


def embed(plan: Plan, samples: Samples) -> Iterator[Batch]:
    """What enters the first layer, on the CPU: hidden states (B, T, D) of samples of equal length, or call by call.

    Only the embedding rows of tokens that occur are read.
    """
    if plan.family.hands_on:
        yield from (plan.skeleton.first_call(torch.tensor([ids])) for ids in samples.token_ids)
        return
    used = torch.tensor(sorted({token for sample in samples.token_ids for token in sample}))
    name = f"{plan.family.embedding}.weight"
    table = plan.reader.gather_rows(name, used)
    row_of = torch.zeros(plan.reader.info(name).shape[0], dtype=torch.int64)
    row_of[used] = torch.arange(len(used))
    ordered = sorted(samples.token_ids, key=len, reverse=True)  # errors are measured on the first batches
    for length, group in itertools.groupby(ordered, key=len):
        ids = torch.tensor(list(group))  # (B, T)
        for batch in torch.split(ids, max(1, _BATCH_TOKENS // length)):
            yield plan.skeleton.embed(batch, table, row_of)


def open_stores(plan: Plan, samples: Samples, state: RunState, mode: Mode, folder: Path) -> list[ActivationStore]:
    """Hidden states before the next layer: of the model being quantized, then of the original if a step needs them.

    Args:
        plan: of the run.
        samples: calibration data.
        state: of the run; after the first layer, states are those that it has saved.
        mode: see `ActivationStore`.
        folder: of the unfinished run.
    Raises:
        ResumeError: saved states are missing, or not what was written.
    """
    names = ["activations", *(["activations-original"] if needs_original(plan.recipe.steps.values()) else [])]
    layer, size = len(state.records), len(state.activations) // len(names)
    if layer == plan.skeleton.num_layers:
        return []
    if layer:
        digests = [list(state.activations[n * size : (n + 1) * size]) for n in range(len(names))]
        return [
            ActivationStore.restore(folder / name, mode, layer, own) for name, own in zip(names, digests, strict=True)
        ]
    # Left by a run that was killed before its first layer was recorded.
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
    return [ActivationStore(folder / name, mode, embed(plan, samples)) for name in names]


def advance(stores: Sequence[ActivationStore], layer: LayerContext) -> list[str]:
    """Turn the states of both models into those before the next layer; their digests."""
    # Where no step compares with the original there is but one store.
    for store, forward in zip(stores, (layer.advance, layer.original_advance), strict=False):
        store.advance(forward)
    return [digest for store in stores for digest in store.digests]
