"""Several residual streams (hyper-connections): a layer reads a mixture of the streams and adds its output to each one.

The mixing weights are computed from the streams, in float32. The weights between old and new streams are made doubly
stochastic, so that the sum of the streams does not grow. Shapes: T tokens, n streams, H hidden width.
Source: Xie et al. 2026, Manifold-Constrained Hyper-Connections; Sinkhorn and Knopp 1967.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.types import Angles, ForwardBatch
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.layers import AnyAttention, Mixture, Norm


@dataclass(kw_only=True, slots=True, eq=False)
class _Mixing:
    """Mixing weights computed from the streams (T, n, H).

    Args:
        weight: (N, n H) float32, projection to N numbers.
        bias: (N,) float32, added to the scaled numbers.
        scale: float32, one factor for each kind of number.
        eps: epsilon of the norm.
        floor: added to values that must not be zero.
    """

    weight: Tensor
    bias: Tensor
    scale: Tensor
    eps: float
    floor: float

    def numbers(self, streams: Tensor) -> Tensor:
        """Return N numbers per token (T, N), without scale and bias; mixing weights are computed from these numbers."""
        x = streams.flatten(1).float()
        return F.linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps), self.weight)

    def read(self, streams: Tensor, numbers: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """Return the sum (T, H) of the streams, weighted by the sigmoid of the scaled numbers (T, n)."""
        opened = torch.sigmoid(numbers * scale + bias) + self.floor
        return (opened.unsqueeze(-1) * streams).sum(1).to(streams.dtype)


@dataclass(kw_only=True, slots=True, eq=False)
class StreamMixture(_Mixing):
    """Computes the mixture of streams that one half of a layer reads, and the weights of the half's output per stream.

    The N numbers are n for reading, n for writing, and n * n between old and new streams.

    Args:
        rounds: iterations that normalize rows and columns to sum to one.
    """

    rounds: int

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what one half of the layer needs to read and update the streams.

        Returns:
            The input (T, H) of the half; the weights (T, n) of its output in each stream; and the mixed streams
            (T, n, H), to which the weighted output is added.
        """
        count = streams.shape[1]
        weights = self.numbers(streams)
        sizes = (count, count, count * count)
        (read, write, mix), biases = (one.split(sizes, -1) for one in (weights, self.bias))  # type: ignore[no-untyped-call]
        written = 2 * torch.sigmoid(write * self.scale[1] + biases[1])
        square = (mix * self.scale[2] + biases[2]).unflatten(-1, (count, count)).softmax(-1) + self.floor
        square = square / (square.sum(-2, keepdim=True) + self.floor)
        for _ in range(self.rounds - 1):
            square = square / (square.sum(-1, keepdim=True) + self.floor)
            square = square / (square.sum(-2, keepdim=True) + self.floor)
        entered = self.read(streams, read, self.scale[0], biases[0])
        return entered, written.to(streams.dtype), square.to(streams.dtype).mT @ streams


class StreamHead(_Mixing):
    """Splits the embedding into streams, and joins the streams before the last norm."""

    __slots__ = ()

    def spread(self, x: Tensor) -> Tensor:
        """Copy x (T, H) into n streams (T, n, H)."""
        return x.unsqueeze(1).expand(-1, len(self.weight), -1)

    def __call__(self, streams: Tensor) -> Tensor:
        """(T, n, H) -> (T, H)."""
        return self.read(streams, self.numbers(streams), self.scale, self.bias)


@dataclass(kw_only=True, slots=True, eq=False)
class StreamedBlock:
    """One decoder layer over several streams: attention, then experts, each after a norm.

    Args:
        attention, mlp: the two halves.
        attention_streams, mlp_streams: stream mixtures of each half.
        input_norm, mlp_norm: norms before each half.
        rope: see `Block`.
    """

    attention: AnyAttention
    mlp: Mixture
    attention_streams: StreamMixture
    mlp_streams: StreamMixture
    input_norm: Norm
    mlp_norm: Norm
    rope: int | None

    def __call__(
        self, x: Tensor, pending: Tensor | None, batch: ForwardBatch, cache: KVCache, angles: Angles | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Block`; x is (T, n, H), and pending is always None."""
        entered, write, mixed = self.attention_streams(x)
        attended = self.attention(self.input_norm(entered)[0], batch, cache, angles)
        x = mixed + write.unsqueeze(-1) * attended.unsqueeze(1)
        entered, write, mixed = self.mlp_streams(x)
        added = self.mlp(self.mlp_norm(entered)[0], batch.token_ids)
        return mixed + write.unsqueeze(-1) * added.unsqueeze(1), None
