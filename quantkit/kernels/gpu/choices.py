"""Tile sizes of the kernels: a default for each shape; on request, Triton times other numbers of warps and stages.

The defaults are not tuned on a GPU; they compile for every chip without register spills. With `QUANTKIT_AUTOTUNE=1`,
`triton.autotune` times a few numbers of warps and stages at a kernel's first launch with a shape, and stores the result
in Triton's disk cache. Decode steps run twice before they are captured as a graph, so the capture has no timing.
Shapes: M rows, N outputs, K inputs.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton

TILE_LIMIT = 256
"""Maximum number of rows for the packed kernels. With more rows, the weight is dequantized into memory and cuBLAS
multiplies.
"""

IS_TUNING = os.environ.get("QUANTKIT_AUTOTUNE", "0") != "0"
_TIMED = tuple((warps, stages) for warps in (4, 8) for stages in (2, 3, 4))

_HOPPER = 90
_ROOMY = (80, 87, 90, 100, 103)  # chips with more than 160 KiB of shared memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Part of a product or of attention that one program computes.

    Args:
        rows: input rows of a product; in attention, number of new tokens times query heads per key head.
        columns: outputs of a product; in attention, cached tokens read at once, at most a page.
        warps, stages: warps and pipeline stages of a program.
        programs: target number of programs per multiprocessor when K, or a sequence, is split.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int = 2

    def options(self, *, staged: bool) -> dict[str, int]:
        """Return the launch options; empty if Triton chooses them.

        Args:
            staged: whether the kernel also needs the number of stages as the constant STAGES.
        """
        if IS_TUNING:
            return {}
        constants = {"STAGES": self.stages} if staged else {}
        return {**constants, "num_warps": self.warps, "num_stages": self.stages}


# Registers cannot hold the total sums and the sums of one group for more than 64 rows.
_TILES = {
    8: Tile(rows=8, columns=128, warps=4, stages=3),
    16: Tile(rows=16, columns=128, warps=4, stages=3),
    32: Tile(rows=32, columns=128, warps=8, stages=3),
    64: Tile(rows=64, columns=128, warps=8, stages=3, programs=1),
}
# Before Hopper, tensor cores read their second operand from registers too, so fewer registers are left.
_TILES_BEFORE_HOPPER = {**_TILES, 64: Tile(rows=64, columns=64, warps=4, stages=3)}
MOST_TILE_ROWS = max(_TILES)


def autotuned(*key: str, staged: bool) -> Callable[[Any], Any]:
    """If autotuning is on, let Triton time a kernel with several numbers of warps and stages, and use the fastest.

    Triton repeats this for each new value of `key`.

    Args:
        key: names of the kernel arguments that identify a shape.
        staged: see `Tile.options`.
    """

    def wrap(kernel: Any) -> Any:
        if not IS_TUNING:
            return kernel
        timed = [
            triton.Config({"STAGES": stages} if staged else {}, num_warps=warps, num_stages=stages)
            for warps, stages in _TIMED
        ]
        return triton.autotune(timed, key=list(key), cache_results=True)(kernel)

    return wrap


def product_tile(count: int, chip: int) -> Tile:
    """Return the tile for this many rows on a chip of this compute capability."""
    tiles = _TILES if chip == 0 or chip >= _HOPPER else _TILES_BEFORE_HOPPER
    return tiles[next((size for size in tiles if count <= size), MOST_TILE_ROWS)]


def page_tile(
    head_dim: int, page_size: int, chip: int, *, single: bool, quantized: bool = False, packed: bool = False
) -> Tile:
    """Return the tile of attention over pages.

    Args:
        head_dim: channels of a key or a value.
        page_size: tokens of a page.
        chip: compute capability.
        single: whether each sequence has one new token.
        quantized: whether keys or values are quantized.
        packed: whether several channels of keys or values share a byte.
    """
    wide = head_dim > 128
    # With three stages, two tiles are loaded while a third is processed; shared memory must hold them for two programs.
    stages = 3 if chip in _ROOMY and (single or not wide) else 2
    columns = min(page_size, 32 if wide else 64)
    if single:
        return Tile(rows=16, columns=columns, warps=8 if wide else 4, stages=stages)
    # The registers hold the sums of all rows and, for quantized tiles, also the numbers that codes are converted to.
    crowded = wide if quantized and not packed else head_dim > 64 and packed
    return Tile(rows=32 if crowded else 64, columns=columns, warps=8 if head_dim > 64 else 4, stages=stages)
