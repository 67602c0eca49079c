"""Whole models in the compressed-tensors format: transformers loads them and computes what was measured."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from quantkit.errors import SchemeError
from quantkit.formats.compressed_tensors import FORMAT
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.scheme import LinearScheme
from quantkit.output.writer import write_json, write_shard
from tests.formats.schemes import SCHEMES, quantize, with_input
from tests.helpers import tiny_config


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config("llama", vocab_size=64)).eval()


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in model.named_modules() if isinstance(child, nn.Linear)}


def write_checkpoint(folder: Path, model: LlamaForCausalLM, schemes: Mapping[str, LinearScheme]) -> nn.Module:
    """Writes the model with these linears quantized; returns what it should compute."""
    expected = copy.deepcopy(model)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, scheme in schemes.items():
        weight = with_input(quantize(tensors.pop(f"{name}.weight"), scheme.weight, model.dtype), scheme)
        tensors.update({f"{name}.{local}": tensor for local, tensor in FORMAT.encode(weight, scheme).items()})
        child = expected.get_submodule(name)
        child.weight.data = weight.dequantize(model.dtype)
        if scheme.activation is not None:
            child.register_forward_pre_hook(
                lambda _, inputs, activation=scheme.activation, scale=weight.input_scale: (
                    fake_quantize_inputs(inputs[0], activation, scale),
                )
            )
    ignored = [name for name in linears_of(model) if name not in schemes]
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]} | FORMAT.config(schemes, ignored)
    write_json(folder / "config.json", config)
    write_shard(folder / "model.safetensors", tensors)
    return expected


def assert_loads(folder: Path, expected: nn.Module) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        difference = (loaded(tokens).logits - expected(tokens).logits).abs().max().item()
    assert difference <= 1e-4


MICROSCALING = [name for name, scheme in SCHEMES.items() if scheme.weight.dtype.scale != "float"]


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in MICROSCALING])
def test_transformers_loads_every_scheme(tmp_path, model, name):
    schemes = {linear_name: SCHEMES[name] for linear_name in linears_of(model) if linear_name != "lm_head"}
    assert_loads(tmp_path, write_checkpoint(tmp_path, model, schemes))


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].activation is None])
def test_a_loader_decodes_the_very_values_that_were_measured(tmp_path, model, name):
    """In the model's own dtype, bit for bit: a code times its scale is rounded once, there as here."""
    loaded, expected = load_half(tmp_path, model, name)
    loaded(torch.arange(4).view(1, 4))  # decodes what is still packed
    for linear_name in linears_of(model):
        assert torch.equal(loaded.get_submodule(linear_name).weight, expected.get_submodule(linear_name).weight)


@pytest.mark.parametrize("name", [name for name in MICROSCALING if SCHEMES[name].activation is not None])
def test_transformers_rounds_microscaled_inputs_as_we_do(tmp_path, model, name):
    """In bfloat16, which is what the library decodes these to; both round inputs to 4 or 8 bits."""
    loaded, expected = load_half(tmp_path, model, name)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        found, wanted = loaded(tokens).logits.float(), expected(tokens).logits.float()
        plain = model(tokens).logits
    assert (found - wanted).std() <= 0.1 * wanted.std()
    assert (wanted - plain).std() > (found - wanted).std()


def load_half(
    folder: Path, model: LlamaForCausalLM, name: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, nn.Module]:
    """Written in bfloat16: as transformers loads it in `dtype`, and as it should be."""
    schemes = {linear_name: SCHEMES[name] for linear_name in linears_of(model) if linear_name != "lm_head"}
    expected = write_checkpoint(folder, copy.deepcopy(model).to(torch.bfloat16), schemes)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), expected


@pytest.mark.parametrize(("name", "same"), [("int4-g32", False), ("int4-g32-asym", True), ("int8-g32-asym", True)])
def test_zero_points_in_float32_are_rounded_by_transformers_to_the_type_of_the_scales(tmp_path, model, name, same):
    """Decoded while loading, as zero points need it; without them decoded later, in the type that was asked for."""
    loaded, rounded = load_half(tmp_path, model, name, torch.float32)
    loaded(torch.arange(4).view(1, 4))
    for linear_name in linears_of(model):
        if linear_name != "lm_head":
            weight = loaded.get_submodule(linear_name).weight
            assert weight.dtype == torch.float32
            assert torch.equal(weight, rounded.get_submodule(linear_name).weight.float()) == same


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
