"""A prediction, from measured pieces, of what many ranks gain in GPTQ; nothing of it has run on so many.

    python evals/scale/predict.py --measure   # the pieces, CPU seconds of one thread, into evals/results/scale

Plain GPTQ of the recipe's 128 samples of 512 tokens. Who solves which rows, and which panels of a Gram matrix are
whose, is asked of the code that runs; what each costs is a piece times its size. Every rank has a core like the one
that the pieces were measured on, and a link of its own. `scale_page.py` shows what comes out, and how far it is from
what two ranks have taken. Seconds of a layer on the rank that has most of it, with T tokens, N x K weights of a linear,
R ranks and pieces a, b, ...:

    forward         2 x weights that a token meets x 1024 tokens x ceil(T / 1024 / R) batches x piece x runs: one for
                    all sums that fit into memory together, one to go on, one to count experts' tokens
    Gram            T x K^2 x piece, by panels or by experts; each rank mirrors every matrix it gets
    solve           of each part of a set: K a + N K b + N K^2 c; once per set and rank the factor, K^2 d + K^3 e
    measure         N K x piece, by the owner of the set
    inputs travel   2 bytes x K T / R x (R - 1) / link; to an expert's owner only its share
    sums and codes  ceil(log2 R) x (4 bytes x K^2 + N K) / link, and N K x piece to pack and unpack
    one rank alone  N K x (reading + writing)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import stamp

from quantkit.compress.algorithms import _gptq_jobs, gptq
from quantkit.compress.algorithms._gptq_jobs import cut_set, fitting_rounds, owners
from quantkit.compress.calibration.errors import relative_error
from quantkit.compress.calibration.observers import Gram
from quantkit.compress.pipeline import inputs, run
from quantkit.distributed import collectives
from quantkit.models.linear_sets import LinearSet
from quantkit.numerics.affine import WeightGrid
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.products import quick_products
from quantkit.numerics.scheme import WeightScheme

FILE = Path(__file__).resolve().parents[1] / "results/scale/pieces.json"
TOKENS, BATCH = 128 * 512, inputs._BATCH_TOKENS_ON_CPU
SCHEME = WeightScheme(dtype=find_dtype("int4"), group_size=128)
Sets = tuple[tuple[int, tuple[int, ...]], ...]
"""Linears that read the same: inputs, and outputs of each."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers of one kind.

    Args:
        count: of them.
        sets: that every token meets.
        expert: sets of one expert.
        experts, top: how many there are, and how many a token meets.
    """

    count: int
    sets: Sets
    expert: Sets = ()
    experts: int = 0
    top: int = 0

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs by name, sets together."""
        named = {f"{at}.{n}": (out, width) for at, (width, outs) in enumerate(self.sets) for n, out in enumerate(outs)}
        for number in range(self.experts):
            for at, (width, outs) in enumerate(self.expert):
                named |= {f"mlp.experts.{number}.{at}_{n}": (out, width) for n, out in enumerate(outs)}
        return named

    @cached_property
    def groups(self) -> list[LinearSet]:
        """As the layer's own code has them."""
        known: dict[str, list[str]] = {}
        for name in self.linears:
            known.setdefault(name.rpartition("_" if "experts" in name else ".")[0], []).append(name)
        return [LinearSet(linears=tuple(names), source=None, parent="") for names in known.values()]

    @property
    def weights(self) -> int:
        """Of a layer."""
        return sum(out * width for out, width in self.linears.values())

    @property
    def met(self) -> int:
        """Weights of a layer that a token meets."""
        dense, expert = (sum(width * sum(outs) for width, outs in sets) for sets in (self.sets, self.expert))
        return dense + self.top * expert


def llama(count: int, width: int, keys: int, inner: int) -> Layers:
    """A Llama's."""
    attention = (width, (width, keys, keys)), (width, (width,))
    return Layers(count=count, sets=(*attention, (width, (inner, inner)), (inner, (width,))))


def _deepseek() -> tuple[Layers, ...]:
    attention = (7168, (1536, 576)), (1536, (24576,)), (512, (32768,)), (16384, (7168,))
    dense, narrow = (((7168, (inner, inner)), (inner, (7168,))) for inner in (18432, 2048))
    mixture = Layers(count=58, sets=(*attention, *narrow), expert=narrow, experts=256, top=8)
    return Layers(count=3, sets=(*attention, *dense)), mixture


