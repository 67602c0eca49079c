"""Data exchanged between a model and its kernels: the batch of one step, linears, attention options.

`kernels.torch_linear`, `kernels.cpu` and `kernels.gpu` implement these protocols; `kernels.ops` chooses among them.
A batch has a number of new tokens for each of its sequences: one in decode, many in a prefill chunk, and k + 1 to
verify k drafts. One data structure serves all three.
Shapes: T tokens, N outputs, K inputs, H heads, D channels of a head, R channels that rotate; in a batch, B sequences
with T new tokens in total, P pages of the longest sequence, R rows whose logits are needed.
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
    """Batch of one step. New tokens of all sequences are concatenated; tensors are on the model's device.

    A worked example, pages of 4 tokens. Sequence A has 5 tokens in pages [7, 2] and gets one more; sequence B is new
    and gets a chunk of 3, in page [9]:

        query_lengths   (1, 3)           context_lengths  (6, 3)
        token_ids       [a5, b0, b1, b2] positions        [5, 0, 1, 2]
        query_starts    [0, 1, 4]        page_table       [[7, 2], [9, -1]]
        slots           [9, 36, 37, 38]  (page * page_size + offset: 2*4+1, 9*4+0, ...)

    Args:
        token_ids: (T,) int64.
        positions: (T,) int64, position of each new token among the tokens that its sequence has in the cache.
        query_starts: (B + 1,) int32, index of each sequence's first new token.
        page_table: (B, P) int32, page numbers of each sequence in order; -1 past its end.
        slots: (T,) int64, cache slot of each new token's key and value: page * page_size + offset.
        residual_rows: (B,) int64, row of each sequence in the residual windows.
        logit_rows: (R,) int64, indices of the new tokens whose logits are needed, ascending.
        query_lengths: number of new tokens per sequence, on the host.
        context_lengths: number of cached tokens per sequence after this step, on the host.
        sequence_ids: number of each sequence, the same in all steps, for models that keep their own state.
        text_positions, text_lengths: like positions and context_lengths, but counting evicted tokens; None = no token
            was evicted. Rotary embeddings use these, see `in_text`.
        adapters: name of each sequence's adapter, None = the base model; empty = no sequence uses an adapter.
        is_fixed: whether a captured graph reuses the tensors for many steps. The values on the host are then invalid.
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
    adapters: tuple[str | None, ...] = ()
    is_fixed: bool = False

    def in_text(self) -> tuple[Tensor, tuple[int, ...]]:
        """Return positions and lengths in the text, counting evicted tokens."""
        positions = self.positions if self.text_positions is None else self.text_positions
        return positions, self.context_lengths if self.text_lengths is None else self.text_lengths


Angles = tuple[Tensor, Tensor]
"""Cosine and sine (T, R/2) float32 of each new token."""

States = tuple[Tensor, Tensor, Tensor]
"""Queries (T, Hq, D), keys and values (T, Hkv, D) of the new tokens of a step; Hkv divides Hq."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationQuantization:
    """Quantization of input rows to 8 bits.

    Args:
        name: int8 or fp8.
        step: calibrated scale of all rows; None = the scale of each row follows from its largest absolute value.
    """

    name: str
    step: float | None = None


class LinearFacts:
    """Shape, size and description of a linear. A stack of experts keeps them after the linear itself is freed.

    Args:
        shape: (N, K).
        stored_bytes: bytes that one decode step reads.
        description: number type and kernel, e.g. `int4 g128 (native)`.
    """

    # A class attribute, because few linears set it.
    activation_quantization: ActivationQuantization | None = None

    def __init__(self, shape: tuple[int, ...], stored_bytes: int, description: str) -> None:
        self.out_features, self.in_features = shape
        self.stored_bytes = stored_bytes
        self.description = description


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSettings:
    """Settings of a linear besides its weight.

    Args:
        bias: (N,), added after the product, or None.
        activation: number type to which inputs are quantized at run time; None = inputs are not quantized.
        dtype: dtype of the computation.
        device: target device.
        rounds_inputs: whether a kernel may round inputs to int16, with one scale per at most 64 neighbouring inputs.
            The error is usually smaller than that of a 16-bit dtype. So this is allowed if the model's dtype has 16
            bits and quantkit computes in float32 instead.
    """

    bias: Tensor | None = None
    activation: ActivationScheme | None = None
    rounds_inputs: bool = False
    dtype: torch.dtype
    device: torch.device

    def bias_in(self, dtype: torch.dtype) -> Tensor | None:
        """Return the bias on the device in this dtype."""
        return None if self.bias is None else self.bias.to(self.device, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSource(LinearSettings):
    """Settings of a linear and its quantized weight (N, K)."""

    weight: QuantizedTensor

    def describe(self, kernel: str) -> str:
        """Return the description of the linear on this kernel."""
        return describe_linear(self.weight.scheme.describe(), self.activation, kernel)


def nbytes(*tensors: Tensor | None) -> int:
    """Total bytes of the tensors that are not None."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def describe_linear(name: str, activation: ActivationScheme | None, kernel: str) -> str:
    """Return the description of a linear: number type, quantization of inputs, kernel."""
    inputs = "" if activation is None else f", activations {activation.describe()}"
    return f"{name}{inputs} ({kernel})"


