"""From logits to tokens on the logits' device, by the kernel there or in plain torch: the same tokens from both.

How a token is drawn is written in `reference.sampling`; the kernel does it in two launches and without asking the host.
Shapes: R rows, V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels.reference import sampling as reference
from quantkit.kernels.reference.sampling import COLDEST, Draw
from quantkit.kernels.transfer import send


def choose(logits: Tensor, draws: Sequence[Draw | None]) -> Tensor:
    """One token for each row, where the logits are.

    Args:
        logits: (R, V) float32; not modified.
        draws: how for each row; None = the largest logit, the first of equals.
    Returns:
        (R,) int64.
    """
    if not any(draw is not None for draw in draws):
        return reference.largest(logits)
    chosen = None
    if gpu.module("sampling", logits.device) is not None:
        chosen = gpu.attempt("sampling", logits.device, _choose_on_gpu, logits, draws)
    return reference.choose(logits, draws) if chosen is None else chosen


def _choose_on_gpu(logits: Tensor, draws: Sequence[Draw | None]) -> Tensor:
    from quantkit.kernels.gpu import sampling as on_gpu

    size = logits.shape[-1]
    # Greedy rows go along in the same launch: a temperature of 0 draws nothing.
    keys = np.array([0 if draw is None else draw.key for draw in draws], dtype=np.int64)
    limits = np.array([size if draw is None else min(draw.top_k or size, size) for draw in draws], dtype=np.int32)
    settings = np.array([_settings(draw) for draw in draws], dtype=np.float32).reshape(-1, 3)
    return on_gpu.choose(logits, *send(logits.device, keys, limits, settings))


def _settings(draw: Draw | None) -> tuple[float, float, float]:
    """Temperature, top-p, and the logarithm of min-p."""
    if draw is None:
        return 0.0, 1.0, -math.inf
    return max(draw.temperature, COLDEST), draw.top_p, math.log(draw.min_p) if draw.min_p > 0 else -math.inf
