"""Which choices are worth measuring: for each kernel a first look at tiles and warps, then the neighbours of the best.

Seeds are what tuned kernels of others run with on Hopper: 32 to 128 outputs and 4 or 8 warps of a tile, loads under
way. What does not fit the registers of a thread, or the memory that the threads of a block share, is left out by
arithmetic; its limits come from compiling for every chip (`evals/gpu/compile_check.py --candidates`). Whoever measures
still drops what spills.
Source: gemlite's configurations for H100; kernels of vLLM and exllamav3.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from quantkit.kernels.gpu.choices import MOST_TILE_ROWS, Choice, Cublas, Decode, Prefill, Product, Tile
from quantkit.kernels.gpu.packing import Packing

_LANES = 32
_MOST_SUMS = 64  # of a thread, those of one group included
_MOST_WORDS = 32  # of a thread
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
_LEAST_SHARED_KIB = 99


def products(rows: int, packing: Packing, chip: int) -> list[Product]:
    """How to multiply so many rows with a packed weight: tiles and warps.

    Args:
        rows: M, one of `choices.ROW_BUCKETS`.
        packing: of the weight; one that is unpacked is never dequantized into memory.
        chip: compute capability.
    """
    tiles = [
        Tile(block_m=block_m, block_n=block_n, warps=warps, stages=2, programs=2)
        for block_m in _block_rows(rows)
        for block_n in (32, 64, 128)
        for warps in (4, 8)
        if 2 * block_m * block_n <= _MOST_SUMS * _LANES * warps
        and block_n * packing.span <= _MOST_WORDS * _LANES * warps
    ]
    shared = 1024 * _SHARED_KIB.get(chip, _LEAST_SHARED_KIB)
    candidates: list[Product] = [tile for tile in tiles if _tile_bytes(tile, packing) <= shared]
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


def refined(choice: Choice) -> list[Choice]:
    """Neighbours of a choice that did well: loads under way, and splits of a product or a sequence."""
    if isinstance(choice, Tile):
        return _varied(choice, stages=(1, 2, 3, 4), programs=(1, 2, 4, 8))
    if isinstance(choice, Decode):
        return _varied(choice, programs=(1, 2, 4), least_tiles=(1, 2, 4, 8))
    return []


def _varied(choice: Tile | Decode | Prefill, **values: Iterable[int]) -> list[Choice]:
    """One field changed at a time."""
    changes: list[dict[str, Any]] = [{name: value} for name, options in values.items() for value in options]
    varied: list[Choice] = [replace(choice, **change) for change in changes]
    return [other for other in dict.fromkeys(varied) if other != choice]


def _block_rows(rows: int) -> tuple[int, ...]:
    """Rows of a tile that waste less than half of it, and half of that."""
    most = min(max(8, rows), MOST_TILE_ROWS)
    return (most,) if most == 8 else (most // 2, most)


def _tile_bytes(tile: Tile, packing: Packing) -> int:
    """Shared memory of a block: words and inputs of each stage."""
    inputs = 2 * packing.span * (16 // packing.bits)
    return tile.stages * (tile.block_m * inputs * 2 + tile.block_n * packing.span * 4)
