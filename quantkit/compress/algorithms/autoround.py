"""AutoRound: tune the rounding and ranges of a whole decoder layer by signed gradient descent on its output error.

The target is the original layer's output for the original model's hidden states. The input is the output of the
quantized earlier layers, so each layer also compensates for the errors of earlier layers. Differences from the paper:
tuning starts from ranges that were searched with the importance of the inputs. It takes many small steps of one
sequence each, instead of a few large steps. It may move a code by more than one place, and it keeps the result only if
the error on held-out sequences has not grown. `_autoround_weight` computes the gradients of rounding, and
`_autoround_block` prepares the layer for autograd.
Source: Cheng et al. 2023, Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.compress.algorithms._autoround_block import Examples, TunedBlock, tunable
from quantkit.compress.algorithms._autoround_weight import TunedWeight
from quantkit.compress.algorithms._options import Positive, Share
from quantkit.compress.algorithms.base import LayerSizes, Step, StepBytes
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import Magnitude
from quantkit.machine.memory import release_freed_memory
from quantkit.numerics.affine import search_parameters
from quantkit.numerics.tensor import QuantizedTensor

# One in this many sequences is held out from tuning. The error before and after tuning is measured on the held-out
# sequences, because tuning on few sequences can halve the error of these sequences while the error on other text
# grows.
_HELD_OUT = 8

# Largest default size of the first gradient step; larger ones were worse in measurements.
_MOST_RATE = 0.005

Tuned = dict[str, TunedWeight]


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoRoundStep(Step):
    """Tune rounding and ranges by signed gradient descent, a whole layer at a time.

    Args:
        iterations: number of gradient steps per layer.
        batch_size: number of sequences per gradient step. For the same total number of sequences, many steps of one
            sequence are better than a few steps of eight.
        learning_rate: size of the first gradient step: rounding offsets move by this many codes, and scales by half
            this fraction of their initial values. The size falls linearly to zero. 0 = 4 / iterations, but at most
            0.005.
    """

    fixes_codes: ClassVar[bool] = True
    needs_targets: ClassVar[bool] = True
    fits_blocks: ClassVar[bool] = False
    # Each gradient step needs the result of the one before it, so processes cannot share the tuning. They do share the
    # other passes over the data.
    on_one_process: ClassVar[bool] = True

    iterations: Positive = 1600
    batch_size: Positive = 1
    learning_rate: Share = 0.0

    def extra_bytes(self, sizes: LayerSizes) -> StepBytes:
        """Return the memory for an offset and a decoded copy of each weight, the gradients, and the target outputs."""
        gradients = sizes.tallest if self.batch_size == 1 else sizes.weights
        statistics = 4 * sizes.weights + sizes.element_bytes * (sizes.weights + gradients)
        return StepBytes(statistics=statistics, hidden_states=sizes.states_bytes)

    def apply(self, layer: LayerContext) -> None:
        """Quantize every linear of the layer that has no codes yet; see `Step.apply`."""
        importance = _importance(layer)
        _round_the_rest(layer)
        names = tuple(name for _, pending in layer.pending() for name in pending)
        if not names:
            return

        def tune(_: str) -> tuple[dict[str, QuantizedTensor], str]:
            with tunable(layer, names) as block:
                tuned = {name: _start(layer, name, importance[name]) for name in names}
                note = self._tune(layer, block, tuned)
            # Free the decoded copies. Then replace the tuning state of each weight by its result, one weight at a time.
            del block
            return {name: tuned.pop(name).result() for name in names}, note

        ((results, note),) = layer.by_owners(names[:1], tune)
        layer.chosen.notes += [note] if note else []
        layer.commit(results)
        release_freed_memory()

    def _tune(self, layer: LayerContext, block: TunedBlock, tuned: Tuned) -> str:
        """Tune the weights of the block. If the held-out error grows, undo the tuning and return a note for the user;
        otherwise return an empty text.
        """
        examples = Examples(layer)
        # Spread evenly over the store, because its batches are sorted by length. A single sequence is used for both
        # purposes.
        held_out = examples.sequences[:: min(_HELD_OUT, len(examples.sequences))]
        seen = [each for each in examples.sequences if each not in held_out] or held_out
        for name, weight in block.weights.items():
            tuned[name].dequantize(weight.data)
        before = block.error(examples, held_out)
        after = math.nan
        if self._descend(layer, block, tuned, examples, seen):
            after = block.error(examples, held_out)
        if not after <= before:  # also true if an error is NaN
            for rounding in tuned.values():
                rounding.reset()
            return f"autoround: tuning did not lower the held-out error ({before:.3g}); rounded to nearest instead"
        return ""

    def _descend(
        self, layer: LayerContext, block: TunedBlock, tuned: Tuned, examples: Examples, seen: list[tuple[int, slice]]
    ) -> bool:
        """Run all gradient steps on the sequences `seen`. Return False, without further steps, as soon as the error is
        NaN or infinite.
        """
        first = self.learning_rate or min(_MOST_RATE, 4 / self.iterations)
        sequences = _shuffled(seen, f"{layer.seed}/{layer.name}")
        for iteration in range(self.iterations):
            rate = first * (1 - iteration / self.iterations)

            def step(name: str, gradient: Tensor, values: Tensor, rate: float = rate) -> None:
                tuned[name].step(gradient, values.data, rate)

            for left in reversed(range(self.batch_size)):
                batch = examples.batch(*next(sequences))
                if not math.isfinite(block.backward(*batch, None if left else step)):
                    return False
        return True


def _importance(layer: LayerContext) -> dict[str, Tensor]:
    """Return the mean square of each input channel, (K,), for each linear to quantize, keyed by linear."""
    sets = layer.pending()
    seen = {names[0]: Magnitude(layer.weight(names[0]).shape[1], layer.device) for _, names in sets}
    seen = layer.known(layer.observe(seen))
    return {name: seen[names[0]].mean_square for _, names in sets for name in names}


def _round_the_rest(layer: LayerContext) -> None:
    """Round the linears whose scheme cannot be tuned, so that the linears to tune can compensate for the errors."""
    for _, names in layer.pending():
        for name in names:
            scheme = layer.schemes[name].weight
            if scheme.dtype.kind == "int" and scheme.block_rows == 1:
                continue
            layer.round([name])
            layer.chosen.notes.append(
                f"autoround: {name} is {scheme.describe()}, which autoround cannot tune; rounded to nearest"
            )


def _start(layer: LayerContext, name: str, importance: Tensor) -> TunedWeight:
    """Create the tunable weight of a linear. Its initial ranges are those that an earlier step chose or, without such
    a step, those with the least rounding error, weighted by the importance of the inputs.
    """
    weight, grid = layer.weight(name), layer.grid(name)
    ranges = layer.chosen.ranges.get(name) or search_parameters(weight, grid, importance=importance)
    return TunedWeight(weight, grid, ranges)


def _shuffled(sequences: list[tuple[int, slice]], seed: str) -> Iterator[tuple[int, slice]]:
    """Yield all sequences in random order, again and again. The order depends only on the run's seed and the layer."""
    # Python's `hash` cannot be used, because it returns a different number for the same text in each process.
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "big")
    generator = torch.Generator().manual_seed(number)
    while True:
        for position in torch.randperm(len(sequences), generator=generator).tolist():
            yield sequences[position]


STEP = AutoRoundStep
