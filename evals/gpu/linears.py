"""A linear by rows: quantkit's with 4-bit weights, as `build_linear` chooses it, against cuBLAS in bf16.

Weights are random and rotate through more than four L2 caches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from results import Results
from timing import dtype_on, gemm_rate, measure, num_copies, open_results, parse
from torch import Tensor

from quantkit.kernels.ops.linear import build_linear
from quantkit.numerics.dtype import FP8, INT4, INT8
from quantkit.numerics.scheme import ActivationScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

SHAPES = {"8192 squared": (8192, 8192), "tiny": (128, 256)}  # (N, K)
ROWS, TINY_ROWS = (1, 16, 64), (1, 17)
SCHEMES: dict[str, tuple[WeightScheme, ActivationScheme | None]] = {
    "quantkit w4a16 g128": (WeightScheme(dtype=INT4, group_size=128), None),
    "quantkit w4a16 g128 asym": (WeightScheme(dtype=INT4, group_size=128, symmetric=False), None),
    "quantkit w8a16": (WeightScheme(dtype=INT8), None),
    "quantkit w8a8 int8": (WeightScheme(dtype=INT8), ActivationScheme(dtype=INT8)),
    "quantkit w8a8 fp8": (WeightScheme(dtype=FP8), ActivationScheme(dtype=FP8)),
}
# What is measured, the base first, and bytes per weight without scales.
CUBLAS, W4 = "cublas bf16", "quantkit w4a16 g128"
KINDS = {CUBLAS: 2.0, W4: 0.5}


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


def random_linear(kind: str, shape: tuple[int, int], device: torch.device) -> Callable[[Tensor], Tensor]:
    """One of KINDS with a random weight."""
    if kind == CUBLAS:
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16)
        return lambda x: torch.nn.functional.linear(x.to(torch.bfloat16), weight)
    scheme, activation = SCHEMES[kind]
    codes = random_weight(*shape, scheme, device)
    return build_linear(codes, activation=activation, dtype=dtype_on(device.type), device=device)


def _measure(
    kind: str, shape: tuple[int, int], rows: tuple[int, ...], device: str
) -> Iterator[tuple[int, Callable[[], dict[str, Any]]]]:
    """One measurement per number of rows over the same rotating weights, made when first needed."""
    target, weight_bytes = torch.device(device), int(shape[0] * shape[1] * KINDS[kind])
    linears: list[Callable[[Tensor], Tensor]] = []

    def run(count: int) -> dict[str, Any]:
        if not linears:
            linears.extend(random_linear(kind, shape, target) for _ in range(num_copies(weight_bytes, device)))
        x = torch.randn(count, shape[1], device=target, dtype=dtype_on(device))
        timing = measure([lambda linear=linear: linear(x) for linear in linears], device)
        moved = getattr(linears[0], "stored_bytes", weight_bytes) + 2 * count * sum(shape)
        kernel = getattr(linears[0], "description", "")
        return {**timing, "bytes": moved, "gigabytes_per_s": moved / timing["us"] / 1e3, "kernel": kernel}

    for count in rows:
        yield count, partial(run, count)


def bench(arguments: argparse.Namespace, results: Results) -> None:
    """All kinds and rows, while there is time, with what follows from their times."""
    device, label = arguments.device, "tiny" if arguments.tiny else "8192 squared"
    shape = SHAPES[label]
    results.meta["gemm_rate"] = gemm_rate(128 if arguments.tiny else 8192, device)
    base: dict[int, float] = {}
    for kind in KINDS:
        for count, work in _measure(kind, shape, TINY_ROWS if arguments.tiny else ROWS, device):
            row = results.attempt(work, shape=label, n=shape[0], k=shape[1], m=count, kind=kind)
            if row is None:
                continue
            if kind == CUBLAS:
                base[count] = row["us"]
            rate = 2 * count * shape[0] * shape[1] / row["us"] * 1e6
            results.extend(
                row,
                speedup=base[count] / row["us"] if count in base else None,
                share_of_copy=row["gigabytes_per_s"] * 1e9 / results.meta["copy_bandwidth"],
                teraflops=rate / 1e12,
                share_of_gemm=rate / results.meta["gemm_rate"],
            )
        if device == "cuda":
            torch.cuda.empty_cache()
    results.finish()


if __name__ == "__main__":
    options = parse()
    with torch.inference_mode():
        bench(options, open_results("linears", options))
