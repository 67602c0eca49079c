"""Sequences with known queries, keys and values; steps over them through a cache; and attention done the slow way.

The slow way is float64, dense, one query at a time. What a query sees of an earlier step is what the cache promises to
keep of it: `remembered` says so for each KV type, so that placement, residual windows, masks and rollback
are checked exactly.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from quantkit.kernels import cpu
from quantkit.kernels.cpu import attention as _native_attention
from quantkit.kernels.layouts import KVLayout, kv_scheme
from quantkit.kernels.reference.kv_codes import codes_of, decode_states
from quantkit.kernels.types import AttentionOptions, ForwardBatch
from quantkit.numerics.kv_cache import LayerCache, hadamard
from quantkit.runtime.cache.kv_cache import KVCache

# The keys of k4v2 are those of int4, and its values those of k3v2.
KV_TYPES = ("auto", "fp8", "int8", "int4", "k4v3", "k3v2")
IMPLEMENTATIONS = ["native", "torch"] + (["cuda"] if torch.cuda.is_available() else [])
# Sequence, first new token, end: a prompt, chunks that end inside, at and past a page border, decodes, a verification.
STEPS = [
    [(0, 0, 7), (1, 0, 3)],
    [(0, 7, 8), (1, 3, 4), (2, 0, 13)],
    [(0, 8, 9), (1, 4, 9)],
    [(2, 13, 14), (0, 9, 10), (1, 9, 30)],
    [(1, 30, 31), (0, 10, 11), (2, 14, 19)],
]
LENGTHS = (11, 31, 19)


def use(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make caches run attention in C, in plain torch, or in plain torch on a GPU."""
    if implementation == "native" and cpu.library() is None:
        pytest.skip(cpu.status())
    if implementation != "native":
        monkeypatch.setattr(_native_attention, "is_available", lambda views: False)
    monkeypatch.setattr(Sequences, "device", "cuda" if implementation == "cuda" else "cpu")


def layout(kind: str = "auto", *, heads=2, dim=16, page_size=4, dtype=torch.float32, **changes) -> KVLayout:
    settings = {"cache": LayerCache(scheme=kv_scheme(kind)), **changes}
    return KVLayout(num_heads=heads, head_dim=dim, page_size=page_size, dtype=dtype, **settings)


def poison(cache: KVCache) -> KVCache:
    """Every bit set: NaN in every float type, so that whatever reads a slot before it is written shows it."""
    for memory in (*cache._pools, *cache._residuals):
        memory.view(torch.uint8).fill_(255)
    return cache


