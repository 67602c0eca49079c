"""What can be chosen about a kernel without changing what it computes, and what is chosen where nobody has measured.

The values here are guesses, not yet run on a GPU; they compile for every chip without spilling. Values measured on
a GPU are data: `tuned` reads and writes them, `configs` finds the one for a launch.
Shapes: M rows, N outputs, K inputs.
"""

from dataclasses import dataclass

TILE_LIMIT = 256
"""Rows up to which the weight is dequantized inside the product, by each tile of rows anew."""

ROW_BUCKETS = (1, 4, 16, 32, 64, 128, 256)
"""Numbers of rows that are measured; one between two of them counts as the higher, one above them all is not tuned."""

_HOPPER = 90
_ROOMY = (80, 87, 90, 100, 103)  # chips with more than 160 KiB of shared memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A product on tensor cores that dequantizes the weight on its way to them.

    Args:
        block_m, block_n: rows and outputs of a program.
        warps, stages: of a program.
        programs: per multiprocessor, that K is split for.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int

    @property
    def constants(self) -> dict[str, int]:
        """What every kernel of tiles is compiled for, rows aside."""
        return {"BLOCK_N": self.block_n, "STAGES": self.stages, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cublas:
    """The weight is dequantized into memory, and cuBLAS multiplies with that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Attention of one new token per sequence.

    Args:
        tile: tokens of a tile, a page at most.
        warps, stages: of a program.
        programs: per multiprocessor, that sequences are split for.
        least_tiles: tiles of a split at least.
        most_splits: of a sequence.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    least_tiles: int
    most_splits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Attention of several new tokens per sequence.

    Args:
        rows: of a program: tokens times the query heads of a key head.
        tile: keys of a tile, a page at most.
        warps, stages: of a program.
    """

    rows: int
    tile: int
    warps: int
    stages: int


Product = Tile | Cublas
Choice = Tile | Cublas | Decode | Prefill

# By rows; 64 of them are as many as registers hold the sums of, and those of one group beside them.
_TILES = {
    8: Tile(block_m=8, block_n=128, warps=4, stages=3, programs=2),
    16: Tile(block_m=16, block_n=128, warps=4, stages=3, programs=2),
    32: Tile(block_m=32, block_n=128, warps=8, stages=3, programs=2),
    64: Tile(block_m=64, block_n=128, warps=8, stages=3, programs=1),
}
# Where the tensor cores take their second operand from registers too.
_TILES_BEFORE_HOPPER = {**_TILES, 64: Tile(block_m=64, block_n=64, warps=4, stages=3, programs=2)}
MOST_TILE_ROWS = max(_TILES)


def default_tile(count: int, chip: int) -> Tile:
    """The tile for this many rows on a chip of this compute capability, whether or not a tile is best."""
    tiles = _TILES if chip == 0 or chip >= _HOPPER else _TILES_BEFORE_HOPPER
    return tiles[next((size for size in tiles if count <= size), MOST_TILE_ROWS)]


def default_product(count: int, chip: int) -> Product:
    """How `count` rows are multiplied with a packed weight."""
    return Cublas() if count > TILE_LIMIT else default_tile(count, chip)


def default_decode(head_dim: int, page_size: int, chip: int) -> Decode:
    """For keys or values of so many channels: what the registers hold, and what is under way beside it."""
    wide = head_dim > 128
    return Decode(
        tile=min(page_size, 32 if wide else 64),
        warps=8 if wide else 4,
        # Two tiles on their way while one is worked on, where shared memory holds them and a second program.
        stages=3 if chip in _ROOMY else 2,
        programs=2,
        least_tiles=4,
        most_splits=64,
    )


def default_prefill(head_dim: int, page_size: int, quantized: bool, halved: bool, chip: int) -> Prefill:
    """For keys or values of so many channels, quantized or not, `halved` if two share a byte."""
    # What the registers hold: the sums of all rows, and of codes also the numbers made of them.
    crowded = head_dim > 128 if quantized and not halved else head_dim > 64 and halved
    like = default_decode(head_dim, page_size, chip)
    stages = 2 if head_dim > 128 else like.stages
    return Prefill(rows=32 if crowded else 64, tile=like.tile, warps=8 if head_dim > 64 else 4, stages=stages)
