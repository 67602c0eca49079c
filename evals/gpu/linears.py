"""Linears by rows: quantkit's, as `make_linear` chooses them, against cuBLAS and torch's own low-bit products."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from timing import Results, parse
from torch import Tensor

from quantkit.kernels.linear import make_linear
from quantkit.measure.timing import measure, num_copies
from quantkit.numerics.dtype import FP8, INT4, INT8
from quantkit.numerics.scheme import ActivationScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

# (N, K); layers of an 8B model first, most important first within the time there is.
SHAPES = {
    "8192 squared": (8192, 8192),
    "8B gate+up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B qkv": (6144, 4096),
    "8B output": (4096, 4096),
    "1B gate+up": (16384, 2048),
    "70B down": (8192, 28672),
}
ROWS = (1, 16, 64, 256, 1024, 4, 4096)
TINY_SHAPES, TINY_ROWS = {"tiny": (128, 256)}, (1, 3, 17)

Make = Callable[[int, int, torch.device], Callable[[Tensor], Tensor]]
SCHEMES: dict[str, tuple[WeightScheme, ActivationScheme | None]] = {
    "quantkit w4a16 g128": (WeightScheme(dtype=INT4, group_size=128), None),
    "quantkit w4a16 g128 asym": (WeightScheme(dtype=INT4, group_size=128, symmetric=False), None),
    "quantkit w8a16": (WeightScheme(dtype=INT8), None),
    "quantkit w8a8 int8": (WeightScheme(dtype=INT8), ActivationScheme(dtype=INT8)),
    "quantkit w8a8 fp8": (WeightScheme(dtype=FP8), ActivationScheme(dtype=FP8)),
}


def random_weight(rows: int, width: int, scheme: WeightScheme, device: torch.device) -> QuantizedTensor:
    """A weight of random codes whose values have about the spread of a trained one."""
    kind = scheme.dtype
    if kind is FP8:
        codes = torch.randn(rows, width, device=device).clamp_(-4, 4).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(int(kind.minimum), int(kind.maximum) + 1, (rows, width), device=device, dtype=torch.int8)
    shape = (rows, scheme.num_groups(width))
    scale = (torch.rand(shape, device=device) + 0.5) / (kind.maximum * width**0.5)
    zero = None if scheme.symmetric else torch.randint(-3, 4, shape, device=device, dtype=torch.int8)
    return QuantizedTensor(codes=codes, scale=scale.to(torch.bfloat16), zero_point=zero, scheme=scheme)


def _quantkit(name: str) -> Make:
    weight_scheme, activation = SCHEMES[name]

    def make(rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
        weight = random_weight(rows, width, weight_scheme, device)
        return make_linear(weight, activation=activation, dtype=torch.bfloat16, device=device)

    return make


def _cublas(rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    return lambda x: torch.nn.functional.linear(x, weight)


def _tinygemm(rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    if device.type != "cuda":
        raise NotImplementedError("CUDA only")
    codes = torch.randint(0, 256, (rows, width // 2), device=device, dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.randn(width // 128, rows, 2, device=device, dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, 128, scales)


def _int_mm(rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The bare product: inputs count as quantized already."""
    weight = torch.randint(-128, 128, (rows, width), device=device, dtype=torch.int8).t()
    inputs: dict[int, Tensor] = {}

    def run(x: Tensor) -> Tensor:
        codes = inputs.setdefault(len(x), torch.randint(-128, 128, x.shape, device=device, dtype=torch.int8))
        return torch._int_mm(codes, weight)

    return run


def _scaled_mm(rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The bare product: inputs count as quantized already."""
    weight = torch.randn(rows, width, device=device).to(torch.float8_e4m3fn).t()
    scale = torch.rand(1, rows, device=device)
    inputs: dict[int, tuple[Tensor, Tensor]] = {}

    def run(x: Tensor) -> Tensor:
        if len(x) not in inputs:
            inputs[len(x)] = x.to(torch.float8_e4m3fn), torch.rand(len(x), 1, device=device)
        codes, row_scale = inputs[len(x)]
        return torch._scaled_mm(codes, weight, scale_a=row_scale, scale_b=scale, out_dtype=torch.bfloat16)

    return run


KINDS: dict[str, tuple[Make, float]] = {
    "cublas bf16": (_cublas, 2.0),
    "quantkit w4a16 g128": (_quantkit("quantkit w4a16 g128"), 0.516),
    "torch tinygemm": (_tinygemm, 0.53),
    "quantkit w8a8 int8": (_quantkit("quantkit w8a8 int8"), 1.0),
    "quantkit w8a8 fp8": (_quantkit("quantkit w8a8 fp8"), 1.0),
    "quantkit w8a16": (_quantkit("quantkit w8a16"), 1.0),
    "torch _int_mm": (_int_mm, 1.0),
    "torch _scaled_mm": (_scaled_mm, 1.0),
    "quantkit w4a16 g128 asym": (_quantkit("quantkit w4a16 g128 asym"), 0.523),
}


def _measure(
    make: Make, weight_bytes: float, shape: tuple[int, int], rows: tuple[int, ...], device: str
) -> Iterator[tuple[int, Callable[[], dict[str, Any]]]]:
    """One measurement per number of rows over the same rotating weights, made when first needed."""
    place = torch.device(device)
    linears: list[Callable[[Tensor], Tensor]] = []

    def run(count: int) -> dict[str, Any]:
        if not linears:
            copies = num_copies(int(shape[0] * shape[1] * weight_bytes), device)
            linears.extend(make(*shape, place) for _ in range(copies))
        x = torch.randn(count, shape[1], device=place, dtype=torch.bfloat16)
        found = measure([lambda linear=linear: linear(x) for linear in linears], device)
        moved = getattr(linears[0], "stored_bytes", shape[0] * shape[1] * weight_bytes) + 2 * count * sum(shape)
        kernel = getattr(linears[0], "description", "")
        return {**found, "bytes": moved, "gigabytes_per_s": moved / found["us"] / 1e3, "kernel": kernel}

    for count in rows:
        yield count, lambda count=count: run(count)


def bench(arguments: argparse.Namespace, results: Results) -> None:
    """All shapes, kinds and rows, while there is time."""
    shapes, rows = (TINY_SHAPES, TINY_ROWS) if arguments.tiny else (SHAPES, ROWS)
    ceiling = results.meta.get("copy_bandwidth")
    for label, shape in shapes.items():
        base: dict[int, float] = {}
        for kind, (make, weight_bytes) in KINDS.items():
            for count, work in _measure(make, weight_bytes, shape, rows, arguments.device):
                if kind == "torch _int_mm" and count <= 16:
                    continue
                found = results.attempt(work, shape=label, n=shape[0], k=shape[1], m=count, kind=kind)
                if found is None:
                    continue
                if kind == "cublas bf16":
                    base[count] = found["us"]
                if count in base:
                    results.rows[-1]["speedup"] = base[count] / found["us"]
                if ceiling:
                    results.rows[-1]["share_of_copy"] = found["gigabytes_per_s"] * 1e9 / ceiling
                results.rows[-1]["teraflops"] = 2 * count * shape[0] * shape[1] / found["us"] / 1e6
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    results.save()


if __name__ == "__main__":
    options = parse()
    with torch.inference_mode():
        bench(options, Results("linears", options))
