"""Linears of others, each small enough to be read beside their documentation; random weights.

`Absent` is raised where one is not there. gemlite, torchao and GPTQModel's Marlin are called as their sources and
documentation say; these three adapters have not been run. Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from results import Absent
from torch import Tensor

Product = Callable[[Tensor], Tensor]
GROUP = 128


def _need(name: str, device: torch.device) -> Any:
    """A module of a peer."""
    if device.type != "cuda":
        raise Absent(f"{name} needs a CUDA device")
    try:
        return importlib.import_module(name)
    except Exception as error:  # also libraries built for another torch
        raise Absent(f"{name}: {error}") from None


def cublas(rows: int, width: int, device: torch.device) -> Product:
    """bf16 by cuBLAS."""
    weight = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    return lambda x: torch.nn.functional.linear(x.to(torch.bfloat16), weight)


def tinygemm(rows: int, width: int, device: torch.device) -> Product:
    """torch's int4 product."""
    if device.type != "cuda":
        raise Absent("torch's tinygemm needs a CUDA device")
    codes = torch.randint(0, 256, (rows, width // 2), device=device, dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.randn(width // GROUP, rows, 2, device=device, dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)


def int_mm(rows: int, width: int, device: torch.device) -> Product:
    """The bare product of INT8: inputs count as quantized already."""
    weight = torch.randint(-128, 128, (rows, width), device=device, dtype=torch.int8).t()
    inputs: dict[int, Tensor] = {}

    def run(x: Tensor) -> Tensor:
        if len(x) not in inputs:
            inputs[len(x)] = torch.randint(-128, 128, x.shape, device=device, dtype=torch.int8)
        return torch._int_mm(inputs[len(x)], weight)

    return run


def scaled_mm(rows: int, width: int, device: torch.device) -> Product:
    """The bare product of FP8: inputs count as quantized already."""
    if device.type != "cuda":
        raise Absent("torch._scaled_mm by rows needs a CUDA device")
    weight = torch.randn(rows, width, device=device).to(torch.float8_e4m3fn).t()
    scale = torch.rand(1, rows, device=device)
    inputs: dict[int, tuple[Tensor, Tensor]] = {}

    def run(x: Tensor) -> Tensor:
        if len(x) not in inputs:
            inputs[len(x)] = x.to(torch.float8_e4m3fn), torch.rand(len(x), 1, device=device)
        codes, row_scale = inputs[len(x)]
        return torch._scaled_mm(codes, weight, scale_a=row_scale, scale_b=scale, out_dtype=torch.bfloat16)

    return run


def gemlite(rows: int, width: int, device: torch.device) -> Product:
    """gemlite's A16W4, groups of 128, with zeros (its only form of INT4)."""
    helper = _need("gemlite.helper", device)
    codes = torch.randint(0, 16, (rows, width), device=device, dtype=torch.uint8)
    scales = torch.rand(rows * width // GROUP, 1, device=device, dtype=torch.bfloat16) / width**0.5
    zeros = torch.full_like(scales, 8.0)
    linear = helper.A16W4_HQQ_INT(device=str(device), dtype=torch.bfloat16).from_weights(codes, scales, zeros)
    return lambda x: linear(x)


def torchao(rows: int, width: int, device: torch.device) -> Product:
    """torchao's Int4WeightOnlyConfig in the packing for tinygemm."""
    quantization = _need("torchao.quantization", device)
    module = torch.nn.Linear(width, rows, bias=False, device=device, dtype=torch.bfloat16)
    config = quantization.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    model = torch.nn.Sequential(module)
    quantization.quantize_(model, config)
    return lambda x: model(x)


def marlin(rows: int, width: int, device: torch.device) -> Product:
    """GPTQModel's Marlin, groups of 128, symmetric."""
    module = _need("gptqmodel.nn_modules.qlinear.marlin", device)
    kind = getattr(module, "MarlinQuantLinear", None) or getattr(module, "MarlinLinear", None)
    if kind is None:
        raise Absent("gptqmodel has no class MarlinQuantLinear or MarlinLinear")
    module = kind(
        bits=4, group_size=GROUP, desc_act=False, sym=True, in_features=width, out_features=rows, bias=False
    ).to(device)
    with torch.no_grad():
        module.qweight.random_(-(2**31), 2**31 - 1)
        module.scales.uniform_(0.5, 1.5).div_(8 * width**0.5)
        module.qzeros.zero_()
    module.post_init()
    return lambda x: module(x)
