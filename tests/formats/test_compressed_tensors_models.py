"""Whole models in the compressed-tensors format: transformers loads them and computes what was measured."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quantkit.checkpoint.writer import write_json, write_shard
from quantkit.errors import SchemeError
from quantkit.formats.compressed_tensors import FORMAT
from quantkit.numerics.affine import fake_quantize_tokens
from quantkit.numerics.scheme import LinearScheme
from tests.formats.schemes import SCHEMES, quantize


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in model.named_modules() if isinstance(child, nn.Linear)}


def write_checkpoint(folder: Path, model: LlamaForCausalLM, schemes: Mapping[str, LinearScheme]) -> nn.Module:
    """Writes the model with these linears quantized; returns what it should compute."""
    expected = copy.deepcopy(model)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, scheme in schemes.items():
        weight = quantize(tensors.pop(f"{name}.weight"), scheme.weight, model.dtype)
        tensors.update({f"{name}.{local}": tensor for local, tensor in FORMAT.encode(weight, scheme).items()})
        child = expected.get_submodule(name)
        child.weight.data = weight.dequantize(model.dtype)
        if scheme.activation is not None:
            child.register_forward_pre_hook(
                lambda _, inputs, activation=scheme.activation: (fake_quantize_tokens(inputs[0], activation),)
            )
    left_alone = [name for name in linears_of(model) if name not in schemes]
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]} | FORMAT.config(schemes, left_alone)
    write_json(folder / "config.json", config)
    write_shard(folder / "model.safetensors", tensors)
    return expected


def assert_loads(folder: Path, expected: nn.Module) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        difference = (loaded(tokens).logits - expected(tokens).logits).abs().max().item()
    assert difference <= 1e-4


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_loads_every_scheme(tmp_path, model, name):
    schemes = {linear_name: SCHEMES[name] for linear_name in linears_of(model) if linear_name != "lm_head"}
    assert_loads(tmp_path, write_checkpoint(tmp_path, model, schemes))


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int2-g16", "int8-channel", "fp8"])
def test_a_loader_decodes_the_very_values_that_were_measured(tmp_path, model, name):
    """In the model's own dtype, bit for bit: a code times its scale is rounded once, there as here."""
    schemes = {linear_name: SCHEMES[name] for linear_name in linears_of(model) if linear_name != "lm_head"}
    half = copy.deepcopy(model).to(torch.bfloat16)
    expected = write_checkpoint(tmp_path, half, schemes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    loaded(torch.arange(4).view(1, 4))  # decodes what is still packed
    for linear_name in schemes:
        assert torch.equal(loaded.get_submodule(linear_name).weight, expected.get_submodule(linear_name).weight)


def test_transformers_loads_a_mixed_model(tmp_path, model):
    schemes = {name: SCHEMES["int4-g32"] for name in linears_of(model) if name != "lm_head"}
    for name in list(schemes):
        if name.endswith("down_proj"):
            schemes[name] = SCHEMES["int8-channel"]
        if name.endswith("o_proj"):
            schemes[name] = SCHEMES["w8a8"]
        if name.startswith("model.layers.1.self_attn"):
            del schemes[name]
    schemes["model.layers.0.mlp.up_proj"] = SCHEMES["fp8"]
    assert_loads(tmp_path, write_checkpoint(tmp_path, model, schemes))
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = FORMAT.recognise(config)
    assert scheme is not None
    assert {name: scheme.find(name) for name in linears_of(model)} == {
        name: schemes.get(name) for name in linears_of(model)
    }


def test_asymmetric_weights_beside_others_are_refused(model):
    """transformers 5.23 with compressed-tensors 0.18 to 0.20 cannot read them, whatever wrote them."""
    schemes = {name: SCHEMES["int4-g32-asym"] for name in linears_of(model) if name != "lm_head"}
    schemes["model.layers.0.mlp.up_proj"] = SCHEMES["int8-channel"]
    with pytest.raises(SchemeError, match=r"set weights\.symmetric=true"):
        FORMAT.config(schemes, ["lm_head"])
