"""Acceptance of an MTP head's drafts with its weights, or all weights, at 16, 8 and 4 bits; and what drafts gain.

    python evals/mtp/train_mtp.py --out mtp-model
    python evals/mtp/measure_mtp.py mtp-model WORK            # -> evals/results/mtp/acceptance.json
    python evals/mtp/measure_mtp.py mtp-model WORK --speed    # -> evals/results/mtp/speed.json, on a quiet machine

Prompts are the beginnings of documents of the demo language that training did not see. Drafts are forced. Text with
drafts must equal text without, greedy and sampled, in float32; the script stops if it does not. The head's linears are
rounded to nearest in groups of 32. The model's are quantized by `rtn-int8` and `rtn-int4`; for the latter, in groups of
32 too.

A step of the model takes so little time that Python takes most of it. For the speed, the model is padded with zeros to
the size of a real one: layers whose outputs are zero, and feed-forward channels that are zero, also in the head. It
predicts the same, and its steps cost what those of a model of this size cost. One sequence at a time decodes with and
without drafts, on one thread and in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

import torch
from language import document_of_kind, draw_kind, split_marks
from provenance import plain, stamp
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from quantkit.api import quantize
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.scheme import WeightScheme
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
RESULT, SPEED = ROOT / "results/mtp/acceptance.json", ROOT / "results/mtp/speed.json"
LAYERS, WIDTH = 12, 8192  # of the padded model
PROMPT_TOKENS, NEW_TOKENS, MAX_DRAFTS, ROUNDS = 32, 96, 3, 5
VARIANTS = ((16, 16), (16, 8), (16, 4), (8, 8), (4, 4))  # bits of the model's linears, and of the head's


def main() -> None:
    """Measure every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder that train_mtp.py wrote")
    parser.add_argument("work", type=Path, help="folder for the variants")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--speed", action="store_true", help="time the padded model")
    options = parser.parse_args()
    prompts = held_out(LLM(options.model, lazy=True), options.prompts)
    about = {
        "prompts": len(prompts), "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "max_drafts": MAX_DRAFTS,
    }  # fmt: skip
    if options.speed:
        row = time_drafts(padded(options.model, options.work / "padded"), prompts[:8])
        print(json.dumps(row))
        kept = {"about": plain(stamp()), "settings": {**about, "prompts": 8, "layers": LAYERS, "width": WIDTH}, **row}
        SPEED.write_text(json.dumps(kept, indent=1) + "\n")
        return
    rows = []
    for bits, head_bits in VARIANTS:
        folder = make_variant(options.model, options.work / f"model{bits}-head{head_bits}", bits, head_bits)
        rows.append({"model_bits": bits, "head_bits": head_bits, **measure(folder, prompts)})
        print(json.dumps(rows[-1]), flush=True)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"about": plain(stamp()), "settings": about, "rows": rows}, indent=1) + "\n")


def held_out(llm: LLM, count: int) -> list[list[int]]:
    """Beginnings of documents that no step of training drew."""
    rng, prompts = random.Random("mtp held out"), list[list[int]]()
    while len(prompts) < count:
        text, _ = split_marks(document_of_kind(draw_kind(rng), rng))
        ids = llm.encode(text)
        if len(ids) >= 1.5 * PROMPT_TOKENS:
            prompts.append(ids[:PROMPT_TOKENS])
    return prompts


def make_variant(source: Path, folder: Path, bits: int, head_bits: int) -> Path:
    """Write the model with its linears and those of its head at these numbers of bits."""
    shutil.rmtree(folder, ignore_errors=True)
    if bits == 16:
        shutil.copytree(source, folder)
    else:
        options = {"overrides": ["weights.group_size=32"]} if bits == 4 else {}
        quantize(source, f"rtn-int{bits}", folder, **options)
    if head_bits < 16:
        (file,) = (path for path in folder.glob("*.safetensors") if "mtp.fc.weight" in load_file(path))
        tensors = load_file(file)
        scheme = WeightScheme(dtype=find_dtype(f"int{head_bits}"), group_size=32)
        for name, weight in tensors.items():
            if name.startswith("mtp.") and weight.dim() == 2:
                rounded = round_to_nearest(weight, WeightGrid(scheme, weight.dtype))
                tensors[name] = rounded.dequantize().to(weight.dtype).contiguous()
        save_file(tensors, file, {"format": "pt"})
    return folder


