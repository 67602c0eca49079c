# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, RET505  only one branch on a constant is compiled
"""Conversion of 4-bit and 8-bit floats inside words by moving bits, identical on every chip and in the interpreter.

Decoding moves the sign, exponent and mantissa of a code to their positions in float16. The result is the code's value
times 2^-`packing.FACTOR_BITS`, also for subnormal codes, because float16 has subnormals too. The scales include the
missing factor. Encoding to e4m3 moves bits in the same way.

    e4m3    seee emmm             float16  seee eemm mmmm mmmm
    e2m1    seem                           s..e eeem mm.. ....   <- e4m3, times 2^8
                                           s... eem. .... ....   <- e2m1, times 2^14

NaN codes of e4m3 are decoded as 480. If a weight contains NaN codes, `packing` sets their scale to NaN.
Source: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) 1.0.
"""

import triton
import triton.language as tl
from triton import knobs

# The interpreter has neither assembler nor bfloat16 arithmetic; other code computes the same results there.
INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)

_SIGNS: tl.constexpr = tl.constexpr(-2147450880)  # 0x80008000: sign bits of both halves of a word
_E4M3: tl.constexpr = tl.constexpr(0x3F803F80)
_E2M1: tl.constexpr = tl.constexpr(0x0E000E00)


@triton.jit
def field_bits(words, SHIFT: tl.constexpr, KIND: tl.constexpr):
    """Return the float16 bits of two codes per word, which begin at bit SHIFT of its two halves. One mask and one shift
    serve both halves.
    """
    if KIND == 1:  # `packing.E4M3`
        if SHIFT == 0:
            return ((words << 8) & _SIGNS) | ((words << 7) & _E4M3)
        else:
            return (words & _SIGNS) | ((words >> 1) & _E4M3)
    elif SHIFT == 12:
        return (words & _SIGNS) | ((words >> 3) & _E2M1)
    else:
        return ((words << (12 - SHIFT)) & _SIGNS) | ((words << (9 - SHIFT)) & _E2M1)


@triton.jit
def half_of_e4m3(wide):
    """Convert e4m3 codes, held in wider integers, to float16. The result is the code's value times 2^-8."""
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def half_number(bits):
    """Interpret the lower half of each word as a float16 number and return it as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_scale(at, kept, SCALES: tl.constexpr):
    """Load scales as float32. Scales stored as e4m3 bytes are multiplied by the power of two that e2m1 codes lack;
    scales stored as exponents already include it.
    """
    if SCALES == 0:  # `packing.NUMBERS`, E4M3_BYTES, EXPONENT_BYTES
        return tl.load(at, mask=kept, other=0.0).to(tl.float32)
    elif SCALES == 1:
        return half_number(tl.load(at, mask=kept, other=0).to(tl.int32) << 7) * 4194304.0  # 2^(8 + 14)
    else:
        return (tl.load(at, mask=kept, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_inputs(at, mask):
    """Load inputs in their stored type, including int8 codes. e4m3 bytes become float16 and lack a factor of 2^8; see
    `row_factor`.
    """
    if at.dtype.element_ty == tl.uint8:
        return half_of_e4m3(tl.load(at, mask=mask, other=0).to(tl.int32))
    elif at.dtype.element_ty == tl.int8:
        return tl.load(at, mask=mask, other=0)
    else:
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def row_factor(inputs):
    """Return the factor by which loaded inputs are too small; see `load_inputs`."""
    return 256.0 if inputs.dtype.element_ty == tl.uint8 else 1.0


@triton.jit
def round_even(x):
    """Round to the nearest integer, halves to even; for magnitudes below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3(x):
    """Convert float32 numbers to e4m3 codes (uint8): clamp to 448, round halves to even; NaN stays NaN."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
