"""Which choice a launch runs with: the user's tuned file over the one that is shipped, over the default.

A launch is looked up by its kernel, what it reads (packing, KV type, widths: these must be equal) and its sizes, of
which the nearest that was measured counts if it is near enough: `tuned.NEAR`. Everything that decides is known on
the host and is the same whenever a shape comes again, so a recorded graph and the next one agree; after the first time
a choice is one access to a cache. On other devices than CUDA, which are there to be exact, it is the default.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

from quantkit.kernels.gpu import capability, tuned
from quantkit.kernels.gpu.choices import (
    ROW_BUCKETS,
    Choice,
    Decode,
    Prefill,
    Product,
    default_decode,
    default_prefill,
    default_product,
)
from quantkit.kernels.gpu.packing import PackedWeight, Packing
from quantkit.kernels.layouts import KVViews
from quantkit.numerics.dtype import INT4
from quantkit.numerics.scheme import KVScheme

_forced: list[Choice] = []


def product(weight: PackedWeight, count: int, device: torch.device) -> Product:
    """How `count` rows of inputs are multiplied with a packed weight.

    Args:
        weight: (N, K).
        count: M, from 1 on.
        device: where.
    """
    choice = _forced_for("product") or _product(device, capability(device), weight.packing, count, *weight.shape)
    return cast(Product, choice)


def decode(views: KVViews, count: int, query_heads: int, device: torch.device) -> Decode:
    """How `count` sequences with one new token each read their pages.

    Args:
        views: a layer's pages.
        count: B.
        query_heads: Hq.
        device: where.
    """
    layout = views.layout
    pages = (layout.scheme, layout.head_dim, layout.page_size, query_heads // layout.num_heads)
    choice = _forced_for("decode") or _decode(device, capability(device), *pages, count * layout.num_heads)
    return cast(Decode, choice)


def prefill(views: KVViews, query_heads: int, device: torch.device) -> Prefill:
    """How sequences with several new tokens read their pages and their fresh keys; arguments as for `decode`."""
    layout = views.layout
    pages = (layout.scheme, layout.head_dim, layout.page_size, query_heads // layout.num_heads)
    return cast(Prefill, _forced_for("prefill") or _prefill(device, capability(device), *pages))


@contextmanager
def forced(*choices: Choice) -> Iterator[None]:
    """Within, launches take these, one per kernel, whatever files say: for measuring and for tests."""
    saved = list(_forced)
    _forced[:] = [*choices, *saved]
    try:
        yield
    finally:
        _forced[:] = saved


def _forced_for(kernel: str) -> Choice | None:
    return next((choice for choice in _forced if isinstance(choice, tuned.CHOICES[kernel])), None)


def forget() -> None:
    """Read the files again at the next launch; graphs recorded before keep what they have."""
    for cached in (_product, _decode, _prefill, _tables):
        cached.cache_clear()


def pages_name(scheme: KVScheme, head_dim: int, page_size: int, group: int) -> str:
    """What is the same about pages that share a choice, as files name it.

    Args:
        scheme: types of keys and values.
        head_dim: channels of a head.
        page_size: tokens of a page.
        group: query heads of a key head.
    """
    kinds = f"{scheme.key.describe()} keys, {scheme.value.describe()} values"
    return f"{kinds}, {head_dim} channels, pages of {page_size}, {group} queries"


def row_bucket(count: int) -> int | None:
    """The number of rows that stands for `count` in files; None = too many."""
    return next((size for size in ROW_BUCKETS if count <= size), None)


@functools.lru_cache(maxsize=8192)
def _product(device: torch.device, chip: int, packing: Packing, count: int, outputs: int, inputs: int) -> Choice:
    bucket = row_bucket(count)
    sizes = {"rows": bucket, "outputs": outputs, "inputs": inputs} if bucket else None
    measured = None if sizes is None else _measured(device, "product", packing.name, sizes)
    return measured or default_product(count, packing.bits, chip)


@functools.lru_cache(maxsize=1024)
def _decode(
    device: torch.device, chip: int, scheme: KVScheme, head_dim: int, page_size: int, group: int, heads: int
) -> Choice:
    name = pages_name(scheme, head_dim, page_size, group)
    return _measured(device, "decode", name, {"heads": heads}) or default_decode(head_dim, page_size, chip)


@functools.lru_cache(maxsize=1024)
def _prefill(device: torch.device, chip: int, scheme: KVScheme, head_dim: int, page_size: int, group: int) -> Choice:
    measured = _measured(device, "prefill", pages_name(scheme, head_dim, page_size, group), {})
    return measured or default_prefill(head_dim, page_size, scheme.is_quantized, is_halved(scheme), chip)


def is_halved(scheme: KVScheme) -> bool:
    """Whether two channels of a key or of a value share a byte."""
    return INT4 in (scheme.key.dtype, scheme.value.dtype)


def _measured(device: torch.device, kernel: str, name: str, sizes: dict[str, int]) -> Choice | None:
    """What files say; a choice of another kernel is none that files can hold."""
    if device.type != "cuda":
        return None
    tables = _tables(torch.cuda.get_device_name(device))
    choices = (table.find(kernel, name, sizes) for table in tables)
    return next((choice for choice in choices if choice is not None), None)


@functools.lru_cache(maxsize=8)
def _tables(name: str) -> tuple[tuned.TunedTable, ...]:
    """What is known about a GPU, first come first served; files that cannot be used are named once and left out."""
    return tuned.tables_of(name)
