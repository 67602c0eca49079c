# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Tokens drawn from logits in two launches, without sorting the vocabulary and without asking the host.

The first draws in every tile of a row, by Gumbel-max as `reference.sampling` does; the second takes the best of all
tiles. If top-k, top-p or min-p exclude that token, they exclude every token that is no likelier, too: so it is drawn
again among those that are, until the drawn token is one that is kept. Whether it is kept takes no sorted list, only the
sum of all that is likelier; and only tiles are read whose largest logit is large enough. A token that is drawn from
many and kept is the one that is drawn from the kept: exactly that of the reference, but for the rounding of sums.

The k-th largest logit is located by bisection of the bits of floats, among the tokens that reach the k-th largest
maximum of a tile. Floats are compared as in `partial_argmax`.
Source: rejection as in FlashInfer (Ye et al. 2025); here by Gumbel-max, which needs no new random numbers.
Shapes: R rows, V vocabulary, N tiles of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.gpu.partial_argmax import LEAST, first, number, ordered

_TILE_BITS = 10
_CHUNK = 4096  # logits that the second launch looks at together

_INFINITE: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def _log_exponentials(key, tokens):
    """`reference.sampling.log_exponentials`: SplitMix64 of the row's key and the token."""
    x = key.to(tl.uint64) + (tokens + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    uniform = ((x >> 32).to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    uniform = tl.minimum(uniform, 0.99999994)  # 1 - 2^-24
    # log(1 - u) to all digits: what rounding takes from 1 - u is put right by the quotient.
    rest = 1.0 - uniform
    exact = tl.where(rest == 1.0, uniform, -tl.log(rest) * tl.div_rn(uniform, tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return tl.log(exact)


@triton.jit
def _sample_tiles_kernel(
    logits, keys, settings, out, sums, vocabulary, row_stride, TILE: tl.constexpr,
):  # fmt: skip
    """Of one tile of a row: its largest, the largest perturbed and whose that is, and the sum of exponentials."""
    row, tile, tiles = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    tokens = tile * TILE + tl.arange(0, TILE)
    kept = tokens < vocabulary
    x = tl.load(logits + row * row_stride + tokens, mask=kept, other=float("-inf"))
    temperature = tl.load(settings + row * 3)
    perturbed = x
    if temperature > 0:
        x = tl.div_rn(x, temperature)
        perturbed = x - _log_exponentials(tl.load(keys + row), tokens)
    top = tl.max(tl.where(kept, ordered(x), LEAST), 0)
    best, token = first(tl.where(kept, ordered(perturbed), LEAST), tokens)
    most = number(top)
    at = out + row * 3 * tiles + tile
    tl.store(at, top)
    tl.store(at + tiles, best)
    tl.store(at + 2 * tiles, token)
    tl.store(sums + row * tiles + tile, tl.sum(tl.where(kept & (x > float("-inf")), tl.exp(x - most), 0.0), 0))


@triton.jit
def _load_chunk(logits, listed, count, shift, chunk, temperature, vocabulary, CHUNK: tl.constexpr):
    """Tokens of a chunk of what is listed, tokens or tiles of 2^shift; their logits over the temperature, in order."""
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    entry = tl.load(listed + (index >> shift), mask=(index >> shift) < count, other=0x3FFFFFFF >> shift)
    tokens = (entry << shift) + (index & ((1 << shift) - 1))
    kept = tokens < vocabulary
    x = tl.div_rn(tl.load(logits + tokens, mask=kept, other=0.0), temperature)
    return tokens, tl.where(kept, ordered(x), LEAST), x


@triton.jit
def _above(
    bound, most, logits, listed, count, shift, temperature, vocabulary, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many of what is listed are larger than the bound, and the sum of their exponentials."""
    how_many = 0
    total = 0.0
    for chunk in range(tl.cdiv(count << shift, CHUNK)):
        _unused, order, x = _load_chunk(logits, listed, count, shift, chunk, temperature, vocabulary, CHUNK)
        how_many += tl.sum((order > bound).to(tl.int32), 0)
        total += tl.sum(tl.where(order > bound, tl.exp(x - most), 0.0), 0)
    return how_many, total


@triton.jit
def _sample_above(
    bound, key, logits, listed, count, shift, temperature, vocabulary, CHUNK: tl.constexpr,
):  # fmt: skip
    """The token drawn among what is listed and larger than the bound, and its order."""
    best = LEAST
    drawn = 0x7FFFFFFF
    for chunk in range(tl.cdiv(count << shift, CHUNK)):
        tokens, order, x = _load_chunk(logits, listed, count, shift, chunk, temperature, vocabulary, CHUNK)
        perturbed = ordered(x - _log_exponentials(key, tokens))
        largest, token = first(tl.where(order > bound, perturbed, LEAST), tokens)
        is_better = (largest > best) | ((largest == best) & (token < drawn))
        best = tl.where(is_better, largest, best)
        drawn = tl.where(is_better, token, drawn)
    return drawn, ordered(tl.div_rn(tl.load(logits + drawn), temperature))


@triton.jit
def _list_tiles(tops, bound, listed, BLOCK: tl.constexpr):
    """List the tiles that have something larger than the bound; how many there are."""
    tl.debug_barrier()  # whoever still reads the last list
    above = (tops > bound).to(tl.int32)
    tl.store(listed + tl.cumsum(above, 0) - 1, tl.arange(0, BLOCK), mask=above > 0)
    tl.debug_barrier()
    return tl.sum(above, 0)


@triton.jit
def _list_tokens(
    bound, target, logits, listed, count, shift, temperature, vocabulary, CHUNK: tl.constexpr,
):  # fmt: skip
    """List the tokens that are larger than the bound, CHUNK at most; how many there are."""
    how_many = 0
    for chunk in range(tl.cdiv(count << shift, CHUNK)):
        tokens, order, _unused = _load_chunk(logits, listed, count, shift, chunk, temperature, vocabulary, CHUNK)
        above = (order > bound).to(tl.int32)
        index = how_many + tl.cumsum(above, 0) - 1
        tl.store(target + index, tokens, mask=(above > 0) & (index < CHUNK))
        how_many += tl.sum(above, 0)
    tl.debug_barrier()
    return how_many


@triton.jit
def _half(low, high):
    """Between two integers, the larger half first, without overflow."""
    return ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)


@triton.jit
def _find_top_k(
    limit, tops, top, bound, logits, listed, temperature, vocabulary, num_tiles,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """What top-k keeps: where it is listed, how many entries, of 2^shift tokens; the bound; the sum of exponentials."""
    most = number(top)
    # The limit-th largest maximum of a tile: so many logits are as large at least.
    low, high = tl.where(limit > num_tiles, LEAST, tl.min(tops, 0)), tl.where(limit > num_tiles, LEAST, top)
    while low < high:
        middle = _half(low, high)
        enough = tl.sum((tops >= middle).to(tl.int32), 0) >= limit
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    floor = tl.maximum(low, LEAST + 1) - 1
    count = _list_tiles(tops, floor, listed, BLOCK)
    shift = SHIFT
    num_listed = _list_tokens(floor, listed + BLOCK, logits, listed, count, shift, temperature, vocabulary, CHUNK)
    if num_listed <= CHUNK:
        listed += BLOCK
        count = num_listed
        shift = 0
    low, high = floor + 1, top  # the limit-th largest logit
    while low < high:
        middle = _half(low, high)
        how_many, _sum = _above(middle - 1, most, logits, listed, count, shift, temperature, vocabulary, CHUNK)
        low = tl.where(how_many >= limit, middle, low)
        high = tl.where(how_many >= limit, high, middle - 1)
    how_many, total = _above(low, most, logits, listed, count, shift, temperature, vocabulary, CHUNK)
    total += (limit - how_many).to(tl.float32) * tl.exp(number(low) - most)
    return listed, count, shift, tl.maximum(bound, low - 1), total


@triton.jit
def _sample_rows_kernel(
    logits, keys, settings, limits, tiles, sums, lists, out, vocabulary, row_stride, num_tiles, list_stride,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The token of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    at = tiles + row * 3 * num_tiles + columns
    tops = tl.load(at, mask=columns < num_tiles, other=LEAST)
    perturbed = tl.load(at + num_tiles, mask=columns < num_tiles, other=LEAST)
    tokens = tl.load(at + 2 * num_tiles, mask=columns < num_tiles, other=0x7FFFFFFF)
    top = tl.max(tops, 0)
    _best, token = first(perturbed, tokens)
    temperature = tl.load(settings + row * 3)
    share = tl.load(settings + row * 3 + 1)
    least = tl.load(settings + row * 3 + 2)  # logarithm of min-p
    limit = tl.load(limits + row)
    logits += row * row_stride
    is_free = (limit >= vocabulary) & (share >= 1.0) & (least == float("-inf"))
    if (temperature > 0) & (top < _INFINITE) & (is_free == 0):
        key = tl.load(keys + row)
        order = ordered(tl.div_rn(tl.load(logits + token), temperature))
        most = number(top)
        bound = tl.maximum(ordered(most + least), LEAST + 1) - 1  # what is kept is larger
        listed = lists + row * list_stride
        factors = tl.where(tops > ordered(float("-inf")), tl.exp(number(tops) - most), 0.0)
        in_tiles = tl.load(sums + row * num_tiles + columns, mask=columns < num_tiles, other=0.0)
        total = tl.sum(tl.where(factors > 0, factors * in_tiles, 0.0), 0)
        shift = SHIFT
        count = 0
        if limit < vocabulary:
            listed, count, shift, bound, total = _find_top_k(
                limit, tops, top, bound, logits, listed, temperature, vocabulary, num_tiles, BLOCK, CHUNK, SHIFT
            )
        is_kept = order == top
        while is_kept == 0:
            # Whatever is larger than the drawn token, or than the bound where that is out.
            edge = tl.maximum(order, bound)
            if shift > 0:
                count = _list_tiles(tops, edge, listed, BLOCK)
            _how_many, before = _above(edge, most, logits, listed, count, shift, temperature, vocabulary, CHUNK)
            is_kept = (order > bound) & ((before < share * total) | (share >= 1.0))
            if is_kept == 0:
                token, order = _sample_above(edge, key, logits, listed, count, shift, temperature, vocabulary, CHUNK)
                is_kept = order == top
    tl.store(out + row, token.to(tl.int64))


def choose(logits: Tensor, keys: Tensor, limits: Tensor, settings: Tensor) -> Tensor:
    """`ops.sampling.choose`, its rows' parameters as tensors.

    Args:
        logits: (R, V) float32, V contiguous; not modified.
        keys: (R,) int64.
        limits: (R,) int32, of top-k; V = all.
        settings: (R, 3) float32: temperature, 0 = the largest logit; top-p; logarithm of min-p.
    Returns:
        (R,) int64.
    """
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    tile = 1 << _TILE_BITS
    num_tiles = -(-size // tile)
    tiles = torch.empty(rows, 3, num_tiles, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, num_tiles, dtype=torch.float32, device=logits.device)
    _sample_tiles_kernel[(num_tiles, rows)](
        logits, keys, settings, tiles, sums, size, logits.stride(0), TILE=tile, num_warps=4
    )
    # Behind the tiles of a row there is room for the tokens that top-k may keep.
    block = power_of_two(num_tiles)
    lists = torch.empty(rows, block + _CHUNK, dtype=torch.int32, device=logits.device)
    _sample_rows_kernel[(rows,)](
        logits, keys, settings, limits, tiles, sums, lists, out, size, logits.stride(0), num_tiles, lists.stride(0),
        BLOCK=block, CHUNK=_CHUNK, SHIFT=_TILE_BITS, num_warps=8,
    )  # fmt: skip
    return out
