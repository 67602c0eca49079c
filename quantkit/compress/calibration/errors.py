"""How far a layer is from what it was: of one linear's outputs, and of the layer's."""

import math
from collections.abc import Callable, Iterator

from torch import Tensor

# Weights whose error is measured at once: its float32 copies must stay small beside the layer.
_ERROR_BLOCK = 1 << 21


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Rows of a weight (N, K) to work on at once."""
    step = max(1, _ERROR_BLOCK // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def weight_error(weight: Tensor, decoded: Callable[[slice], Tensor]) -> float:
    """||W - D|| / ||W||; a block of rows at a time.

    Args:
        weight: (N, K).
        decoded: makes these rows of D.
    """
    wrong = total = 0.0
    for rows in row_blocks(*weight.shape):
        reference = weight[rows].float()
        wrong += (decoded(rows).float() - reference).square().sum().item()
        total += reference.square().sum().item()
    return math.sqrt(wrong / total) if total > 0 else 0.0


def signal_to_noise_db(reference: Tensor, output: Tensor) -> float:
    """10 log10 of signal over noise power; capped at 200 dB when there is no noise."""
    signal = reference.float().square().sum().item()
    noise = (output.float() - reference.float()).square().sum().item()
    return min(200.0, 10 * math.log10(signal / noise)) if noise > 0 and signal > 0 else 200.0
