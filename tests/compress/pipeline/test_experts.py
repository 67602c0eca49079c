"""Mixtures of experts under compression: a linear per expert, tokens counted, a rule for under-calibrated ones."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantkit import quantize
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.algorithms._gptq_jobs import fitting_rounds
from quantkit.compress.calibration.expert_inputs import UNDER_CALIBRATED_TOKENS
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.stream import Stream
from quantkit.compress.pipeline import layers as pipeline
from quantkit.errors import RecipeError, SchemeError
from quantkit.huggingface.experts import rebuild_layer
from quantkit.huggingface.skeleton import Skeleton
from quantkit.models.families import find
from quantkit.runtime.llm import LLM
from tests.compress.pipeline.test_quantize import IDS, run
from tests.helpers import load_tensors, make_model, tiny_config, transformers_logits

SMALL = {"calibration.samples": 4, "calibration.sequence_length": 32}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("mixtral") / "model", "mixtral")


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_linear_experts_compute_what_the_fused_module_computes(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    family = find({"architectures": [type(model).__name__]})
    layer = model.get_submodule(family.layers)[1]
    fused = next((m for m in layer.modules() if getattr(getattr(m, "gate_up_proj", None), "ndim", 0) == 3), None)
    if fused is None:
        pytest.skip("this version of transformers keeps experts apart")
    hidden, index = torch.randn(20, 64), torch.randint(0, 4, (20, 1))
    index = torch.cat([index, (index + 1) % 4], dim=1)
    weights = torch.rand(20, 2)
    stacked = {name: value.detach().clone() for name, value in fused.named_parameters()}
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        if name in stacked:
            getattr(fused, name).data.normal_()
            stacked[name] = getattr(fused, name).data.clone()
    with torch.no_grad():
        expected = fused(hidden, index, weights)
    rebuild_layer(layer, family)
    container = layer.get_submodule(family.experts.down.partition(".{expert}")[0])
    fill(container, stacked, family.experts)
    with torch.no_grad():
        torch.testing.assert_close(container(hidden, index, weights), expected, rtol=1e-5, atol=1e-6)
        dense = torch.zeros(20, 4).scatter_(1, index, weights)  # as transformers 4 hands scores to gpt-oss
        torch.testing.assert_close(container(hidden, index, dense), expected, rtol=1e-5, atol=1e-6)


def fill(container, stacked, data):
    """Weights of one linear each out of the stacked ones, written down independently of `ModelReader`."""
    names = [name.rpartition(".")[2] for name in (*data.up, data.down)]
    for number, expert in enumerate(container):
        up, down = stacked["gate_up_proj"][number], stacked["down_proj"][number]
        if data.transposed:
            up, down = up.T, down.T
        halves = (up[0::2], up[1::2]) if data.interleaved else up.chunk(2)
        for name, weight in zip(names, (*halves, down), strict=True):
            expert.get_submodule(name).weight = torch.nn.Parameter(weight.clone())
        if "down_proj_bias" in stacked:
            bias = stacked["gate_up_proj_bias"][number]
            for name, value in zip(names, (bias[0::2], bias[1::2], stacked["down_proj_bias"][number]), strict=True):
                expert.get_submodule(name).bias = torch.nn.Parameter(value.clone())


def stack_experts(folder, output):
    """The same Qwen3-MoE with the experts of each layer in two tensors, as newer tools save them."""
    shutil.copytree(folder, output)
    tensors = load_file(output / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        kinds = {
            kind: [tensors.pop(f"{prefix}{e}.{kind}_proj.weight") for e in range(4)] for kind in ("gate", "up", "down")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat([torch.stack(kinds["gate"]), torch.stack(kinds["up"])], dim=1)
        tensors[f"{prefix}down_proj"] = torch.stack(kinds["down"])
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return output


def test_stacked_and_single_experts_are_one_model(tmp_path, text_file):
    single = make_model(tmp_path / "single", "qwen3_moe")
    stacked = stack_experts(single, tmp_path / "stacked")
    family = find(CheckpointReader(single).config)
    readers = [ModelReader(folder, family) for folder in (single, stacked)]
    assert readers[0].names == readers[1].names
    assert readers[0].num_bytes == readers[1].num_bytes
    for name in readers[0].names:
        assert torch.equal(readers[0].tensor(name), readers[1].tensor(name))
        assert readers[0].info(name).shape == readers[1].info(name).shape
    for folder in (single, stacked):
        run(folder, "rtn-int8", tmp_path / f"{folder.name}-out")
    first, second = load_tensors(tmp_path / "single-out"), load_tensors(tmp_path / "stacked-out")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_ignored_keeps_the_layout_it_came_in(tmp_path):
    stacked = stack_experts(make_model(tmp_path / "single", "qwen3_moe"), tmp_path / "stacked")
    run(stacked, "rtn-int8", tmp_path / "out", overrides={"ignore": ["*.mlp.experts.*"]})
    before, after = load_tensors(stacked), load_tensors(tmp_path / "out")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(before[name], after[name])
    assert "model.layers.1.self_attn.q_proj.weight_packed" in after


def test_tokens_are_counted_and_starved_experts_noted(mixtral, tmp_path, text_file):
    result = run(mixtral, "gptq-int4", tmp_path / "out", text_file, overrides=SMALL)
    for layer in result.layers:
        assert len(layer.tokens_per_expert) == 4
        assert sum(layer.tokens_per_expert) == 2 * 4 * 32  # two experts for each of four times 32 tokens
        under_calibrated = sum(count < UNDER_CALIBRATED_TOKENS for count in layer.tokens_per_expert)
        noted = [note for note in layer.notes if "experts saw fewer than" in note]
        assert len(noted) == (under_calibrated > 0)
        assert all("their statistics use all tokens" in note for note in noted)
    assert any(min(layer.tokens_per_expert) < UNDER_CALIBRATED_TOKENS for layer in result.layers)
    written = json.loads((tmp_path / "out" / "quantkit.json").read_text())["result"]["layers"]
    assert [tuple(layer["tokens_per_expert"]) for layer in written] == [
        layer.tokens_per_expert for layer in result.layers
    ]
    assert {"model.layers.0.block_sparse_moe.gate", "lm_head"} <= set(result.ignored)
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert torch.equal(load_tensors(mixtral)[router], load_tensors(tmp_path / "out")[router])


def test_routed_statistics_leave_starved_experts_to_plain_rounding(mixtral, tmp_path, text_file):
    changes = {**SMALL, "calibration.experts": "routed"}
    result = run(mixtral, "gptq-int4", tmp_path / "out", text_file, overrides=changes)
    plain, compared = run(mixtral, "rtn-int4", tmp_path / "plain"), 0
    ours, rounded = load_tensors(tmp_path / "out"), load_tensors(tmp_path / "plain")
    assert result.num_quantized == plain.num_quantized
    for layer in result.layers:
        for number, count in enumerate(layer.tokens_per_expert):
            name = f"{layer.name}.block_sparse_moe.experts.{number}.w1.weight_packed"
            assert torch.equal(ours[name], rounded[name]) == (count < UNDER_CALIBRATED_TOKENS)
            compared += count < UNDER_CALIBRATED_TOKENS
        if min(layer.tokens_per_expert) < UNDER_CALIBRATED_TOKENS:
            assert any("they are rounded to nearest" in note for note in layer.notes)
    assert compared


def test_each_expert_has_its_own_scales(mixtral, tmp_path, text_file):
    run(mixtral, "gptq-int4", tmp_path / "out", text_file, overrides=SMALL)
    tensors = load_tensors(tmp_path / "out")
    scales = [tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight_scale"] for e in range(4)]
    assert all(not torch.equal(scales[0], other) for other in scales[1:])


@pytest.mark.parametrize("recipe", ["awq-int4", "gptq-int4"])
def test_a_killed_run_resumes_bit_for_bit(mixtral, tmp_path, text_file, monkeypatch, recipe):
    changes = {**SMALL, "weights.symmetric": True}
    whole = run(mixtral, recipe, tmp_path / "whole", text_file, overrides=changes)
    run_layer = pipeline._run_layer

    def killed(plan, index, *rest):
        if index == 1:
            raise KeyboardInterrupt
        run_layer(plan, index, *rest)

    monkeypatch.setattr(pipeline, "_run_layer", killed)
    with pytest.raises(KeyboardInterrupt):
        run(mixtral, recipe, tmp_path / "resumed", text_file, overrides=changes)
    monkeypatch.undo()
    resumed = run(mixtral, recipe, tmp_path / "resumed", text_file, overrides=changes)
    assert resumed.resumed_layers == 1
    assert [r.tokens_per_expert for r in resumed.layers] == [r.tokens_per_expert for r in whole.layers]
    for path in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "resumed" / path.name).read_bytes()


@pytest.mark.parametrize("recipe", ["gptq-int4", "fp8-dynamic", "w8a8-int8"])
def test_compressed_experts_run_natively(mixtral, tmp_path, text_file, recipe):
    """The runtime takes quantized experts; with weights alone it computes what transformers decodes."""
    result = run(mixtral, recipe, tmp_path / "out", text_file, overrides=SMALL if recipe != "fp8-dynamic" else {})
    assert any("INT8 experts" in text for text in result.warnings) == (recipe == "w8a8-int8")
    llm = LLM(tmp_path / "out", dtype="float32")
    assert llm.model.paged
    if recipe == "gptq-int4":
        expected = transformers_logits(tmp_path / "out", IDS[:1])[0]
        torch.testing.assert_close(llm.score([IDS[0].tolist()])[0], expected, rtol=0, atol=2e-3)


def test_the_recipe_to_try_first_leaves_out_what_loaders_of_experts_do_not_take(mixtral, tmp_path, text_file):
    result = run(mixtral, "awq-int4", tmp_path / "out", text_file, overrides=SMALL)
    why = "transformers 5.23.0: its dequantizer stops at experts with zero points"
    assert f"symmetric: auto gives the weights no zero points: {why}" in result.warnings
    assert not any(name.endswith("zero_point") for name in load_tensors(tmp_path / "out"))
    recipe = json.loads((tmp_path / "out" / "quantkit.json").read_text())["recipe"]
    assert recipe["weights"]["symmetric"] is True


def test_experts_with_zero_points_are_for_engines_that_take_them(mixtral, tmp_path):
    asymmetric = {"weights.group_size": 16, "weights.symmetric": False}
    result = run(mixtral, "rtn-int4", tmp_path / "out", overrides=asymmetric)
    assert any("its dequantizer stops at experts with zero points" in text for text in result.warnings)
    run(mixtral, "rtn-int4", tmp_path / "dense", overrides={**asymmetric, "format": "dense"})
    codes, values = (LLM(tmp_path / name, dtype="float32").score([IDS[0].tolist()])[0] for name in ("out", "dense"))
    torch.testing.assert_close(codes, values, rtol=0, atol=2e-3)
    auto = {**asymmetric, "weights.symmetric": "auto"}
    result = quantize(mixtral, "rtn-int4", tmp_path / "vllm", overrides=auto, engine="vllm")
    assert result.warnings[0].startswith("vLLM 0.32.0: slow, ")
    assert any(name.endswith("zero_point") for name in load_tensors(tmp_path / "vllm"))
    with pytest.raises(SchemeError, match=r"transformers 5\.23\.0 \(.* set weights.symmetric=true"):
        quantize(mixtral, "rtn-int4", tmp_path / "no", overrides=asymmetric, engine="transformers")
    with pytest.raises(SchemeError, match=r"vLLM 0\.32\.0 \(the CPU build has no kernel for experts with"):
        quantize(mixtral, "rtn-int4", tmp_path / "no", overrides=asymmetric, engine="vllm:cpu")
    assert not (tmp_path / "no").exists()


def test_what_no_loader_takes_is_refused(mixtral, tmp_path):
    with pytest.raises(RecipeError, match=r"experts\.0\.w1 .*, \.\.\. .*w3 .* are fused by inference engines"):
        run(mixtral, "rtn-int8", tmp_path / "out", overrides={"ignore": ["*.experts.2.*"]})
    assert not (tmp_path / "out").exists()


def test_statistics_of_experts_come_in_turns_when_they_are_many(mixtral):
    family = find(CheckpointReader(mixtral).config)
    skeleton = Skeleton(ModelReader(mixtral, family), family, torch.float32, torch.device("cpu"))
    block, sets = skeleton.layer(0), skeleton.linear_sets(0)
    layer = LayerContext(name="x", stream=Stream(block), sets=sets, schemes={}, scale_dtype={}, head_dim=16)
    pending = [(group, group.linears) for group in sets]
    assert list(fitting_rounds(layer, pending, one_by_one=False)) == [pending]  # narrow experts: everything fits
    rounds = list(fitting_rounds(layer, pending, one_by_one=True))
    assert [len(entries) for entries in rounds] == [1, 1, 1, 4]  # no expert reads what another gives
    for expert in range(4):
        block.get_submodule(f"block_sparse_moe.experts.{expert}").w2 = torch.nn.Linear(400, 2, bias=False)
    rounds = list(fitting_rounds(layer, pending, one_by_one=False))
    assert [len(entries) for entries in rounds] == [len(pending) - 4, *[1] * 4]
    assert [entry for entries in rounds for entry in entries] == pending


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("dtype: nvfp4", "NVFP4 experts without their global scale"),
        ("dtype: mxfp8", "scales per block or group"),
        ("dtype: fp8, group_size: 32x32", "scales per block or group"),
    ],
)
def test_experts_that_only_transformers_misreads_are_written_and_said(mixtral, tmp_path, weights, said):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"name: mine\nweights: {{{weights}}}\n")
    result = quantize(mixtral, recipe, tmp_path / "out")
    assert any(said in text for text in result.warnings)
    assert any(".experts." in linear.name for layer in result.layers for linear in layer.linears)


def test_experts_may_have_other_numbers_than_attention(mixtral, tmp_path):
    """transformers takes one scheme for all experts, and the right one only if it comes first in config.json."""
    changes = {"overrides": [{"modules": "*.experts.*", "weights": {"dtype": "int4", "group_size": 32}}]}
    run(mixtral, "rtn-int8", tmp_path / "out", overrides=changes)
    run(mixtral, "rtn-int8", tmp_path / "dense", overrides={**changes, "format": "dense"})
    torch.testing.assert_close(
        transformers_logits(tmp_path / "out", IDS), transformers_logits(tmp_path / "dense", IDS), rtol=0, atol=1e-4
    )
