"""Which choice a launch runs with: the user's tuned file over the one that is shipped, over the default.

A launch is found again by its kernel, what it reads (bits, groups, KV type, widths: these must be equal) and its sizes,
of which the nearest that was measured counts if it is near enough: `tuned.NEAR`. Everything that decides is known on
the host and is the same whenever a shape comes again, so a recorded graph and the next one agree; after the first time
a choice is one look into a cache. On other devices than CUDA, which are there to be exact, it is the default.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quantkit.kernels.gpu import capability, tuned
from quantkit.kernels.gpu.choices import (
    ROW_BUCKETS,
    Choice,
    Decode,
    Prefill,
    Product,
    Rows,
    Tile,
    Vendor,
    default_decode,
    default_prefill,
    default_product,
)
from quantkit.kernels.gpu.layout import E2M1, E4M3, E4M3_BYTES, EXPONENT_BYTES, INTEGER, NUMBERS, PackedWeight
from quantkit.kernels.layouts import KVViews
from quantkit.numerics.dtype import INT4

_PRODUCTS = (Rows, Tile, Vendor)
_FIELDS = {E4M3: "e4m3", E2M1: "e2m1"}
_SCALES = {E4M3_BYTES: ("scales e4m3",), EXPONENT_BYTES: ("scales e8m0",)}
_forced: list[Choice] = []


def product(weight: PackedWeight, count: int, device: torch.device) -> Product:
    """How `count` rows of inputs are multiplied with a packed weight.

    Args:
        weight: (N, K).
        count: M, from 1 on.
        device: where.
    """
    for choice in _forced:
        if isinstance(choice, _PRODUCTS):
            return choice
    has_zero, (outputs, inputs) = weight.zero is not None, weight.shape
    return _product(
        device, capability(device), weight.bits, weight.group, weight.span, has_zero, weight.natural, weight.kind,
        weight.scales, count, outputs, inputs,
    )  # fmt: skip


def decode(views: KVViews, count: int, query_heads: int, device: torch.device) -> Decode:
    """How `count` sequences with one new token each read their pages.

    Args:
        views: a layer's pages.
        count: B.
        query_heads: Hq.
        device: where.
    """
    for choice in _forced:
        if isinstance(choice, Decode):
            return choice
    layout = views.layout
    group = query_heads // layout.num_heads
    widest = max(layout.head_dim, layout.value_width)
    return _decode(
        device, capability(device), _cache_kind(views), widest, layout.page_size, group, count * layout.num_heads
    )


def prefill(views: KVViews, query_heads: int, device: torch.device) -> Prefill:
    """How sequences with several new tokens read their pages and their fresh keys; arguments as for `decode`."""
    for choice in _forced:
        if isinstance(choice, Prefill):
            return choice
    layout = views.layout
    halved = INT4 in (layout.scheme.key.dtype, layout.scheme.value.dtype)
    widest, group = max(layout.head_dim, layout.value_width), query_heads // layout.num_heads
    return _prefill(
        device, capability(device), _cache_kind(views), widest, layout.page_size, group, layout.is_quantized, halved
    )


@contextmanager
def forced(*choices: Choice) -> Iterator[None]:
    """Within, launches take these, one per kernel, whatever files say: for measuring and for tests."""
    saved = list(_forced)
    _forced[:] = [*choices, *saved]
    try:
        yield
    finally:
        _forced[:] = saved


def forget() -> None:
    """Read the files again at the next launch; graphs recorded before keep what they have."""
    for cached in (_product, _decode, _prefill, _tables):
        cached.cache_clear()


def product_kind(
    *,
    bits: int,
    group: int,
    span: int,
    has_zero: bool,
    natural: bool = False,
    kind: int = INTEGER,
    scales: int = NUMBERS,
) -> str:
    """What is the same about weights that share a choice, as files name it."""
    words = [
        _FIELDS.get(kind, f"{bits} bits"),
        *_SCALES.get(scales, ()),
        f"groups of {group}" if group else "per output",
        f"span {span}",
    ]
    return ", ".join([*words, *(["zeros"] if has_zero else []), *(["natural"] if natural else [])])


def weight_kind(weight: PackedWeight) -> str:
    """`product_kind` of a weight."""
    return product_kind(
        bits=weight.bits,
        group=weight.group,
        span=weight.span,
        has_zero=weight.zero is not None,
        natural=weight.natural,
        kind=weight.kind,
        scales=weight.scales,
    )


def cache_kind(kinds: tuple[str, str], widest: int, page_size: int, group: int) -> str:
    """The same about pages: types of keys and values, channels, tokens of a page, query heads of a key head."""
    return f"{kinds[0]} keys, {kinds[1]} values, {widest} channels, pages of {page_size}, {group} queries"


def row_bucket(count: int) -> int | None:
    """The number of rows that stands for `count` in files; None = too many."""
    return next((size for size in ROW_BUCKETS if count <= size), None)


@functools.lru_cache(maxsize=8192)
def _product(
    device: torch.device, chip: int, bits: int, group: int, span: int, has_zero: bool, natural: bool,
    fields: int, scales: int, count: int, outputs: int, inputs: int,
) -> Product:  # fmt: skip
    kind = product_kind(
        bits=bits, group=group, span=span, has_zero=has_zero, natural=natural, kind=fields, scales=scales
    )
    bucket = row_bucket(count)
    found = bucket and _find(device, "product", kind, {"rows": bucket, "outputs": outputs, "inputs": inputs})
    return found if isinstance(found, _PRODUCTS) else default_product(count, bits, chip, span)


@functools.lru_cache(maxsize=1024)
def _decode(
    device: torch.device, chip: int, kinds: tuple[str, str], widest: int, page_size: int, group: int, heads: int
) -> Decode:
    found = _find(device, "decode", cache_kind(kinds, widest, page_size, group), {"heads": heads})
    return found if isinstance(found, Decode) else default_decode(widest, page_size, chip)


@functools.lru_cache(maxsize=1024)
def _prefill(
    device: torch.device, chip: int, kinds: tuple[str, str], widest: int, page_size: int, group: int,
    quantized: bool, halved: bool,
) -> Prefill:  # fmt: skip
    found = _find(device, "prefill", cache_kind(kinds, widest, page_size, group), {})
    return found if isinstance(found, Prefill) else default_prefill(widest, page_size, quantized, halved, chip)


def _cache_kind(views: KVViews) -> tuple[str, str]:
    scheme = views.layout.scheme
    return scheme.key.describe(), scheme.value.describe()


def _find(device: torch.device, kernel: str, kind: str, sizes: dict[str, int]) -> Choice | None:
    if device.type != "cuda":
        return None
    tables = _tables(torch.cuda.get_device_name(device))
    return next((found for table in tables if (found := table.find(kernel, kind, sizes)) is not None), None)


@functools.lru_cache(maxsize=8)
def _tables(name: str) -> tuple[tuned.Table, ...]:
    """What is known about a GPU, first come first served; files that cannot be used are told once and left out."""
    return tuned.tables_of(name)