class Linear(LinearFacts, ABC):
    """A linear whose weight is in the layout of one kernel; no autograd.

    If `activation_quantization` is set, the linear also accepts `QuantizedActivations` with this quantization.
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Multiply the inputs by the weight, and add the bias if there is one.

        Args:
            x: (T, K), any float dtype, T may be 0; not modified.
        Returns:
            (T, N) in the dtype of x.
        """

    def gated(self, x: Tensor, activation: str) -> Tensor | None:
        """Return `ops.gated` of the outputs, computed in the same launch; None if the kernel cannot do this."""
        return None


class WrappedLinear(Linear):
    """A linear that transforms its inputs before another linear multiplies them.

    Args:
        linear: the linear that multiplies.
        change: transforms the inputs, (T, K) to (T, K).
        description: description that replaces the linear's; None = keep the linear's.
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
    """Inputs of a linear as 8-bit codes with one scale per row, quantized by the operation that produced them.

    Only linears with `activation_quantization` receive such inputs instead of a tensor. The linears are chosen when a
    model is loaded, so functions between operation and linear declare their arguments as `Tensor` and do not check.

    Args:
        codes: at least (T, K), contiguous; int8, or uint8 holding e4m3. Rows past T are unused.
        scale: (T, 1) float32; NaN for a row whose outputs are NaN.
        dtype: dtype of the original inputs, and of the outputs.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.scale)


class StackedExperts(Protocol):
    """All experts of a layer as one module; it never waits for the device, so calls can be captured as a graph."""

    @property
    def linears(self) -> tuple[LinearFacts, ...]:
        """Shape, size and description of the linears in the stack, two linears per expert."""

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
            shared: (T, K), added to the result; None = nothing is added.
            shared_score: (T, 1); its sigmoid scales `shared`. None = no scaling.
            choose: maps scores to the weights (T, k) float32 and the indices (T, k) of the chosen experts, like
                `reference.experts.route`.
        Returns:
            (T, K), dtype of x.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """Root mean square norms of each head's queries and keys, applied before the rotation.

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
        scale: factor on the scores.
        window: a query sees a key if query position - key position < window; None = all.
        softcap: scores become softcap * tanh(score / softcap); None = no softcap.
        interleaved: rotate channels (2i, 2i + 1) instead of (i, i + R/2); see `ops.rotary_`.
        norms: norms of queries and keys; None = none.
        sinks: (Hq,) float32, one extra score per head that adds to the softmax sum but has no value; None = no sinks.
            Only for layouts with `sinks`.
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
        """Compute the attention of new tokens to the cache and to each other, and store their keys and values.

        Queries and keys are normalized and rotated first, if `options` and `angles` say so.

        Args:
            states: queries, keys and values, possibly slices of a larger tensor; queries and keys may be modified in
                place.
            batch: the batch of the step; its page table covers all tokens, including new ones.
            options: scale, window, norms and further options.
            angles: cosine and sine for the rotation, see `ops.rotary_`; None = no rotation.
        Returns:
            (T, Hq, D), dtype of the queries.
        """
