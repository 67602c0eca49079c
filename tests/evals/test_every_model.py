"""Tiny models of transformers' classes: some of them end to end, a tenth of all in CI, and defects that are noticed."""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

CHECKS = Path(__file__).parents[2] / "evals" / "checks"
sys.path.insert(0, str(CHECKS))

import every_model  # noqa: E402
import model_row  # noqa: E402
import models_page  # noqa: E402
import tiny_models  # noqa: E402

from quantkit import api  # noqa: E402


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
def test_a_tenth_of_all_models_is_no_worse_than_the_page_says(tmp_path, capsys):
    known = every_model.read(models_page.newest())
    tenth = str(datetime.date.today().toordinal() % 10)
    rows, _ = rows_of(tmp_path / "rows.json", capsys, "--tenth", tenth, "--jobs", "2")
    verdicts = ("right", "refused", "wrong", "crash")
    assert len(rows) > 20
    for name, row in rows.items():
        for recipe, entry in row["recipes"].items():
            before = known[name]["recipes"][recipe]["verdict"]
            assert verdicts.index(entry["verdict"]) <= verdicts.index(before), (name, entry)


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


def fail(output):
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("defect", "verdict"),
    [(swap, "wrong"), (rename, "wrong"), (double, "wrong"), (fail, "crash")],
    ids=["swapped", "renamed", "doubled", "failing"],
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
