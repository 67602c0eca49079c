"""Tiny models of transformers' classes: some end to end, a fortieth of all in CI, and defects that are noticed."""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

CHECKS = Path(__file__).parents[2] / "evals" / "checks"
sys.path[:0] = [str(CHECKS), str(CHECKS.parent / "page_sections")]

import every_model  # noqa: E402
import likeness  # noqa: E402
import model_row  # noqa: E402
import models_page  # noqa: E402
import tiny_models  # noqa: E402

from quantkit import api  # noqa: E402
from quantkit.errors import SchemeError  # noqa: E402


def rows_of(file, capsys, *options):
    every_model.main(["--output", str(file), "--recipes", "rtn-int4", *options])
    return every_model.read(file), json.loads(capsys.readouterr().out.splitlines()[-1])


def test_some_models_end_to_end_and_only_once(tmp_path, capsys):
    file = tmp_path / "rows.json"
    rows, made = rows_of(file, capsys, "--classes", "llama,lfm2,qwen2_moe")
    assert made["right"] == sum(made.values()) == 3, rows
    assert [rows[name]["source"]["native"] for name in ("llama", "qwen2_moe", "lfm2")] == [True, True, False]
    assert rows["llama"]["recipes"]["rtn-int4"]["share"] == 1
    _, made = rows_of(file, capsys, "--classes", "llama,lfm2,qwen2_moe")
    assert sum(made.values()) == 0  # nothing was made again


@pytest.mark.slow
def test_a_fortieth_of_all_models_is_no_worse_than_the_page_says(tmp_path, capsys):
    known = every_model.read(models_page.newest())
    names = list(tiny_models.rows())[datetime.date.today().toordinal() % 40 :: 40]
    rows, _ = rows_of(tmp_path / "rows.json", capsys, "--classes", ",".join(names), "--jobs", "2")
    verdicts = every_model.VERDICTS
    assert len(rows) == len(names) > 4, sorted({*names} ^ rows.keys())
    for name, row in rows.items():
        for recipe, entry in row["recipes"].items():
            # Of a class that transformers did not have when the page was written nothing is known.
            before = known[name]["recipes"][recipe]["verdict"] if name in known else "refused"
            assert verdicts.index(entry["verdict"]) <= verdicts.index(before), (name, recipe, entry, names)


def edit(output, changed):
    for file in output.glob("*.safetensors"):
        tensors = dict(changed(name, value) for name, value in load_file(file).items())
        save_file(tensors, file, {"format": "pt"})


def swap(output):
    """Two matrices of equal shapes under each other's names."""
    other = {"q_proj": "o_proj", "o_proj": "q_proj"}
    edit(output, lambda name, value: (re.sub("q_proj|o_proj", lambda match: other[match[0]], name), value))


def rename(output):
    edit(output, lambda name, value: (name.replace("o_proj", "out_proj"), value))


def double(output):
    edit(output, lambda name, value: (name, value * 2 if name.endswith("v_proj.weight_scale") else value))


def unsettle(output):
    """A norm that is not quantized."""
    edit(output, lambda name, value: (name, value * 1.5 if name.endswith("0.input_layernorm.weight") else value))


def fail(output):
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("defect", "verdict"),
    [(swap, "wrong"), (rename, "wrong"), (double, "wrong"), (unsettle, "wrong"), (fail, "crash")],
    ids=["swapped", "renamed", "doubled", "another norm", "failing"],
)
def test_a_defect_is_noticed(tmp_path, monkeypatch, defect, verdict):
    honest = api.quantize

    def quantize(model, recipe, output, **options):
        result = honest(model, recipe, output, **options)
        defect(output)
        return result

    monkeypatch.setattr(api, "quantize", quantize)
    row = model_row.make_row("llama", tmp_path, ["rtn-int4"])
    assert row["source"]["verdict"] == "right"
    assert row["recipes"]["rtn-int4"]["verdict"] == verdict, row


