"""Recipes with `mtp:`: linears of MTP heads are rounded to nearest, into separate files, and all loaders read them."""

from __future__ import annotations

import json

import pytest
import torch

import quantkit
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline import data_free, layers
from quantkit.compress.recipe import load
from quantkit.errors import RecipeError, SchemeError
from quantkit.formats import recognise
from quantkit.inspection import inspect
from tests.compress.pipeline.test_mtp import FUSED, targeted, vllm_compressed_tensors
from tests.compress.pipeline.test_ranks import compress
from tests.helpers import load_tensors, transformers_logits
from tests.mtp_models import HEADS, make_mtp_model

SMALL = {"mtp": "int8", "weights.group_size": 32}


def decoded(folder, name):
    """The weight of a linear as any reader of the checkpoint decodes it."""
    reader = CheckpointReader(folder)
    format_, scheme = recognise(reader.config, "config.json")
    local = {one.removeprefix(f"{name}."): reader.tensor(one) for one in reader.names if one.startswith(f"{name}.")}
    return scheme.find(name), format_.decode(local, scheme.find(name)).dequantize(torch.float32)


@pytest.mark.parametrize("kind", HEADS)
def test_linears_of_the_head_have_eight_bits_and_the_rest_is_as_without(tmp_path, kind):
    model = make_mtp_model(tmp_path / "model", kind)
    kept = quantkit.quantize(model, "rtn-int4", tmp_path / "kept", overrides={**SMALL, "mtp": "keep"})
    made = quantkit.quantize(model, "rtn-int4", tmp_path / "made", overrides=SMALL)
    assert kept.mtp.describe() == "not quantized"
    count = made.mtp.num_linears
    assert made.mtp.describe() == f"quantized without data: {count} linears int8 channel"
    assert made.num_quantized == kept.num_quantized + count
    source, before, after = (load_tensors(folder) for folder in (model, tmp_path / "kept", tmp_path / "made"))
    same = [name for name in before if name in after]
    assert all(torch.equal(before[name], after[name]) for name in same)
    gone = {name for name in before if name not in after}
    assert gone and all(name.startswith(("mtp.layers.0.", "model.layers.2.")) for name in gone)
    assert {name for name in same if name.endswith((".fc.weight", ".eh_proj.weight"))}
    for linear in made.mtp.linears:
        scheme, weight = decoded(tmp_path / "made", linear.name)
        assert scheme.describe() == "int8 channel"
        if f"{linear.name}.weight" in source:  # experts may be stored in one tensor
            original = source[f"{linear.name}.weight"].float()
            assert 0 < (weight - original).norm() < 0.01 * original.norm()
    section = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    names = [linear.name for linear in made.mtp.linears]
    assert targeted(names, section) == set(names)
    assert all(vllm_compressed_tensors(name, section, FUSED) for name in names)
    assert json.loads((tmp_path / "made" / "quantkit.json").read_text())["result"]["mtp"]["num_linears"] == count


def test_stacked_experts_are_quantized_one_by_one(tmp_path):
    model = make_mtp_model(tmp_path / "model", "qwen3_5_moe_text", stacked=True)
    made = quantkit.quantize(model, "rtn-int4", tmp_path / "out", overrides=SMALL)
    source = load_tensors(model)["mtp.layers.0.mlp.experts.gate_up_proj"].float()
    assert sum(".experts." in linear.name for linear in made.mtp.linears) == 12
    for part, rows in (("gate", slice(0, 32)), ("up", slice(32, 64))):
        weight = decoded(tmp_path / "out", f"mtp.layers.0.mlp.experts.3.{part}_proj")[1]
        assert (weight - source[3, rows]).norm() < 0.01 * source[3, rows].norm()


def test_transformers_computes_the_same_with_and_without(tmp_path):
    model = make_mtp_model(tmp_path / "model", "qwen3_5_text", dtype=torch.float32)
    ids = torch.tensor([[3, 5, 9, 200, 7]])
    for name, mtp in (("kept", "keep"), ("made", "int8")):
        quantkit.quantize(model, "rtn-int4", tmp_path / name, overrides={**SMALL, "mtp": mtp})
    kept, made = (transformers_logits(tmp_path / name, ids) for name in ("kept", "made"))
    torch.testing.assert_close(made, kept, rtol=0, atol=0)