_NARROW = ((1024, (512, 512)), (512, (1024,)))
MODELS: dict[str, tuple[Layers, ...]] = {
    "8B": (llama(32, 4096, 1024, 14336),),
    "70B": (llama(80, 8192, 1024, 28672),),
    "DeepSeek-V3": _deepseek(),
}
MEASURED = {  # works of measure_scale.py
    "plain-gptq": llama(2, 2048, 256, 5632),
    "moe-gptq": Layers(count=1, sets=((1024, (1024, 256, 256)), (1024, (1024,))), expert=_NARROW, experts=64, top=8),
}


@contextmanager
def as_one_of(ranks: int) -> Iterator[None]:
    """While open, work is assigned to so many."""
    world = collectives.world
    collectives.world = _gptq_jobs.world = lambda: ranks
    try:
        yield
    finally:
        collectives.world = _gptq_jobs.world = world


def layer_seconds(
    layers: Layers, ranks: int, pieces: dict[str, float], link: float, tokens: int = TOKENS
) -> dict[str, float]:
    """Seconds of each kind that one layer takes, on the rank that takes longest of each; and `runs`, how often it runs.

    Args:
        layers: of a model.
        ranks: how many.
        pieces: seconds of one thread, see `measure`.
        link: bytes per second each way, of each rank.
        tokens: of calibration data.
    """
    with as_one_of(ranks):
        weights = {name: torch.empty(shape, device="meta") for name, shape in layers.linears.items()}
        plan = SimpleNamespace(
            recipe=SimpleNamespace(steps={}),
            skeleton=SimpleNamespace(linear_shapes=lambda _: layers.linears),
            sets=lambda _: layers.groups,
        )
        owner = run._owners(plan, 0)  # type: ignore[arg-type]
        context: Any = SimpleNamespace(
            block=SimpleNamespace(parameters=lambda: [SimpleNamespace(nbytes=2 * layers.weights)]),
            weight=weights.__getitem__,
            schemes=dict.fromkeys(weights, SimpleNamespace(weight=SCHEME)),
            device=torch.device("cpu"),
            owner=lambda name: owner.get(name, 0),
        )
        rounds = list(fitting_rounds(context, [(group, group.linears) for group in layers.groups], one_by_one=False))
        gram, solve, measure = ([0.0] * ranks for _ in range(3))
        for entries in rounds:
            jobs = [job for _, names in entries for job in cut_set(context, names)]
            factored = set()
            for job, solver in zip(jobs, owners(context, jobs), strict=True):
                rows, width = sum(part.stop - part.start for _, part in job.rows), layers.linears[job.set[0]][1]
                solve[solver] += solve_seconds(pieces, rows, width)
                if (solver, job.set) not in factored:
                    factored.add((solver, job.set))
                    solve[solver] += pieces["factor2"] * width**2 + pieces["factor3"] * width**3
            for _, names in entries:
                width, is_expert = layers.linears[names[0]][1], "experts" in names[0]
                measure[owner[names[0]]] += pieces["measure"] * sum(weights[name].numel() for name in names)
                if is_expert:
                    seen = tokens * layers.top / layers.experts
                    gram[owner[names[0]]] += pieces["gram"] * seen * width**2 + pieces["finish"] * width**2
                    continue
                for panel, summed_by in Gram(width, torch.device("meta"), split=True)._shared:
                    gram[summed_by] += pieces["gram"] * tokens * (panel.stop - panel.start) * 2 * panel.stop
                gram = [seconds + pieces["finish"] * width**2 for seconds in gram]
    turns, hops = math.ceil(tokens / BATCH / ranks), math.ceil(math.log2(ranks))
    runs = len(rounds) + 1 + bool(layers.experts)
    widths = sum(width for width, _ in layers.sets), layers.top * sum(width for width, _ in layers.expert)
    sent = 2 * tokens / ranks * (ranks - 1) * (widths[0] + widths[1] / ranks)
    filled = hops * sum(4 * width**2 for width, _ in layers.sets) + hops * layers.weights
    return {
        "forward": 2 * pieces["forward"] * layers.met * turns * min(BATCH, tokens) * runs,
        "Gram": max(gram),
        "solve": max(solve),
        "measure": max(measure),
        "inputs travel": sent / link,
        "sums and codes travel": filled / link + (pieces["pack"] * layers.weights if ranks > 1 else 0.0),
        "one rank alone": (pieces["load"] + pieces["write"]) * layers.weights,
        "runs": runs,
    }


