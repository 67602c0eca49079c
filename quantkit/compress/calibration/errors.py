"""How far a layer is from what it was: of one linear's outputs, and of the layer's."""

import math
from collections.abc import Callable, Iterator

from torch import Tensor

# Weights whose error is measured at once: its float32 copies must stay small beside the layer.
_ERROR_BLOCK = 1 << 21


def row_blocks(weight: Tensor) -> Iterator[slice]:
    """Rows of a weight (N, K) to work on at once."""
    step = max(1, _ERROR_BLOCK // weight.shape[1])
    return (slice(start, start + step) for start in range(0, weight.shape[0], step))


def relative_error(weight: Tensor, decoded: Callable[[slice], Tensor], sample: Tensor | None) -> float:
    """||X (W - D)'|| / ||X W'||, or ||W - D|| / ||W|| without inputs; a block of rows at a time.

    Args:
        weight: (N, K).
        decoded: makes these rows of D.
        sample: (T, K) float32 inputs, or None.
    """
    wrong = total = 0.0
    for rows in row_blocks(weight):
        reference = weight[rows].float()
        difference = decoded(rows).float() - reference
        if sample is not None:
            difference, reference = sample @ difference.T, sample @ reference.T
        wrong += difference.square().sum().item()
        total += reference.square().sum().item()
    return math.sqrt(wrong / total) if total > 0 else 0.0


def signal_to_noise_db(reference: Tensor, output: Tensor) -> float:
    """10 log10 of signal over noise power; capped at 200 dB when there is no noise."""
    signal = reference.float().square().sum().item()
    noise = (output.float() - reference.float()).square().sum().item()
    return min(200.0, 10 * math.log10(signal / noise)) if noise > 0 and signal > 0 else 200.0
