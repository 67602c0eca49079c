"""Heads that predict further tokens stay as they are: every loader is told so, for each of their modules."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.utils.match import is_match
from safetensors.torch import save_file

import quantkit
from quantkit.compress.convert import convert
from tests.helpers import load_tensors, make_model

LAYER = "mtp.layers.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Qwen3-Next with a head in its files that transformers does not build; its experts are two tensors."""
    folder = make_model(tmp_path_factory.mktemp("mtp") / "model", "qwen3_next", dtype=torch.bfloat16)
    tensors = load_tensors(folder) | {
        "mtp.fc.weight": torch.randn(64, 128),
        "mtp.norm.weight": torch.ones(64),
        f"{LAYER}.self_attn.q_proj.weight": torch.randn(64, 64),
        f"{LAYER}.mlp.gate.weight": torch.randn(4, 64),
        f"{LAYER}.mlp.experts.gate_up_proj": torch.randn(4, 64, 64),
        f"{LAYER}.mlp.experts.down_proj": torch.randn(4, 64, 32),
        "mtp.conv.weight": torch.randn(8, 1, 4),
    }
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def quantized(folder, names):
    """Those of these modules that compressed-tensors takes for quantized, were they linears."""
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    targets = [target for group in section["config_groups"].values() for target in group["targets"]]
    return [name for name in names if is_match(name, torch.nn.Linear(1, 1), targets, section["ignore"])]


def test_no_module_of_the_head_counts_as_quantized(model, tmp_path):
    quantkit.quantize(model, "rtn-int8", tmp_path / "out")
    convert(tmp_path / "out", "gptq", tmp_path / "gptq")
    convert(tmp_path / "gptq", "compressed-tensors", tmp_path / "back")
    experts = f"{LAYER}.mlp.experts"
    # Engines ask for experts in one tensor by the module, and by the linears that it is made of.
    names = ["mtp.fc", f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.gate", experts]
    names += [f"{experts}.{number}.{part}_proj" for number in range(4) for part in ("gate", "up", "down")]
    body = "model.layers.1.mlp.shared_expert.down_proj"
    for folder in (tmp_path / "out", tmp_path / "back"):
        assert quantized(folder, [*names, "lm_head", body]) == [body]
        ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
        assert len(ignored) == len(set(ignored))
        assert not {"model.embed_tokens", "mtp.conv"} & set(ignored)
