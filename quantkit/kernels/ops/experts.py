"""Experts of a layer laid out as one, where there are kernels that run them so.

Elsewhere `reference.experts` chooses and runs them one by one.
"""

from collections.abc import Iterable

import torch

from quantkit.kernels import gpu
from quantkit.kernels.types import Linear, StackedExperts


def can_stack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether experts on this device are for Triton's kernels, if they are stored in a way that those take."""
    return gpu.module("experts", device) is not None and dtype in (torch.bfloat16, torch.float16)


def stack(
    experts: Iterable[tuple[Linear, Linear]], *, count: int, activation: str, num_chosen: int, normalize: bool
) -> StackedExperts | str:
    """Lay the experts of a layer out as one.

    Args:
        experts: gate with up, and down, of each; one that has been asked for is not needed any more.
        count: E.
        activation: of the gate.
        num_chosen, normalize: see `reference.experts.route`.
    Returns:
        the experts; or why they must be run one by one.
    """
    from quantkit.kernels.gpu import experts as on_gpu

    return on_gpu.stack(experts, count=count, activation=activation, num_chosen=num_chosen, normalize=normalize)
