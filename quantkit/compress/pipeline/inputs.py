"""From calibration data to the hidden states before each layer."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoints.tokenizer import load_tokenizer
from quantkit.compress.calibration.activations import ActivationStore, Mode
from quantkit.compress.calibration.dataset import Samples, load_samples
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.pipeline.plan import Plan

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
    samples = load_samples(
        plan.bundled_text if calibration.data == "bundled" else calibration.data,
        load_tokenizer(plan.reader.path),
        samples=calibration.samples,
        sequence_length=calibration.sequence_length,
        vocab_size=plan.reader.info(f"{plan.family.embedding}.weight").shape[0],
        seed=plan.recipe.seed,
        field=calibration.field,
        split=calibration.split,
    )
    limit = plan.reader.config.get("max_position_embeddings")
    if limit is None or calibration.sequence_length <= limit:
        return samples
    text = f"sequence_length {calibration.sequence_length} is beyond the {limit} positions that the model was made for"
    return replace(samples, warnings=(*samples.warnings, text))


def embed(plan: Plan, samples: Samples) -> Iterator[Tensor]:
    """Hidden states before the first layer, batches (B, T, D) of samples of equal length, on the CPU.

    Only the embedding rows of tokens that occur are read.
    """
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


class HiddenStates:
    """Hidden states before the next layer: of the model being quantized, and of the original if a step needs them.

    Args:
        plan: of the run.
        samples: calibration data; None = there are no hidden states.
        folder: of the run; the states lie in sub-folders of it.
        mode: see `ActivationStore`.
        layer: the next one; after the first, states are those that an interrupted run has saved.
        digests: of these, of both models in one list, the original's last.
    Raises:
        ResumeError: saved states are missing, or not what was written.
    """

    def __init__(
        self, plan: Plan, samples: Samples | None, folder: Path, mode: Mode, *, layer: int, digests: list[str]
    ) -> None:
        names = ["activations", *(["activations-original"] if plan.needs_original else [])]
        size = len(digests) // len(names)
        self._stores: list[ActivationStore] = []
        if samples is None or layer == plan.skeleton.num_layers:
            return
        for number, name in enumerate(names):
            if layer:
                own = digests[number * size : (number + 1) * size]
                self._stores.append(ActivationStore.restore(folder / name, mode, layer, own))
            else:
                shutil.rmtree(folder / name, ignore_errors=True)
                self._stores.append(ActivationStore(folder / name, mode, embed(plan, samples)))

    @property
    def quantized(self) -> ActivationStore | None:
        """Of the model being quantized."""
        return self._stores[0] if self._stores else None

    @property
    def original(self) -> ActivationStore | None:
        """Of the original model."""
        return self._stores[1] if len(self._stores) > 1 else None

    def advance(self, layer: LayerContext) -> list[str]:
        """Turn the states into those before the next layer; their digests."""
        for store, forward in zip(self._stores, (layer.forward, layer.original_forward), strict=False):
            store.advance(forward)
        return [digest for store in self._stores for digest in store.digests]

    def forget_previous(self) -> None:
        """Delete the files of the layer before; to be called once progress has been recorded."""
        for store in self._stores:
            store.forget_previous()
