"""Attention of others over bf16 keys and values: torch's SDPA and flex attention, and FlashInfer over pages.

`Absent` is raised where one is not there. FlashInfer is called as its documentation says; its adapters have not been
run. Shapes: B sequences of C tokens, of which the last L are new; heads of an 8B model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from results import Absent
from timing import dtype_on
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from quantkit.benchmark.timing import num_copies

Calls = list[Callable[[], object]]
_WORKSPACE = 256 << 20


@dataclass(frozen=True)
class Case:
    """What is attended to.

    Args:
        batch, context, new: B, C and L.
        heads, kv_heads, dim, page: of the model and the cache.
    """

    batch: int
    context: int
    new: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 64

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in bf16."""
        return 4 * self.batch * self.context * self.kv_heads * self.dim

    @property
    def flop(self) -> float:
        """Of both products, causal."""
        pairs = self.new * (self.context - self.new) + self.new * (self.new + 1) / 2
        return 4.0 * self.batch * self.heads * self.dim * pairs


def _contiguous(case: Case, device: str) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Queries (B, H, L, D), and rotating keys and values (B, Hkv, C, D)."""
    dtype = dtype_on(device)
    query = torch.randn(case.batch, case.heads, case.new, case.dim, device=device, dtype=dtype)
    shape = (case.batch, case.kv_heads, case.context, case.dim)
    pairs = [
        (torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype))
        for _ in range(num_copies(case.kv_bytes, device))
    ]
    return query, pairs


def sdpa(case: Case, device: str) -> Calls:
    """torch's scaled_dot_product_attention."""
    query, pairs = _contiguous(case, device)
    attend = torch.nn.functional.scaled_dot_product_attention
    mask = causal_lower_right(case.new, case.context) if case.new > 1 else None
    return [lambda k=k, v=v: attend(query, k, v, attn_mask=mask, enable_gqa=True) for k, v in pairs]


def flex(case: Case, device: str) -> Calls:
    """torch's flex attention, compiled."""
    if device != "cuda":
        raise Absent("compiled flex attention needs a CUDA device")
    module = importlib.import_module("torch.nn.attention.flex_attention")
    compiled = torch.compile(module.flex_attention, dynamic=False)
    query, pairs = _contiguous(case, device)
    offset = case.context - case.new

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + offset >= k

    mask = None
    if case.new > 1:
        mask = module.create_block_mask(causal, None, None, case.new, case.context, device=device)
    return [lambda k=k, v=v: compiled(query, k, v, block_mask=mask, enable_gqa=True) for k, v in pairs]


def flashinfer(case: Case, device: str) -> Calls:
    """FlashInfer over pages of bf16, decode or prefill."""
    if device != "cuda":
        raise Absent("flashinfer needs a CUDA device")
    try:
        library = importlib.import_module("flashinfer")
    except Exception as error:  # also one built for another torch
        raise Absent(f"flashinfer: {error}") from None
    wrapper = _decode_wrapper(library, case, device) if case.new == 1 else _prefill_wrapper(library, case, device)
    tokens = case.batch * case.new
    query = torch.randn(tokens, case.heads, case.dim, device=device, dtype=torch.bfloat16)
    pages = case.batch * -(-case.context // case.page)
    shape = (pages, 2, case.page, case.kv_heads, case.dim)  # "NHD"
    caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(num_copies(case.kv_bytes, device))]
    return [lambda cache=cache: wrapper.run(query, cache) for cache in caches]


def _tables(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Where the pages of each sequence begin, their shuffled numbers, and the tokens in its last page."""
    each = -(-case.context // case.page)
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * each
    indices = torch.randperm(case.batch * each, device=device).to(torch.int32)
    last = torch.full((case.batch,), (case.context - 1) % case.page + 1, dtype=torch.int32, device=device)
    return starts, indices, last


def _decode_wrapper(library: Any, case: Case, device: str) -> Any:
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(*_tables(case, device), case.heads, case.kv_heads, case.dim, case.page, **kinds)
    return wrapper


def _prefill_wrapper(library: Any, case: Case, device: str) -> Any:
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.new
    sizes = (case.heads, case.kv_heads, case.dim, case.page)
    wrapper.plan(starts, *_tables(case, device), *sizes, causal=True, q_data_type=torch.bfloat16)
    return wrapper


COMPILED = "torch flex bf16, contiguous"
PEERS: dict[str, Callable[[Case, str], Calls]] = {
    "torch sdpa bf16, contiguous": sdpa,
    "flashinfer bf16, paged": flashinfer,
    COMPILED: flex,
}
