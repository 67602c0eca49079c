"""Writes IDS.json for loader_logits.py: windows of a text and the beginnings of its stories, as a model's token ids.

python make_token_ids.py MODEL TEXT IDS.json [--windows 16] [--length 128]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

PROMPTS = 20


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("output")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = Path(options.text).read_text(encoding="utf-8")[:400_000]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer("", add_special_tokens=True)["input_ids"]
    length = options.length - len(start)
    windows = [start + ids[i * length : (i + 1) * length] for i in range(options.windows)]
    step = len(ids) // PROMPTS
    prompts = [start + ids[i * step : i * step + 16] for i in range(PROMPTS)]
    Path(options.output).write_text(json.dumps({"text": windows, "prompts": prompts}))


if __name__ == "__main__":
    main()
