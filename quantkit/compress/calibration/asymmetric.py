"""A layer's inputs beside those that the same tokens have in the original model. Shapes: T tokens, K inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from quantkit.checkpoints.memory import release_freed_memory
from quantkit.compress.calibration.expert_inputs import probe
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import PairObserver


def observe_beside_original(layer: LayerContext, observers: Mapping[str, PairObserver]) -> None:
    """Run all calibration data through a layer and the original one, each with the states of its own model.

    Args:
        layer: of a run whose steps ask for the original model.
        observers: by relative name of a linear that sees every token; each is shown the linear's inputs and, divided by
            what has been folded into their source since, those of the original model.
    """
    assert layer.store is not None, "this recipe has no calibration data"
    assert layer.original_store is not None, "no step of the recipe has asked for the original model"
    assert layer.original is not None, "no step of the recipe has asked for the original layer"
    for hidden, original in zip(layer.store, layer.original_store, strict=True):
        inputs = _inputs(layer.block, tuple(observers), partial(layer.forward, hidden))
        wanted = _inputs(layer.original, tuple(observers), partial(layer.original_forward, original))
        for name, observer in observers.items():
            key = next(group.linears[0] for group in layer.sets if name in group.linears)
            observer.update(inputs[name], wanted[name] / layer.divisors.get(key, 1.0))
    release_freed_memory()


def _inputs(block: nn.Module, names: tuple[str, ...], run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """(T, K) inputs that linears of a block get while `run` runs it, up to the last of them."""
    found: dict[str, Tensor] = {}

    def look(name: str, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> None:
        found[name] = args[0].reshape(-1, args[0].shape[-1])

    probe(block, names, look, run)
    return found
