"""Statistics of a linear's inputs, updated batch by batch. Shapes: T tokens, K inputs, G groups of g inputs."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

# Columns of the Gram matrix computed at once; only blocks on and below the diagonal are computed.
_PANEL = 512
# Tokens converted to float32 at once for it.
_TOKENS = 1024


class Observer(Protocol):
    """Something that looks at the inputs of a linear."""

    def update(self, inputs: Tensor) -> None:
        """Take in (T, K) inputs of any float dtype; they are not modified."""


class _MeanMatrix:
    """A (K, K) float32 sum over tokens, whose mean is handed out once.

    Args:
        width: K.
        device: where the matrix lives.
        rows: of the matrix, if not K.
    """

    def __init__(self, width: int, device: torch.device, rows: int | None = None) -> None:
        self._sum = torch.zeros(rows or width, width, dtype=torch.float32, device=device)
        self.num_tokens = 0

    def finish(self) -> Tensor:
        """The mean; the observer gives up its memory and is not to be used again."""
        total, self._sum = self._sum, torch.empty(0)
        return total.div_(max(self.num_tokens, 1))


class Gram(_MeanMatrix):
    """Mean of x x' over tokens: GPTQ's Hessian up to a factor."""

    def update(self, inputs: Tensor) -> None:
        """Add (T, K) inputs."""
        for rows in torch.split(inputs, _TOKENS):
            values = rows.float()
            for start in range(0, values.shape[1], _PANEL):
                stop = min(start + _PANEL, values.shape[1])
                self._sum[start:stop, :stop].addmm_(values[:, start:stop].T, values[:, :stop])
        self.num_tokens += inputs.shape[0]

    def finish(self) -> Tensor:
        """The (K, K) mean, of which only the lower half was summed; see `_MeanMatrix.finish`."""
        mean = super().finish()
        for start in range(0, mean.shape[0], _PANEL):
            stop = min(start + _PANEL, mean.shape[0])
            block = mean[start:stop, start:stop]
            # Computed in full, but its two halves need not agree to the last bit, and a Hessian must be symmetric.
            block.copy_(block.tril() + block.tril(-1).T)
            mean[:start, start:stop] = mean[start:stop, :start].T
        return mean


class CrossGram(_MeanMatrix):
    """What the inputs of linears have in common with their errors: mean of (o - x) x', o from the original model.

    Linears with few outputs only need W (o - x) x', which is a smaller matrix.

    Args:
        weights: (N_i, K) of all linears that read the input, as they are until the mean is taken.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        sizes, width = [len(weight) for weight in weights], weights[0].shape[1]
        # By outputs each token costs a product more, so they must be at most half as many.
        self._sizes = sizes if 2 * sum(sizes) <= width else None
        self._weights = list(weights) if self._sizes else []
        super().__init__(width, weights[0].device, sum(sizes) if self._sizes else None)

    def update(self, inputs: Tensor, original: Tensor) -> None:
        """Add (T, K) inputs and those that the same tokens have in the original model; neither is modified."""
        for rows, others in zip(torch.split(inputs, _TOKENS), torch.split(original, _TOKENS), strict=True):
            values = rows.float()
            # The difference first: of two sums o x' and x x' little but rounding would be left.
            wrong = others - values  # in float32
            if not wrong.any():  # what enters the first layer
                continue
            if self._weights:
                wrong = wrong.to(self._weights[0].dtype)
                wrong = torch.cat([linear(wrong, weight) for weight in self._weights], dim=1).float()
            self._sum.addmm_(wrong.T, values)
        self.num_tokens += inputs.shape[0]

    def errors(self) -> Tensor | tuple[Tensor, ...]:
        """The (K, K) mean, or (N_i, K) W times it of each linear; as `finish`."""
        mean, self._weights = self.finish(), []
        return mean if self._sizes is None else torch.split(mean, self._sizes)


class GroupGram:
    """Mean of x x' inside each group of inputs: what a change of that group's weights costs, to second order.

    Args:
        width: K.
        group: g; must divide K.
        device: where the (G, g, g) float32 tensor lives.
    """

    def __init__(self, width: int, group: int, device: torch.device) -> None:
        self._sum = torch.zeros(width // group, group, group, dtype=torch.float32, device=device)
        self.num_tokens = 0

    def update(self, inputs: Tensor) -> None:
        """Add (T, K) inputs."""
        by_group = inputs.float().view(inputs.shape[0], *self._sum.shape[:2]).permute(1, 0, 2)  # (G, T, g)
        self._sum.baddbmm_(by_group.transpose(1, 2), by_group)
        self.num_tokens += inputs.shape[0]

    @property
    def mean(self) -> Tensor:
        """(G, g, g) float32."""
        return self._sum / max(self.num_tokens, 1)


class Magnitude:
    """Per input channel: mean |x|, largest |x| and mean x^2, each (K,) float32.

    Args:
        width: K.
        device: where the vectors live.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self._sum = torch.zeros(width, dtype=torch.float32, device=device)
        self._square = torch.zeros_like(self._sum)
        self.largest = torch.zeros_like(self._sum)
        self.num_tokens = 0

    def update(self, inputs: Tensor) -> None:
        """Add (T, K) inputs."""
        size = inputs.float().abs()
        self._sum += size.sum(0)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self._square += size.square_().sum(0)
        self.num_tokens += inputs.shape[0]

    @property
    def mean(self) -> Tensor:
        """Mean |x| per channel, (K,)."""
        return self._sum / max(self.num_tokens, 1)

    @property
    def mean_square(self) -> Tensor:
        """Mean x^2 per channel, (K,)."""
        return self._square / max(self.num_tokens, 1)


class Sample:
    """A few input rows, spread evenly over each batch, to measure errors on.

    Args:
        rows_per_batch: rows kept of each update.
        limit: rows kept in all.
    """

    def __init__(self, rows_per_batch: int = 16, limit: int = 64) -> None:
        self._rows_per_batch, self._limit = rows_per_batch, limit
        self._kept: list[Tensor] = []

    def update(self, inputs: Tensor) -> None:
        """Keep some of (T, K) inputs."""
        free = self._limit - sum(map(len, self._kept))
        if free > 0 and len(inputs):
            self._kept.append(spread_rows(inputs, min(free, self._rows_per_batch)))

    @property
    def rows(self) -> Tensor:
        """(at most `limit`, K) float32."""
        return torch.cat(self._kept)


def spread_rows(inputs: Tensor, count: int) -> Tensor:
    """At most `count` > 0 of the rows of (T > 0, K) inputs in float32, spread evenly over them."""
    count = min(count, len(inputs))
    return inputs[torch.linspace(0, len(inputs) - 1, count, device=inputs.device).long()].float()
