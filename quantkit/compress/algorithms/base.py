"""Interface of all algorithms. A step changes the weights of a layer, or chooses the ranges or codes of the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quantkit.errors import ModelError

if TYPE_CHECKING:  # planning imports this module to ask steps for their memory, and must not import torch
    from quantkit.checkpoints.model_reader import ModelReader
    from quantkit.checkpoints.reader import CheckpointReader
    from quantkit.compress.calibration.layer import LayerContext
    from quantkit.models.family import Family


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Sizes that determine how much memory it takes to compress a model's layers.

    Args:
        weights: number of weights in the linears of the largest layer.
        tallest: number of weights in the largest linear.
        width: number of inputs K of the widest linear.
        element_bytes: bytes per number in the dtype of weights and hidden states.
        states_bytes: bytes of the hidden states of one model, quantized or original, that are kept in memory; 0 if they
            are on disk or there is no data.
    """

    weights: int
    tallest: int
    width: int
    element_bytes: int
    states_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """Bytes that a step needs at its peak, in addition to the layer and to the hidden states that the run keeps.

    Args:
        statistics: statistics of inputs, and temporaries of tuning or solving.
        hidden_states: hidden states in addition to those that the run keeps.
    """

    statistics: int = 0
    hidden_states: int = 0


class Step(ABC):
    """One algorithm with its options. Each subclass is a frozen dataclass in its own file, which exports it as STEP.

    The fields are the options that a recipe may set; the class docstring's `Args:` documents them. On each layer in
    turn, the steps run in the order of the recipe. Class attributes and properties state everything that other parts of
    quantkit must know about a step, so no other code names an algorithm.
    """

    __slots__ = ()

    fixes_codes: ClassVar[bool] = False
    """The step sets codes, so later steps change nothing."""
    is_for_activations: ClassVar[bool] = False
    """The step only helps where activations are quantized."""
    replaces_model: ClassVar[bool] = False
    """`open` reads the checkpoint as a different model, so codes of a quantized source cannot be kept."""
    moves_scales: ClassVar[bool] = False
    """The step moves scales between a linear and the previous module, so neither alone fits into the original model."""
    needs_targets: ClassVar[bool] = False
    """The run computes the original model's outputs (`layer.data.targets`)."""
    fits_blocks: ClassVar[bool] = True
    """The step can choose the scales of ggml's types, which are whole multiples of the scale of a block."""
    on_one_process: ClassVar[bool] = False
    """One process runs the step on the whole layer, because the work cannot be divided among several processes."""
    independent_options: ClassVar[Mapping[str, Any]] = {}
    """Options that make a layer's result independent of the layers before it. `search` uses them."""

    @property
    def needs_original(self) -> bool:
        """Whether the run must also keep the original layer and the original model's hidden states (`layer.data`)."""
        return False

    @property
    def reorders_groups(self) -> bool:
        """Whether the step may put inputs that are not neighbours into one group. The format must then store the group
        of each input.
        """
        return False

    def extra_bytes(self, sizes: LayerSizes) -> StepBytes:
        """Return the step's extra memory at its peak: by default 0, for steps that need almost none."""
        return StepBytes()

    def open(self, source: CheckpointReader, family: Family) -> ModelReader:
        """Return a reader of the model that all steps of the recipe work on: the source model, or a different model
        if `replaces_model` is true.

        Raises:
            ModelError: the step cannot work on this model.
        """
        from quantkit.checkpoints.model_reader import ModelReader

        return ModelReader.of(source, family)

    @abstractmethod
    def apply(self, layer: LayerContext) -> None:
        """Run the step on one layer.

        Args:
            layer: the layer. Steps change its weights (SmoothQuant, AWQ), store ranges in `layer.chosen.ranges` (RTN,
                AWQ), or set codes with `layer.commit` (GPTQ, AutoRound).
        """


def needs_original(steps: Collection[Step]) -> bool:
    """Whether any of these steps uses the original model. The run then also keeps the original layer and the original
    model's hidden states.
    """
    return any(step.needs_original for step in steps)


def follows_original(steps: Collection[Step]) -> bool:
    """Whether any of these steps needs the original model's hidden states, either before or after a layer."""
    return needs_original(steps) or any(step.needs_targets for step in steps)


def keeps_original(steps: Collection[Step], *, hands_on: bool) -> bool:
    """Whether the run keeps the original layer. It does if a step uses the original model, and also if a step needs
    target outputs and layers exchange more than hidden states (`hands_on`).
    """
    return needs_original(steps) or (hands_on and follows_original(steps))


def reorders_groups(steps: Collection[Step]) -> bool:
    """Whether any of these steps may put inputs that are not neighbours into one group."""
    return any(step.reorders_groups for step in steps)


def moves_scales(steps: Mapping[str, Step]) -> bool:
    """Whether scales must be moved back before a linear of the compressed model can be used in the original model.

    Raises:
        ModelError: a step replaces the model, so no linear of the compressed model can be used in the original.
    """
    other = next((name for name, step in steps.items() if step.replaces_model), None)
    if other is not None:
        raise ModelError(f"step {other} changes the whole model, so no part can be measured alone; remove the step")
    return any(step.moves_scales for step in steps.values())


def steps_bytes(
    steps: Collection[Step],
    layers: Iterable[Collection[tuple[int, int]]],
    element_bytes: int,
    num_states: int,
    *,
    hands_on: bool = False,
) -> dict[str, int]:
    """Estimate the peak memory of compressing a model, in bytes by purpose, without reading any tensor.

    Args:
        steps: steps of a recipe, which run one after another.
        layers: for each layer, the shapes (N, K) of its linears.
        element_bytes: bytes per number in the dtype of weights and hidden states.
        num_states: number of elements of one model's hidden states that are kept in memory.
        hands_on: whether layers exchange more than hidden states.
    """
    shapes = [layer for layer in layers if layer]
    sizes = LayerSizes(
        weights=max((sum(n * k for n, k in layer) for layer in shapes), default=0),
        tallest=max((n * k for layer in shapes for n, k in layer), default=0),
        width=max((k for layer in shapes for _, k in layer), default=0),
        element_bytes=element_bytes,
        states_bytes=num_states * element_bytes,
    )
    extra = [step.extra_bytes(sizes) for step in steps]
    models = 2 if keeps_original(steps, hands_on=hands_on) else 1
    return {
        "layer": models * sizes.weights * sizes.element_bytes,
        "hidden_states": sizes.states_bytes + max((e.hidden_states for e in extra), default=0),
        "statistics": max((e.statistics for e in extra), default=0),
        "working_copies": 3 * 4 * sizes.tallest,
    }
