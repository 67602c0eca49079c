"""Train a small model with an MTP head from nothing, in the demo language: about four minutes on a CPU core.

    python evals/mtp/train_mtp.py --out mtp-model
    python evals/mtp/train_mtp.py --out mtp-deeper --layers 10

The model is a Qwen3.5 without recurrent layers, so quantkit's engine can run its head and transformers loads the rest.
Model and head are trained together: the model predicts the next token, the head the one after it from the model's
hidden states (with gradients) and the embedding of the next token. The documents of each step are a function of the
seed and the step, so equal threads and versions give equal weights. quantkit ships no such model; `measure_mtp.py`
measures one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "evals" / "demo"))

from packing import PADDING, draw_batch  # noqa: E402 - a script beside this folder

DEMO_MODEL = REPOSITORY / "quantkit" / "demo" / "model"
ROWS, LENGTH = 8, 160
HEAD_WEIGHT = 0.5  # of the head's loss, beside the model's
WARMUP, DECAY = 40, 0.5


class Head(nn.Module):
    """An MTP head; its parameters are named as in published checkpoints, below `mtp.`."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.num_hidden_layers - 1)])
        self.norm = Qwen3_5RMSNorm(width, eps=eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=config.initializer_range)
            else:
                assert "norm" in name, f"{name} has no initial value"

    def forward(self, hidden: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states (B, T, H) of the head, from the model's and the embeddings of the tokens that follow."""
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        return self.norm(self.layers[0](self.fc(joined), position_embeddings=angles))


def build(tokenizer: PreTrainedTokenizerFast, layers: int, seed: int) -> tuple[Qwen3_5ForCausalLM, Head]:
    """A freshly initialised model and its head."""
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        mtp_num_hidden_layers=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    return Qwen3_5ForCausalLM(config), Head(config)


def losses(model: Qwen3_5ForCausalLM, head: Head, tokens: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies of the model and of the head; `known` marks the tokens (B, T) that are no filler."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    embedded = model.model.embed_tokens(tokens[:, 1:-1])
    positions = torch.arange(embedded.shape[1])[None]
    states = head(hidden[:, :-2], embedded, model.model.rotary_emb(embedded, positions))

    def loss(states: Tensor, ahead: int) -> Tensor:
        targets = tokens[:, ahead:].masked_fill(~known[:, ahead:], -100)
        return functional.cross_entropy(model.lm_head(states).flatten(0, 1), targets.flatten(), ignore_index=-100)

    return loss(hidden[:, :-1], 1), loss(states, 2)


def train(model: Qwen3_5ForCausalLM, head: Head, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
    """Train both in place."""
    parameters = list({id(one): one for one in (*model.parameters(), *head.parameters())}.values())
    optimizer = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    began = time.perf_counter()
    for step in range(args.steps):
        batch = draw_batch(tokenizer, f"mtp {args.seed}", step, ROWS, LENGTH)
        own, further = losses(model, head, batch.tokens, batch.kinds != PADDING)
        (own + HEAD_WEIGHT * further).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        factor = min(1.0, (step + 1) / WARMUP, (args.steps - step) / (args.steps * DECAY))
        optimizer.param_groups[0]["lr"] = args.rate * factor
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == args.steps - 1:
            values = f"{time.perf_counter() - began:.0f} s loss {own.item():.3f} head {further.item():.3f}"
            print(f"step {step}/{args.steps} {values}", flush=True)


def export(model: Qwen3_5ForCausalLM, head: Head, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the bfloat16 checkpoint with the head's tensors, and the tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"mtp.{name}": value.detach().to(torch.bfloat16) for name, value in head.state_dict().items()}
    save_file(tensors, file, {"format": "pt"})
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Train and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to export to")
    parser.add_argument("--layers", type=int, default=3, help="of the model; the head has one")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model, head = build(tokenizer, args.layers, args.seed)
    train(model, head, tokenizer, args)
    export(model, head, tokenizer, args.out)


if __name__ == "__main__":
    main()
