"""Layers handed out one by one compute what the whole transformers model computes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, ModelError
from quantkit.huggingface.experts import rebuild_layer
from quantkit.huggingface.skeleton import Skeleton
from quantkit.models.families import find
from quantkit.models.family import Experts
from tests.helpers import FAMILIES, edit_config, make_model


def open_skeleton(folder, dtype=torch.float32):
    reader = CheckpointReader(folder)
    return Skeleton(reader, find(reader.config), dtype, torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_layer_by_layer_equals_the_whole_model(tmp_path, family, shards):
    folder = make_model(tmp_path / family, family, shards=shards)
    assert len(list(folder.glob("*.safetensors"))) >= shards
    skeleton = open_skeleton(folder)
    ids = torch.randint(2, 260, (2, 48))
    name = "model.embed_tokens.weight"
    used = ids.unique()
    row_of = torch.zeros(260, dtype=torch.int64)
    row_of[used] = torch.arange(len(used))
    hidden = skeleton.embed(ids, skeleton.reader.gather_rows(name, used), row_of)
    with torch.no_grad():
        for index in range(skeleton.num_layers):
            hidden = skeleton.layer(index)(hidden, **skeleton.arguments(index, hidden))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        hidden = model.model.norm(hidden)
        whole = model.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(hidden, whole, rtol=1e-5, atol=1e-5)


def test_no_weight_is_held(tmp_path):
    skeleton = open_skeleton(make_model(tmp_path / "m"))
    held = [p for p in skeleton._model.parameters() if p.device.type != "meta"]
    assert held == []
    skeleton.layer(0)
    assert [p for p in skeleton._model.parameters() if p.device.type != "meta"] == []


def test_shapes_without_reading(tmp_path):
    shapes = open_skeleton(make_model(tmp_path / "m")).linear_shapes(1)
    assert shapes["self_attn.k_proj"] == (32, 64)
    assert shapes["mlp.down_proj"] == (64, 96)


def test_a_model_without_one_hidden_size_is_as_wide_as_its_embeddings(tmp_path):
    """BLT's config.json has a width for each of its parts and none for the whole."""
    skeleton = open_skeleton(make_model(tmp_path / "m"))
    skeleton._config = SimpleNamespace(num_attention_heads=4)
    assert (skeleton.hidden_size, skeleton.head_dim(0)) == (64, 16)


def test_of_several_stacks_of_experts_those_of_the_family_are_taken_apart():
    """Ernie 4.5 VL has experts for text and others for images in every layer."""

    def stack():
        module = nn.Module()
        for name, shape in (("gate_up_proj", (4, 64, 32)), ("down_proj", (4, 32, 32))):
            module.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
        return module

    layer = nn.ModuleDict({"text": nn.ModuleDict({"experts": stack()}), "image": nn.ModuleDict({"experts": stack()})})
    up = ("text.experts.{expert}.gate_proj", "text.experts.{expert}.up_proj")
    data = Experts(up=up, down="text.experts.{expert}.down_proj")
    rebuild_layer(layer, replace(find({"architectures": ["LlamaForCausalLM"]}), experts=data))
    names = {name for name, _ in layer.named_parameters()}
    assert {"text.experts.0.gate_proj.weight", "image.experts.gate_up_proj"} <= names
    assert not any(name.startswith("image.experts.0") for name in names)


def test_broken_weights_are_named(tmp_path):
    folder = make_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    skeleton = open_skeleton(folder)
    skeleton.layer(0)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 NaN or infinite"):
        skeleton.layer(1)


def test_wrong_shapes_and_missing_tensors_are_named(tmp_path):
    folder = make_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.layers.0.input_layernorm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight \(64,\) is missing"):
        open_skeleton(folder).check_tensors()
    tensors["model.layers.0.input_layernorm.weight"] = norm[:32].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has shape \(32,\), but config.json says \(64,\)"):
        open_skeleton(folder).check_tensors()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no-such-type"},
        {"hidden_size": "wide"},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**39},
        {"num_hidden_layers": float("inf")},
        {"num_nextn_predict_layers": 1 << 31},
        {"vision_config": {"num_hidden_layers": 1 << 40}},
    ],
)
def test_configs_that_build_nothing_are_one_line(tmp_path, changes):
    folder = make_model(tmp_path / "m")
    edit_config(folder, **changes)
    with pytest.raises(ModelError) as caught:
        open_skeleton(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
