"""Greedy text of the demo model on the GPU engine against the CPU engine: every recipe's number types, every KV type.

The weights are rounded as each shipped recipe stores them (to nearest: how they are chosen makes no difference here).
The CPU computes in float32, the GPU in float16, so two words that are almost equally likely may change places: where
the text differs, the distance of the two best logits on the CPU is shown, and below 1 % of their range it counts as a
tie. Recipes that round activations are shown, not judged: a last bit before that rounding is a whole step after it.
Exit code 1 if anything else differs. MODELS="folder folder" adds other models as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from timing import Results, parse

# isort: split
import torch

import quantkit
from quantkit.compress.recipe.load import build, load, shipped
from quantkit.errors import RecipeError
from quantkit.runtime.types import SamplingParams

PROMPTS = ("Once upon a time", "The little dog", "Sums:42+37=", "One day, a girl named Lily wanted to", "He said that")
TIE = 0.01
# How the GPU engine runs: sequences at once, graphs.
WAYS = {"alone, graph": (1, True), "batch, graph": (8, True), "batch, eager": (8, False), "alone, eager": (1, False)}


def variants(tiny: bool) -> Iterator[tuple[str, str, str, bool]]:
    """Name, recipe ("" = the demo model as it is) or folder, KV type, and whether activations are rounded."""
    if tiny:
        yield "as it is", "", "int8", False
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
        self._work, self._made = work, {}
        for recipe in dict.fromkeys(name for name in recipes if name and not Path(name).is_dir()):
            command = [sys.executable, __file__, "--quantize", recipe, str(work / recipe)]
            self._made[recipe] = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def path(self, recipe: str) -> Path | None:
        """Where one is, once it is there; other models are as they are, the demo model is None."""
        if recipe not in self._made:
            return Path(recipe) if recipe else None
        _, said = self._made[recipe].communicate()
        if self._made[recipe].returncode:
            raise RuntimeError(f"not made: {said.strip().splitlines()[-1]}")
        return self._work / recipe

    def stop(self) -> None:
        """End what is still at work."""
        for process in self._made.values():
            process.kill()


def generate(llm: quantkit.LLM, num_tokens: int) -> list[list[int]]:
    """Tokens after each prompt."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [list(done.token_ids) for done in llm.generate(list(PROMPTS[:2] if num_tokens < 8 else PROMPTS), params)]


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
    known = memory.setdefault(f"{path} {kv}", {})
    if not known:
        known["llm"] = open_llm(path, "reference", kv, 1)
        known["tokens"] = generate(known["llm"], num_tokens)
    sequences, graphs = WAYS[way]
    llm = open_llm(path, device, kv, sequences, graphs)
    tokens = generate(llm, num_tokens)
    gaps = []
    for prompt, ours, theirs in zip(PROMPTS, tokens, known["tokens"], strict=False):
        equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if equal is not None:
            gaps.append(_gap(known["llm"], known["llm"].encode(prompt) + theirs[:equal]))
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


def bench(arguments: argparse.Namespace, results: Results) -> int:
    """All variants in all ways, while there is time; how many rows are wrong."""
    wrong = 0
    num_tokens = 2 if arguments.tiny else 48
    todo = list(variants(arguments.tiny))
    with tempfile.TemporaryDirectory() as folder:
        made = Checkpoints([recipe for _, recipe, _, _ in todo], Path(folder))
        for name, recipe, kv, rounds in todo:
            memory: dict[str, Any] = {}
            for way in ("batch, eager",) if arguments.tiny else WAYS:

                def work(recipe: str = recipe, kv: str = kv, way: str = way, memory: Any = memory) -> dict[str, Any]:
                    return compare(made.path(recipe), kv, arguments.device, way, num_tokens, memory)

                before = len(results.rows)
                outcome = results.attempt(work, weights=name, kv=kv, way=way, judged=not rounds)
                if outcome is not None and not rounds:
                    wrong += outcome["same"] + outcome["ties"] < outcome["prompts"]
                elif outcome is None and len(results.rows) > before:
                    wrong += 1
        made.stop()
    results.meta["wrong"] = wrong
    results.save()
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["--quantize"]:
        quantize(sys.argv[2], Path(sys.argv[3]))
        sys.exit()
    options = parse(60)
    sys.exit(bool(bench(options, Results("greedy", options))))
