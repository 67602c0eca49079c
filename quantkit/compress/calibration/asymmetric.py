"""Asymmetric calibration (GPTAQ): a layer's inputs beside those of the same tokens in the original model.

Shapes: T tokens, K inputs.
Source: Li et al. 2025, GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from quantkit.checkpoints.memory import release_freed_memory
from quantkit.compress.calibration.expert_inputs import probe
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import CrossGram


def observe_asymmetric(layer: LayerContext, observers: Mapping[str, CrossGram]) -> None:
    """Run all calibration data through a layer and the original one, each with the states of its own model.

    Args:
        layer: of a run whose steps ask for the original model.
        observers: by relative name of a linear that sees every token; each is shown the linear's inputs and, divided by
            what has been folded into their source since, those of the original model.
    """
    data = layer.data
    assert data.store is not None, "this recipe has no calibration data"
    assert data.original_store is not None, "no step of the recipe has asked for the original model"
    assert data.original is not None, "no step of the recipe has asked for the original layer"
    for hidden, original in zip(data.store, data.original_store, strict=True):
        inputs = _inputs(layer.block, tuple(observers), partial(layer.forward, hidden))
        targets = _inputs(data.original, tuple(observers), partial(layer.original_forward, original))
        for name, observer in observers.items():
            observer.update(inputs[name], targets[name] / data.divisors.get(layer.set_key(name), 1.0))
    release_freed_memory()


def _inputs(block: nn.Module, names: tuple[str, ...], run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """(T, K) inputs that linears of a block get while `run` runs it, up to the last of them."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str, args: tuple[Tensor, ...], _: dict[str, Any]) -> None:
        inputs[name] = args[0].reshape(-1, args[0].shape[-1])

    probe(block, names, keep, run)
    return inputs
