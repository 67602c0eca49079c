"""DeepSeek-V4's attention: a window of single tokens, plus entries that each represent several tokens.

Each token has one vector, which is the key and the value of every head. Attention outputs are rotated back by the
query's angle, so that only distances matter. An entry is a sum of its tokens, weighted per channel by gates. A query
sees an entry if none of the entry's tokens is newer than the query. In layers whose entries represent few tokens,
entries overlap, and an indexer selects the entries that a query reads. Everything runs in torch, one sequence at a
time. Shapes: T new tokens of all sequences, L new tokens of one sequence, H hidden width, Hq heads, D channels of a
head (the last R of them are rotated), r tokens per entry, E entries.
Source: DeepSeek-AI 2026, DeepSeek-V4; transformers `models/deepseek_v4/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.reference.attention import Span, attend_plainly, seen_by, spans
from quantkit.kernels.reference.experts import choose_experts
from quantkit.kernels.reference.ops import rotary_
from quantkit.kernels.types import Angles, AttentionOptions, ForwardBatch, Linear
from quantkit.models.layer_state_sizes import AttentionShape
from quantkit.models.rope import RopeConfig
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.cache.non_paged import EntryPool
from quantkit.runtime.model.layers import Mixture, Norm
from quantkit.runtime.model.residual_streams import StreamedBlock, StreamHead, StreamMixture
from quantkit.runtime.model.rope import angles_at
from quantkit.runtime.model.weights import Weights, build_mixture

_QUERIES = 128  # number of queries of a sequence whose scores are in memory at once


@dataclass(kw_only=True, slots=True, eq=False)
class Compressor:
    """Computes the entries of a layer, or the keys of its indexer.

    Args:
        bias: (r, S D) float32, bias of the gates for each position of a token in its entry; S is 2 if entries overlap,
            otherwise 1.
        norm: norm of an entry.
        width: number of channels D of an entry.
        rope: rotary embedding of entries. Entry i has the position of token i * r, the first of its tokens that is not
            also in the previous entry.
    """

    bias: Tensor
    norm: Norm
    width: int
    rope: RopeConfig

    def __call__(self, tokens: Tensor, start: int, first: int, last: int) -> Tensor:
        """Compute entries.

        Args:
            tokens: (n, 2 S D) values and gates of the tokens from position `start` on.
            first, last: index of the first entry to compute, and the index after the last.
        Returns:
            Entries (last - first, D).
        """
        rate, overlaps = len(self.bias), self.bias.shape[1] > self.width
        begin = (first - overlaps) * rate
        value, gate = tokens[max(0, begin) - start : last * rate - start].chunk(2, dim=1)
        before = max(0, -begin)  # no tokens precede those of the first entry
        value, gate = F.pad(value, (0, 0, before, 0)), F.pad(gate.float(), (0, 0, before, 0), value=-torch.inf)
        value, gate = (one.view(-1, *self.bias.shape) for one in (value, gate))  # (E + overlaps, r, S D)
        gate = gate + self.bias
        if overlaps:
            value, gate = (torch.cat([o[:-1, :, : self.width], o[1:, :, self.width :]], dim=1) for o in (value, gate))
        entries = (value * gate.softmax(dim=1).to(value.dtype)).sum(dim=1)
        positions = torch.arange(first, last, device=tokens.device) * rate
        return at_angles(self.norm(entries)[0], angles_at(self.rope, positions))


@dataclass(kw_only=True, slots=True, eq=False)
class Indexer:
    """Selects the entries that a query reads.

    Args:
        query: linear (T, rank) -> (T, heads D) that computes the indexer's queries.
        weight: linear (T, H) -> (T, heads) that computes the weight of each head.
        num_heads: number of heads of the indexer.
        top_k: maximum number of entries that a query reads.
    """

    query: Linear
    weight: Linear
    num_heads: int
    top_k: int

    def scored(self, x: Tensor, narrow: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return the indexer's queries (T, heads, D) and weights (T, heads).

        Args:
            x: (T, H), input of the layer.
            narrow: (T, rank), low-rank queries.
            angles: cosine and sine of the new tokens.
        """
        query = at_angles(self.query(narrow).view(len(x), self.num_heads, -1), angles)
        return query, self.weight(x).float() * self.num_heads**-0.5

    def pick(self, query: Tensor, weight: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """Select the entries that the new tokens of one sequence read.

        Args:
            query: (L, heads, D), the indexer's queries.
            weight: (L, heads), weights of the heads.
            keys: (E, D), the indexer's key of each entry.
            seen: (L, E), true where an entry is complete for a query.
        Returns:
            (L, E), true where a query reads an entry.
        """
        if keys.shape[0] <= self.top_k:
            return seen
        single, scale = keys.float().T, query.shape[-1] ** -0.5
        parts = zip(query.split(_QUERIES), weight.split(_QUERIES), strict=True)  # type: ignore[no-untyped-call]
        scores = [(F.relu(some.float() @ single) * scale * of_head.unsqueeze(-1)).sum(1) for some, of_head in parts]
        total = torch.cat(scores).masked_fill(~seen, -torch.inf)  # (L, E)
        return seen & torch.zeros_like(seen).scatter_(1, total.topk(self.top_k, dim=-1).indices, True)


@dataclass(kw_only=True, slots=True, eq=False)
class CompressedAttention:
    """DeepSeek-V4's attention of one layer over its cache.

    Args:
        layer: layer number in the cache.
        shape: shape of the layer's cache.
        qkv: linear (T, H) -> (T, rank + D) that computes low-rank queries and the key.
        query_norm, query_up: norm and linear that map low-rank queries to queries (T, Hq D).
        key_norm: norm of the key.
        grouped: (g, outputs of a group, Hq D / g), weight of the first output projection, which has g groups.
        output: the second output projection.
        options: scale, window and sinks.
        eps: epsilon of each query's norm, which has no weight.
        past: linear from (T, H) whose outputs are the inputs of the entries, then the inputs of the indexer's keys.
            None = the layer has no entries.
        compressors: the first computes the layer's entries, the second (if any) the indexer's keys.
        indexer: selects entries; None = queries read all entries.
    """

    layer: int
    shape: AttentionShape
    qkv: Linear
    query_norm: Norm
    query_up: Linear
    key_norm: Norm
    grouped: Tensor
    output: Linear
    options: AttentionOptions
    eps: float
    past: Linear | None
    compressors: tuple[Compressor, ...]
    indexer: Indexer | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `AnyAttention`."""
        beside = () if self.past is None else (self.past,)
        own = () if self.indexer is None else (self.indexer.query, self.indexer.weight)
        return self.qkv, self.query_up, *beside, *own, self.output

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, angles: Angles | None) -> Tensor:
        """See `Attention`."""
        assert angles is not None, "all layers have positions"
        narrow, key = self.qkv(x).tensor_split((-self.shape.key_dim,), dim=1)
        narrow = self.query_norm(narrow.contiguous())[0]
        query = self.query_up(narrow).view(len(x), self.shape.num_heads, -1)
        query = query * torch.rsqrt(query.float().square().mean(-1, keepdim=True) + self.eps).to(query.dtype)
        query, key = at_angles(query, angles), at_angles(self.key_norm(key.contiguous())[0], angles)
        past = None if self.past is None else self.past(x)
        scored = None if self.indexer is None else self.indexer.scored(x, narrow, angles)
        pool, mixed = cache.entries[self.layer], []
        for span in spans(batch):
            row, pages = batch.residual_rows[span.row], batch.page_table[span.row].clamp_min(0).long()
            keys = torch.cat([pool.window(row, span.cached, key.dtype), key[span.new]])
            entries = [] if past is None else self._entries(pool, row, pages, span, past[span.new])
            own = None if scored is None else (scored[0][span.new], scored[1][span.new])
            mixed.append(self._attend(query[span.new], keys, entries, own, span.cached))
            pool.keep_window(row, span.cached + len(key[span.new]), key[span.new])
        out = at_angles(torch.cat(mixed), (angles[0], -angles[1])).reshape(len(x), len(self.grouped), -1)
        return self.output(torch.bmm(out.transpose(0, 1), self.grouped.mT).transpose(0, 1).reshape(len(x), -1))

    def _entries(self, pool: EntryPool, row: Tensor, pages: Tensor, span: Span, fresh: Tensor) -> list[Tensor]:
        """Compute and store the entries that new tokens complete; return all entries of the sequence.

        Args:
            pool: cache of the layer.
            row: row of the sequence in the cache.
            pages: pages of the sequence.
            span: position of the sequence in the batch.
            fresh: outputs of `past` for the sequence's new tokens.
        Returns:
            Entries (E, D), then the indexer's keys (E, D) if there is an indexer.
        """
        length = span.cached + len(fresh)
        before = pool.past(row, span.cached).to(fresh.dtype)
        tokens, first, last = torch.cat([before, fresh]), span.cached // self.shape.ratio, length // self.shape.ratio
        if last > first:
            parts = tokens.split([2 * one.bias.shape[1] for one in self.compressors], dim=1)  # type: ignore[no-untyped-call]
            start = span.cached - len(before)
            made = [one(part, start, first, last) for one, part in zip(self.compressors, parts, strict=True)]
            pool.append(pages, first, made)
        pool.keep_past(row, tokens)
        return pool.entries(pages, last, fresh.dtype)

    def _attend(
        self, query: Tensor, keys: Tensor, entries: Sequence[Tensor], own: tuple[Tensor, Tensor] | None, cached: int
    ) -> Tensor:
        """Compute the attention of one sequence.

        Args:
            query: (L, Hq, D).
            keys: (N, D), uncompressed keys; the last L belong to the queries' own tokens.
            entries: the layer's entries (E, D), then the indexer's keys (E, D) if there is an indexer; may be empty.
            own: the indexer's queries and weights of the L new tokens; None = there is no indexer.
            cached: number of tokens before the L new tokens.
        Returns:
            (L, Hq, D).
        """
        length = len(query)
        seen = seen_by(length, len(keys), self.options.window, query.device)
        if entries:
            ends = torch.arange(1, len(entries[0]) + 1, device=query.device) * self.shape.ratio
            complete = ends <= torch.arange(cached + 1, cached + length + 1, device=query.device).unsqueeze(1)
            if self.indexer is not None and own is not None:
                complete = self.indexer.pick(*own, entries[1], complete)
            seen, keys = torch.cat([seen, complete], dim=1), torch.cat([keys, entries[0]])
        parts = zip(query.split(_QUERIES), seen.split(_QUERIES), strict=True)  # type: ignore[no-untyped-call]
        mixed = [
            attend_plainly(part.transpose(0, 1), keys[None], keys[None], mask, self.options).transpose(0, 1)
            for part, mask in parts
        ]
        return torch.cat(mixed)


def at_angles(states: Tensor, angles: Angles) -> Tensor:
    """Return a copy of states (T, D) or (T, heads, D) with the last channels rotated, in neighbouring pairs."""
    cos, sin = angles
    plain, rotated = states.tensor_split((-2 * cos.shape[-1],), dim=-1)
    several = rotated.float().clone(memory_format=torch.contiguous_format).view(len(states), -1, 2 * cos.shape[-1])
    rotary_(several, several[:, :0], cos, sin, interleaved=True)
    return torch.cat([plain, several.view(rotated.shape).to(states.dtype)], dim=-1)


def build_streamed_block(weights: Weights, index: int, ropes: Sequence[RopeConfig]) -> StreamedBlock:
    """Build one decoder layer; see `weights.build_block`."""
    config = weights.config
    prefix, rope = f"{config.family.layers}.{index}.", config.ropes[index]
    assert rope is not None, "all layers have positions"
    rounds = config.entries.count("hc_sinkhorn_iters", default=20)
    return StreamedBlock(
        attention=_build_attention(weights, index, f"{prefix}self_attn.", rope),
        mlp=_build_mixture(weights, prefix),
        attention_streams=StreamMixture(rounds=rounds, **_mixing(weights, f"{prefix}attn_hc.")),
        mlp_streams=StreamMixture(rounds=rounds, **_mixing(weights, f"{prefix}ffn_hc.")),
        input_norm=weights.norm(f"{prefix}input_layernorm"),
        mlp_norm=weights.norm(f"{prefix}post_attention_layernorm"),
        rope=ropes.index(rope),
    )


def _build_mixture(weights: Weights, prefix: str) -> Mixture:
    """Build a mixture of experts that are chosen by token id, or by scores with a balance term."""
    mixture, gate, experts = build_mixture(weights, prefix), f"{prefix}mlp.gate.", weights.config.experts
    assert experts is not None, "all layers have experts"
    if f"{gate}tid2eid" in weights.reader:
        mixture.table = weights.tensor(f"{gate}tid2eid", torch.int64)
    else:
        balance = weights.tensor(f"{gate}e_score_correction_bias", torch.float32)
        mixture.choose = partial(choose_experts, experts=experts, balance=balance)
    return mixture


def build_head(weights: Weights) -> StreamHead:
    """Build the module that joins all streams after the last layer."""
    return StreamHead(**_mixing(weights, "model.hc_head.hc_"))


def _mixing(weights: Weights, prefix: str) -> dict[str, Any]:
    """Return the arguments of a stream mixture, keyed by field name."""
    names = {"weight": "fn", "bias": "base", "scale": "scale"}
    tensors = {name: weights.tensor(prefix + part, torch.float32) for name, part in names.items()}
    return {**tensors, "eps": weights.config.norm_eps, "floor": weights.config.entries.number("hc_eps", default=1e-6)}


def _build_attention(weights: Weights, index: int, prefix: str, rope: RopeConfig) -> CompressedAttention:
    config, shape = weights.config, weights.config.attention(index)
    assert isinstance(shape, AttentionShape)
    owners = [f"{prefix}compressor.", f"{prefix}compressor.indexer."][: shape.series if shape.ratio else 0]
    groups, grouped = config.entries.count("o_groups"), weights.dense(f"{prefix}o_a_proj")
    return CompressedAttention(
        layer=index,
        shape=shape,
        qkv=weights.linear([f"{prefix}q_a_proj", f"{prefix}kv_proj"]),
        query_norm=weights.norm(f"{prefix}q_a_norm"),
        query_up=weights.linear([f"{prefix}q_b_proj"]),
        key_norm=weights.norm(f"{prefix}kv_norm"),
        grouped=grouped.view(groups, -1, grouped.shape[1]),
        output=weights.linear([f"{prefix}o_b_proj"]),
        options=AttentionOptions(
            scale=config.attention_scale, window=shape.window, sinks=weights.tensor(f"{prefix}sinks", torch.float32)
        ),
        eps=config.norm_eps,
        past=weights.linear([f"{owner}{part}_proj" for owner in owners for part in ("kv", "gate")]) if owners else None,
        compressors=tuple(
            Compressor(
                bias=weights.tensor(f"{owner}position_bias", torch.float32),
                norm=weights.norm(f"{owner}kv_norm"),
                width=width,
                rope=rope,
            )
            for owner, width in zip(owners, (shape.key_dim, shape.index_dim), strict=False)
        ),
        indexer=_build_indexer(weights, shape, owners[-1]) if shape.index_dim else None,
    )


def _build_indexer(weights: Weights, shape: AttentionShape, owner: str) -> Indexer:
    return Indexer(
        query=weights.linear([f"{owner}q_b_proj"]),
        weight=weights.linear([f"{owner}scorer.weights_proj"]),
        num_heads=shape.index_heads,
        top_k=shape.top_k or 0,
    )
