"""Linears by rows: quantkit's, as `build_linear` chooses them, against cuBLAS and the low-bit products of torch.

Weights are random and rotate through more than four L2 caches; the most telling figures come first, and what does not
fit the time is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from results import Absent, Results
from timing import dtype_on, gemm_rate, measure, num_copies, open_results, parse
from torch import Tensor

from quantkit.kernels.ops.linear import build_linear
from quantkit.numerics.dtype import FP8, INT4, INT8
from quantkit.numerics.scheme import ActivationScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

# (N, K) of layers.
SHAPES = {
    "8192 squared": (8192, 8192),
    "8B gate+up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B qkv": (6144, 4096),
    "8B output": (4096, 4096),
    "1B gate+up": (16384, 2048),
    "1B down": (2048, 8192),
    "70B gate+up": (57344, 8192),
    "70B down": (8192, 28672),
    "tiny": (128, 256),
}
GROUP = 128
EIGHT = ("8B gate+up", "8B down", "8B qkv", "8B output")

Make = Callable[[int, int, torch.device], Callable[[Tensor], Tensor]]
SCHEMES: dict[str, tuple[WeightScheme, ActivationScheme | None]] = {
    "quantkit w4a16 g128": (WeightScheme(dtype=INT4, group_size=128), None),
    "quantkit w4a16 g128 asym": (WeightScheme(dtype=INT4, group_size=128, symmetric=False), None),
    "quantkit w8a16": (WeightScheme(dtype=INT8), None),
    "quantkit fp8 w8a16": (WeightScheme(dtype=FP8), None),
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
    return QuantizedTensor(codes=codes, scale=scale.to(dtype_on(device.type)), zero_point=zero, scheme=scheme)


def _quantkit(name: str, rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    weight_scheme, activation = SCHEMES[name]
    weight = random_weight(rows, width, weight_scheme, device)
    return build_linear(weight, activation=activation, dtype=dtype_on(device.type), device=device)


def cublas(rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """bf16 by cuBLAS."""
    weight = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    return lambda x: torch.nn.functional.linear(x.to(torch.bfloat16), weight)


def tinygemm(rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """torch's int4 product."""
    if device.type != "cuda":
        raise Absent("torch's tinygemm needs a CUDA device")
    codes = torch.randint(0, 256, (rows, width // 2), device=device, dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.randn(width // GROUP, rows, 2, device=device, dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)


def int_mm(rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The bare product of INT8: inputs count as quantized already."""
    weight = torch.randint(-128, 128, (rows, width), device=device, dtype=torch.int8).t()
    inputs: dict[int, Tensor] = {}

    def run(x: Tensor) -> Tensor:
        if len(x) not in inputs:
            inputs[len(x)] = torch.randint(-128, 128, x.shape, device=device, dtype=torch.int8)
        return torch._int_mm(inputs[len(x)], weight)

    return run


def scaled_mm(rows: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
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


# What makes them, and the bytes of a weight where the linear does not say.
KINDS: dict[str, tuple[Make, float]] = {
    "cublas bf16": (cublas, 2.0),
    "torch tinygemm": (tinygemm, 0.53),
    "torch _int_mm": (int_mm, 1.0),
    "torch _scaled_mm": (scaled_mm, 1.0),
    **{name: (partial(_quantkit, name), scheme.dtype.bits / 8) for name, (scheme, _) in SCHEMES.items()},
}
W4 = ("cublas bf16", "quantkit w4a16 g128", "torch tinygemm")
A8 = ("cublas bf16", "quantkit w8a8 fp8", "quantkit w8a8 int8", "torch _scaled_mm", "torch _int_mm")
# Shapes, kinds and rows, most telling first; the first entry is a part of its own.
PLAN: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]], ...] = (
    (("8192 squared",), W4[:2], (1, 16, 64)),
    (("8192 squared",), W4, (1, 16, 64, 256)),
    (("8B gate+up", "8B down"), W4, (1, 16, 64, 256)),
    (("8192 squared", "8B gate+up"), A8, (512, 1024, 4096)),
    (("8B qkv", "8B output"), W4, (1, 16, 64)),
    (("8192 squared",), (*A8[:3], "quantkit w8a16", "quantkit fp8 w8a16", "quantkit w4a16 g128 asym"), (1, 16, 64)),
    (("8192 squared",), W4, (2, 4, 8, 32, 128, 512, 1024, 4096)),
    (("1B gate+up", "1B down", "70B down", "70B gate+up"), W4, (1, 16, 64, 256)),
    (EIGHT, A8[:3], (1, 16, 64, 256)),
)
TINY_PLAN = ((("tiny",), tuple(KINDS), (1, 17)),)


def _measure(
    build: Make, weight_bytes: float, shape: tuple[int, int], rows: tuple[int, ...], device: str
) -> Iterator[tuple[int, Callable[[], dict[str, Any]]]]:
    """One measurement per number of rows over the same rotating weights, made when first needed."""
    target = torch.device(device)
    linears: list[Callable[[Tensor], Tensor]] = []

    def run(count: int) -> dict[str, Any]:
        if not linears:
            copies = num_copies(int(shape[0] * shape[1] * weight_bytes), device)
            linears.extend(build(*shape, target) for _ in range(copies))
        x = torch.randn(count, shape[1], device=target, dtype=dtype_on(device))
        timing = measure([lambda linear=linear: linear(x) for linear in linears], device)
        moved = getattr(linears[0], "stored_bytes", shape[0] * shape[1] * weight_bytes) + 2 * count * sum(shape)
        kernel = getattr(linears[0], "description", "")
        return {**timing, "bytes": moved, "gigabytes_per_s": moved / timing["us"] / 1e3, "kernel": kernel}

    for count in rows:
        yield count, partial(run, count)


def bench(arguments: argparse.Namespace, results: Results) -> None:
    """All of the plan, while there is time."""
    results.meta["gemm_rate"] = gemm_rate(128 if arguments.tiny else 8192, arguments.device)
    base: dict[tuple[str, int], float] = {}
    seen: set[tuple[str, str, int]] = set()
    plan = TINY_PLAN if arguments.tiny else PLAN
    for shapes, kinds, rows in plan[:1] if arguments.first else plan:
        for label in shapes:
            for kind in kinds:
                new = tuple(count for count in rows if (label, kind, count) not in seen)
                if kind == "torch _int_mm":
                    new = tuple(count for count in new if count > 16)  # what it takes
                seen.update((label, kind, count) for count in new)
                _bench_one(label, kind, new, arguments.device, results, base)
    results.finish()


def _bench_one(
    label: str,
    kind: str,
    rows: tuple[int, ...],
    device: str,
    results: Results,
    base: dict[tuple[str, int], float],
) -> None:
    """One kind of linear of one shape, with what follows from its times."""
    shape, (build, weight_bytes) = SHAPES[label], KINDS[kind]
    for count, work in _measure(build, weight_bytes, shape, rows, device):
        row = results.attempt(work, shape=label, n=shape[0], k=shape[1], m=count, kind=kind)
        if row is None:
            continue
        if kind == "cublas bf16":
            base[label, count] = row["us"]
        rate = 2 * count * shape[0] * shape[1] / row["us"] * 1e6
        results.extend(
            row,
            speedup=base[label, count] / row["us"] if (label, count) in base else None,
            share_of_copy=row["gigabytes_per_s"] * 1e9 / results.meta["copy_bandwidth"],
            teraflops=rate / 1e12,
            share_of_gemm=rate / results.meta["gemm_rate"],
        )
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    options = parse(first="only the first entry of the plan")
    with torch.inference_mode():
        bench(options, open_results("linears", options))
