"""Widths that a recipe's group size does not divide: which groups they get, who is told, and that all of it loads."""

from __future__ import annotations

import json

import pytest
import torch

import quantkit
from quantkit.compress.pipeline.plan import build_plan
from quantkit.compress.recipe import load
from quantkit.errors import SchemeError
from quantkit.runtime.llm import LLM
from tests.compress.pipeline.test_quantize import IDS, decoded_logits
from tests.helpers import make_model, transformers_logits

SHORT = {"calibration.samples": 4, "calibration.sequence_length": 32}
WIDTHS = {"hidden_size": 192, "intermediate_size": 256}  # 128 divides the second alone


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("widths") / "model", **WIDTHS)


def sizes(model, recipe, **options):
    plan = build_plan(str(model), load(recipe, options.pop("overrides", {})), None, "cpu", options.pop("engine", None))
    return plan, {name.removeprefix("model.layers."): s.weight.group_size for name, s in plan.linears.items()}


def test_each_linear_has_the_largest_groups_that_divide_its_inputs(model, tmp_path, text_file):
    overrides = {**SHORT, "calibration.data": str(text_file)}
    result = quantkit.quantize(model, "gptq-int4", tmp_path / "out", overrides=overrides)
    records = {linear.name: linear.scheme for linear in result.layers[1].linears}
    assert records["mlp.down_proj"] == "int4 g128"
    assert {scheme for name, scheme in records.items() if name != "mlp.down_proj"} == {"int4 g64"}
    notes = [text for text in result.warnings if "group_size" in text]
    assert notes == [
        "group_size 128 does not divide 192 inputs: 12 of 14 linears, such as model.layers.0.self_attn.q_proj, "
        "have groups of 64 instead"
    ]
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["result"]["layers"][0]["linears"][0]["scheme"] == "int4 g64"
    logits = transformers_logits(tmp_path / "out", IDS)
    torch.testing.assert_close(logits, decoded_logits(model, tmp_path / "out"), rtol=0, atol=1e-4)
    ours = LLM(tmp_path / "out", dtype="float32").score([IDS[0].tolist()])[0]
    torch.testing.assert_close(ours, logits[0], rtol=0, atol=2e-3)


@pytest.mark.parametrize(("ignore", "samples"), [([], 64), (["*.down_proj"], 48)])
def test_the_widest_linear_to_quantize_gives_the_number_of_samples(model, ignore, samples):
    plan, _ = sizes(model, "gptq-int4", overrides={"calibration.sequence_length": 64, "ignore": ignore})
    assert plan.recipe.calibration.samples == samples == plan.recipe.source["calibration"]["samples"]


@pytest.mark.parametrize(
    ("recipe", "format_"), [("awq-int4", "awq"), ("awq-int4", "compressed-tensors"), ("awq-int4", "gguf")]
)
def test_all_have_the_smallest_where_zero_points_or_the_format_take_one_size(model, recipe, format_):
    plan, given = sizes(model, recipe, overrides={"format": format_})
    assert set(given.values()) == {64}
    assert not any(scheme.weight.symmetric for scheme in plan.linears.values())
    assert "group_size 128 does not divide 192 inputs: all 14 linears have groups of 64 instead" in plan.warnings
    assert plan.recipe.source["weights"]["group_size"] == 64


def test_an_engine_that_reads_one_size_gets_one(model, monkeypatch):
    from quantkit.compress.recipe import assignment

    def judge(engine, stored):
        right = len({linear.groups for linear in stored.linears}) == 1
        return assignment.EngineReading(engine=engine, release="1", reads="fast" if right else "no", reason="one size")

    monkeypatch.setattr(assignment, "judge", judge)
    assert set(sizes(model, "gptq-int4", engine="vllm")[1].values()) == {64}
    assert set(sizes(model, "gptq-int4")[1].values()) == {64, 128}


def test_strict_groups_are_refused_with_sizes_that_engines_read(model):
    strict = {"weights.group_size": {"size": 128, "strict": True}}
    with pytest.raises(SchemeError, match=r"128 does not divide 192 inputs; set weights.group_size to 64 or 32 or cha"):
        sizes(model, "gptq-int4", overrides=strict)
    plan, given = sizes(model, "gptq-int4", overrides={"weights.group_size": {"size": 64, "strict": True}})
    assert set(given.values()) == {64}
    assert plan.recipe.source["weights"]["group_size"] == {"size": 64, "strict": True}


def test_a_width_that_no_size_divides_is_refused(tmp_path):
    odd = make_model(tmp_path / "odd", hidden_size=80, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(SchemeError, match=r"128 does not divide 80 inputs; set weights.group_size to channel, or add"):
        sizes(odd, "rtn-int4")


def test_experts_of_a_layer_share_one_size(tmp_path):
    model = make_model(tmp_path / "moe", "qwen3_moe", hidden_size=256, moe_intermediate_size=64)
    _, given = sizes(model, "rtn-int4")
    assert {size for name, size in given.items() if ".experts." in name} == {64}
    assert given["0.self_attn.q_proj"] == 128
