"""Rounded inputs: compressed-tensors' own arithmetic, bit for bit, for every scheme that it has."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats.compressed_tensors import FORMAT
from quantkit.numerics.activation_quant import fake_quantize_inputs, input_scale
from quantkit.numerics.dtype import FP8, INT8, NVFP4
from quantkit.numerics.scheme import ActivationScheme
from tests.formats.schemes import SCHEMES

QUANTIZED = [name for name, scheme in SCHEMES.items() if scheme.activation is not None]


def inputs() -> torch.Tensor:
    values = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    values[0, 3, :32] = 0
    values[0, 4] *= 1e-4
    values[0, 5, 7] = 60
    return values


@pytest.mark.parametrize("name", QUANTIZED)
def test_inputs_are_rounded_as_the_library_does(name):
    scheme, values = SCHEMES[name].activation, inputs()
    group = FORMAT.config({"a": SCHEMES[name]}, [])["quantization_config"]["config_groups"]["group_0"]
    args = QuantizationArgs(**group["input_activations"])
    scale = input_scale(values.abs().max(), scheme, torch.float32) if scheme.is_calibrated else None
    outer = None
    if scheme.dtype.scale == "e4m3":
        outer = generate_gparam(values.min(), values.max())
        assert torch.equal(scale, outer)
    if scheme.dynamic:
        step, zero = compute_dynamic_scales_and_zp(values, args, torch.nn.Module(), global_scale=outer)
    else:
        step, zero = scale, torch.zeros(1)
    expected = fake_quantize(values, step, zero, args, global_scale=outer)
    assert torch.equal(fake_quantize_inputs(values, scheme, scale), expected)


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_a_static_scale_clips_what_is_larger(dtype):
    scheme = ActivationScheme(dtype=dtype, granularity="tensor", dynamic=False)
    scale = input_scale(torch.tensor(2.0), scheme, torch.float32)
    assert scale.shape == (1,)
    back = fake_quantize_inputs(torch.tensor([[0.5, 8.0, -8.0]]), scheme, scale)
    assert back[0, 0] == pytest.approx(0.5, abs=0.02)
    assert back[0, 1:].tolist() == pytest.approx([dtype.maximum * scale.item(), dtype.minimum * scale.item()])


def test_a_calibrated_scale_is_never_made_up():
    for scheme in (
        ActivationScheme(dtype=FP8, granularity="tensor", dynamic=False),
        ActivationScheme(dtype=NVFP4, group_size=16),
    ):
        with pytest.raises(CheckpointError, match="need a calibrated input scale"):
            fake_quantize_inputs(torch.randn(2, 16), scheme)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": FP8, "granularity": "tensor"},
        {"dtype": FP8, "dynamic": False},
        {"dtype": FP8, "granularity": "tensor", "dynamic": False, "group_size": 128},
        {"dtype": NVFP4},
        {"dtype": INT8, "group_size": 0},
    ],
)
def test_what_no_engine_computes_is_refused(fields):
    with pytest.raises(SchemeError, match=r"activations\.(dynamic|group_size)"):
        ActivationScheme(**fields)
