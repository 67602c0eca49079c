"""Multi-head latent attention: the cache holds one narrow vector and one rotated key of a token, whatever the heads.

Keys and values of a head are products of the narrow vector with two matrices of the head. Neither is computed: the
query is multiplied by the keys' matrix, so that it meets the vector itself, and what attention adds up of the vectors
is multiplied by the values' matrix ("absorption"). To the cache that is one head of keys, whose last channels are also
its values. Shapes: T new tokens, H hidden width, Hq heads, R rotated and P plain channels of a query, C channels of the
narrow vector, V channels of a head's value.
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
    """Latent attention of one layer over its part of the KV cache.

    Args:
        layer: its number in the cache.
        qkv: (T, H) -> queries (Hq (P + R)) or what they come from, then C and R of the key.
        query_norm, query_up: from what queries come from to queries; None = they come from `qkv`.
        latent_norm: of the narrow vector.
        key_up: (Hq, P, C).
        value_up: (Hq, C, V).
        output: (T, Hq V) -> (T, H).
        sizes: of all these.
        options: what the attention kernel does besides.
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
        """See `Attention`."""
        sizes, joint = self.sizes, self.qkv(x)
        query, latent, rotary = joint.tensor_split((-sizes.rank - sizes.rope_dim, -sizes.rope_dim), dim=1)
        if self.query_norm is not None and self.query_up is not None:
            query = self.query_up(self.query_norm(query.contiguous())[0])
        query = query.reshape(len(x), -1, sizes.head_dim)  # (T, Hq, P + R)
        if self.growth is not None:
            query = query * self.growth(batch.in_text()[0])[:, None, None].to(query.dtype)
        absorbed = torch.bmm(query[..., : sizes.plain_dim].transpose(0, 1), self.key_up).transpose(0, 1)  # (T, Hq, C)
        # The rotated channels first, as attention rotates the first.
        query = torch.cat([query[..., sizes.plain_dim :], absorbed], dim=-1)
        latent = self.latent_norm(latent.contiguous())[0]
        key = torch.cat([rotary, latent], dim=-1).unsqueeze(1)  # (T, 1, R + C)
        states = query, key, key[..., sizes.rope_dim :]
        mixed = cache.attention[self.layer](states, batch, self.options, angles)  # (T, Hq, C)
        values = torch.bmm(mixed.transpose(0, 1), self.value_up).transpose(0, 1)  # (T, Hq, V)
        return self.output(values.reshape(len(x), -1))