def test_ignore_and_overrides_apply_to_heads_too(tmp_path):
    model = make_mtp_model(tmp_path / "model", "qwen3_5_text")
    wider = {"modules": "mtp.*.down_proj", "weights": {"dtype": "int8", "group_size": 32}}
    changes = {**SMALL, "ignore": ["mtp.*.self_attn.*"], "overrides": [wider]}
    result = quantkit.quantize(model, "rtn-int4", tmp_path / "out", overrides=changes)
    schemes = {linear.name.rpartition(".")[2]: linear.scheme for linear in result.mtp.linears}
    assert schemes == {"gate_proj": "int8 channel", "up_proj": "int8 channel", "down_proj": "int8 g32"}
    assert result.mtp.describe().endswith("; 4 not quantized")


def test_a_run_that_ends_in_the_head_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    model = make_mtp_model(tmp_path / "model", "qwen3_next")
    monkeypatch.setattr(data_free, "_FILE_BYTES", 1 << 14)  # several files
    quantkit.quantize(model, "rtn-int4", tmp_path / "whole", overrides=SMALL)
    written = []

    def write_audited_shard(plan, file, *args):
        if file.startswith("model-mtp-"):
            if written:
                raise KeyboardInterrupt
            written.append(file)
        return layers.write_audited_shard(plan, file, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data_free, "write_audited_shard", write_audited_shard)
        quantkit.quantize(model, "rtn-int4", tmp_path / "out", overrides=SMALL)
    result = quantkit.quantize(model, "rtn-int4", tmp_path / "out", overrides=SMALL)
    assert result.resumed_layers == result.num_layers
    files = sorted(path.name for path in (tmp_path / "whole").iterdir() if path.name != "quantkit-run.json")
    assert sum(name.startswith("model-mtp-") for name in files) > 1
    assert all((tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in files)


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path, text_file):
    given = (make_mtp_model(tmp_path / "model", "qwen3_5_text"), text_file, "rtn-int4", "--set", "mtp=int8")
    assert compress(tmp_path, 2, *given) == compress(tmp_path, 1, *given)


def test_a_model_without_heads_is_quantized_as_without_the_key(tiny_llama, tmp_path):
    for name, mtp in (("kept", "keep"), ("made", "int8")):
        result = quantkit.quantize(tiny_llama, "rtn-int8", tmp_path / name, overrides={"mtp": mtp})
        assert result.mtp is None
        assert ("mtp has no effect" in " ".join(result.warnings)) is (mtp == "int8")
    assert load_tensors(tmp_path / "kept").keys() == load_tensors(tmp_path / "made").keys()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"mtp": "int8", "format": "gptq"},
            "mtp: only format compressed-tensors can store MTP heads",
        ),
        ({"mtp": "int8", "format": "awq"}, "the format is awq; remove 'mtp'"),
        ({"mtp": "int9"}, "mtp: expected int8, keep or a mapping such as .*, found 'int9'"),
        ({"mtp": {"dtype": "fp8", "group_size": "tensor"}}, "mtp: MTP heads need a scale per channel"),
        ({"mtp": {"bits": 8}}, "unknown key 'bits'"),
    ],
)
def test_a_wrong_key_is_refused_in_one_line(changes, says):
    with pytest.raises(RecipeError, match=says) as caught:
        load("rtn-int4", changes)
    assert "\n" not in str(caught.value)


def test_zero_points_beside_another_scheme_are_refused(tmp_path):
    model = make_mtp_model(tmp_path / "model", "qwen3_5_text")
    changes = {**SMALL, "weights.symmetric": False}
    with pytest.raises(SchemeError, match="zero points together with weights of a different scheme"):
        quantkit.quantize(model, "rtn-int4", tmp_path / "out", overrides=changes)


def test_inspect_says_how_heads_are_stored(tmp_path, tiny_llama):
    model = make_mtp_model(tmp_path / "model", "deepseek_v3")
    assert inspect(model).mtp.describe().startswith("1: bfloat16, ")
    assert inspect(tiny_llama).mtp is None
    quantkit.quantize(model, "rtn-int4", tmp_path / "out", overrides=SMALL)
    summary = inspect(tmp_path / "out").mtp
    assert summary.stored_as == ("bfloat16", "int8 channel")
    assert summary.num_parameters == inspect(model).mtp.num_parameters
    assert summary.num_bytes < inspect(model).mtp.num_bytes
