"""A decoder-only model over a paged KV cache: embedding, blocks, head. One code for every family, steered by data.

Shapes: T new tokens of all sequences, H hidden width, R rows whose logits are wanted, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from quantkit.kernels.layouts import EntryLayout, KVLayout, Layout, StateLayout, kv_dtype
from quantkit.kernels.types import ForwardBatch, Linear
from quantkit.models.layer_state_sizes import StateShape
from quantkit.models.rope import RopeConfig
from quantkit.numerics.kv_cache import LayerCache
from quantkit.numerics.scheme import KVScheme
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.cache_schemes import StoredCache
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.layers import Block, Norm, add_and_norm
from quantkit.runtime.model.residual_streams import StreamedBlock, StreamHead
from quantkit.runtime.model.rope import RopeTable


@dataclass(kw_only=True, eq=False)
class Model(ABC):
    """Model that the engine runs.

    Args:
        vocab_size, max_length: of the logits, and tokens of a sequence.
        eos_ids: tokens that end a sequence.
        stored_bytes: of the weights that one decode step reads; num_bytes: of all weights.
        dtype: of the computation.
        device: where it runs.
        notes: what was decided at load and a user should know.
    Attributes:
        paged: whether keys and values live in the engine's `KVCache`. False: the model keeps its own state by
            sequence id, so there is no prefix cache and no KV quantization.
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

    def layouts(self, kv_cache: str | None, page_size: int) -> list[Layout]:
        """Return how each layer keeps keys and values, or a state; empty if the model keeps them itself.

        Args:
            kv_cache: short name of their number type, see `StoredCache.choose`; None = as computed.
            page_size: tokens per page.
        """
        return []

    @property
    def is_recurrent(self) -> bool:
        """Whether layers keep a state in the cache, from which no tokens can be taken back."""
        return False

    @abstractmethod
    def forward(self, batch: ForwardBatch, cache: KVCache | None) -> Tensor:
        """One step: return the logits (R, V) float32 after `batch.logit_rows`."""

    def forget(self, sequence_id: int) -> None:  # noqa: B027 - most models have nothing to drop
        """Drop what is kept for a sequence; nothing where the model is paged."""


@dataclass(kw_only=True, eq=False)
class NativeModel(Model):
    """A model built from its family's data. Weights are laid out already; `loader` makes it.

    Args:
        config: what it computes.
        embedding: (V, H) table, any float dtype.
        blocks: in running order.
        streams: what makes one residual stream of several; None = there is one.
        ropes: rotary embeddings that the blocks refer to.
        final_norm: before the head.
        head: (R, H) -> (R, V).
        stored_cache: what the checkpoint says about its KV cache.
    """

    config: ModelConfig
    embedding: Tensor
    blocks: Sequence[Block | StreamedBlock]
    streams: StreamHead | None = None
    ropes: Sequence[RopeConfig]
    final_norm: Norm
    head: Linear
    stored_cache: StoredCache

    def __post_init__(self) -> None:
        self._tables = [RopeTable(rope, self.device) for rope in self.ropes]
        self._embedding_scale = self.config.embedding_scale
        if self.config.family.multipliers.root_embedding:
            # Gemma was trained with the root of its width rounded to the model's dtype.
            self._embedding_scale = torch.tensor(self._embedding_scale, dtype=self.dtype).item()

    @property
    def is_recurrent(self) -> bool:
        """See `Model`."""
        return self.config.is_recurrent

    def layouts(self, kv_cache: str | None, page_size: int) -> list[Layout]:
        return config_layouts(self.config, self.stored_cache, kv_cache, page_size, self.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache | None) -> Tensor:
        """See `Model`; the cache must be there."""
        assert cache is not None, "a paged model needs a KV cache"
        x = embedding(batch.token_ids, self.embedding).to(self.dtype)  # (T, H)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if self.streams is not None:
            x = self.streams.spread(x)
        # Once per step for all layers that share a rotary embedding.
        angles = [table.gather(batch) for table in self._tables]
        pending: Tensor | None = None
        for block in self.blocks:
            x, pending = block(x, pending, batch, cache, None if block.rope is None else angles[block.rope])
        return self._logits(x, pending, batch.logit_rows)

    def reserve(self, length: int) -> None:
        """Compute now what depends on positions up to this length, so that it stays where it is in memory."""
        for table in self._tables:
            table.reserve(length)

    def why_not_capturable(self, max_length: int) -> str | None:
        """Return why a step cannot be a CUDA graph, as it asks the host on its way; None if it can.

        Args:
            max_length: tokens of the longest sequence.
        """
        if self.is_recurrent:
            return "layers that keep a state are computed by torch, launch by launch"
        if any(not getattr(block.mlp, "is_capturable", False) for block in self.blocks):
            return "which experts are chosen is asked by the host"
        if any((table.rope.turning_length or max_length) < max_length for table in self._tables):
            return "rotary embeddings of long sequences depend on their length"
        return None

    def _logits(self, x: Tensor, pending: Tensor | None, rows: Tensor) -> Tensor:
        if not len(rows):
            return torch.empty(0, self.vocab_size, dtype=torch.float32, device=x.device)
        if len(rows) < len(x):
            # Before norm and head, which then work on the wanted rows only; of a prompt that is mostly one.
            x, pending = x[rows], None if pending is None else pending[rows]
        if self.streams is not None:
            x = self.streams(x)
        normed, _ = add_and_norm(self.final_norm, x, pending)
        logits, softcap = self.head(normed).float(), self.config.logits_softcap
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def config_layouts(
    config: ModelConfig, stored: StoredCache, kv_cache: str | None, page_size: int, dtype: torch.dtype
) -> list[Layout]:
    """Return how each layer of a model keeps keys and values, or its state.

    Args:
        config: of the model.
        stored: what its checkpoint says.
        kv_cache, page_size: see `Model.layouts`.
        dtype: of the computation.
    """
    layouts: list[Layout] = []
    sizes: dict[str, Any] = {"page_size": page_size, "dtype": kv_dtype(kv_cache or "auto", dtype)}
    for index, cache in enumerate(stored.choose(kv_cache)):
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
                # A window layer reads few tokens: there is little to save, and its errors are known to cost accuracy.
                cache=cache if shape.window is None else LayerCache(),
                is_windowed=shape.window is not None,
                **sizes,
            )
            layouts.append(layout)
    return layouts
