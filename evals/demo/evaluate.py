"""Accuracy of a checkpoint on the five demo tasks, by log-likelihood, as lm-eval measures it.

    python evals/demo/evaluate.py quantkit/demo/model --dtype float32
    python evals/demo/evaluate.py quantkit/demo/model --round-bits 3

--round-bits rounds every linear layer of the decoder to the nearest level per output channel, without any
calibration: what a quantizer has to beat.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from language import TASKS, Item
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_DIR = REPOSITORY / "quantkit" / "demo" / "model"
ITEMS_DIR = REPOSITORY / "evals" / "tasks" / "demo"


def read_items(task: str, folder: Path = ITEMS_DIR) -> list[Item]:
    """The held-out items of one task."""
    rows = [json.loads(line) for line in (folder / f"demo_{task}.jsonl").read_text().splitlines()]
    return [Item(task=task, context=r["context"], choices=tuple(r["choices"]), answer=r["answer"]) for r in rows]


@torch.no_grad()
def round_linears(model: PreTrainedModel, bits: int) -> None:
    """Round the decoder's linears in place: one scale per output channel, absmax / ((2^bits - 1) / 2)."""
    top = 2 ** (bits - 1) - 1
    for layer in model.get_decoder().layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                largest = module.weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
                scale = largest / ((2**bits - 1) / 2)
                module.weight.copy_((module.weight / scale).round().clamp(-top - 1, top) * scale)


@torch.no_grad()
def choice_scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: list[Item]) -> list[list[float]]:
    """Log-likelihood of every choice of every item, given its context."""
    starts = [len(tokenizer(item.context).input_ids) for item in items]
    wholes = [[tuple(tokenizer(item.context + choice).input_ids) for choice in item.choices] for item in items]
    # Choices of one token share their input, the context: a quarter of the work.
    rows = {tokens: row for row, tokens in enumerate(dict.fromkeys(w[:-1] for group in wholes for w in group))}
    # (B, T); padding is behind, where causal attention hides it
    inputs = pad_sequence([torch.tensor(tokens) for tokens in rows], batch_first=True)
    log_probs = model(input_ids=inputs, use_cache=False).logits.float().log_softmax(-1)  # (B, T, V)

    def score(whole: tuple[int, ...], start: int) -> float:
        row = log_probs[rows[whole[:-1]]]
        return sum(row[i - 1, whole[i]].item() for i in range(start, len(whole)))

    return [[score(whole, start) for whole in group] for group, start in zip(wholes, starts, strict=True)]


def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: list[Item], batch_size: int) -> float:
    """Share of items whose right choice scores highest, in percent."""
    items = sorted(items, key=lambda item: len(item.context))
    right = 0
    for start in range(0, len(items), batch_size):
        batch = items[start : start + batch_size]
        for item, scores in zip(batch, choice_scores(model, tokenizer, batch), strict=True):
            right += scores.index(max(scores)) == item.answer
    return 100 * right / len(items)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=MODEL_DIR)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--round-bits", type=int, help="round the decoder's linears to this many bits first")
    parser.add_argument("--limit", type=int, help="items per task")
    parser.add_argument("--batch-size", type=int, default=16, help="items per forward pass")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype)).eval()
    if args.round_bits:
        round_linears(model, args.round_bits)
    results = {}
    for task in TASKS:
        results[task] = accuracy(model, tokenizer, read_items(task)[: args.limit], args.batch_size)
        if not args.json:
            print(f"{task:12} {results[task]:6.1f} %", flush=True)
    if args.json:
        print(json.dumps({"dtype": args.dtype, "round_bits": args.round_bits, "accuracy": results}))


if __name__ == "__main__":
    main()
