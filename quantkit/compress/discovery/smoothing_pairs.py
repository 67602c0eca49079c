"""Find modules that can absorb a set's smoothing scale, by trial: fold a scale in and test that the layer's output is
unchanged.

Scales are random powers of two. Multiplying by them is exact, so a correct fold leaves the output unchanged up to the
order of sums, and a wrong fold changes it. Every fold is tried with the layer's own weights and with larger ones. With
the larger weights, a clamp between the source and the set takes effect, so that the fold changes the output.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantkit.compress.calibration.folding import folded
from quantkit.compress.discovery.input_sets import Draft, same
from quantkit.compress.discovery.recorder import Recording
from quantkit.errors import ModelError
from quantkit.models.linear_sets import LinearSet

# Largest relative change of an output that counts as unchanged: a correct fold changes only the order of sums.
TOLERANCE = 1e-6
_GAINS = (1.0, 64.0)
_MOST_CANDIDATES = 6
_LARGEST_EXPONENT = 2


@dataclass(kw_only=True, slots=True)
class FoldTrial:
    """A layer on which folds are tried; it is modified during a trial and restored afterwards.

    Args:
        block: the layer, with float32 weights.
        run: calls the layer once and returns every tensor that it passes on.
        head_dim: width of an attention head.
        expected: outputs without a fold, keyed by the gain of the weights; computed in the first trial.
    """

    block: nn.Module
    run: Callable[[], Sequence[Tensor]]
    head_dim: int
    expected: dict[float, list[Tensor]] = field(default_factory=dict)

    def change(self, groups: Sequence[LinearSet]) -> float:
        """Return the largest relative change of the layer's output when scales are folded into all sets at once.

        Raises:
            ModelError: the layer's output is not finite, neither with its own weights nor with larger ones.
        """
        self._expect()
        values = dict(_fold(self.block, groups, self.head_dim))
        worst = 0.0
        for gain, expected in self.expected.items():
            with _changed(self.block, values, gain):
                worst = max(worst, *(_distance(a, b) for a, b in zip(self.run(), expected, strict=True)))
        return worst

    def _expect(self) -> None:
        for gain in _GAINS if not self.expected else ():
            with _changed(self.block, {}, gain):
                outputs = [tensor.clone() for tensor in self.run()]
            # If the layer overflows with one gain, the other gain decides.
            if all(bool(torch.isfinite(tensor).all()) for tensor in outputs):
                self.expected[gain] = outputs
        if not self.expected:
            raise ModelError("a decoder layer with random weights computes values that are not finite")


def source_candidates(block: nn.Module, seen: Recording, draft: Draft, head_dim: int) -> list[tuple[str, bool]]:
    """Return the modules that may have computed the input of a set, the likeliest first.

    Args:
        block: the layer.
        seen: record of one run of its modules.
        draft: the set.
        head_dim: width of an attention head.
    Returns:
        For each module, its relative name, and whether its outputs are value heads that several query heads share.
    """
    width = block.get_parameter(f"{draft.linears[0]}.weight").shape[1]
    producers: list[tuple[str, bool]] = []
    others: list[tuple[str, bool]] = []
    linears = [what.order for name, what in seen.modules.items() if isinstance(block.get_submodule(name), nn.Linear)]
    for name, what in sorted(seen.modules.items(), key=lambda item: item[1].order, reverse=True):
        if what.order >= draft.order or name in draft.linears:
            continue
        parameters = dict(block.get_submodule(name).named_parameters(recurse=False))
        weight = parameters.get("weight")
        # A fold divides every parameter of the source by output, so each must have one entry per output.
        if weight is None or any(p.dim() == 0 or p.shape[0] != weight.shape[0] for p in parameters.values()):
            continue
        outputs = weight.shape[0]
        if weight.dim() == 1 and outputs == width:
            if same(what.output, draft.rows):
                producers.append((name, False))
            # A linear in between would mix the channels that this module scales.
            elif not any(what.order < order < draft.order for order in linears):
                others.append((name, False))  # a computation without weights lies between the module and the set
        elif weight.dim() == 2 and isinstance(block.get_submodule(name), nn.Linear):
            if outputs == width:
                # With as many value heads as query heads, each channel has its own scale, so sharing does not matter.
                others.append((name, False))
            elif width % outputs == 0 and outputs % head_dim == 0:
                others.append((name, True))
    return (producers + others)[:_MOST_CANDIDATES]


def _fold(block: nn.Module, groups: Sequence[LinearSet], head_dim: int) -> Iterator[tuple[str, Tensor]]:
    for group in groups:
        width = block.get_parameter(f"{group.linears[0]}.weight").shape[1]
        outputs = block.get_parameter(f"{group.source}.weight").shape[0]
        # The scales of a pair are the same in every process.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{group.source} {group.linears[0]}".encode()))
        exponents = torch.randint(-_LARGEST_EXPONENT, _LARGEST_EXPONENT + 1, (outputs,), generator=generator)
        scales = torch.exp2(exponents.float())
        if outputs != width:
            heads = scales.view(-1, 1, head_dim)
            scales = heads.expand(-1, width // outputs, -1).reshape(-1)
        yield from folded(block, group, scales, head_dim)


def _distance(output: Tensor, expected: Tensor) -> float:
    if output.shape != expected.shape:
        return float("inf")
    size: float = expected.double().norm().item()
    wrong: float = (output.double() - expected.double()).norm().item()
    return wrong / size if size > 0 else wrong


@contextmanager
def _changed(block: nn.Module, values: dict[str, Tensor], gain: float) -> Iterator[None]:
    """While open, set the parameters named in `values`, and multiply the weights of all linears by `gain`.

    Nothing is copied. Afterwards, everything is restored, exactly if `gain` is a power of two.
    """
    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    kept = {name: block.get_parameter(name).data for name in values}
    try:
        for name, value in values.items():
            block.get_parameter(name).data = value
        for linear in linears:
            linear.weight.data.mul_(gain)
        yield
    finally:
        for linear in linears:
            linear.weight.data.div_(gain)
        for name, value in kept.items():
            block.get_parameter(name).data = value
