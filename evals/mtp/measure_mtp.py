"""Acceptance of an MTP head's drafts with its weights, or all weights, at 16, 8 and 4 bits; and what drafts gain.

    python evals/mtp/train_mtp.py --out mtp-model
    python evals/mtp/measure_mtp.py mtp-model WORK    # -> evals/results/mtp/acceptance.json

Prompts are the beginnings of documents of the demo language that training did not see. Drafts are forced. Text with
drafts must equal text without, greedy and sampled, in float32; the script stops if it does not. `gain` compares one
sequence at a time with and without drafts, on one thread and in turns, by CPU seconds: the machine may be busy. The
head's linears are rounded to nearest in groups of 32. The model's are quantized by `rtn-int8` and `rtn-int4`; for the
latter, in groups of 32 too.
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
RESULT = ROOT / "results/mtp/acceptance.json"
PROMPT_TOKENS, NEW_TOKENS, MAX_DRAFTS, ROUNDS = 32, 96, 3, 5
VARIANTS = ((16, 16), (16, 8), (16, 4), (8, 8), (4, 4))  # bits of the model's linears, and of the head's


def main() -> None:
    """Measure every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder that train_mtp.py wrote")
    parser.add_argument("work", type=Path, help="folder for the variants")
    parser.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args()
    prompts = held_out(LLM(options.model, lazy=True), options.prompts)
    rows = []
    for bits, head_bits in VARIANTS:
        folder = make_variant(options.model, options.work / f"model{bits}-head{head_bits}", bits, head_bits)
        rows.append({"model_bits": bits, "head_bits": head_bits, **measure(folder, prompts)})
        print(json.dumps(rows[-1]), flush=True)
    about = {
        "prompts": len(prompts), "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "max_drafts": MAX_DRAFTS,
        "speed_rounds": ROUNDS,
    }  # fmt: skip
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
    chosen = load(folder, speculate="mtp", max_drafts=MAX_DRAFTS)
    seconds: dict[str, list[float]] = {"without": [], "drafted": [], "chosen": []}
    for _ in range(ROUNDS):
        for name, llm in (("without", without), ("drafted", drafting), ("chosen", chosen)):
            began = time.process_time()
            for prompt in prompts[:8]:
                llm.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
            seconds[name].append(time.process_time() - began)
    count = 8 * NEW_TOKENS
    return {
        "acceptance": stats["acceptance"],
        "by_position": stats["acceptance_by_position"],
        "drafts": stats["drafted_tokens"],
        "sampled_by_position": again.stats()["acceptance_by_position"],
        "text_is_equal": True,
        "tokens_per_cpu_s": {name: count / median(each) for name, each in seconds.items()},
        "gain": {
            name: median(plain / each for plain, each in zip(seconds["without"], seconds[name], strict=True))
            for name in ("drafted", "chosen")
        },
    }


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Tokens of every answer."""
    return [completion.token_ids for completion in llm.generate(prompts, params)]


if __name__ == "__main__":
    main()
