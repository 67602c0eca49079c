"""Every smoothing source that a family's data names can absorb a scale: the layer computes what it computed before."""

from __future__ import annotations

import pytest
import torch

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.algorithms._smoothing import can_fold, fold, shared_by_heads
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.stream import Stream
from quantkit.huggingface.skeleton import Skeleton
from quantkit.models.families import find
from tests.helpers import EVERY_FAMILY, make_model

# Sets of the last layer that can be smoothed; a family with fewer has lost one.
COUNTS = {
    "llama": 4,
    "phi": 2,
    "cohere": 3,
    "gpt2": 2,
    "opt": 4,
    "mixtral": 7,
    "deepseek_v3": 9,
    "gpt_oss": 3,
    "olmo2": 2,
    "gemma2": 4,
    "nemotron": 3,
    "qwen3_5": 4,
    "stablelm": 4,
}


def contexts(folder):
    """The layers of a model, with no data."""
    family = find(CheckpointReader(folder).config)
    skeleton = Skeleton(ModelReader(folder, family), family, torch.float32, torch.device("cpu"))
    for index in range(skeleton.num_layers):
        yield LayerContext(
            name=skeleton.layer_name(index),
            stream=Stream(
                skeleton.layer(index),
                ActivationStore(None, "ram", iter(())),
                lambda hidden, index=index: skeleton.arguments(index, hidden),
            ),
            sets=skeleton.linear_sets(index),
            schemes={},
            scale_dtype={},
            head_dim=skeleton.head_dim(index),
        )


def check_folds(layer, hidden):
    """Fold random scales into every set that can take them; how many there were."""
    expected, count = layer.forward(hidden), 0
    for group in layer.sets:
        if not can_fold(layer, group):
            continue
        width = layer.weight(group.linears[0]).shape[1]
        fold(layer, group, shared_by_heads(layer, group, torch.rand(width).mul(3).exp()))
        count += 1
        torch.testing.assert_close(layer.forward(hidden), expected, rtol=2e-4, atol=2e-4, msg=f"{group}")
    return count


# DeepSeek-V4's layers take several streams and token ids: what AWQ folds there is seen in whole models only.
@pytest.mark.parametrize("family", [name for name in EVERY_FAMILY if name != "deepseek_v4"])
def test_a_folded_layer_computes_the_same(tmp_path, family):
    folder, hidden = make_model(tmp_path / "model", family, num_hidden_layers=2), torch.randn(2, 12, 64)
    with torch.inference_mode():
        counts = [check_folds(layer, hidden) for layer in contexts(folder)]
    assert counts[-1] == COUNTS.get(family, counts[-1])


def test_rounding_a_norm_that_adds_one_does_not_change_the_layer(tmp_path):
    """Near -1, bfloat16 has steps that are large beside 1 + weight."""
    folder, hidden = make_model(tmp_path / "model", "gemma2", num_hidden_layers=1), torch.randn(2, 12, 64)
    with torch.inference_mode():
        (layer,) = contexts(folder)
        norms = ("input_layernorm.weight", "pre_feedforward_layernorm.weight")
        for name in norms:
            weight = layer.block.get_parameter(name).data
            weight.copy_(weight.uniform_(-0.999, -0.9).bfloat16())
        layer.stored_dtype.update(dict.fromkeys(norms, torch.bfloat16))
        assert check_folds(layer, hidden) == 4
        for name in norms:
            stored = layer.block.get_parameter(name)
            assert torch.equal(stored, stored.to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("family", "changes", "count"),
    [
        ("opt", {"do_layer_norm_before": False}, 2),
        ("opt", {"activation_function": "gelu"}, 3),
        ("falcon", {"parallel_attn": False, "new_decoder_architecture": False}, 2),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}, 3),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, 0),
        ("deepseek_v3", {"q_lora_rank": None}, 8),
        ("qwen2_moe", {"mlp_only_layers": [1]}, 4),
        ("qwen3_moe", {"decoder_sparse_step": 2}, 7),
    ],
)
def test_variants_of_a_family(tmp_path, family, changes, count):
    folder, hidden = make_model(tmp_path / "model", family, num_hidden_layers=2, **changes), torch.randn(2, 12, 64)
    with torch.inference_mode():
        assert [check_folds(layer, hidden) for layer in contexts(folder)][-1] == count
