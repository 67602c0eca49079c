"""Write a Llama of a given size with random weights, a shard at a time, so that it never is in memory as a whole.

    python evals/checks/make_random_llama.py OUT [--parameters 3b] [--dtype float32]

For checks of memory and time: the numbers mean nothing, their shapes and their amount do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_WIDE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32}  # TinyLlama-1.1B, of 22 layers
SHAPES = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    **{
        f"1b-{count}layer{'s' * (count > 1)}": {**_WIDE, "num_hidden_layers": count, "num_key_value_heads": 4}
        for count in (1, 2, 8)
    },
    "1b": {**_WIDE, "num_hidden_layers": 22},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
}
VOCABULARY = 32000


def main() -> None:
    """Write the model and a byte-level tokenizer beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parameters", choices=SHAPES, default="3b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    make(options.out, options.parameters, getattr(torch, options.dtype))


def make(out: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model of that name from SHAPES to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    config = config_of(SHAPES[name], dtype)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(out, VOCABULARY)
    write_weights(out, config, dtype)


def config_of(shape: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a Llama with grouped-query attention and an untied head."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **shape,
    }


def write_tokenizer(out: Path, size: int = 0) -> None:
    """A tokenizer of single bytes, and of words up to so many tokens: what is drawn then has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"\u0120word{number}" for number in range(len(pieces), size)]  # behind a space, as GPT-2 writes it
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(out)


def weight_shapes(config: Mapping[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shapes of the weights of a Llama by name: of each layer, then of what is outside of them."""
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = config["num_key_value_heads"] * width // config["num_attention_heads"]
    heads = {"q": width, "k": keys, "v": keys, "o": width}
    linears = {f"self_attn.{name}_proj": (rows, width) for name, rows in heads.items()}
    linears |= {f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")} | {"mlp.down_proj": (width, inner)}
    norms: dict[str, tuple[int, ...]] = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (width,))
    for layer in range(config["num_hidden_layers"]):
        yield {f"model.layers.{layer}.{name}.weight": size for name, size in {**linears, **norms}.items()}
    table = (vocabulary, width)
    yield {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": (width,)}


def write_weights(out: Path, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """One shard per layer and one for the rest, with an index."""
    generator, weight_map = torch.Generator().manual_seed(0), dict[str, str]()
    for number, shapes in enumerate(weight_shapes(config), 1):
        file = f"model-{number:05d}-of-{config['num_hidden_layers'] + 1:05d}.safetensors"
        tensors = {name: random_tensor(size, generator, dtype) for name, size in shapes.items()}
        save_file(tensors, out / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shapes, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def random_tensor(size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Ones for norms, small normal numbers for matrices."""
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    return torch.randn(size, generator=generator).mul_(0.02).to(dtype)


if __name__ == "__main__":
    main()
