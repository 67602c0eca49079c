"""Descriptions of MTP heads: their number, and the names and shapes of their tensors."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import ModelError
from quantkit.models.description import ModelDescription, describe
from quantkit.models.families import find
from quantkit.models.mtp import head_tensors, mtp_heads, mtp_prefixes
from tests.helpers import SETTINGS, SIZES

CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}


def description_of(kind: str, **entries: Any) -> ModelDescription:
    config = {**SIZES, **SETTINGS.get(kind, {}), "architectures": [CLASSES[kind]], "model_type": kind, **entries}
    return describe(config, find(config))


def shapes_of(model: ModelDescription, names: list[str] | None = None) -> dict[str, tuple[int, ...]]:
    (head,) = mtp_heads(model, names)
    tensors = head_tensors(model, head)
    linears = {name: (one.out_features, one.in_features) for one in tensors.matrices for name in one.names}
    return linears | dict(tensors.vectors)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_heads_may_be_layers_after_the_last_one(kind):
    model = description_of(kind, num_nextn_predict_layers=1)
    shapes = shapes_of(model)
    assert shapes["model.layers.2.eh_proj"] == (64, 128)
    assert shapes["model.layers.2.embed_tokens"] == shapes["model.layers.2.shared_head.head"] == (260, 64)
    assert shapes["model.layers.2.shared_head.norm.weight"] == shapes["model.layers.2.enorm.weight"] == (64,)
    assert shapes["model.layers.2.mlp.experts.3.down_proj"] == (64, 32)  # as in layer 1; layer 0 is dense
    own = shapes_of(model, ["model.layers.2.eh_proj.weight"])
    assert set(shapes) - set(own) == {"model.layers.2.embed_tokens", "model.layers.2.shared_head.head"}
    assert mtp_prefixes(model) == ("model.layers.2.",)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_heads_of_qwen_have_a_folder_and_full_attention(kind):
    model = description_of(kind)
    shapes = shapes_of(model, ["mtp.layers.0.input_layernorm.weight"])
    assert shapes["mtp.fc"] == (64, 128)
    assert shapes["mtp.pre_fc_norm_hidden.weight"] == shapes["mtp.norm.weight"] == (64,)
    assert shapes["mtp.layers.0.self_attn.q_proj"] == (128, 64)  # queries and their gates
    assert ("mtp.layers.0.mlp.experts.0.up_proj" in shapes) == (kind != "qwen3_5_text")
    assert not any("linear_attn" in name for name in shapes)
    assert mtp_prefixes(model) == ("mtp.",)


def test_names_of_a_head_are_full_names():
    (head,) = mtp_heads(description_of("qwen3_5_text"), ["mtp.layers.0.input_layernorm.weight"])
    assert (head.layer, head.block, head.projection) == (1, "mtp.layers.0.", "mtp.fc")
    assert (head.embedding_norm, head.hidden_norm) == ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    assert head.final_norm == "mtp.norm"
    assert (head.embedding, head.output) == (None, None)

    model = description_of("deepseek_v3", num_nextn_predict_layers=1)
    names = ["model.layers.2.eh_proj.weight", "model.layers.2.embed_tokens.weight"]
    (head,) = mtp_heads(model, names)
    assert head.block == "model.layers.2."
    assert (head.embedding, head.output) == ("model.layers.2.embed_tokens", None)
    (head,) = mtp_heads(model)
    assert head.output == "model.layers.2.shared_head.head"


def test_the_files_decide_how_many_heads_there_are():
    layer = ["mtp.layers.0.input_layernorm.weight", "mtp.layers.1.input_layernorm.weight"]
    named = description_of("qwen3_5_text", mtp_num_hidden_layers=2)
    for model, names, count in (
        (named, layer, 2),
        (named, layer[:1], 1),
        (named, [], 0),
        (named, None, 2),
        (description_of("qwen3_next"), layer, 1),  # its config.json does not say how many
        (description_of("qwen3_next"), None, 0),
        (description_of("deepseek_v3", num_nextn_predict_layers=0), ["model.layers.2.enorm.weight"], 0),
        (description_of("llama", num_nextn_predict_layers=1), None, 0),  # not described
    ):
        assert len(mtp_heads(model, names)) == count
    with pytest.raises(ModelError, match="mtp_num_hidden_layers is -1"):
        mtp_heads(description_of("qwen3_5_text", mtp_num_hidden_layers=-1))
    with pytest.raises(ModelError, match="no layer with attention"):
        mtp_heads(description_of("qwen3_5_text", layer_types=["linear_attention"] * 2), layer)


def test_heads_that_are_not_described_are_not_read():
    model = description_of("llama", num_nextn_predict_layers=2)
    assert mtp_prefixes(model) == ("model.layers.2.", "model.layers.3.", "mtp.")
    assert mtp_prefixes(description_of("llama")) == ()
