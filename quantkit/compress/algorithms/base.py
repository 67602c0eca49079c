"""The seam of all algorithms: a step rewrites a layer's weights or sets its codes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # planning asks steps for their memory, without torch
    from quantkit.compress.calibration.layer import LayerContext


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Sizes of a layer that decide the memory of a compression.

    Args:
        weights: numbers in the linears of the largest layer.
        tallest: numbers in the largest linear.
        width: inputs K of the widest linear.
        element_bytes: of the dtype of weights and hidden states.
        states_bytes: hidden states of one model that are kept in memory; 0 where they are on disk, or there is no data.
    """

    weights: int
    tallest: int
    width: int
    element_bytes: int
    states_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """Peak memory of a step, beside the layer and the hidden states.

    Args:
        statistics: of inputs, and what is tuned or solved.
        hidden_states: more of these than those that the run keeps.
    """

    statistics: int = 0
    hidden_states: int = 0


class Step(Protocol):
    """One algorithm with its options, as a frozen dataclass called STEP in its own file.

    The fields are the options that a recipe may set; their defaults and the class docstring's `Args:` are
    their documentation. Steps run in the order of the recipe, on one layer after another.

    A step may have a property `needs_original`: true makes the run keep the hidden states of the original model beside
    those of the quantized one, on disk, and the layer as it was (`original_store` and `original` of `layer.data`). A
    step that only wants to know the original's outputs has `needs_targets` instead (`targets` of `layer.data`). A
    property `reorders_groups` says that groups are formed in another order than that of the inputs. A method
    `extra_bytes(sizes: LayerSizes) -> StepBytes` says what memory it takes; one without takes next to none. A method
    `open(source: CheckpointReader, family: Family) -> ModelReader` of one step of a recipe makes another model of the
    checkpoint, which computes the same, and on which all steps then work; it raises ModelError where it cannot.
    """

    def apply(self, layer: LayerContext) -> None:
        """Improve one layer.

        Args:
            layer: modified: either its weights (SmoothQuant, AWQ) or, by `layer.commit`, its codes (GPTQ).
        """


def needs_original(steps: Collection[Step]) -> bool:
    """Whether some step compares with the original model, whose layer and hidden states are then kept too."""
    return any(getattr(step, "needs_original", False) for step in steps)


def follows_original(steps: Collection[Step]) -> bool:
    """Whether some step asks what the original model makes of the data, before a layer or after it."""
    return needs_original(steps) or any(getattr(step, "needs_targets", False) for step in steps)


def keeps_original(steps: Collection[Step], *, hands_on: bool) -> bool:
    """Whether the original layer is kept: also for its outputs alone, where it hands on more than hidden states."""
    return needs_original(steps) or (hands_on and follows_original(steps))


def reorders_groups(steps: Collection[Step]) -> bool:
    """Whether some step forms groups in another order than that of the inputs."""
    return any(getattr(step, "reorders_groups", False) for step in steps)


def steps_bytes(
    steps: Collection[Step],
    layers: Iterable[Collection[tuple[int, int]]],
    element_bytes: int,
    num_states: int,
    *,
    hands_on: bool = False,
) -> dict[str, int]:
    """What compressing holds in memory at once, by purpose; a plain estimate made before anything is read.

    Args:
        steps: of a recipe, which run one after another.
        layers: (N, K) of each linear, per layer.
        element_bytes: of the dtype of weights and hidden states.
        num_states: elements of the hidden states of one model that are kept in memory.
        hands_on: layers hand on more than hidden states.
    """
    shapes = [layer for layer in layers if layer]
    sizes = LayerSizes(
        weights=max((sum(n * k for n, k in layer) for layer in shapes), default=0),
        tallest=max((n * k for layer in shapes for n, k in layer), default=0),
        width=max((k for layer in shapes for _, k in layer), default=0),
        element_bytes=element_bytes,
        states_bytes=num_states * element_bytes,
    )
    extra = [step.extra_bytes(sizes) if hasattr(step, "extra_bytes") else StepBytes() for step in steps]
    models = 2 if keeps_original(steps, hands_on=hands_on) else 1
    return {
        "layer": models * sizes.weights * sizes.element_bytes,
        "hidden_states": sizes.states_bytes + max((e.hidden_states for e in extra), default=0),
        "statistics": max((e.statistics for e in extra), default=0),
        "working_copies": 3 * 4 * sizes.tallest,
    }
