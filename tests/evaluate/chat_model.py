"""A tiny chat model that is written, not trained: it calls a tool where tools are offered, and chats where none are.

Its first layer's MLP is a memory: each token of an answer has a direction of its own in the residual stream, and the
MLP maps it to the directions of the tokens that may follow. So an answer is a chain of tokens, with a choice at some,
and a fault in head or MLP changes what the model does, as in a real one.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers import edit_config, make_model

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call> with arguments as JSON <offered>"
    "{% else %}<plain>{% endif %}"
)
WORDS = (
    "<plain>", "<offered>", "<tool_call>", '{"name": "weather", "arguments": ', '{"', "city", '": "', "Oslo", '"}',
    "}\n", "</tool_call>", "Yes", "No", " of", " course", " then", "Well",
)  # fmt: skip
END = "</s>"
NEXT = {
    "<plain>": ("Yes", "No", "Well"),
    "<offered>": ("<tool_call>",),
    "Yes": (" of",),
    "Well": (" of",),
    " of": (" course",),
    " course": (" then",),
    "No": (" then",),
    " then": (END,),
    "</tool_call>": (END,),
    **dict(zip(WORDS[2:10], [(word,) for word in WORDS[3:11]], strict=True)),
}
VOCABULARY = 258 + len(WORDS)
PROMPTS = [
    {"messages": [{"role": "user", "content": f"{word}?"}], "expect": {"options": ["Yes", "No", "Well"]}}
    for word in ("Tea", "Rain", "Snow", "Bread", "Salt", "Soup", "Wine", "Fish", "Corn", "Rice")
] + [
    {
        "messages": [{"role": "user", "content": f"Weather {number}?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
                },
            }
        ],
        "expect": {"calls": ["weather"]},
    }
    for number in range(10)
]


def ids() -> dict[str, int]:
    """Token ids of the words."""
    return {END: 1, **{word: 258 + number for number, word in enumerate(WORDS)}}


def make_chat_model(folder: Path) -> Path:
    """Write the model in float32."""
    from transformers import AutoTokenizer

    make_model(folder, vocab_size=VOCABULARY, max_position_embeddings=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(WORDS))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    assert [tokenizer.convert_tokens_to_ids(word) for word in WORDS] == list(range(258, VOCABULARY))
    edit_config(folder, eos_token_id=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1)
        elif "o_proj" in name or "down_proj" in name or "embed" in name:
            tensor.mul_(0.01)  # whatever else there is hardly matters
    torch.manual_seed(1)
    directions = torch.linalg.qr(torch.randn(64, 64))[0]
    of_word = {word: directions[number] for number, word in enumerate(WORDS)}
    said = {word: directions[32 + number] for number, word in enumerate((*WORDS, END))}
    mlp, known = "model.layers.0.mlp", ids()
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{mlp}.{name}.weight"].zero_()
    tensors["lm_head.weight"].zero_()
    for row, word in enumerate(WORDS):
        tensors["model.embed_tokens.weight"][known[word]] = of_word[word]
        tensors[f"{mlp}.gate_proj.weight"][row] = of_word[word]
        tensors[f"{mlp}.up_proj.weight"][row] = of_word[word]
        for place, follower in enumerate(NEXT.get(word, ())):  # the first is the likeliest
            tensors[f"{mlp}.down_proj.weight"][:, row] += said[follower] * (1 - place / 8) / 16
    for word, direction in said.items():
        tensors["lm_head.weight"][known[word]] = 1.2 * direction
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    return folder


def halve_end(tensors: dict[str, torch.Tensor]) -> None:
    """The head's row of the end token at half its size."""
    tensors["lm_head.weight"][1] *= 0.5


def swap_call(tensors: dict[str, torch.Tensor]) -> None:
    """The head's rows of the tool-call token and of a word exchanged."""
    one, other = ids()["<tool_call>"], ids()["Yes"]
    tensors["lm_head.weight"][[one, other]] = tensors["lm_head.weight"][[other, one]]


def two_bits(tensors: dict[str, torch.Tensor]) -> None:
    """The first layer's MLP rounded to four levels per row."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = tensors[f"model.layers.0.mlp.{name}.weight"]
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-9) / 2
        weight.copy_((weight / scale).round().clamp(-2, 1) * scale)


def write_prompts(path: Path) -> Path:
    """Write the prompts as a file for --prompts."""
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path
