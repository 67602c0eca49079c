"""The first MTP head of a model, ready to run: one more decoder layer that drafts the token after the next one.

`models.mtp` says what a head computes and what its tensors are called. The head's layer keeps keys and values in the
model's KV cache, as the layer after the model's last one, so pages, shared prefixes and preemption apply to it
too. Shapes: T tokens, H hidden width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import RequestError
from quantkit.kernels.types import Angles, ForwardBatch, Linear
from quantkit.models.mtp import MTPHead, mtp_heads
from quantkit.models.rope import RopeConfig
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.latent_attention import LatentAttention
from quantkit.runtime.model.layers import Attention, Block, Norm, add_and_norm
from quantkit.runtime.model.weights import Weights, build_block


@dataclass(kw_only=True, slots=True, eq=False)
class DraftHead:
    """Computes the hidden states of drafts from the model's hidden states and the next tokens.

    Args:
        description: names of the head's modules, and the order of its computations.
        embedding: looks up token ids (T,) in the head's own table; None = it uses the model's table.
        embedding_norm, hidden_norm: norms of the two inputs.
        projection: linear (T, 2 H) -> (T, H).
        block: the decoder layer.
        final_norm: norm after the decoder layer.
        output: the head's own output projection, (T, H) -> (T, V); None = it uses the model's.
    """

    description: MTPHead
    embedding: Callable[[Tensor], Tensor] | None
    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear
    block: Block
    final_norm: Norm
    output: Linear | None

    def __call__(
        self, hidden: Tensor, embedded: Tensor, batch: ForwardBatch, cache: KVCache, angles: Angles | None
    ) -> Tensor:
        """Return the head's hidden states (T, H), which are also what a further step of the head reads.

        Args:
            hidden: (T, H), the model's hidden states after its final norm, or the head's own at the previous position.
            embedded: (T, H), embeddings of the tokens that follow.
            batch: positions and pages of the hidden states.
            cache, angles: see `Attention`.
        """
        if self.description.zero_first:
            embedded = embedded.masked_fill(batch.in_text()[0][:, None] == 0, 0.0)
        parts = [self.embedding_norm(embedded)[0], self.hidden_norm(hidden)[0]]
        x = self.projection(torch.cat(parts[::-1] if self.description.hidden_first else parts, dim=1))
        x, pending = self.block(x, None, batch, cache, angles)
        return add_and_norm(self.final_norm if self.description.chains_normed else None, x, pending)[0]

    def scores(self, states: Tensor, output: Linear) -> Tensor:
        """Return the scores (T, V) of the head's hidden states (T, H); `output` is the model's output projection."""
        normed = states if self.description.chains_normed else self.final_norm(states)[0]
        return (self.output or output)(normed)


def find_draft_head(config: ModelConfig, reader: CheckpointReader) -> MTPHead:
    """Return the description of a checkpoint's first MTP head, the only head that drafts.

    Raises:
        RequestError: the checkpoint has no MTP head.
    """
    heads = mtp_heads(config, reader.names)
    if not heads:
        raise RequestError(
            f"{reader.path}: the model has no MTP head that can draft; use speculate=ngram (--speculate ngram), or "
            "leave speculate out"
        )
    return heads[0]


def build_draft_head(weights: Weights, head: MTPHead, ropes: Sequence[RopeConfig]) -> DraftHead:
    """Build an MTP head.

    Args:
        weights: builds the parts of the head and counts their bytes.
        head: description of the head.
        ropes: rotary embeddings of the model.
    """
    block = build_block(weights, head.layer, ropes, prefix=head.block)
    assert isinstance(block.attention, Attention | LatentAttention), "a head attends to keys and values"
    block.attention.layer = weights.config.num_layers
    family = weights.config.family
    embedding = _unless_copy(weights, head.embedding, family.embedding)
    output = _unless_copy(weights, head.output, family.embedding if weights.config.tied else family.head)
    table = f"{embedding}.weight"
    stored = weights.reader.info(table).dtype if embedding is not None else None
    return DraftHead(
        description=head,
        embedding=None if embedding is None else partial(F.embedding, weight=weights.tensor(table, stored)),
        embedding_norm=weights.norm(head.embedding_norm),
        hidden_norm=weights.norm(head.hidden_norm),
        projection=weights.linear([head.projection]),
        block=block,
        final_norm=weights.norm(head.final_norm),
        output=None if output is None else weights.linear([output]),
    )


def _unless_copy(weights: Weights, name: str | None, other: str) -> str | None:
    """Return `name`, or None if the weight of this module equals that of the model's module `other`.

    Published checkpoints store copies of the model's embedding and output projection for the head. Memory needs only
    one of them.

    Args:
        weights: reads the weights.
        name: module of the MTP head; None = the head has no such module.
        other: module of the model.
    """
    reader, own, shared = weights.reader, f"{name}.weight", f"{other}.weight"
    if name is None or own not in reader or shared not in reader or reader.info(own).dtype != reader.info(shared).dtype:
        return name
    return None if torch.equal(reader.tensor(own), reader.tensor(shared)) else name
