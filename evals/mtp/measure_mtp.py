"""Acceptance of an MTP head's drafts with its weights, or all weights, at 16, 8 and 4 bits; and what drafts gain.

    python evals/mtp/train_mtp.py --out mtp-model
    python evals/mtp/measure_mtp.py mtp-model WORK            # -> evals/results/mtp/acceptance.json
    python evals/mtp/train_mtp.py --out mtp-deeper --layers 10
    # -> evals/results/mtp/speed.json; on a quiet machine
    python evals/mtp/measure_mtp.py mtp-model WORK --speed --deeper mtp-deeper

Prompts are the beginnings of documents of the demo language that training did not see. Drafts are forced. Text with
drafts must equal text without, greedy and sampled, in float32; the script stops if it does not. The head's linears are
rounded to nearest in groups of 32. The model's are quantized by `rtn-int8` and `rtn-int4`; for the latter, in groups of
32 too.

`--speed` compares one sequence at a time with and without drafts, in turns, by the clock. It does so with the model as
it is, with a deeper one that was trained in the same way, and with a padded one: layers that add zero, and feed-forward
channels that no layer reads. The padded model computes the same function, and its steps read as many bytes as those of
a larger model.
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

from quantkit.api import quantize
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.scheme import WeightScheme
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/mtp"
PROMPT_TOKENS, NEW_TOKENS, MAX_DRAFTS, ROUNDS = 32, 96, 3, 9
PADDED_LAYERS, PADDED_CHANNELS = 16, 8192
VARIANTS = ((16, 16), (16, 8), (16, 4), (8, 8), (4, 4))  # bits of the model's linears, and of the head's


def main() -> None:
    """Measure every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder that train_mtp.py wrote")
    parser.add_argument("work", type=Path, help="folder for the variants")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--speed", action="store_true", help="measure speeds instead of acceptance")
    parser.add_argument("--deeper", type=Path, help="model of 10 layers, for --speed")
    options = parser.parse_args()
    prompts = held_out(LLM(options.model, lazy=True), options.prompts)
    if options.speed:
        models = {"3 layers": options.model, "3 layers, padded": padded(options.model, options.work / "padded")}
        if options.deeper is not None:
            models["10 layers"] = options.deeper
        rows = [{"model": name, **speed(folder, prompts[:8])} for name, folder in models.items()]
        keep("speed", rows, {"prompts": 8, "rounds": ROUNDS, "threads": 1})
        return
    rows = []
    for bits, head_bits in VARIANTS:
        folder = make_variant(options.model, options.work / f"model{bits}-head{head_bits}", bits, head_bits)
        rows.append({"model_bits": bits, "head_bits": head_bits, **measure(folder, prompts)})
        print(json.dumps(rows[-1]), flush=True)
    keep("acceptance", rows, {"prompts": len(prompts)})


def keep(name: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Write a result."""
    settings |= {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "max_drafts": MAX_DRAFTS}
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = {"about": plain(stamp()), "settings": settings, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


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
    """Acceptance by position, equality of texts, and the ratio of CPU seconds."""
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
    """Write the model with more layers and feed-forward channels, none of which change what it computes."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    count, width = config["num_hidden_layers"], config["intermediate_size"]
    config |= {
        "num_hidden_layers": PADDED_LAYERS,
        "intermediate_size": PADDED_CHANNELS,
        "layer_types": ["full_attention"] * PADDED_LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name, weight in list(tensors.items()):
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            noise = torch.randn(PADDED_CHANNELS - width, weight.shape[1]) * weight.float().std()
            tensors[name] = torch.cat([weight, noise.to(weight.dtype)])
        elif name.endswith("down_proj.weight"):
            tensors[name] = torch.cat([weight, weight.new_zeros(len(weight), PADDED_CHANNELS - width)], dim=1)
    for name, weight in list(tensors.items()):
        start, _, rest = name.partition(f".layers.{count - 1}.")
        if rest and not start.startswith("mtp"):
            silent = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            for layer in range(count, PADDED_LAYERS):
                tensors[f"{start}.layers.{layer}.{rest}"] = torch.zeros_like(weight) if silent else weight.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def speed(folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens per second without drafts, with forced ones and with those that the engine chooses to make."""
    drafts = {"speculate": "mtp", "max_drafts": MAX_DRAFTS}
    llms = {
        "without": load(folder),
        "drafted": load(folder, force_speculation=True, **drafts),
        "chosen": load(folder, **drafts),
    }
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    for turn in range(ROUNDS):
        for name, llm in llms.items():
            began = time.perf_counter()
            text = [tokens(llm, [prompt], [params]) for prompt in prompts]
            seconds[name].append(time.perf_counter() - began)
            if turn == 0 and name == "without":
                expected = text
            if text != expected:
                raise SystemExit(f"{folder}: text of {name} differs from text without drafts")
    gains = {
        name: [plain / each for plain, each in zip(seconds["without"], seconds[name], strict=True)]
        for name in ("drafted", "chosen")
    }
    return {
        "weight_bytes": llms["without"].stats()["weight_bytes"],
        "acceptance": llms["drafted"].stats()["acceptance"],
        "tokens_per_s": {name: len(prompts) * NEW_TOKENS / median(each) for name, each in seconds.items()},
        "gain": {name: [median(each), min(each), max(each)] for name, each in gains.items()},
    }


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Tokens of every answer."""
    return [completion.token_ids for completion in llm.generate(prompts, params)]


if __name__ == "__main__":
    main()
