"""Greedy text of the demo model on the GPU engine against the CPU engine: every recipe's number types, every KV type.

The weights are rounded as each shipped recipe stores them (to nearest: how they are chosen makes no difference here).
The CPU computes in float32, the GPU in float16, so two words that are almost equally likely may change places: where
the text differs, the distance of the two best logits on the CPU is shown, and below 1 % of their range it counts as a
tie. Recipes that round activations are shown, not judged: a last bit before that rounding is a whole step after it.
Anything else that differs counts as wrong. MODELS="folder folder" adds other models as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from timing import open_results, parse

# isort: split
import torch
from results import Results

import quantkit
from quantkit.compress.recipe.load import build, load, shipped
from quantkit.errors import RecipeError
from quantkit.evaluate.fidelity import Texts, divergences
from quantkit.runtime.types import SamplingParams

# Imported late, when a checkpoint is written.
NEEDS = ("accelerate", "compressed_tensors", "quantkit.api")
PROMPTS = ("Once upon a time", "The little dog", "Sums:42+37=", "One day, a girl named Lily wanted to", "He said that")
TIE = 0.01
# How the GPU engine runs: sequences at once, graphs.
WAYS = {"alone, graph": (1, True), "batch, graph": (8, True), "batch, eager": (8, False), "alone, eager": (1, False)}
TINY_WAYS = ("batch, eager",)


def variants(tiny: bool) -> Iterator[tuple[str, str, str, bool]]:
    """Name, recipe ("" = the demo model as it is) or folder, KV type, and whether activations are rounded."""
    if tiny:
        yield "rtn-int4", "rtn-int4", "int8", False
        return
    for kv in ("auto", "int8", "fp8", "int4"):
        yield "as it is", "", kv, False
    seen = set()
    for name in shipped():
        source = load(name).source
        numbers = json.dumps([source.get(key) for key in ("weights", "activations", "kv_cache")])
        if numbers not in seen:
            seen.add(numbers)
            yield name, name, "auto", "activations" in source
    for kv in ("int8", "fp8", "int4"):
        yield "rtn-int4", "rtn-int4", kv, False
    for folder in os.environ.get("MODELS", "").split():
        for kv in ("auto", "int8", "fp8", "int4"):
            yield Path(folder).name, folder, kv, False


def quantize(recipe: str, folder: Path) -> None:
    """The demo model in a recipe's number types."""
    data = {**load(recipe).source, "steps": [], "gates": []}
    data["calibration"] = {"data": "bundled", "samples": 8, "sequence_length": 64}
    try:
        made = build(data, recipe)
    except RecipeError:  # numbers that need no data
        made = build({key: value for key, value in data.items() if key != "calibration"}, recipe)
    quantkit.quantize(None, made, folder, device="cpu")


class Checkpoints:
    """All of them made at once, each by a process of its own, while the first are already compared.

    Args:
        recipes: by name.
        work: where they go.
    """

    def __init__(self, recipes: Iterable[str], work: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._work, self._makers = work, {}
        for recipe in dict.fromkeys(name for name in recipes if name and not Path(name).is_dir()):
            command = [sys.executable, __file__, "--quantize", recipe, str(work / recipe)]
            with self._said(recipe).open("w") as said:
                self._makers[recipe] = subprocess.Popen(command, env=environment, stdout=said, stderr=said)

    def path(self, recipe: str) -> Path | None:
        """Where one is, once it is there; other models are as they are, the demo model is None."""
        if recipe not in self._makers:
            return Path(recipe) if recipe else None
        if self._makers[recipe].wait():
            raise RuntimeError(f"not made: {(self._said(recipe).read_text().strip() or 'no word').splitlines()[-1]}")
        return self._work / recipe

    def stop(self) -> None:
        """End what is still at work."""
        for process in self._makers.values():
            process.kill()

    def _said(self, recipe: str) -> Path:
        return self._work / f"{recipe}.log"


def generate(llm: quantkit.LLM, num_tokens: int) -> Texts:
    """Tokens after each prompt."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [done.token_ids for done in llm.generate(list(PROMPTS[:2] if num_tokens < 8 else PROMPTS), params)]


def open_llm(path: Path | None, device: str, kv: str, sequences: int, graphs: bool = True) -> quantkit.LLM:
    """An engine: float32 without the GPU's kernels on the CPU, float16 with them otherwise."""
    os.environ["QUANTKIT_CUDA_GRAPHS"] = "1" if graphs else "0"
    dtype = "float32" if device == "reference" else "float16"
    target = "cpu" if device == "reference" else device
    return quantkit.LLM(path, device=target, dtype=dtype, kv_cache=kv, max_length=256, max_sequences=sequences)


def compare(
    path: Path | None, kv: str, device: str, way: str, num_tokens: int, memory: dict[str, Any]
) -> dict[str, Any]:
    """How far one way of the GPU engine gives the CPU engine's text."""
    if memory.get("of") != (path, kv):  # the ways of a variant follow one another
        reference = open_llm(path, "reference", kv, 1)
        memory.update(of=(path, kv), llm=reference, tokens=generate(reference, num_tokens))
    sequences, graphs = WAYS[way]
    llm = open_llm(path, device, kv, sequences, graphs)
    tokens = generate(llm, num_tokens)
    gaps = []
    for prompt, equal, theirs in zip(PROMPTS, divergences(tokens, memory["tokens"]), memory["tokens"], strict=False):
        if equal is not None:
            gaps.append(_gap(memory["llm"], [*memory["llm"].encode(prompt), *theirs[:equal]]))
    return {
        "prompts": len(tokens),
        "same": len(tokens) - len(gaps),
        "ties": sum(gap < TIE for gap in gaps),
        "largest_gap": max(gaps, default=0.0),
        "graphs": llm.engine.runner.graph_status or "none",
    }


def _gap(llm: quantkit.LLM, ids: list[int]) -> float:
    """Distance of the two best logits of the next token, as a share of their range."""
    logits = llm.score([ids])[0][-1].float()
    best = torch.topk(logits, 2).values
    return ((best[0] - best[1]) / (logits.max() - logits.min())).item()


def bench(arguments: argparse.Namespace, results: Results) -> None:
    """All variants in all ways, while there is time."""
    num_tokens = 2 if arguments.tiny else 48
    todo = [
        (recipe, {"weights": name, "kv": kv, "way": way, "judged": not rounds})
        for name, recipe, kv, rounds in variants(arguments.tiny)
        for way in (TINY_WAYS if arguments.tiny else WAYS)
    ]
    todo = [(recipe, labels) for recipe, labels in todo if results.known(**labels) is None]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints([recipe for recipe, _ in todo], Path(folder))
        memory: dict[str, Any] = {}

        def work(recipe: str, kv: str, way: str) -> dict[str, Any]:
            return compare(checkpoints.path(recipe), kv, arguments.device, way, num_tokens, memory)

        for recipe, labels in todo:
            results.attempt(partial(work, recipe, labels["kv"], labels["way"]), **labels)
        checkpoints.stop()
    judged = [row for row in results.rows if row["judged"]]
    wrong = sum("error" in row or row["same"] + row["ties"] < row["prompts"] for row in judged)
    results.meta["wrong"] = wrong
    results.finish(is_wrong=bool(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--quantize"]:
        quantize(sys.argv[2], Path(sys.argv[3]))
        sys.exit()
    options = parse(60)
    bench(options, open_results("greedy", options, row_seconds=90))