def solve_seconds(pieces: dict[str, float], rows: int, width: int) -> float:
    """Of GPTQ's loops, ranges and fits: so much per column, per weight, and per weight and column."""
    return width * (pieces["solve1"] + rows * (pieces["solve2"] + width * pieces["solve3"]))


def model_seconds(name: str, ranks: int, pieces: dict[str, float], link: float) -> dict[str, float]:
    """Of all layers of a model, by kind."""
    total: dict[str, float] = {}
    for layers in MODELS[name]:
        parts = layer_seconds(layers, ranks, pieces, link)
        del parts["runs"]
        for kind, seconds in parts.items():
            total[kind] = total.get(kind, 0.0) + layers.count * seconds
    return total


def measure() -> dict[str, float]:
    """Pieces: seconds per operation, weight or byte, as their names in `layer_seconds` say."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pieces = {"forward": _forward()}
    inputs_ = torch.randn(1024, 5632).bfloat16()
    gram = Gram(5632, inputs_.device)
    pieces["gram"] = cpu(lambda: gram.update(inputs_)) / (1024 * 5632**2)
    pieces["finish"] = cpu(gram.finish, 1) / 5632**2
    grams = {width: _gram(width) for width in (2048, 5632)}
    small, large = (cpu(lambda g=gram: _factor(g.clone())) for gram in grams.values())
    pieces["factor3"] = (large - small * (5632 / 2048) ** 2) / (5632**3 - 2048 * 5632**2)
    pieces["factor2"] = small / 2048**2 - 2048 * pieces["factor3"]
    sizes = [(512, 2048), (2048, 2048), (1024, 5632)]
    factors = {width: _factor(gram.clone()) for width, gram in grams.items()}
    taken = [cpu(lambda n=rows, k=width: _solve(n, factors[k]), 1) for rows, width in sizes]
    terms = torch.tensor([[k, n * k, n * k * k] for n, k in sizes], dtype=torch.float64)
    solved = torch.linalg.solve(terms, torch.tensor(taken, dtype=torch.float64)).tolist()
    pieces |= dict(zip(("solve1", "solve2", "solve3"), solved, strict=True))
    weight, sample = torch.randn(2048, 2048).bfloat16(), torch.randn(64, 2048)
    pieces["measure"] = 2 * cpu(lambda: relative_error(weight, weight.__getitem__, sample)) / weight.numel()
    codes = torch.zeros(1 << 24, dtype=torch.uint8)
    pieces["pack"] = cpu(lambda: collectives._unpacked(collectives._packed(codes))) / len(codes)
    phases = json.loads(FILE.with_name("ranks.json").read_text())["plain-gptq 1"]["phases_s"]
    weights = MEASURED["plain-gptq"].count * MEASURED["plain-gptq"].weights
    return {**pieces, "load": phases["load"] / weights, "write": phases["write"] / weights}


def cpu(work: Callable[[], object], times: int = 3) -> float:
    """CPU seconds of one call, the least of some."""
    taken = []
    for _ in range(times):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


@torch.inference_mode()
def _forward() -> float:
    """Of a decoder layer, by its weights' products."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=4
    )
    model = LlamaModel(config).bfloat16()
    states = torch.randn(BATCH // 512, 512, 2048).bfloat16()
    return cpu(lambda: model(inputs_embeds=states)) / (2 * MEASURED["plain-gptq"].met * BATCH)


def _gram(width: int) -> Tensor:
    rows = torch.randn(256, width)
    return rows.T @ rows / len(rows) + torch.eye(width)


def _factor(gram: Tensor) -> gptq.Factor:
    return gptq.GptqStep()._factor(gram)


def _solve(rows: int, factor: gptq.Factor) -> object:
    weight = torch.randn(rows, len(factor.lower)).mul_(0.02)
    grids = [WeightGrid(SCHEME, torch.bfloat16, None)]
    return gptq.GptqStep()._solve([weight], grids, factor, torch.bfloat16, gptq.Workspace())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", required=True)
    parser.parse_args()
    with quick_products(torch.device("cpu")):
        measured = measure()
    FILE.write_text(json.dumps({"pieces": measured, "taken": asdict(stamp())}, indent=1) + "\n", encoding="utf-8")
