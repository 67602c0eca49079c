"""`quantkit inspect`: of nothing, and of what quantize has just made."""

from __future__ import annotations

import json

import pytest


def test_inspect_of_nothing(invoke, tmp_path):
    answer = invoke("inspect", str(tmp_path / "nothing"))
    assert answer.exit_code == 4
    assert answer.stderr.startswith("error: no such model directory")


def test_quantize_and_inspect_the_demo_model(invoke, tmp_path):
    out = tmp_path / "demo"
    answer = invoke("quantize", "--recipe", "rtn-int8", "-o", str(out), "--json")
    assert answer.exit_code == 0, answer.stderr
    made = json.loads(answer.stdout)
    seen = json.loads(invoke("inspect", str(out), "--json").stdout)
    assert (seen["format"], seen["recipe"]) == ("compressed-tensors", "rtn-int8")
    assert seen["num_bytes"] == made["output_bytes"]
    assert seen["bits_per_weight"] == pytest.approx(made["bits_per_weight"], rel=1e-3)
    assert len(seen["layers"]) == made["num_layers"]
    shown = invoke("inspect", str(out)).stdout
    for part in ("int8 channel", "self_attn.q_proj", "embedding", "norms", "worst error"):
        assert part in shown


def test_errors_of_linears_are_shown_only_if_there_are_any(invoke, tmp_path):
    out = str(tmp_path / "demo")
    answer = invoke("quantize", "--recipe", "kv-fp8", "--samples", "2", "--sequence-length", "32", "-o", out)
    assert answer.exit_code == 0, answer.stderr
    shown = invoke("inspect", out).stdout
    assert "keys fp8 per tensor" in shown
    assert "worst error" not in shown


def test_a_quantized_embedding_is_no_linear(invoke, tmp_path):
    recipe, out = tmp_path / "mine.yaml", tmp_path / "demo.gguf"
    recipe.write_text("weights: {dtype: q4_k}\nformat: gguf\nembedding: q6_k\n")
    answer = invoke("quantize", "--recipe", str(recipe), "-o", str(out), "--json")
    assert answer.exit_code == 0, answer.stderr
    seen = json.loads(invoke("inspect", str(out), "--json").stdout)
    assert any(module["kind"] == "embedding" and module["stored_as"] == "Q6_K" for module in seen["modules"])
    assert seen["bits_per_weight"] == json.loads(answer.stdout)["bits_per_weight"] == 4.5


def test_a_gguf_file_has_bits_of_its_own_and_no_manifest(invoke, tmp_path):
    out = str(tmp_path / "demo.gguf")
    answer = invoke("quantize", "--recipe", "rtn-int4", "--format", "gguf", "-o", out, "--json")
    assert answer.exit_code == 0, answer.stderr
    # A block of 32 weights has its own scale, whatever the recipe's groups.
    assert json.loads(answer.stdout)["bits_per_weight"] == 4.5
    shown = invoke("inspect", out).stdout
    assert "4.500" in shown
    assert "quantkit.json" not in shown
