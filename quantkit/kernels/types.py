"""Data that flows between a model and its kernels: the batch of one step, linears, attention options.

`kernels.torch_linear`, `kernels.cpu` and `kernels.gpu` implement these protocols, and `kernels.ops` hands them out.
A batch is a list of (sequence, number of new tokens) as tensors. Decode is one new token, a prefill chunk is many, a
speculative verification is k + 1: one shape serves all three.
Shapes: T tokens, N outputs, K inputs, H heads, D channels of a head, R that rotate; in a batch B sequences, T new
tokens of all of them together, P pages of the longest, R rows whose logits are wanted.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.numerics.scheme import ActivationScheme
from quantkit.numerics.tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """One step. New tokens of all sequences lie one after another; tensors are on the model's device.

    A worked example, pages of 4 tokens. Sequence A has 5 tokens in pages [7, 2] and gets one more; sequence B is new
    and gets a chunk of 3, in page [9]:

        query_lengths   (1, 3)           context_lengths  (6, 3)
        token_ids       [a5, b0, b1, b2] positions        [5, 0, 1, 2]
        query_starts    [0, 1, 4]        page_table       [[7, 2], [9, -1]]
        slots           [9, 36, 37, 38]  (page * page_size + offset: 2*4+1, 9*4+0, ...)

    Args:
        token_ids: (T,) int64.
        positions: (T,) int64, of each new token among those of its sequence that the cache keeps.
        query_starts: (B + 1,) int32, where each sequence's new tokens start.
        page_table: (B, P) int32, page numbers of each sequence in order; -1 past its end.
        slots: (T,) int64, where the keys and values of each new token are stored: page * page_size + offset.
        residual_rows: (B,) int64, the sequence's row in the buffers of residual windows.
        logit_rows: (R,) int64, the new tokens after which logits are wanted, in order.
        query_lengths: new tokens by sequence, on the host.
        context_lengths: tokens by sequence in the cache after this step, new ones included, on the host.
        sequence_ids: stable number of each sequence, for models that keep state of their own.
        text_positions, text_lengths: as positions and context_lengths, with the tokens whose pages were evicted; None =
            the same, as there are none. What is rotated by its position asks these, see `in_text`.
        is_fixed: the tensors will hold one step after another: what the host knows is true of none.
    """

    token_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    page_table: Tensor
    slots: Tensor
    residual_rows: Tensor
    logit_rows: Tensor
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    sequence_ids: tuple[int, ...]
    text_positions: Tensor | None = None
    text_lengths: tuple[int, ...] | None = None
    is_fixed: bool = False

    def in_text(self) -> tuple[Tensor, tuple[int, ...]]:
        """Positions of the new tokens in their sequences, and lengths of these, whatever the cache keeps."""
        positions = self.positions if self.text_positions is None else self.text_positions
        return positions, self.context_lengths if self.text_lengths is None else self.text_lengths


Angles = tuple[Tensor, Tensor]
"""Cosine and sine (T, R/2) float32 of each new token."""

States = tuple[Tensor, Tensor, Tensor]
"""Queries (T, Hq, D), keys and values (T, Hkv, D) of the new tokens of a step; Hkv divides Hq."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationQuantization:
    """Quantization of rows of inputs to 8 bits.

    Args:
        name: int8 or fp8.
        step: the scale of all of them, found by calibration; None = each row its own, so that its largest value fits.
    """

    name: str
    step: float | None = None


