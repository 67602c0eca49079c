"""The end of a model: logits in float32 out of what enters its head, and the likeliest tokens where they cost nothing.

Shapes: R rows, H hidden width, V vocabulary.
"""

import torch
from torch import Tensor

from quantkit.kernels import gpu
from quantkit.kernels.types import Linear, Logits


def logits(head: Linear, x: Tensor, *, scale: float = 1.0, softcap: float | None = None) -> Logits:
    """Multiply with the head.

    Args:
        head: (R, H) to (R, V).
        x: (R, H), R from 1 on; not modified.
        scale: that the products are multiplied with.
        softcap: logits become softcap * tanh(logit / softcap); None = as they are.
    """
    on_gpu = gpu.module("head", x.device)
    if on_gpu and (fused := gpu.attempt("head", x.device, on_gpu.logits, head, x, scale, softcap)) is not None:
        return Logits(*fused)
    values = head(x).float()
    if scale != 1.0:
        values = values * scale
    if softcap is not None:
        values = torch.tanh(values / softcap) * softcap
    return Logits(values)
