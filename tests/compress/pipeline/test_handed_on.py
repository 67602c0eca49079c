"""Models whose layers hand on more than hidden states: calibrated in the model's own order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.calibration.stream import Stream
from quantkit.compress.discovery.discover import discover
from quantkit.compress.pipeline import layers
from quantkit.huggingface.layer_inputs import compute_with
from quantkit.huggingface.skeleton import Skeleton
from tests.compress.pipeline.test_quantize import IDS, run
from tests.helpers import (
    known_to_transformers,
    load_tensors,
    make_model,
    save_tokenizer,
    tiny_config,
    transformers_logits,
)

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_INDEX = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 16}
_FOUR = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, dict[str, Any]] = {
    # Per-layer inputs from token ids; the upper half of the layers attends to keys and values of the lower half.
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": _FOUR,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 260,
        "head_dim": 16,
        "global_head_dim": 16,
        "sliding_window": 32,
    },
    # Every other layer attends to the tokens that the one before has chosen.
    "glm_moe_dsa": {
        **_LATENT,
        **_INDEX,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    # Every layer is given the embeddings, and attention layers share their weights.
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "tie_word_embeddings": True,
        "attn_layer_offset": 1,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 32,
    },
    # The state of a router goes on to the next one; so few experts that one may see every token.
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 16},
    # Several streams of hidden states, and experts chosen by token id.
    "deepseek_v4": {
        **_INDEX,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe"],
        "max_position_embeddings": 512,
    },
    "hy_v4": {
        **_LATENT,
        **_INDEX,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
}


AWQ_THEN_GPTQ = [{"awq": {"clip": False}}, {"gptq": {"asymmetric_calibration": 1.0, "true_sequential": True}}]
ALWAYS = {"zaya": "gptq-int4"}
"""What is calibrated by default; the others take as long each."""


def make_handed_on(folder, family, **changes):
    """A random model of one of `MODELS`, with a tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **{**MODELS[family], **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(4)
    model.save_pretrained(folder, save_original_format=False)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    return make_handed_on(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("model", sorted(filter(known_to_transformers, MODELS)), indirect=True)
def test_layers_one_by_one_compute_what_the_model_computes(model):
    from transformers import AutoModelForCausalLM

    family = discover(CheckpointReader(model)).family
    assert family.hands_on
    skeleton = Skeleton(ModelReader(model, family), family, torch.float32, torch.device("cpu"))
    call = skeleton.first_call(IDS)
    inputs = [call.hidden]
    for index in range(skeleton.num_layers - 1):
        call = skeleton.next_call(index, call, compute_with(skeleton.layer(index)))
        inputs.append(call.hidden)
    expected: list[torch.Tensor] = []
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for layer in whole.get_submodule(family.layers):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: expected.append((*args, *kwargs.values())[0].clone()), with_kwargs=True
        )
    with torch.no_grad():
        whole(input_ids=IDS)
    assert len(inputs) == len(expected)
    for ours, theirs in zip(inputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param(name, recipe, marks=[] if recipe in ("rtn-int4", ALWAYS.get(name)) else [pytest.mark.slow])
        for name in sorted(filter(known_to_transformers, MODELS))
        for recipe in ("gptq-int4", "rtn-int4")
    ],
    indirect=["model"],
)
def test_they_load_in_transformers(model, tmp_path, text_file, recipe):
    kept = model.name.startswith(("deepseek_v4", "hy_v4", "zaya"))  # whose experts have other names in files
    changes = {"ignore": ["*.experts.[0-9]*"]} if kept else {}
    changes |= {"steps": AWQ_THEN_GPTQ} if recipe == "gptq-int4" else {}
    run(model, recipe, tmp_path / "out", text_file, overrides={"format": "compressed-tensors", **changes})
    actual, original = (transformers_logits(folder, IDS) for folder in (tmp_path / "out", model))
    if recipe == "rtn-int4" or model.name.startswith(tuple(ALWAYS)):
        # Whether codes decode to the values of the run is the same for all recipes, and calibration takes long.
        run(model, recipe, tmp_path / "dense", text_file, overrides={"format": "dense", **changes})
        torch.testing.assert_close(actual, transformers_logits(tmp_path / "dense", IDS), rtol=0, atol=1e-4)
    assert 0 < (actual - original).norm() / original.norm() < 1


