"""Seeded random mixtures of experts of Qwen3-MoE's kind, in bfloat16: a tiny one, and a layer of many narrow experts.

python evals/scale/mixtures.py tiny|narrow FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checks"))

from make_random_llama import write_tokenizer

SHAPES = {
    "tiny": {
        "vocab_size": 260,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
    },
    "narrow": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 2048,
    },
}


def write(name: str, folder: Path) -> None:
    """Model and tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SHAPES[name])
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
