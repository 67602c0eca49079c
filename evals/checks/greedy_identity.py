"""Greedy text of the bundled runtime against transformers, token by token, in every way the engine can compute it.

    python evals/checks/greedy_identity.py MODEL TEXT [--recipes] [--prompts 20] [--new-tokens 200]

MODEL is a float32 model directory, TEXT a file whose paragraphs give the prompts. Each way must give the very tokens
that transformers gives: alone, in a batch, in chunks, without chunks, with the prefix cache, with preemption forced by
a small pool, with n-gram and with draft-model speculation. With --recipes, every shipped recipe compresses MODEL and
the checkpoint is compared with transformers reading it. Where a token differs, the gap between the two best logits of
transformers is shown: below 1e-4 (relative) it is a tie that float rounding may break either way. Exit code 1 if
anything else differs.

Recipes that quantize activations are shown, not judged: a difference of 1e-7 before the rounding of an input is a whole
step after it, so that transformers with its cache does not even agree with transformers without; both counts are shown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from quantkit.evaluate.fidelity import Texts, divergences

Prompts = list[list[int]]
TIE = 1e-4


def main() -> int:
    """Compare, print a line per way, return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--recipes", action="store_true")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--group-size", type=int, default=32, help="for recipes whose groups do not divide this model")
    options = parser.parse_args()
    prompts = read_prompts(options)
    with tempfile.TemporaryDirectory() as work:
        good = compare_ways(options, prompts, Path(work))
        if options.recipes:
            good &= compare_recipes(options, prompts, Path(work))
    return 0 if good else 1


def read_prompts(options: argparse.Namespace) -> Prompts:
    """Beginnings of different lengths, 3 to about 40 tokens, of the text's paragraphs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    paragraphs = [part.strip() for part in options.text.read_text(encoding="utf-8").split("\n") if len(part) > 80]
    step = max(1, len(paragraphs) // options.prompts)
    chosen = paragraphs[::step][: options.prompts]
    return [tokenizer(text)["input_ids"][: 3 + 2 * index] for index, text in enumerate(chosen)]


def compare_ways(options: argparse.Namespace, prompts: Prompts, work: Path) -> bool:
    """All ways of the engine on the model itself."""
    import quantkit

    wanted, model = reference(options.model, prompts, options.new_tokens)
    draft = work / "draft"
    quantkit.quantize(options.model, "rtn-int4", draft, overrides={"weights.group_size": options.group_size})
    longest = max(len(prompt) for prompt in prompts) + options.new_tokens
    ways: dict[str, dict[str, Any]] = {
        "alone": {"max_sequences": 1},
        "in a batch": {"max_sequences": len(prompts)},
        "chunks of 7 and less": {"token_budget": 7, "max_sequences": 4},
        "not chunked": {"chunked": False},
        "prefix cache off": {"prefix_cache": False},
        "prefix cache, small pages": {"page_size": 4},
        "preemption": {"page_size": 8, "num_pages": -(-longest // 8) + 8},
        "n-gram speculation": {"speculate": "ngram", "force_speculation": True},
        "draft speculation": {"speculate": str(draft), "force_speculation": True},
    }
    good = True
    for name, settings in ways.items():
        good &= report(name, *ours(options.model, prompts, options.new_tokens, settings), wanted, model, prompts)
    return good


def compare_recipes(options: argparse.Namespace, prompts: Prompts, work: Path) -> bool:
    """Every shipped recipe's checkpoint in both engines."""
    import quantkit

    good = True
    for name in quantkit.list_recipes():
        out = work / name
        changes: dict[str, Any] = {}
        if "int4" in name:
            changes["weights.group_size"] = options.group_size
        if not name.startswith(("rtn", "fp8")):
            changes |= {"calibration.samples": 16, "calibration.sequence_length": 128}
            changes["calibration.data"] = str(options.text)
        quantkit.quantize(options.model, name, out, overrides=changes)
        wanted, model = reference(out, prompts, options.new_tokens)
        found, stats = ours(out, prompts, options.new_tokens, {})
        if name.startswith(("w8a8", "fp8")):
            itself, _ = reference(out, prompts, options.new_tokens, use_cache=False)
            print(f"{name:28} {agreement(found, wanted)}")
            print(f"    transformers, no cache   {agreement(itself, wanted)}", flush=True)
        else:
            good &= report(name, found, stats, wanted, model, prompts)
    return good


def agreement(found: Texts, wanted: Texts) -> str:
    """How many texts are equal, and the mean number of tokens before the first that differs."""
    parted = divergences(found, wanted)
    lengths = [len(text) if at is None else at for at, text in zip(parted, wanted, strict=True)]
    equal = f"{parted.count(None)} of {len(wanted)} identical"
    return f"{equal}; {sum(lengths) / len(lengths):.0f} tokens agree on average"


def ours(path: Path, prompts: Prompts, new_tokens: int, settings: dict[str, Any]) -> tuple[Texts, dict[str, Any]]:
    """New tokens of the bundled runtime, and its statistics; each prompt is given twice where pages are shared."""
    from quantkit import LLM, SamplingParams

    llm = LLM(path, dtype="float32", **settings)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    if settings.get("page_size") == 4:
        llm.generate(prompts, params)  # the second time finds the pages of the first
    return [done.token_ids for done in llm.generate(prompts, params)], llm.stats()


def reference(path: Path, prompts: Prompts, new_tokens: int, use_cache: bool = True) -> tuple[Texts, Any]:
    """New tokens of transformers, and the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    found = []
    for prompt in prompts:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                use_cache=use_cache,
            )
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found, model


def report(name: str, found: Texts, stats: dict[str, Any], wanted: Texts, model: Any, prompts: Prompts) -> bool:
    """One line, and one more per prompt that differs; whether all differences are ties."""
    parted = divergences(found, wanted)
    extra = {key: stats[key] for key in ("preemptions", "prefix_hit_tokens", "acceptance") if stats.get(key)}
    print(f"{name:28} {parted.count(None)} of {len(wanted)} identical  {extra or ''}", flush=True)
    good = True
    for number, (at, a, b) in enumerate(zip(parted, found, wanted, strict=True)):
        if at is None:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompts[number], *b[:at]]])).logits[0, -1]
        gap = ((logits[b[at]] - logits[a[at]]) / logits.abs().max()).item()
        good &= gap < TIE
        print(f"    prompt {number}: token {at} is {a[at]} instead of {b[at]}, relative gap of their logits {gap:.1e}")
    return good


if __name__ == "__main__":
    sys.exit(main())