def test_weights_that_layers_share_stay_as_they_are(tmp_path):
    if not known_to_transformers("zamba"):
        pytest.skip("the installed transformers lacks it")
    model = make_handed_on(tmp_path / "model", "zamba")
    result = run(model, "rtn-int8", tmp_path / "out")
    names = [f"{layer.name}.{linear.name}" for layer in result.layers for linear in layer.linears]
    assert names
    assert not any("shared_transf" in name for name in names)
    before, after = load_tensors(model), load_tensors(tmp_path / "out")
    shared = [name for name in before if "shared_transf" in name]
    assert shared == [name for name in after if "shared_transf" in name]


def test_experts_beside_an_mlp_in_the_layer_itself_are_experts(tmp_path, text_file):
    if not known_to_transformers("gemma4_text"):
        pytest.skip("the installed transformers lacks it")
    few = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": True}
    mixture = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    model = make_handed_on(tmp_path / "model", "gemma4_text", **few, **mixture)
    result = run(model, "gptq-int4", tmp_path / "out", text_file, overrides={"format": "dense"})
    assert all(len(layer.tokens_per_expert) == 4 and sum(layer.tokens_per_expert) > 0 for layer in result.layers)
    actual, original = (transformers_logits(folder, IDS) for folder in (tmp_path / "out", model))
    assert 0 < (actual - original).norm() / original.norm() < 1


@pytest.mark.skipif(not known_to_transformers("gemma4_text"), reason="the installed transformers lacks it")
def test_an_interrupted_run_goes_on_with_what_was_handed_on(tmp_path, text_file):
    """States of both models, with keys and values that later layers use again, from disk."""
    model, stopped = make_handed_on(tmp_path / "model", "gemma4_text"), []
    run(model, "gptq-int4", tmp_path / "whole", text_file, activations="disk")
    original = layers.write_layer

    def stop(plan, index, layer, folder):
        if index == 3 and not stopped:
            stopped.append(index)
            raise KeyboardInterrupt
        return original(plan, index, layer, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "write_layer", stop)
        with pytest.raises(KeyboardInterrupt):
            run(model, "gptq-int4", tmp_path / "parts", text_file)
    assert run(model, "gptq-int4", tmp_path / "parts", text_file).resumed_layers == 3
    first, second = load_tensors(tmp_path / "whole"), load_tensors(tmp_path / "parts")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.skipif(not known_to_transformers("gemma3n_text"), reason="the installed transformers lacks it")
def test_autoround_aims_at_all_streams_wherever_they_are_kept(tmp_path, text_file, monkeypatch):
    """Of Gemma 3n, which has them in front of batch and tokens; each output of the original is computed once."""
    few = {"num_kv_shared_layers": 0, "layer_types": _FOUR[:2], "head_dim": 16, "sliding_window": 32, "laurel_rank": 32}
    few |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 260, "altup_num_inputs": 2}
    model = make_model(tmp_path / "model", "gemma3n_text", **few)
    own, computed, forward, context = [], [], Stream.forward, layers.layer_context

    def built(*given):
        layer = context(*given)
        own.append(layer.stream)
        return layer

    def counted(stream, *given, **extra):
        computed.extend([] if stream in own else given)
        return forward(stream, *given, **extra)

    monkeypatch.setattr(layers, "layer_context", built)
    monkeypatch.setattr(Stream, "forward", counted)
    for mode in ("ram", "disk"):
        changes = {"steps.autoround.iterations": 24}
        run(model, "autoround-int4", tmp_path / mode, text_file, activations=mode, overrides=changes)
    assert len(computed) == 2 * 2 * 8
    first, second = load_tensors(tmp_path / "ram"), load_tensors(tmp_path / "disk")
    assert all(torch.equal(first[name], second[name]) for name in first)
