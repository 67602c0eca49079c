"""Which choices are worth measuring: for each kernel a first look at tiles and warps, then the neighbours of the best.

Seeds are what tuned kernels of others run with on Hopper: 16 to 128 outputs and 4 or 8 warps of a tile, 8 to 32 outputs
and 1 to 8 warps of rows. What does not fit the registers of a thread is left out by arithmetic, and the rest has been
compiled for every chip (`evals/gpu/compile_check.py --candidates`); whoever measures still drops what spills.
Source: gemlite's configurations for H100; TileOPs on matrix-vector products on H200; kernels of vLLM and exllamav3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from quantkit.kernels.triton.choices import ROW_LIMIT, Choice, Decode, Prefill, Product, Rows, Tile, Vendor

_LANES = 32
_LEAST_WORDS = 4  # of a thread: one load of 16 bytes
_MOST_SUMS = 64  # of a thread: registers for the sums of a group and for those of all groups
_MOST_WORDS = 32  # of a thread: registers that a block's words take


def products(rows: int, *, bits: int, span: int, natural: bool) -> list[Product]:
    """How to multiply so many rows with a packed weight: tiles and warps.

    Args:
        rows: M, one of `choices.ROW_BUCKETS`.
        bits, span: of the weight.
        natural: INT8 codes as they are, which nothing decodes into memory.
    """
    found: list[Product] = []
    if rows <= ROW_LIMIT:
        found += [
            Rows(block_n=block_n, warps=warps, stages=1, programs=8)
            for block_n in (4, 8, 16, 32)
            for warps in (1, 2, 4, 8)
            if _rows_fit(rows, block_n, warps, span)
        ]
    if rows > 1 and bits > 2:
        found += [
            Tile(block_m=block_m, block_n=block_n, warps=warps, stages=2, programs=2)
            for block_m in _block_rows(rows)
            for block_n in (32, 64, 128)
            for warps in (4, 8)
            if _tile_fits(block_m, block_n, warps, span)
        ]
    if rows > 16 and not natural:
        found.append(Vendor())
    return found


def decodes(*, page_size: int) -> list[Decode]:
    """How sequences with one new token read their pages."""
    return [
        Decode(tile=tile, warps=warps, stages=2, programs=2, least_tiles=4, most_parts=64)
        for tile in (16, 32, 64)
        for warps in (2, 4, 8)
        if tile <= page_size
    ]


def prefills(*, page_size: int) -> list[Prefill]:
    """How sequences with several new tokens read their pages and fresh keys."""
    return [
        Prefill(rows=rows, tile=tile, warps=warps, stages=2)
        for rows in (32, 64, 128)
        for tile in (32, 64)
        for warps in (4, 8)
        if tile <= page_size
    ]


def refined(choice: Choice) -> list[Choice]:
    """Neighbours of a choice that did well: loads under way, and parts that a product or a sequence is cut into."""
    if isinstance(choice, Rows):
        return _varied(choice, stages=(1, 2, 3, 4), programs=(2, 4, 8, 16, 32))
    if isinstance(choice, Tile):
        return _varied(choice, stages=(1, 2, 3, 4), programs=(1, 2, 4, 8))
    if isinstance(choice, Decode):
        return _varied(choice, stages=(1, 2, 3), programs=(1, 2, 4), least_tiles=(1, 2, 4, 8))
    return _varied(choice, stages=(1, 2, 3)) if isinstance(choice, Prefill) else []


def _varied(choice: Rows | Tile | Decode | Prefill, **values: Iterable[int]) -> list[Choice]:
    """One field changed at a time."""
    changes: list[dict[str, Any]] = [{name: value} for name, options in values.items() for value in options]
    found: list[Choice] = [replace(choice, **change) for change in changes]
    return [other for other in dict.fromkeys(found) if other != choice]


def _block_rows(rows: int) -> tuple[int, ...]:
    """Rows of a tile that waste less than half of it, and half of that."""
    most = min(max(16, rows), 64)
    return (most,) if most == 16 else (most // 2, most)


def _rows_fit(rows: int, block_n: int, warps: int, span: int) -> bool:
    words = block_n * span // (_LANES * warps)
    return words >= _LEAST_WORDS and rows * words <= _MOST_SUMS


def _tile_fits(block_m: int, block_n: int, warps: int, span: int) -> bool:
    threads = _LANES * warps
    return block_m * block_n // threads <= _MOST_SUMS and block_n * span // threads <= _MOST_WORDS
