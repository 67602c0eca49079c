"""Mixtures of experts by tokens: quantkit's grouped products against a loop over cuBLAS products and `_grouped_mm`.

What is timed is everything between the router's scores and the sum over a token's experts. Scores are random, weights
are random and rotate through more than four L2 caches. The loop asks the host who is chosen, so it is no graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from results import Absent, Results
from timing import dtype_on, open_results, parse
from torch import Tensor
from torch.nn.functional import linear

from quantkit.benchmark.timing import measure, num_copies
from quantkit.kernels import ops
from quantkit.kernels.gpu.expert_tiles import ExpertWeights
from quantkit.kernels.gpu.experts import TritonExperts
from quantkit.kernels.gpu.packing import Packing
from quantkit.kernels.reference import experts as reference

# Experts, chosen, hidden width, width of an expert.
SHAPES = {"Mixtral 8x7B": (8, 2, 4096, 14336), "Qwen3 30B-A3B": (128, 8, 2048, 768), "tiny": (2, 1, 128, 128)}
KINDS = ("loop bf16", "quantkit w4a16 g128", "quantkit bf16", "torch _grouped_mm")
PLAN = (("Mixtral 8x7B", (1, 16, 256, 4, 64, 2048)), ("Qwen3 30B-A3B", (1, 32, 512, 4, 4096)))
TINY_PLAN = (("tiny", (1, 9)),)

Mix = Callable[[Tensor, Tensor], Tensor]


def _packed(count: int, rows: int, width: int, device: torch.device) -> ExpertWeights:
    """INT4 experts of random codes, a scale per 128 inputs."""
    words = torch.randint(-(2**31), 2**31, (count, rows, width // 8), device=device, dtype=torch.int64).to(torch.int32)
    scale = (torch.rand(count, width // 128, rows, device=device) + 0.5) / (8 * width**0.5)
    return ExpertWeights(
        words=words,
        scale=scale.to(dtype_on(device.type)),
        zero=None,
        shape=(rows, width),
        packing=Packing(bits=4, span=64 if width % 512 == 0 else 32 if width % 256 == 0 else 16, group=128),
        outer=torch.ones(count, device=device),
    )


def _dense(count: int, rows: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(count, rows, width, device=device, dtype=dtype_on(device.type)) * width**-0.5


def _as_they_are(weight: Tensor) -> ExpertWeights:
    shape = (weight.shape[1], weight.shape[2])
    return ExpertWeights(words=weight, scale=None, zero=None, shape=shape, packing=Packing(bits=16, span=0, group=0))


def _quantkit(name: str, sizes: tuple[int, int, int, int], device: torch.device) -> Mix:
    count, picks, hidden, width = sizes
    shapes = (count, 2 * width, hidden), (count, hidden, width)
    if "w4a16" in name:
        weights = [_packed(*shape, device) for shape in shapes]
    else:
        weights = [_as_they_are(_dense(*shape, device)) for shape in shapes]
    stacked = TritonExperts(*weights, activation="silu", num_chosen=picks, normalize=True)
    return lambda x, scores: stacked(x, scores, None, None)


def _loop(name: str, sizes: tuple[int, int, int, int], device: torch.device) -> Mix:
    count, picks, hidden, width = sizes
    up, down = _dense(count, 2 * width, hidden, device), _dense(count, hidden, width, device)

    def each(number: int, rows: Tensor) -> Tensor:
        return linear(ops.gated(linear(rows, up[number]), "silu"), down[number])

    every = [partial(each, number) for number in range(count)]

    def run(x: Tensor, scores: Tensor) -> Tensor:
        weights, chosen = reference.route(scores, picks, True)
        return reference.run_each(x, chosen, weights, every, torch.zeros_like(x))

    return run


def _grouped_mm(name: str, sizes: tuple[int, int, int, int], device: torch.device) -> Mix:
    if device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        raise Absent("torch._grouped_mm needs CUDA and a torch that has it")
    count, picks, hidden, width = sizes
    up, down = _dense(count, 2 * width, hidden, device), _dense(count, hidden, width, device)
    numbers = torch.arange(count, device=device)

    def run(x: Tensor, scores: Tensor) -> Tensor:
        weights, chosen = reference.route(scores, picks, True)
        places, order = chosen.view(-1).sort(stable=True)
        ends = torch.searchsorted(places, numbers, right=True).to(torch.int32)
        opened = ops.gated(torch._grouped_mm(x[order // picks], up.transpose(1, 2), offs=ends), "silu")
        outputs = torch._grouped_mm(opened, down.transpose(1, 2), offs=ends)
        outputs = outputs * weights.view(-1)[order].unsqueeze(1).to(x.dtype)
        return torch.zeros_like(x).index_add_(0, order // picks, outputs)

    return run


def _builder_of(kind: str) -> Callable[[str, tuple[int, int, int, int], torch.device], Mix]:
    return {"loop bf16": _loop, "torch _grouped_mm": _grouped_mm}.get(kind, _quantkit)


def _run(kind: str, made: list[Mix], label: str, tokens: int, device: str) -> dict[str, Any]:
    count, picks, hidden, width = SHAPES[label]
    target = torch.device(device)
    weight_bytes = 3 * hidden * width * (33 / 64 if "w4a16" in kind else 2)
    if not made:
        copies = num_copies(int(weight_bytes * picks), device, limit=4)
        made.extend(_builder_of(kind)(kind, SHAPES[label], target) for _ in range(copies))
    x = torch.randn(tokens, hidden, device=target, dtype=dtype_on(device))
    scores = [torch.randn(tokens, count, device=target, dtype=dtype_on(device)) for _ in made]
    timing = measure([partial(mix, x, score) for mix, score in zip(made, scores, strict=True)], device)
    active = sum(len(reference.route(score, picks, True)[1].unique()) for score in scores) / len(scores)
    moved = weight_bytes * active + 2 * tokens * picks * (2 * hidden + 2 * width)
    return {**timing, "active": active, "bytes": moved, "gigabytes_per_s": moved / timing["us"] / 1e3}


def bench(arguments: argparse.Namespace, results: Results) -> None:
    """All shapes, kinds and numbers of tokens, while there is time."""
    base: dict[tuple[str, int], float] = {}
    for label, every in TINY_PLAN if arguments.tiny else PLAN:
        for kind in KINDS:
            made: list[Mix] = []
            for tokens in every:
                work = partial(_run, kind, made, label, tokens, arguments.device)
                row = results.attempt(work, shape=label, tokens=tokens, kind=kind)
                if row is None:
                    continue
                if kind == KINDS[0]:
                    base[label, tokens] = row["us"]
                _, picks, hidden, width = SHAPES[label]
                results.extend(
                    row,
                    speedup=base[label, tokens] / row["us"] if (label, tokens) in base else None,
                    share_of_copy=row["gigabytes_per_s"] * 1e9 / results.meta["copy_bandwidth"],
                    teraflops=6 * tokens * picks * hidden * width / row["us"] / 1e6,
                )
            made.clear()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    results.finish()


if __name__ == "__main__":
    options = parse(28.0)
    with torch.inference_mode():
        bench(options, open_results("experts", options))
