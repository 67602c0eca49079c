"""`quantkit recipes`: listed, shown, checked."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_recipes_list(invoke):
    assert all(name in invoke("recipes", "list").stdout for name in ("awq-int4", "fp8-dynamic", "smoothquant, gptq"))
    listed = json.loads(invoke("recipes", "list", "--json").stdout)["recipes"]
    assert [entry["name"] for entry in listed] == sorted(entry["name"] for entry in listed)
    assert all(entry["description"] for entry in listed)


def test_recipes_show_prints_the_file_and_with_json_every_default(invoke, tmp_path):
    shown = invoke("recipes", "show", "gptq-int4").stdout
    assert shown == (ROOT / "recipes" / "gptq-int4.yaml").read_text()
    data = json.loads(invoke("recipes", "show", "gptq-int4", "--json").stdout)
    assert data["steps"][0]["gptq"]["block_size"] == 512
    copy = tmp_path / "mine.yaml"
    copy.write_text(shown)
    assert invoke("recipes", "show", str(copy)).stdout == shown


def test_recipes_check(invoke, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("weights: {dtype: int4}\nsteps: [gptq, awq]")
    answer = invoke("recipes", "check", str(path))
    assert answer.exit_code == 0
    assert "mine.yaml: valid" in answer.stdout.replace("\n", "")
    assert "remark: gptq fixes the codes" in answer.stdout
    data = json.loads(invoke("recipes", "check", str(path), "--json").stdout)
    assert data["valid"]
    assert len(data["remarks"]) == 1
    path.write_text("weights: {dtype: int7}")
    answer = invoke("recipes", "check", str(path), "--json")
    assert answer.exit_code == 4
    assert "weights.dtype" in json.loads(answer.stdout)["error"]
