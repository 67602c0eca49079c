"""Which choice a launch runs with: the user's tuned file over the one that is shipped, over the default.

A launch is looked up by its kernel, what it reads (packing, KV type, widths: these must be equal) and its sizes, of
which the nearest that was measured counts if it is near enough: `tuned.NEAR`. Everything that decides is known on
the host and is the same whenever a shape comes again, so a recorded graph and the next one agree; after the first time
a choice is one access to a cache. On other devices than CUDA, which are there to be exact, it is the default.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quantkit.kernels.gpu import capability, choices, tuned
from quantkit.kernels.gpu.choices import ROW_BUCKETS, Choice, Cublas, Decode, Prefill, Product, Tile
from quantkit.kernels.gpu.packing import PackedWeight, Packing
from quantkit.kernels.layouts import KVViews
from quantkit.numerics.dtype import INT4
from quantkit.numerics.scheme import KVScheme

_Pages = tuple[KVScheme, int, int, int]  # the scheme, channels of a head, tokens of a page, queries of a key head
_forced: list[Choice] = []


def product(weight: PackedWeight, count: int, device: torch.device) -> Product:
    """How `count` rows of inputs are multiplied with a packed weight.

    Args:
        weight: (N, K).
        count: M, from 1 on.
        device: where.
    """
    sizes = count, *weight.shape
    return _forced_for(Tile, Cublas) or _product(device, capability(device), weight.packing, *sizes)


def decode(views: KVViews, count: int, query_heads: int, device: torch.device) -> Decode:
    """How `count` sequences with one new token each read their pages.

    Args:
        views: a layer's pages.
        count: B.
        query_heads: Hq.
        device: where.
    """
    heads = count * views.layout.num_heads
    return _forced_for(Decode) or _decode(device, capability(device), _pages(views, query_heads), heads)


def prefill(views: KVViews, query_heads: int, device: torch.device) -> Prefill:
    """How sequences with several new tokens read their pages and their fresh keys; arguments as for `decode`."""
    return _forced_for(Prefill) or _prefill(device, capability(device), _pages(views, query_heads))


def _pages(views: KVViews, query_heads: int) -> _Pages:
    layout = views.layout
    return layout.scheme, layout.head_dim, layout.page_size, query_heads // layout.num_heads


@contextmanager
def forced(*choices: Choice) -> Iterator[None]:
    """Within, launches take these, one per kernel, whatever files say: for measuring and for tests."""
    saved = list(_forced)
    _forced[:] = [*choices, *saved]
    try:
        yield
    finally:
        _forced[:] = saved


def _forced_for(*kinds: type[Choice]) -> Any:
    return next((choice for choice in _forced if isinstance(choice, kinds)), None)


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
def _product(device: torch.device, chip: int, packing: Packing, count: int, outputs: int, inputs: int) -> Product:
    bucket = row_bucket(count)
    sizes = {"rows": bucket, "outputs": outputs, "inputs": inputs}
    measured = _measured(device, "product", packing.name, sizes) if bucket else None
    return measured or choices.default_product(count, chip)


@functools.lru_cache(maxsize=1024)
def _decode(device: torch.device, chip: int, pages: _Pages, heads: int) -> Decode:
    _, head_dim, page_size, _ = pages
    measured = _measured(device, "decode", pages_name(*pages), {"heads": heads})
    return measured or choices.default_decode(head_dim, page_size, chip)


@functools.lru_cache(maxsize=1024)
def _prefill(device: torch.device, chip: int, pages: _Pages) -> Prefill:
    scheme, head_dim, page_size, _ = pages
    measured = _measured(device, "prefill", pages_name(*pages), {})
    return measured or choices.default_prefill(head_dim, page_size, scheme.is_quantized, is_halved(scheme), chip)


def is_halved(scheme: KVScheme) -> bool:
    """Whether two channels of a key or of a value share a byte."""
    return INT4 in (scheme.key.dtype, scheme.value.dtype)


def _measured(device: torch.device, kernel: str, name: str, sizes: dict[str, Any]) -> Any:
    """What files say, or None; a choice of another kernel is none that files can hold."""
    if device.type != "cuda":
        return None
    tables = _tables(torch.cuda.get_device_name(device))
    return next((choice for table in tables if (choice := table.find(kernel, name, sizes)) is not None), None)


@functools.lru_cache(maxsize=8)
def _tables(name: str) -> tuple[tuned.TunedTable, ...]:
    """What is known about a GPU, first come first served; files that cannot be used are named once and left out."""
    return tuned.tables_of(name)
