"""From calibration data to the hidden states before each layer."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

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
        state: of the run; after the first layer, states are those that it has saved in its folder. Its digests are of
            both models in one list, the original's last.
        mode: see `ActivationStore`.
    Attributes:
        quantized, original: states of the two models; None where there are none.
    Raises:
        ResumeError: saved states are missing, or not what was written.
    """

    def __init__(self, plan: Plan, samples: Samples | None, state: RunState, mode: Mode) -> None:
        self._stores = [] if samples is None else list(_open_stores(plan, samples, state, mode))
        self.quantized, self.original = [*self._stores, None, None][:2]

    def advance(self, layer: LayerContext) -> list[str]:
        """Turn the states into those before the next layer; their digests."""
        for store, forward in zip(self._stores, (layer.forward, layer.original_forward), strict=False):
            store.advance(forward)
        return [digest for store in self._stores for digest in store.digests]

    def forget_previous(self) -> None:
        """Delete the files of the layer before; to be called once progress has been recorded."""
        for store in self._stores:
            store.forget_previous()


def _open_stores(plan: Plan, samples: Samples, state: RunState, mode: Mode) -> Iterator[ActivationStore]:
    # The digests of both models' states are saved as one list: equally many of each.
    names = ["activations", *(["activations-original"] if needs_original(plan.recipe.steps) else [])]
    layer, size = len(state.records), len(state.activations) // len(names)
    for number, name in enumerate(names if layer < plan.skeleton.num_layers else ()):
        folder = state.folder / name
        if layer:
            own = state.activations[number * size : (number + 1) * size]
            yield ActivationStore.restore(folder, mode, layer, own)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            yield ActivationStore(folder, mode, embed(plan, samples))
