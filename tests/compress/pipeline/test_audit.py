"""The last check fires: one planted defect for each thing it promises."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.checkpoint_writer import Shard
from quantkit.compress.pipeline.finish import audit_checkpoint
from quantkit.compress.pipeline.layers import check_weight
from quantkit.compress.pipeline.plan import build_plan
from quantkit.compress.pipeline.run import quantize
from quantkit.compress.recipe import load
from quantkit.errors import AuditError
from quantkit.results import LayerRecord
from tests.helpers import load_tensors, make_model

RECIPE = load("rtn-int4", {"weights.group_size": 32, "weights.symmetric": False})


@pytest.fixture
def finished(tmp_path):
    """Plan, folder and records of a checkpoint that passes."""
    model = make_model(tmp_path / "model")
    quantize(str(model), RECIPE, tmp_path / "out")
    result = json.loads((tmp_path / "out" / "quantkit-run.json").read_text())
    records = [LayerRecord.from_dict(layer) for layer in result["layers"]]
    plan = build_plan(str(model), RECIPE, tmp_path / "other", "cpu")
    audit_checkpoint(tmp_path / "out", plan, records)
    return plan, tmp_path / "out", records


def rewrite(folder, name, value):
    """Replace one tensor of a sharded checkpoint; None drops it."""
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    tensors.pop(name)
    if value is None:
        del index["weight_map"][name]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        tensors[name] = value
    save_file(tensors, path, {"format": "pt"})


def edit_quantization(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: rewrite(f, "lm_head.weight", torch.zeros(260, 64)), "lm_head.weight differs from the source"),
        (
            lambda f: rewrite(f, "lm_head.weight", None),
            "lm_head must stay unquantized, but its weight is missing",
        ),
        (
            lambda f: rewrite(f, "model.layers.1.mlp.up_proj.weight_packed", torch.zeros(96, 4, dtype=torch.int32)),
            "bytes on disk, but its recorded",
        ),
        (lambda f: edit_quantization(f, lambda q: q.update(ignore=[])), "describes lm_head as quantized"),
        (
            lambda f: edit_quantization(f, lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8)),
            "describes .* differently",
        ),
        (lambda f: edit_quantization(f, lambda q: q.update(quant_method="gptq")), "does not describe the format"),
    ],
    ids=["changed head", "lost head", "wrong size", "ignore", "bits", "method"],
)
def test_defects_of_the_files_are_found(finished, spoil, message):
    plan, folder, records = finished
    spoil(folder)
    with pytest.raises(AuditError, match=message):
        audit_checkpoint(folder, plan, records)


def test_a_linear_that_was_not_quantized_is_found(finished):
    plan, folder, records = finished
    records[1] = dataclasses.replace(records[1], linears=records[1].linears[1:])
    with pytest.raises(AuditError, match="13 linears were quantized, but 14 were planned"):
        audit_checkpoint(folder, plan, records)


def one_weight(plan, folder):
    prefix = "model.layers.0.mlp.up_proj"
    tensors = {n.removeprefix(f"{prefix}."): t for n, t in load_tensors(folder).items() if n.startswith(prefix)}
    return prefix, plan.format.decode(tensors, plan.linears[prefix]), plan.linears[prefix]


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_a_bad_scale_is_found(finished, bad):
    plan, folder, _ = finished
    prefix, weight, _ = one_weight(plan, folder)
    check_weight(prefix, weight)
    weight.scale[2, 1] = bad
    with pytest.raises(AuditError, match="a scale is zero or not finite"):
        check_weight(prefix, weight)


def test_a_code_outside_its_type_is_found(finished):
    plan, folder, _ = finished
    prefix, weight, _ = one_weight(plan, folder)
    weight.codes[0, 0] = 9
    with pytest.raises(AuditError, match="a code is outside the range of int4"):
        check_weight(prefix, weight)


def test_a_flipped_bit_in_the_shard_is_found(finished):
    plan, folder, _ = finished
    prefix, weight, scheme = one_weight(plan, folder)
    file = ModelReader.of(CheckpointReader.of_file(folder / "model-00001-of-00003.safetensors"), plan.family)
    shard = Shard(plan.format)
    shard.add_linear(prefix, weight, scheme)
    shard.check(file)
    weight.codes[3, 5] ^= 1
    shard.add_linear(prefix, weight, scheme)
    with pytest.raises(AuditError, match="reads back differently"):
        shard.check(file)