class LinearFacts:
    """Description of a linear layer; it remains when the layer becomes part of a stack of experts.

    Args:
        shape: (N, K).
        stored_bytes: what one decode step reads.
        description: number type and kernel, e.g. `int4 g128 (native)`.
    """

    # Of the class, because few linears have one.
    activation_quantization: ActivationQuantization | None = None

    def __init__(self, shape: tuple[int, ...], stored_bytes: int, description: str) -> None:
        self.out_features, self.in_features = shape
        self.stored_bytes = stored_bytes
        self.description = description


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSettings:
    """Settings that a linear is laid out from, besides its weight.

    Args:
        bias: (N,), added after the product; or None.
        activation: what inputs are quantized to at run time; None = they are not.
        dtype: of the computation.
        device: where it runs.
    """

    bias: Tensor | None = None
    activation: ActivationScheme | None = None
    dtype: torch.dtype
    device: torch.device

    def bias_in(self, dtype: torch.dtype) -> Tensor | None:
        """The bias on the device."""
        return None if self.bias is None else self.bias.to(self.device, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSource(LinearSettings):
    """Source of a linear with a quantized weight (N, K)."""

    weight: QuantizedTensor

    def describe(self, kernel: str) -> str:
        """The description of the linear on a kernel."""
        return describe_linear(self.weight.scheme.describe(), self.activation, kernel)


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of those that there are."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def describe_linear(name: str, activation: ActivationScheme | None, kernel: str) -> str:
    """The description of a linear: its weight, how its inputs are quantized, and what multiplies."""
    inputs = "" if activation is None else f", activations {activation.describe()}"
    return f"{name}{inputs} ({kernel})"


class Linear(LinearFacts, ABC):
    """A linear layer whose weight is laid out for one kernel; no autograd.

    Where `activation_quantization` is set, it also takes `QuantizedActivations` that are quantized so.
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: (T, K), any float dtype, T may be 0; not modified.
        Returns:
            (T, N) in the dtype of x.
        """

    def gated(self, x: Tensor, activation: str) -> Tensor | None:
        """`ops.gated` of the outputs, in the launch of the product; None where that takes two."""
        return None


class WrappedLinear(Linear):
    """Base of a linear whose inputs are changed first, in a way that its kernel does not do by itself.

    Args:
        linear: what multiplies.
        change: of the inputs, (T, K) to (T, K).
        description: in place of the linear's.
    """

    def __init__(self, linear: Linear, change: Callable[[Tensor], Tensor], description: str | None = None) -> None:
        shape = (linear.out_features, linear.in_features)
        super().__init__(shape, linear.stored_bytes, description or linear.description)
        self._linear, self._change = linear, change

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._linear(self._change(x))


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedActivations:
    """Inputs of a linear as codes of 8 bits with a scale per row, handed on by what produced them.

    A linear whose `activation_quantization` is set takes them in place of a tensor, and only such ones are given any:
    that is decided when a model is loaded, so the steps between them do not ask and say `Tensor`.

    Args:
        codes: at least (T, K), contiguous; int8, or uint8 that hold e4m3. Rows past T mean nothing.
        scale: (T, 1) float32; NaN for a row whose outputs are NaN.
        dtype: of what they were, and of the outputs.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.scale)


class StackedExperts(Protocol):
    """All experts of a layer as one; nothing is asked by the host, so that calls can be captured as a graph."""

    @property
    def linears(self) -> tuple[LinearFacts, ...]:
        """The stacked linears, two of each expert."""

    def __call__(
        self,
        x: Tensor,
        scores: Tensor,
        shared: Tensor | None,
        shared_score: Tensor | None,
        choose: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Compute the same as `reference.experts.run_each`.

        Args:
            x: (T, K); not modified.
            scores: (T, E) router logits.
            shared: (T, K) is added to the result; None = nothing is.
            shared_score: (T, 1), weighs `shared` through a sigmoid; None = it counts fully.
            choose: scores to weights (T, k) float32 and numbers (T, k) of the chosen, as `reference.experts.route`.
        Returns:
            (T, K), dtype of x.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """Root mean square norms of each head's queries and keys, before the rotation.

    Args:
        query, key: weights (D,).
        eps, offset: see `ops.rms_norm`.
    """

    query: Tensor
    key: Tensor
    eps: float
    offset: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """Options of attention beyond softmax(q . k) v.

    Args:
        scale: of the scores.
        window: a key is seen if query position - key position < window; None = all.
        softcap: scores become softcap * tanh(score / softcap); None = as they are.
        interleaved: angles turn channels (2i, 2i + 1) instead of (i, i + R/2); see `ops.rotary_`.
        norms: of queries and keys; None = none.
        sinks: (Hq,) float32, a score of each head beside those of the keys, which counts in the sum and has no value;
            None = there are none. Only for layouts that say so.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    interleaved: bool = False
    norms: HeadNorms | None = None
    sinks: Tensor | None = None


class PagedAttention(Protocol):
    """Attention of one layer, bound to its pages."""

    def __call__(
        self, states: States, batch: ForwardBatch, options: AttentionOptions, angles: Angles | None = None
    ) -> Tensor:
        """Norm and rotate queries and keys, attend to the cache and to each other, store keys and values in it.

        Args:
            states: may be slices of a larger tensor; queries and keys are modified where they are normed or rotated.
            batch: what belongs to whom; its page table covers all tokens, new ones included.
            options: scale, window, norms and the like.
            angles: to rotate by, see `ops.rotary_`; None = not at all.
        Returns:
            (T, Hq, D), dtype of the queries.
        """
