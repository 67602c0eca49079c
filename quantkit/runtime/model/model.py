"""A decoder-only model over a paged KV cache: embedding, blocks, head. The same code runs every model family.

Shapes: T new tokens of all sequences, H hidden width, R rows whose logits are wanted, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.kernels.layouts import EntryLayout, KVLayout, Layout, StateLayout, kv_dtype
from quantkit.kernels.types import ForwardBatch, Linear
from quantkit.models.layer_state_sizes import StateShape
from quantkit.models.mtp import MTPHead
from quantkit.models.rope import RopeConfig
from quantkit.numerics.kv_cache import LayerCache
from quantkit.numerics.scheme import KVScheme
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.adapters import Adapters
from quantkit.runtime.model.cache_schemes import StoredCache
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.layers import Block, Norm, add_and_norm
from quantkit.runtime.model.mtp import DraftHead
from quantkit.runtime.model.residual_streams import StreamedBlock, StreamHead
from quantkit.runtime.model.rope import RopeTable


@dataclass(kw_only=True, eq=False)
class Model(ABC):
    """Interface of a model that the engine runs.

    Args:
        vocab_size, max_length: number of logits per row, and the maximum number of tokens per sequence that the model
            supports.
        eos_ids: tokens that end a sequence.
        stored_bytes: bytes of the weights that one decode step reads.
        num_bytes: bytes of all weights.
        dtype: dtype of the computation.
        device: device of the model.
        notes: decisions at load that users should know about.
        adapters: adapters that requests can choose.
    Attributes:
        paged: whether the engine's `KVCache` holds keys and values. False = the model keeps its own state per sequence
            id, so there is no prefix cache and no KV quantization.
    """

    paged: ClassVar[bool] = True
    vocab_size: int
    max_length: int
    eos_ids: tuple[int, ...]
    stored_bytes: int
    num_bytes: int
    dtype: torch.dtype
    device: torch.device
    notes: tuple[str, ...]
    adapters: Adapters = field(default_factory=Adapters)

    def layouts(self, kv_cache: str | None, page_size: int) -> list[Layout]:
        """Return the layout of each layer's keys and values, or of its state; empty if the model keeps them itself.

        Args:
            kv_cache: short name of the number type, see `StoredCache.choose`; None = unquantized.
            page_size: tokens per page.
        """
        return []

    @property
    def is_recurrent(self) -> bool:
        """Whether layers keep a recurrent state in the cache, from which tokens cannot be removed."""
        return False

    @abstractmethod
    def forward(self, batch: ForwardBatch, cache: KVCache | None) -> Tensor:
        """Compute one step; return the logits (R, V) float32 of the rows `batch.logit_rows`."""

    def forget(self, sequence_id: int) -> None:  # noqa: B027 - most models have nothing to drop
        """Drop the data that the model keeps for a sequence; do nothing if the id is unknown or the model is paged."""


@dataclass(kw_only=True, eq=False)
class NativeModel(Model):
    """A model built from its family's description by `loader`, with weights in kernel layout.

    Args:
        config: config of the model.
        embedding: looks up rows of the embedding table: (T,) -> (T, H), any float dtype.
        blocks: decoder layers in running order.
        streams: splits and joins several residual streams; None = the model has one stream.
        ropes: rotary embeddings that the blocks refer to by index.
        final_norm: norm before the head.
        head: output head, (R, H) -> (R, V).
        stored_cache: KV cache settings of the checkpoint.
        mtp: MTP head; None = the model has none, or runs without it.
    Attributes:
        tables: angles of each rotary embedding.
    """

    config: ModelConfig
    embedding: Callable[[Tensor], Tensor]
    blocks: Sequence[Block | StreamedBlock]
    streams: StreamHead | None = None
    ropes: Sequence[RopeConfig]
    final_norm: Norm
    head: Linear
    stored_cache: StoredCache
    mtp: DraftHead | None = None

    def __post_init__(self) -> None:
        self.tables = [RopeTable(rope, self.device) for rope in self.ropes]
        self._embedding_scale = self.config.embedding_scale
        if self.config.family.multipliers.root_embedding:
            # Gemma was trained with the square root of its width, rounded to the model's dtype.
            self._embedding_scale = torch.tensor(self._embedding_scale, dtype=self.dtype).item()

    @property
    def is_recurrent(self) -> bool:
        """See `Model`."""
        return self.config.is_recurrent

    def layouts(self, kv_cache: str | None, page_size: int) -> list[Layout]:
        head = None if self.mtp is None else self.mtp.description
        return config_layouts(self.config, self.stored_cache, kv_cache, page_size, self.dtype, head)

    def forward(self, batch: ForwardBatch, cache: KVCache | None) -> Tensor:
        """See `Model`; needs a cache."""
        return self.compute(batch, cache)[0]

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch, cache: KVCache | None) -> tuple[Tensor, Tensor | None]:
        """Compute one step; return the logits as `forward` does, and what the MTP head reads.

        Returns:
            Logits (R, V), and the hidden states (T, H) of all rows after the final norm. The hidden states are None if
            the model has no MTP head.
        """
        assert cache is not None, "a paged model needs a KV cache"
        self.adapters.select(batch)
        x = self.embed(batch.token_ids)
        if self.streams is not None:
            x = self.streams.spread(x)
        # Once per step for all layers that share a rotary embedding.
        angles = [table.gather(batch) for table in self.tables]
        pending: Tensor | None = None
        for block in self.blocks:
            x, pending = block(x, pending, batch, cache, None if block.rope is None else angles[block.rope])
        if self.mtp is None:
            return self._logits(x, pending, batch.logit_rows), None
        hidden, _ = add_and_norm(self.final_norm, x, pending)
        rows = hidden if len(batch.logit_rows) == len(hidden) else hidden[batch.logit_rows]
        return self.scaled_logits(self.head(rows)) if len(rows) else self._no_logits(), hidden

    @torch.inference_mode()
    def draft_states(self, hidden: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Run the MTP head, and store its keys and values.

        Args:
            hidden: (T, H) hidden states of the model; for drafts after the first, of the head itself.
            batch: positions and pages of these states; `token_ids` (T,) are the tokens that follow them.
            cache: KV cache.
        Returns:
            Hidden states (T, H) of the head; see `draft_logits`.
        """
        mtp = self.mtp
        assert mtp is not None, "the model has no MTP head"
        angles = None if mtp.block.rope is None else self.tables[mtp.block.rope].gather(batch)
        return mtp(hidden, self.embed(batch.token_ids, mtp.embedding), batch, cache, angles)

    def draft_logits(self, states: Tensor) -> Tensor:
        """Return the logits (T, V) float32 of drafts from hidden states (T, H) of the MTP head."""
        assert self.mtp is not None, "the model has no MTP head"
        return self.scaled_logits(self.mtp.scores(states, self.head))

    def embed(self, token_ids: Tensor, look_up: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the embeddings (T, H) of tokens (T,), in the model's dtype and scaled.

        Args:
            token_ids: (T,).
            look_up: returns rows of a different embedding table; None = use the model's table.
        """
        x = (look_up or self.embedding)(token_ids).to(self.dtype)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

    def reserve(self, length: int) -> None:
        """Compute the angle tables of all positions below `length` now, so that their addresses stay fixed."""
        for table in self.tables:
            table.reserve(length)

    def why_not_capturable(self, max_length: int) -> str | None:
        """Return why a decode step cannot be captured as a CUDA graph, in words for users; None if it can.

        Args:
            max_length: maximum number of tokens of one sequence.
        """
        if self.is_recurrent:
            return "the recurrent layers run in plain torch"
        if any(not getattr(block.mlp, "is_capturable", False) for block in self.blocks):
            return "the host must know which experts are chosen"
        if any((table.rope.turning_length or max_length) < max_length for table in self.tables):
            return "rotary embeddings depend on the length of long sequences"
        return None

    def _logits(self, x: Tensor, pending: Tensor | None, rows: Tensor) -> Tensor:
        if not len(rows):
            return self._no_logits()
        if len(rows) < len(x):
            # Before norm and head, so that both work on the wanted rows only; for a prompt, that is usually one row.
            x, pending = x[rows], None if pending is None else pending[rows]
        if self.streams is not None:
            x = self.streams(x)
        normed, _ = add_and_norm(self.final_norm, x, pending)
        return self.scaled_logits(self.head(normed))

    def _no_logits(self) -> Tensor:
        return torch.empty(0, self.vocab_size, dtype=torch.float32, device=self.device)

    def scaled_logits(self, scores: Tensor) -> Tensor:
        """Return logits (R, V) float32: the head's outputs (R, V) with the model's factor and softcap applied."""
        logits, softcap = scores.float(), self.config.logits_softcap
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def config_layouts(
    config: ModelConfig,
    stored: StoredCache,
    kv_cache: str | None,
    page_size: int,
    dtype: torch.dtype,
    head: MTPHead | None = None,
) -> list[Layout]:
    """Return the layout of each layer's keys and values, or of its state.

    Args:
        config: config of the model.
        stored: KV cache settings of the checkpoint.
        kv_cache, page_size: see `Model.layouts`.
        dtype: dtype of the computation.
        head: MTP head whose layer follows the model's; its keys and values are never quantized. None = no head.
    """
    layouts: list[Layout] = []
    sizes: dict[str, Any] = {"page_size": page_size, "dtype": kv_dtype(kv_cache or "auto", dtype)}
    caches = list(enumerate(stored.choose(kv_cache)))
    for index, cache in caches if head is None else [*caches, (head.layer, LayerCache())]:
        shape = config.attention(index)
        if isinstance(shape, StateShape):
            layouts.append(StateLayout(shape=shape, page_size=page_size))
        elif shape.has_rows:
            kept = KVScheme() if shape.kind == "window" else cache.scheme
            layouts.append(EntryLayout(shape=shape, scheme=kept, **sizes))
        else:
            layout = KVLayout(
                num_heads=shape.num_kv_heads,
                head_dim=shape.key_dim,
                rope_dim=shape.rope_dim,
                sinks=config.family.sinks is not None,
                # A window layer reads few tokens: quantization saves little there, and is known to cost accuracy.
                cache=cache if shape.window is None else LayerCache(),
                is_windowed=shape.window is not None,
                **sizes,
            )
            layouts.append(layout)
    return layouts
