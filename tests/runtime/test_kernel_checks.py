"""Which kernels a model is going to use, as far as headers and settings tell; a child is sent them."""

from __future__ import annotations

import pickle

import pytest
import torch

from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.kernel_checks import checks_of
from tests.helpers import edit_config, make_model

CPU = torch.device("cpu")
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
    "ignore": ["lm_head"],
}


def keys(folder, draft=False, **settings):
    checks = list(checks_of(folder, EngineConfig(**settings), CPU, draft=draft))
    assert [check.key for check in pickle.loads(pickle.dumps(checks))] == [check.key for check in checks]
    return list(dict.fromkeys(check.key for check in checks))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)
    edit_config(folder, quantization_config=SCHEME)
    return folder


def test_of_a_quantized_model(model):
    pages = "16 channels, pages of 64, 2 queries, rotated, bfloat16"
    assert set(keys(model, dtype="bf16", kv_cache="int8", head_dtype="int8")) == {
        "sampling: all kinds",
        "ops: silu, bfloat16",
        "head: int8 channel, bfloat16",
        "quantized_linear: int4 g32, bfloat16",
        "quantized_linear: int8 channel, bfloat16",
        f"attention: keys int8 per token, values int8 per token, {pages}",
    }
    assert keys(model, dtype="bf16", kv_cache="int8", head_dtype="int8", draft=True) == [
        "sampling: all kinds",
        "ops: silu, bfloat16",
        "head: unquantized, bfloat16",
        "quantized_linear: int4 g32, bfloat16",
        f"attention: keys unquantized, values unquantized, {pages}",
    ]


def test_in_float32_and_by_transformers_there_are_few(model):
    assert keys(model, dtype="fp32") == ["sampling: all kinds", "ops: silu, float32", "head: unquantized, float32"]
    assert keys(model, backend="transformers") == ["sampling: all kinds"]


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("qwen3", ["2 queries, norms, rotated, float16"]),
        ("gemma2", ["2 queries, window, softcap, rotated, float16", "2 queries, softcap, rotated, float16"]),
        ("cohere", ["2 queries, interleaved, rotated, float16"]),
    ],
)
def test_attention_is_told_apart_by_what_it_does_besides(tmp_path, family, wanted):
    found = [key for key in keys(make_model(tmp_path, family), dtype="fp16") if key.startswith("attention")]
    assert [key.partition("pages of 64, ")[2] for key in found] == wanted


def test_experts_are_checked_as_they_are_stored(tmp_path):
    folder = make_model(tmp_path, "qwen3_moe")
    assert keys(folder, dtype="fp16")[-1] == "experts: unquantized, float16"
    edit_config(folder, quantization_config=SCHEME)
    assert keys(folder, dtype="fp16")[-1] == "experts: int4 g32, float16"
