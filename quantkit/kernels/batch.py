"""What one step computes: a list of (sequence, number of new tokens), as tensors that kernels read.

Decode is one new token, a prefill chunk is many, a speculative verification is k + 1: one shape serves all three.
Shapes: B sequences, T new tokens of all of them together, P pages of the longest, R rows whose logits are wanted.
"""

from dataclasses import dataclass

from torch import Tensor


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