def load(folder: Path, **settings: Any) -> LLM:
    """An engine in float32 on one thread."""
    return LLM(folder, dtype="float32", threads=1, prefix_cache=False, **settings)


def measure(folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Acceptance by position, and equality of texts."""
    forced = {"speculate": "mtp", "force_speculation": True, "max_drafts": MAX_DRAFTS}
    without, drafting = load(folder), load(folder, **forced)
    greedy = [SamplingParams(max_tokens=NEW_TOKENS) for _ in prompts]
    expected = tokens(without, prompts, greedy)
    if tokens(drafting, prompts, greedy) != expected:
        raise SystemExit(f"{folder}: greedy text with drafts differs from text without")
    stats = drafting.stats()
    sampled = [SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, seed=seed) for seed in range(len(prompts))]
    again = load(folder, **forced)
    if tokens(again, prompts, sampled) != tokens(without, prompts, sampled):
        raise SystemExit(f"{folder}: sampled text with drafts differs from text without")
    return {
        "acceptance": stats["acceptance"],
        "by_position": stats["acceptance_by_position"],
        "drafts": stats["drafted_tokens"],
        "sampled_by_position": again.stats()["acceptance_by_position"],
        "text_is_equal": True,
    }


def padded(source: Path, folder: Path) -> Path:
    """Write the model with zeros added, so that it has LAYERS layers and WIDTH feed-forward channels."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    for index in range(config["num_hidden_layers"], LAYERS):
        for name in [name for name in tensors if name.startswith(last)]:
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            value = torch.zeros_like(tensors[name]) if is_output else tensors[name].clone()
            tensors[name.replace(last, f"model.layers.{index}.")] = value
    missing = WIDTH - config["intermediate_size"]
    for name, value in tensors.items():
        if ".mlp." in name:
            pads = (0, missing) if "down_proj" in name else (0, 0, 0, missing)
            tensors[name] = pad(value, pads).contiguous()
    config |= {"num_hidden_layers": LAYERS, "intermediate_size": WIDTH, "layer_types": ["full_attention"] * LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def time_drafts(folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens per second without drafts, with forced ones, and with as many as the engine chooses."""
    settings = {"speculate": "mtp", "max_drafts": MAX_DRAFTS}
    engines = {
        "without": load(folder),
        "forced": load(folder, **settings, force_speculation=True),
        "chosen": load(folder, **settings),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    texts: dict[str, list[Any]] = {name: [] for name in engines}
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for _ in range(ROUNDS):
        for name, llm in engines.items():
            began = time.perf_counter()
            texts[name] = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
            seconds[name].append(time.perf_counter() - began)
    if texts["forced"] != texts["without"] or texts["chosen"] != texts["without"]:
        raise SystemExit("text with drafts differs from text without")
    pairs = {name: list(zip(seconds["without"], each, strict=True)) for name, each in seconds.items()}
    return {
        "weight_bytes": engines["without"].stats()["weight_bytes"],
        "acceptance": engines["forced"].stats()["acceptance"],
        "tokens_per_s": {name: len(prompts) * NEW_TOKENS / median(each) for name, each in seconds.items()},
        "gain": {name: median(plain / each for plain, each in pairs[name]) for name in ("forced", "chosen")},
    }


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Tokens of every answer."""
    return [completion.token_ids for completion in llm.generate(prompts, params)]


if __name__ == "__main__":
    main()
