"""Random models with an MTP head, and the head's computations written plainly around transformers' decoder layer."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers import edit_config, load_tensors
from tests.runtime.helpers import make_loud_model

# Families whose heads the runtime runs, with what makes their models free of recurrent layers.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["full_attention"] * 3},
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {"q_lora_rank": 32},
}


def make_mtp_model(folder: Path, kind: str, *, own_tables: bool = False, **changes: Any) -> Path:
    """Write a random model of two layers with a head; its decoder layer was the third layer of a larger model.

    That larger model stays in the folder `larger`.
    """
    make_loud_model(folder / "larger", kind, **{"num_hidden_layers": 3, **KINDS[kind], **changes})
    generator = torch.Generator().manual_seed(5)
    tensors = load_tensors(folder / "larger")
    width = tensors["model.norm.weight"].shape[0]
    is_qwen = kind.startswith("qwen")
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    if not is_qwen:
        norms = ("model.layers.2.enorm", "model.layers.2.hnorm", "model.layers.2.shared_head.norm")
    for name in norms:
        noise = 0.3 * torch.randn(width, generator=generator)
        tensors[f"{name}.weight"] = noise if is_qwen else 1 + noise
    projection = "mtp.fc" if is_qwen else "model.layers.2.eh_proj"
    tensors[f"{projection}.weight"] = torch.randn(width, 2 * width, generator=generator) / (2 * width) ** 0.5
    if is_qwen:
        tensors = {name.replace("model.layers.2.", "mtp.layers.0."): value for name, value in tensors.items()}
    if own_tables:
        for name in ("embed_tokens", "shared_head.head"):
            table = tensors["model.embed_tokens.weight"]
            tensors[f"model.layers.2.{name}.weight"] = torch.randn(table.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "larger" / "config.json").read_text())
    lists = {key: config[key][:2] for key in ("layer_types", "mlp_layer_types") if isinstance(config.get(key), list)}
    (folder / "config.json").write_text(json.dumps(config))
    count = "mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"
    edit_config(folder, num_hidden_layers=2, **lists, **{count: 1})
    return folder


def make_predictable(folder: Path) -> Path:
    """Write a model in which each token depends only on the one before it, as the head knows too."""
    make_mtp_model(folder, "qwen3_5_text")
    tensors = load_tensors(folder)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "mtp.pre_fc_norm" in name:
            value.zero_()
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["mtp.fc.weight"] = torch.eye(64, 128)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass
class Reference:
    """The model and the head's layer by transformers; the head's norms, projections and order of computations here."""

    folder: Path

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, **options).eval()
        self.layer = AutoModelForCausalLM.from_pretrained(self.folder / "larger", **options).eval().model.layers[2]
        self.tensors = load_tensors(self.folder)
        self.is_qwen = "mtp.fc.weight" in self.tensors

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return scaled * (self.tensors[name + ".weight"] + self.is_qwen)

    def _table(self, own: str, shared: str) -> Tensor:
        return self.tensors.get(f"model.layers.2.{own}.weight", self.tensors[shared + ".weight"])

    @torch.inference_mode()
    def draft_logits(self, ids: list[int], num_steps: int) -> Tensor:
        """Logits of drafts: at every position but the last of `ids`, then at `num_steps` more, after each argmax."""
        hidden = self.model.model(input_ids=torch.tensor([ids[:-1]])).last_hidden_state
        tokens, names = list(ids[1:]), ("model.layers.2.enorm", "model.layers.2.hnorm", "model.layers.2.eh_proj")
        if self.is_qwen:
            names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc")
        final = "mtp.norm" if self.is_qwen else "model.layers.2.shared_head.norm"
        while True:
            embedded = self._table("embed_tokens", "model.embed_tokens")[torch.tensor([tokens])]
            if not self.is_qwen:
                embedded[:, 0] = 0
            joined = torch.cat([self._norm(embedded, names[0]), self._norm(hidden, names[1])], dim=-1)
            x = joined @ self.tensors[names[2] + ".weight"].T
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
            angles = self.model.model.rotary_emb(x, positions)
            out = self.layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
            normed = self._norm(out, final)
            logits = (normed @ self._table("shared_head.head", "lm_head").T)[0]
            if len(tokens) == len(ids) - 1 + num_steps:
                return logits
            tokens.append(int(logits[-1].argmax()))
            hidden = torch.cat([hidden, (normed if self.is_qwen else out)[:, -1:]], dim=1)


def drafts_in_turns(llm: Any, asked: list[list[int]], params: Any) -> tuple[list[Any], list[Any]]:
    """Drafts of each sequence with its length before them, and the texts, of an engine that drafts in some steps."""
    turns, seen, proposer = itertools.cycle((0, 3, 0, 0, 1)), [], llm.engine._proposer
    llm.engine.controller.choose = lambda number: next(turns)
    propose = proposer.propose

    def kept(sequences: Any, count: int) -> None:
        propose(sequences, count)
        seen.extend((s.id, len(s.ids), tuple(s.drafts)) for s in sequences)

    proposer.propose = kept
    return seen, [completion.token_ids for completion in llm.generate(asked, params)]
