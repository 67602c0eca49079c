"""Which choices are worth measuring: for each kernel a first look at tiles and warps, then the neighbours of the best.

Seeds are what tuned kernels of others run with on Hopper: 16 to 128 outputs and 4 or 8 warps of a tile, 4 to 32 outputs
and 1 to 8 warps of rows, loads under way in both. What does not fit the registers of a thread, or the memory that the
threads of a block share, is left out by arithmetic; its limits come from compiling for every chip
(`evals/gpu/compile_check.py --candidates`). Whoever measures still drops what spills.
Source: gemlite's configurations for H100; TileOPs on matrix-vector products on H200; kernels of vLLM and exllamav3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from quantkit.kernels.gpu.choices import ROW_LIMIT, Choice, Cublas, Decode, Prefill, Product, Rows, Tile
from quantkit.kernels.gpu.packing import Packing

_LANES = 32
_LEAST_WORDS = 4  # of a thread: one load of 16 bytes
_MOST_WORDS = 16  # of a thread of rows; half where they have 16 fields, or a scale and a zero for each field
_MOST_SUMS = 32  # of a thread; as many registers again are for the sums of one group; half for tiles before Hopper
_ROW_TILES = (256, 512, 1024, 2048)  # words
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
_LEAST_SHARED_KIB = 99
_HOPPER = 90


def products(rows: int, packing: Packing, chip: int) -> list[Product]:
    """How to multiply so many rows with a packed weight: tiles and warps.

    Args:
        rows: M, one of `choices.ROW_BUCKETS`.
        packing: of the weight; one that is unpacked is never dequantized into memory.
        chip: compute capability.
    """
    bits, span = packing.bits, packing.span
    candidates: list[Product] = []
    if rows <= ROW_LIMIT:
        candidates += [
            Rows(block_n=words // span, warps=warps, stages=2, programs=8)
            for words in _ROW_TILES
            for warps in (1, 2, 4, 8)
            if _rows_fit(rows, words // (_LANES * warps), bits, span)
        ]
    if rows > 1 and bits > 2:
        most = _MOST_SUMS if chip >= _HOPPER else _MOST_SUMS // 2
        tiles = [
            Tile(block_m=block_m, block_n=block_n, warps=warps, stages=2, programs=2)
            for block_m in _block_rows(rows)
            for block_n in (32, 64, 128)
            for warps in (4, 8)
            if block_m * block_n // (_LANES * warps) <= most and block_n * span // (_LANES * warps) <= 32
        ]
        candidates += [tile for tile in tiles if _tile_bytes(tile) <= _shared(chip)]
    if rows > 16 and not packing.unpacked:
        candidates.append(Cublas())
    return candidates


def decodes(*, page_size: int, head_dim: int, halved: bool) -> list[Decode]:
    """How sequences with one new token read their pages.

    Args:
        page_size: tokens of a page.
        head_dim: channels of a head.
        halved: two share a byte.
    """
    return [
        Decode(tile=tile, warps=warps, stages=2, programs=2, least_tiles=4, most_splits=64)
        for tile in (16, 32, 64)
        for warps in (2, 4, 8)
        # Keys or values of a tile as numbers, and sums of 16 rows, by thread.
        if tile <= page_size
        and (tile + 16) * head_dim <= (80 if halved else 128) * _LANES * warps
        and (warps == 8 or not (halved and head_dim > 128))
    ]


def prefills(*, page_size: int, default: Prefill) -> list[Prefill]:
    """How sequences with several new tokens read their pages and fresh keys: nothing larger than the default."""
    return [
        Prefill(rows=rows, tile=tile, warps=warps, stages=2)
        for rows in (default.rows // 2, default.rows)
        for tile in (default.tile // 2, default.tile)
        for warps in sorted({default.warps, 8})
        if 16 <= tile <= page_size and rows >= 16
    ]


def refined(choice: Choice, chip: int) -> list[Choice]:
    """Neighbours of a choice that did well: loads under way, and splits of a product or a sequence."""
    if isinstance(choice, Rows):
        return _varied(choice, stages=(1, 2, 3, 4), programs=(2, 4, 8, 16, 32))
    if isinstance(choice, Tile):
        others = _varied(choice, stages=(1, 2, 3, 4), programs=(1, 2, 4, 8))
        return [other for other in others if isinstance(other, Tile) and _tile_bytes(other) <= _shared(chip)]
    if isinstance(choice, Decode):
        return _varied(choice, programs=(1, 2, 4), least_tiles=(1, 2, 4, 8))
    return []


def _varied(choice: Rows | Tile | Decode | Prefill, **values: Iterable[int]) -> list[Choice]:
    """One field changed at a time."""
    changes: list[dict[str, Any]] = [{name: value} for name, options in values.items() for value in options]
    varied: list[Choice] = [replace(choice, **change) for change in changes]
    return [other for other in dict.fromkeys(varied) if other != choice]


def _block_rows(rows: int) -> tuple[int, ...]:
    """Rows of a tile that waste less than half of it, and half of that."""
    most = min(max(16, rows), 64)
    return (most,) if most == 16 else (most // 2, most)


def _rows_fit(rows: int, words: int, bits: int, span: int) -> bool:
    most = _MOST_WORDS // 2 if bits == 2 or span < 64 else _MOST_WORDS
    return _LEAST_WORDS <= words <= most and rows * words <= _MOST_SUMS


def _tile_bytes(tile: Tile) -> int:
    """Shared memory, rather too much: inputs of four fields of 64 words that are under way, and numbers of one."""
    return tile.stages * tile.block_m * 64 * 4 * 2 + tile.block_n * 64 * 2 + 4096


def _shared(chip: int) -> int:
    return 1024 * _SHARED_KIB.get(chip, _LEAST_SHARED_KIB)
