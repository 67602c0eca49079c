"""Recurrent layers: one token by the rule itself, several by matrix products; torch on every device."""

from torch import Tensor

from quantkit.kernels.reference.recurrence import causal_conv as causal_conv
from quantkit.kernels.reference.recurrence import recur
from quantkit.kernels.torch import recurrence


def scan(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.recurrence.recur`."""
    run = recur if value.shape[1] == 1 else recurrence.scan
    return run(query, key, value, decay, rate, state)
