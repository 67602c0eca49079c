"""Writes gptq_awq.json beside this file: what GPTQModel's own packers make of fixed codes.

Run it by hand after a change of a layout, where GPTQModel 7.6 is installed: python tests/golden/make_gptq_awq.py
Words are stored as hexadecimal bytes in little-endian order.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from torch import nn

ROWS, WIDTH, GROUP = 32, 64, 32


def fixed_codes(bits: int, shape: tuple[int, int], step: int) -> torch.Tensor:
    """Codes without a short period, every value of the type among them; unsigned."""
    count = torch.arange(shape[0] * shape[1])
    return ((count * step + count * count // 3) % 2**bits).view(shape)


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "hex": bytes(data.tolist()).hex()}


def linear(weight: torch.Tensor) -> nn.Linear:
    module = nn.Linear(WIDTH, ROWS, bias=False)
    module.weight.data = weight
    return module


def case(bits: int, symmetric: bool, order: bool, kind: str) -> dict[str, Any]:
    """The library packs exactly decodable values with the scales and zero points they were made with."""
    groups = WIDTH // GROUP
    codes = fixed_codes(bits, (ROWS, WIDTH), 7)
    zero = torch.full((ROWS, groups), 2 ** (bits - 1)) if symmetric else fixed_codes(bits, (ROWS, groups), 5)
    if kind == "gptq":
        zero = zero.clamp(min=1)
    scale = 2.0 ** (torch.arange(ROWS * groups) % 4 - 3).view(ROWS, groups)
    index = torch.arange(WIDTH) // GROUP
    if order:
        index = index[torch.arange(WIDTH) * 29 % WIDTH]
    weight = (codes - zero[:, index]) * scale[:, index]
    numbers = {"bits": bits, "group_size": GROUP, "sym": symmetric, "in_features": WIDTH, "out_features": ROWS}
    if kind == "awq":
        module = AwqTorchLinear(**numbers, desc_act=False, bias=False, register_buffers=True)
        module.pack(linear(weight), scale.clone(), zero.clone())
        names = ("qweight", "qzeros", "scales")
    else:
        module = TorchLinear(**numbers, desc_act=order, bias=False, register_buffers=True)
        module.pack_original(linear(weight), scale.clone(), zero.clone(), index.to(torch.int32))
        if kind == "gptq":
            convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=bits, group_size=GROUP))
        names = ("qweight", "qzeros", "scales", "g_idx")
    half = 2 ** (bits - 1)
    return {
        "format": kind,
        "bits": bits,
        "symmetric": symmetric,
        "group_size": GROUP,
        "codes": describe((codes - half).to(torch.int8)),
        "scale": describe(scale.half()),
        "zero_point": None if symmetric else describe((zero - half).to(torch.int8)),
        "group_index": describe(index) if order else None,
        "tensors": {name: describe(getattr(module, name)) for name in names},
    }


if __name__ == "__main__":
    cases = [case(bits, True, False, "gptq") for bits in (2, 3, 4, 8)]
    cases += [case(4, True, True, "gptq"), case(4, False, False, "awq")]
    cases += [case(bits, False, False, "gptq-v2") for bits in (2, 3, 4, 8)]
    data = {"library": f"gptqmodel {version('gptqmodel')}", "cases": cases}
    Path(__file__).with_name("gptq_awq.json").write_text(json.dumps(data) + "\n")