@dataclasses.dataclass
class Sequences:
    """`lengths[b]` tokens of sequence b, with pages in shuffled order; more may be drawn for tokens taken back."""

    device: ClassVar[str] = "cpu"
    layout: KVLayout
    lengths: tuple[int, ...]
    query_heads: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape, kv = self.layout, self.layout.num_heads

        def draw(heads, width, length):
            return torch.randn(length, heads, width, generator=generator).to(shape.dtype)

        self.query = [draw(self.query_heads, shape.head_dim, n) for n in self.lengths]
        self.key = [3 * draw(kv, shape.head_dim, n) + 1 for n in self.lengths]
        self.value = [draw(kv, shape.head_dim, n) for n in self.lengths]
        counts = [-(-n // shape.page_size) for n in self.lengths]
        self.num_pages = sum(counts) + 3
        order = torch.randperm(self.num_pages, generator=generator)
        self.pages = list(order[: sum(counts)].split(counts))
        self.rows = torch.randperm(len(self.lengths) + 1, generator=generator)

    def cache(self) -> KVCache:
        return poison(KVCache([self.layout], self.num_pages, len(self.lengths) + 1, self.device))

    def batch(self, spans: list[tuple[int, int, int]]) -> ForwardBatch:
        """A step with new tokens start..stop of some sequences."""
        size = self.layout.page_size
        positions = [torch.arange(start, stop) for _, start, stop in spans]
        counts = [-(-stop // size) for _, _, stop in spans]
        table = torch.full((len(spans), max(counts)), -1, dtype=torch.int32)
        for row, ((number, _, _), count) in enumerate(zip(spans, counts, strict=True)):
            table[row, :count] = self.pages[number][:count]
        news = [stop - start for _, start, stop in spans]
        slots = [self.pages[n][p // size] * size + p % size for (n, _, _), p in zip(spans, positions, strict=True)]
        return ForwardBatch(
            token_ids=torch.zeros(sum(news), dtype=torch.int64, device=self.device),
            positions=torch.cat(positions).to(self.device),
            query_starts=torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32).to(self.device),
            page_table=table.to(self.device),
            slots=torch.cat(slots).to(self.device),
            residual_rows=self.rows[[number for number, _, _ in spans]].to(self.device),
            logit_rows=(torch.tensor(news).cumsum(0) - 1).to(self.device),
            query_lengths=tuple(news),
            context_lengths=tuple(stop for _, _, stop in spans),
            sequence_ids=tuple(number for number, _, _ in spans),
        )

    def step(self, cache: KVCache, spans: list[tuple[int, int, int]], **options) -> list[Tensor]:
        """Attention outputs (L, Hq, D) of new tokens start..stop of some sequences."""
        options = {"scale": self.layout.head_dim**-0.5, **options}
        query, key, value = (
            torch.cat([source[number][start:stop] for number, start, stop in spans]).to(self.device)
            for source in (self.query, self.key, self.value)
        )
        angles = options.pop("angles", None)
        out = cache.attention[0]((query, key, value), self.batch(spans), AttentionOptions(**options), angles).cpu()
        return list(out.split([stop - start for _, start, stop in spans]))

    def expected(self, number: int, start: int, stop: int, **options) -> Tensor:
        """What `step` should give for one of its spans, in float64."""
        key = torch.cat([remembered(self.layout, "key", self.key[number], start), self.key[number][start:stop]])
        value = torch.cat([remembered(self.layout, "value", self.value[number], start), self.value[number][start:stop]])
        options = {"scale": self.layout.head_dim**-0.5, **options}
        return dense(self.query[number][start:stop], key, value, **options)


def remembered(shape: KVLayout, what: str, states: Tensor, length: int) -> Tensor:
    """The first `length` keys or values (L, H, D) as the cache gives them back in a later step."""
    scheme = getattr(shape.scheme, what)
    states = states[:length]
    if scheme.dtype is None:
        return states
    waits = shape.has_residual if what == "key" else shape.has_value_residual
    if not waits:
        fixed = torch.tensor(getattr(shape.cache, f"{what}_scale")).reshape(-1, 1) if scheme.is_fixed else 1.0
        turn = hadamard(shape.head_dim) if what == "key" and shape.scheme.rotation != "none" else None
        if turn is not None:
            states = (states.float() @ turn).to(states.dtype)
        decoded = decode_states(*codes_of(states, scheme, fixed), scheme, shape.dtype, fixed)
        return decoded if turn is None else (decoded.float() @ turn).to(decoded.dtype)
    complete = length // shape.page_size * shape.page_size
    pages = states[:complete].view(-1, shape.page_size, *states.shape[1:]).transpose(1, 2)  # (P, H, S, D)
    decoded = (
        decode_states(*codes_of(pages, scheme), scheme, shape.dtype).transpose(1, 2).reshape(-1, *states.shape[1:])
    )
    return torch.cat([decoded, states[complete:]])


def dense(query, key, value, *, scale, window=None, softcap=None) -> Tensor:
    """Attention of the last queries (L, Hq, D) over keys (N, Hkv, D), one query and head at a time, in float64."""
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=torch.float64)
    groups = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        position = key.shape[0] - query.shape[0] + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            keys = key[first : position + 1, head // groups].double()
            scores = keys @ query[row, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ value[first : position + 1, head // groups].double()
    return out
