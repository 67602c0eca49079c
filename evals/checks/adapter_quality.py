"""Whether to merge an adapter before quantizing or to apply it to the quantized base: KL against original + adapter.

    python evals/checks/adapter_quality.py train BASE ADAPTER --text FILE [--steps 60] [--rank 16]     # needs peft
    python evals/checks/adapter_quality.py compare BASE ADAPTER WORK --text FILE [--recipes gptq-int4,rtn-int4]
                                                                    # -> evals/results/adapter/<name>.json

`train` trains a LoRA adapter on all linears of the decoder layers, with a fixed seed, on windows from random places of
a text. `compare` quantizes the base twice per recipe: with the adapter merged, and without it, where the adapter then
computes on top of the codes. Give `compare` a text that `train` did not see. Windows, KL and intervals are those of
evals/accuracy/score.py.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "accuracy"))

import torch
from provenance import VERSIONS, known_rows, plain, stamp, version
from score import Interval, difference, interval, log_probabilities, read_windows, score

import quantkit
from quantkit.evaluate.loading import load_llm
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import PromptScoring, SamplingParams

RESULTS = Path(__file__).resolve().parents[1] / "results/adapter"
TRAINING = "training.json"


def main() -> None:
    """Train an adapter, or compare the two ways to use it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "compare"))
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("work", type=Path, nargs="?")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--recipes", default="gptq-int4,awq-int4,rtn-int4")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=40)
    options = parser.parse_args()
    if options.what == "train":
        train(options)
    else:
        compare(options)


def train(options: argparse.Namespace) -> None:
    """Train on random windows of the text; the recipe of the training is kept beside the adapter."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    ids = AutoTokenizer.from_pretrained(options.base)(options.text.read_text(encoding="utf-8"), verbose=False)
    tokens, draw = ids["input_ids"], random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.rate)
    for step in range(options.steps):
        starts = [draw.randrange(len(tokens) - options.length) for _ in range(options.batch)]
        batch = torch.tensor([tokens[start : start + options.length] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} of {options.steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(options.adapter)
    kept = {key: getattr(options, key) for key in ("steps", "batch", "length", "rate")}
    (options.adapter / TRAINING).write_text(json.dumps({"text": options.text.name, **kept}, indent=1) + "\n")


def compare(options: argparse.Namespace) -> None:
    """A row per recipe; rows that are there already are kept."""
    merged = {"merged": options.adapter}
    file = RESULTS / f"{options.base.name}.json"
    rows = known_rows(file)
    original = _load(options.base, merge=options.adapter)
    text = options.text.read_text(encoding="utf-8")
    windows = read_windows(original, text, max_windows=options.windows)
    predictions = list(log_probabilities(original, windows))
    plain_base, applied = _load(options.base), _load(options.base, adapters=merged, adapter="merged")
    base, same = score([plain_base, applied], original, windows, predictions)
    distance = logit_difference(options, applied, text)
    del plain_base, applied
    about = {
        **(plain(stamp()) or {}),
        "versions": {name: version(name) for name in (*VERSIONS, "peft")},
        "text": options.text.name,
        "windows": base.windows,
        "tokens": base.tokens,
        "adapter": _adapter(options.adapter),
        "kl of the base without the adapter": _numbers(interval(base.kl)),
        "kl of the adapter applied to the original": _numbers(interval(same.kl)),
        "largest logit difference from transformers + PEFT": distance,
        "calibration": f"bundled text, {options.samples} samples of {options.sequence_length} tokens",
    }
    for recipe in options.recipes.split(","):
        if any(row["recipe"] == recipe for row in rows):
            continue
        folders = [_quantized(options, recipe, how) for how in ("merged", "base")]
        models = [_load(folders[0]), _load(folders[1], adapters=merged, adapter="merged")]
        first, second = score(models, original, windows, predictions)
        rows.append(
            {
                "recipe": recipe,
                "merged, then quantized": _numbers(interval(first.kl)),
                "quantized, then applied": _numbers(interval(second.kl)),
                "difference": _numbers(difference(first.kl, second.kl)),
                "top1": [first.top1, second.top1],
                "perplexity": [first.perplexity, second.perplexity],
            }
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


def logit_difference(options: argparse.Namespace, llm: LLM, text: str) -> float:
    """Largest absolute difference of the engine's logits from those of transformers + PEFT, both in float32.

    Over the first 1,024 tokens of the text, in two windows. `llm` is the base with the adapter on top.
    """
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, options.adapter).eval()
    tokens, params = llm.encode(text[:20000]), SamplingParams(max_tokens=0, scoring=PromptScoring(logits=True))
    differences = []
    for window in (tokens[:512], tokens[512:1024]):
        (done,) = llm.generate([window], params)
        with torch.inference_mode():
            expected = model(torch.tensor([window])).logits[0]
        assert done.scores is not None and done.scores.logits is not None
        differences.append((done.scores.logits - expected).abs().max().item())
    return max(differences)


def _quantized(options: argparse.Namespace, recipe: str, how: str) -> Path:
    """A checkpoint of the base, with the adapter merged or without it."""
    folder: Path = options.work / f"{recipe}-{how}"
    data = {"calibration.samples": options.samples, "calibration.sequence_length": options.sequence_length}
    shutil.rmtree(folder, ignore_errors=True)
    quantkit.quantize(
        options.base,
        recipe,
        folder,
        overrides={} if recipe.startswith("rtn") else data,
        device="cpu",
        adapter=options.adapter if how == "merged" else None,
    )
    return folder


def _load(path: Path, **settings: Any) -> LLM:
    # Little cache: a forked child may not reserve what several models could use.
    return load_llm(str(path), dtype="float32", memory="256MiB", **settings)


def _adapter(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    training = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
    return {**{key: config[key] for key in ("r", "lora_alpha", "target_modules")}, "training": training}


def _numbers(value: Interval) -> list[float]:
    return [value.mean, value.low, value.high]


if __name__ == "__main__":
    main()
