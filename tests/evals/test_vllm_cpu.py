"""What was seen in vLLM: no row is wrong, the rules foretell each, and planted faults are the ones that are named."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

CHECKS = Path(__file__).parents[2] / "evals" / "checks"


@pytest.fixture
def load(monkeypatch):
    for folder in (CHECKS, CHECKS.parent, CHECKS.parent / "page_sections"):
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module


def test_no_row_is_wrong_and_every_planted_fault_was_noticed(load):
    newest = load("engines_page").newest
    rows, breaches = newest("rows")["rows"], newest("breaches")["rows"]
    assert [row for row in rows if row["verdict"] == "wrong"] == []
    assert {row["breach"] for row in breaches} == set(load("vllm_cpu_models").BREACHES)
    assert {row["verdict"] for row in breaches} == {"noticed"}


def test_rules_say_of_every_row_what_vllm_did(load, tmp_path):
    """A row that ran is read, one that was refused is not, for the reason that vLLM gave."""
    models, rows = load("vllm_cpu_models"), load("engines_page").newest("rows")["rows"]
    configs = {name: models.write_config(name, tmp_path / f"{name}.json") for name in models.MODELS}
    differ = []
    for row in rows:
        case = row["case"].removeprefix("unquantized").partition(",")[0]
        said = models.foretold(configs[row["model"]], case)
        ran = row["verdict"] == "agrees"
        explained = ran or (bool(said.error) and said.error in row["reason"])
        if row["verdict"] != "refused by us" and (said.is_right != ran or not explained):
            differ.append((row["model"], row["case"], row["verdict"], said.reads, said.reason))
    assert not differ


def test_rules_say_of_every_row_what_other_engines_did_on_a_cpu(load):
    models, checks = load("vllm_cpu_models"), load("cpu_engines")
    files = sorted(checks.RESULTS.glob("*.json"))
    assert {"openvino", "onnxruntime"} <= {file.stem for file in files} <= checks.PACKAGES.keys()
    rows = [(file.stem, row) for file in files for row in json.loads(file.read_text())["rows"]]
    assert len(rows) == sum(len(checks.FORMATS.get(file.stem, checks.CASES)) for file in files)
    for engine, row in rows:
        rules = checks.RULES.get(engine, engine)
        said = models.foretold(None, row["case"].removeprefix("unquantized"), rules)
        assert checks.is_foretold(row, said), (engine, row, said)


def test_a_refusal_tells_whose_words_are_whose(load):
    row = {"case": "mxfp4", "verdict": "refused", "reason": "Error: x " * 20}
    rows = [row, {**row, "case": "nvfp4"}, {"verdict": "agrees"}]
    result = {"name": "onnxruntime", "made": {"engine": "onnxruntime-genai 1.0"}, "rows": rows}
    (line,) = load("engines_page")._others_refusals([result])
    start = "- onnxruntime-genai, `mxfp4`, `nvfp4`. Our rule: its model builder supports compressed-tensors"
    assert line.startswith(start)
    assert '. Its message: "Error: x Error' in line
    assert line.endswith('..."')
    assert len(line) < 300


def test_nvfp4_files_must_share_global_scales_and_have_no_negative_ones(load, tmp_path):
    models = load("vllm_cpu_models")
    names = [f"layer.self_attn.{part}_proj" for part in "qkv"]
    tensors = {f"{name}.weight_global_scale": torch.tensor([4.0]) for name in names}
    tensors |= {f"{name}.weight_scale": torch.ones(2, 2).to(torch.float8_e4m3fn) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    assert models.file_faults(tmp_path) == []
    broken = models.break_copy(tmp_path, tmp_path.with_name("broken"), models.unshare_scales)
    (fault,) = models.file_faults(broken)
    assert "k_proj.weight_global_scale is 8, but that of q_proj" in fault
    save_file(
        {**tensors, f"{names[2]}.weight_scale": (-torch.ones(2, 2)).to(torch.float8_e4m3fn)},
        tmp_path / "model.safetensors",
    )
    (fault,) = models.file_faults(tmp_path)
    assert fault == "layer.self_attn.v_proj.weight_scale has negative scales"


def test_planted_faults_change_what_they_say(load):
    models = load("vllm_cpu_models")
    codes = torch.tensor([[0x7FEDCBA9 - (1 << 31)]], dtype=torch.int32)  # nibbles 9 a b c d e f f
    tensors = {"a.weight_zero_point": codes.clone()}
    models.shift_zero_points(tensors)
    assert [int(tensors["a.weight_zero_point"]) >> shift & 15 for shift in range(0, 32, 4)] == [
        10,
        11,
        12,
        13,
        14,
        15,
        15,
        15,
    ]
    packed = {"down_proj.qweight": torch.tensor([[0x76543210]], dtype=torch.int32)}
    models.swap_nibbles(packed)
    assert int(packed["down_proj.qweight"]) == 0x67452301
