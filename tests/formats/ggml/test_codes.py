"""GGUF types: each decodes as the gguf package does; those of equal steps also as codes, which kernels multiply."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quantkit.errors import CheckpointError
from quantkit.formats.ggml.blocks import Block, dequantize_blocks
from quantkit.formats.ggml.codes import LOCAL_NAMES, SCHEMES, decode_codes, width_of
from quantkit.kernels.ops.linear import build_linear

# Positions of the float16 scales and minimums in a block.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
TYPES = [block for block in Block if hasattr(gguf.quants, block.name) or block.name[:2] in ("F3", "F1")]


def random_blocks(name: str, rows: int, width: int) -> torch.Tensor:
    """Rows of random blocks whose scales are ordinary numbers."""
    values, size = gguf.GGML_QUANT_SIZES[Block[name]]
    data = torch.randint(0, 256, (rows, width // values, size), dtype=torch.uint8, generator=torch.manual_seed(0))
    for at in HALVES.get(name, (0, 2) if name.endswith("_1") else (0,)):
        data[..., at + 1] = data[..., at + 1] & 0x83 | 0x1C
    if name == "MXFP4":
        data[..., 0] = 118 + data[..., 0] % 8
    return data.view(rows, -1)


@pytest.mark.parametrize("block", TYPES, ids=lambda block: block.name)
def test_every_type_decodes_as_the_library_does_whatever_the_bytes(block):
    values, size = gguf.GGML_QUANT_SIZES[block]
    data = torch.randint(0, 256, (5, 2 * size), dtype=torch.uint8, generator=torch.manual_seed(1))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data.numpy(), block)
    actual = dequantize_blocks(block, data, (5, 2 * values)).float().numpy()
    lost = np.isnan(expected)  # a NaN may have any payload
    assert np.array_equal(np.isnan(actual), lost)
    assert actual[~lost].tobytes() == expected[~lost].astype(np.float32).tobytes()


def test_the_types_of_the_format_are_all_there():
    said = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS "
    said += "IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4"
    assert set(said.split()) <= {block.name for block in TYPES}


@pytest.mark.parametrize("name", SCHEMES)
def test_codes_mean_what_the_library_reads(name):
    data, local = random_blocks(name, 6, 512), f"weight_{name.lower()}"
    halves = HALVES.get(name, (0, 2) if name.endswith("_1") else (0,))
    data.view(6, -1, gguf.GGML_QUANT_SIZES[Block[name]][1])[:2, :, list(halves)[:1]] &= 0x7F
    if halves:  # groups of equal values, with and without a minimum
        first = data.view(6, -1, gguf.GGML_QUANT_SIZES[Block[name]][1])[:2]
        first[..., halves[0] : halves[0] + 2] = 0
        first[0, ..., halves[-1] : halves[-1] + 2] = 0
    weight = decode_codes({local: data})
    expected = dequantize_blocks(Block[name], data, (6, 512))
    assert weight.scheme == SCHEMES[name].weight
    assert width_of(local, data.shape[1]) == 512
    if weight.scheme.symmetric:
        assert torch.equal(weight.dequantize(), expected)
    else:  # minimum / scale is rounded once
        torch.testing.assert_close(weight.dequantize(), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_kernels_multiply_the_codes(name, dtype):
    data = random_blocks(name, 100, 512)
    linear = build_linear(decode_codes({f"weight_{name.lower()}": data}), dtype=dtype, device=torch.device("cpu"))
    x = torch.randn(7, 512, generator=torch.manual_seed(2)).to(dtype)
    expected = x.double() @ dequantize_blocks(Block[name], data, (100, 512)).double().T
    error = (linear(x).double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "MXFP4"])
def test_scales_that_are_no_numbers_are_refused(name):
    data = random_blocks(name, 2, 512)
    at = HALVES.get(name, (0,))[0]
    data[1, at : at + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=f"{name} blocks is not finite"):
        decode_codes({f"weight_{name.lower()}": data})


def test_local_names_are_those_of_quantized_linears():
    from quantkit.formats.base import stores_codes

    assert all(stores_codes([name]) for name in LOCAL_NAMES)
    assert not stores_codes(["weight", "bias", "weight_shape"])
