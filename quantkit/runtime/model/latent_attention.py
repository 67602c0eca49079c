"""Multi-head latent attention: per token, the cache holds one low-rank vector and one rotated key for all heads.

Each head has two matrices that map the low-rank vector to its key and value. Instead of computing keys and values, this
module applies the key matrix to the query, and the value matrix to the attention-weighted sum of low-rank vectors
("absorption"). The cache thus sees a single head of keys, and some channels of a key are also the value. Shapes: T new
tokens, H hidden width, Hq heads, R rotated and P plain channels of a query, C channels of the low-rank vector, V
channels of a head's value.
Source: DeepSeek-AI 2024, DeepSeek-V2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kernels.types import Angles, AttentionOptions, ForwardBatch, Linear
from quantkit.models.description import LatentShape
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.layers import Norm


@dataclass(kw_only=True, slots=True, eq=False)
class LatentAttention:
    """Latent attention of one layer over its KV cache.

    Args:
        layer: layer number in the cache.
        qkv: linear that computes queries (T, Hq (P + R)) or low-rank queries, then the low-rank vector (T, C) and the
            rotated channels of the key (T, R), from (T, H).
        query_norm, query_up: norm and linear that map low-rank queries to queries; None = `qkv` computes queries.
        latent_norm: norm of the low-rank vector.
        key_up: (Hq, P, C), each head's matrix from the low-rank vector to the plain channels of the key.
        value_up: (Hq, C, V), each head's matrix from the low-rank vector to the value.
        output: output projection, (T, Hq V) -> (T, H).
        sizes: sizes of these tensors.
        options: further options of the attention kernel.
        growth: see `Attention`.
    """

    layer: int
    qkv: Linear
    query_norm: Norm | None
    query_up: Linear | None
    latent_norm: Norm
    key_up: Tensor
    value_up: Tensor
    output: Linear
    sizes: LatentShape
    options: AttentionOptions
    growth: Callable[[Tensor], Tensor] | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `AnyAttention`."""
        return self.qkv, *([] if self.query_up is None else [self.query_up]), self.output

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, angles: Angles | None) -> Tensor:
        """Compute the attention of the new tokens, and store their keys; see `Attention`."""
        sizes, joint = self.sizes, self.qkv(x)
        query, latent, rotary = joint.tensor_split((-sizes.rank - sizes.rope_dim, -sizes.rope_dim), dim=1)
        if self.query_norm is not None and self.query_up is not None:
            query = self.query_up(self.query_norm(query.contiguous())[0])
        query = query.reshape(len(x), -1, sizes.head_dim)  # (T, Hq, P + R)
        if self.growth is not None:
            query = query * self.growth(batch.in_text()[0])[:, None, None].to(query.dtype)
        absorbed = torch.bmm(query[..., : sizes.plain_dim].transpose(0, 1), self.key_up).transpose(0, 1)  # (T, Hq, C)
        # The rotated channels come first, because the attention kernel rotates the first channels.
        query = torch.cat([query[..., sizes.plain_dim :], absorbed], dim=-1)
        latent = self.latent_norm(latent.contiguous())[0]
        key = torch.cat([rotary, latent], dim=-1).unsqueeze(1)  # (T, 1, R + C)
        states = query, key, key[..., sizes.rope_dim :]
        mixed = cache.attention[self.layer](states, batch, self.options, angles)  # (T, Hq, C)
        values = torch.bmm(mixed.transpose(0, 1), self.value_up).transpose(0, 1)  # (T, Hq, V)
        return self.output(values.reshape(len(x), -1))
