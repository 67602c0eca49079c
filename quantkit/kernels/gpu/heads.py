# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201
"""One head of one token inside kernels: normed, and rotated by the angles of its position."""

import triton
import triton.language as tl


@triton.jit
def turn_head(
    at, weight, cos, sin, token, eps, offset,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm the channels of one head of one token, round, and rotate the first 2 HALF; in place."""
    factor = 1.0
    if HAS_NORM:
        channels = tl.arange(0, BLOCK)
        real = channels < WIDTH
        x = tl.load(at + channels, mask=real, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        tl.debug_barrier()  # every thread has read before one writes
        if 2 * HALF < WIDTH:
            scale = tl.load(weight + channels, mask=real, other=0.0).to(tl.float32) + offset
            tl.store(at + channels, (x * factor * scale).to(at.dtype.element_ty), mask=real & (channels >= 2 * HALF))
    if HALF > 0:
        pairs = tl.arange(0, HALF_BLOCK)
        kept = pairs < HALF
        one, other = pairs, HALF + pairs
        if INTERLEAVED:
            one, other = 2 * pairs, 2 * pairs + 1
        c = tl.load(cos + token * HALF + pairs, mask=kept, other=0.0)
        s = tl.load(sin + token * HALF + pairs, mask=kept, other=0.0)
        a = tl.load(at + one, mask=kept, other=0.0).to(tl.float32)
        b = tl.load(at + other, mask=kept, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.load(weight + one, mask=kept, other=0.0).to(tl.float32) + offset
            a = (a * factor * scale).to(at.dtype.element_ty).to(tl.float32)
            scale = tl.load(weight + other, mask=kept, other=0.0).to(tl.float32) + offset
            b = (b * factor * scale).to(at.dtype.element_ty).to(tl.float32)
        tl.store(at + one, (a * c - b * s).to(at.dtype.element_ty), mask=kept)
        tl.store(at + other, (b * c + a * s).to(at.dtype.element_ty), mask=kept)