def test_parts_of_a_source_are_told_by_their_values():
    source = {"experts": torch.randn(4, 64, 32), "query": torch.randn(32, 32), "key": torch.randn(16, 32)}
    source["ids"] = torch.arange(64 * 32).reshape(64, 32)
    before = {name: tensor.clone() for name, tensor in source.items()}
    assert likeness.put_decoded(source, "experts.2.up.weight", before["experts"][2, 1::2] * 0.9) == pytest.approx(0.1)
    assert likeness.put_decoded(source, "experts.1.down.weight", before["experts"][1].T * 0.5) == pytest.approx(0.5)
    assert torch.equal(source["experts"][2, 1::2], before["experts"][2, 1::2] * 0.9)
    assert torch.equal(source["experts"][2, ::2], before["experts"][2, ::2])
    assert torch.equal(source["experts"][1], before["experts"][1] * 0.5)
    joined = torch.cat([before["query"] * 0.7, before["key"] * 0.8])
    assert likeness.put_decoded(source, "joined.weight", joined) == pytest.approx(0.3)
    assert torch.equal(torch.cat([source["query"], source["key"]]), joined)
    with pytest.raises(ValueError, match=r"x\.weight \(64, 32\) resembles no weight"):
        likeness.put_decoded(source, "x.weight", torch.randn(64, 32))


def test_what_steps_change_is_put_and_the_rest_left_as_it_is():
    source = {"norm": torch.ones(8), "renamed": torch.arange(4.0), "ids": torch.arange(3)}
    likeness.put_changed(source, "norm", torch.full((8,), 2.0))
    likeness.put_changed(source, "bias", torch.arange(4.0))
    likeness.put_changed(source, "other", torch.randn(16, 1, 4))
    likeness.put_changed(source, "ids", torch.zeros(3, dtype=torch.long))
    assert source["norm"].tolist() == [2.0] * 8
    assert source["renamed"].tolist() == [0, 1, 2, 3]
    assert source["ids"].tolist() == [0, 1, 2]


WARNING = "transformers does not load compressed experts of X; for it set format=dense"


@pytest.mark.parametrize(
    ("entry", "warnings", "verdict"),
    [
        ({}, (), "right"),
        ({"why": "other keys"}, (), "wrong"),
        ({"why": "other keys"}, ("few samples", WARNING), "quantkit only"),
        ({"why": "other keys", "run": {"verdict": "wrong", "why": "other tokens"}}, (WARNING,), "wrong"),
        ({"why": "other keys", "run": {"verdict": "refused", "why": "no"}}, (WARNING,), "wrong"),
        ({"run": {"verdict": "refused", "why": "no"}}, (), "refused"),
        ({"error": 0.3}, (WARNING,), "wrong"),
        ({"to source": 0.5}, (), "wrong"),
    ],
)
def test_a_verdict_is_quantkit_only_where_the_run_warned_and_quantkit_is_right(entry, warnings, verdict):
    known = {"error": 0.02, "to source": 0.99, "run": {"verdict": "right"}, **entry}
    assert model_row._concluded(known, api.load_recipe("fp8-dynamic"), warnings)["verdict"] == verdict


def test_groups_become_smaller_where_they_do_not_fit(monkeypatch):
    def quantize(model, recipe, output, *, overrides, device):
        size = overrides.get("weights.group_size", 128)
        if size > 8:
            raise SchemeError(f"group_size {size} does not divide 24 inputs; set weights.group_size to channel")
        return "result"

    monkeypatch.setattr(api, "quantize", quantize)
    made = model_row._quantize("model", "rtn-int4", "output", {"calibration.samples": 4})
    assert made == ("result", {"weights.group_size": 8})


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (["right", "quantkit only"], "right"),
        (["refused", "quantkit only"], "quantkit only"),
        (["quantkit only", "wrong"], "wrong"),
        (["refused", "refused"], "refused"),
    ],
)
def test_a_row_is_what_its_recipes_are(verdicts, whole):
    recipes = {str(number): {"verdict": verdict} for number, verdict in enumerate(verdicts)}
    row = {"built": "yes", "decoder": "yes", "source": {"verdict": "right"}, "recipes": recipes}
    assert every_model.verdict(row) == whole


def test_sizes_shrink_by_what_they_are_called():
    small = tiny_models.shrink(
        {
            "hidden_size": 4096,
            "num_hidden_layers": 5,
            "layer_types": ["a", "a", "b", "a", "b"],
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": None,
            "eos_token_id": 100_000,
            "text_config": {"model_type": "x", "n_layer": 9},
        }
    )
    assert small["layer_types"] == ["a", "b"]
    assert small["num_hidden_layers"] == small["text_config"]["n_layer"] == 2
    assert small["num_attention_heads"] == small["num_key_value_heads"] == 4
    assert (small["hidden_size"], small["head_dim"]) == (128, 32)
    assert small["eos_token_id"] < tiny_models.VOCABULARY
