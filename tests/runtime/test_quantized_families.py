"""What a recipe has written of a family: the runtime computes what transformers computes with the same files."""

from __future__ import annotations

import pytest

from quantkit.api import quantize
from quantkit.runtime.model.loader import load_model
from tests.helpers import GRANITE_EXPERTS, NEMOTRON_EXPERTS
from tests.runtime.helpers import difference, make_loud_model, prompts, reference_logits, run

# Transformers loads no experts of these as codes.
EXPERTS_AS_VALUES = {"gpt_oss": {}, "granitemoe": {}, "granitemoeshared": {}, "granitemoehybrid": GRANITE_EXPERTS}
# Of one of each kind; `test_greedy_text` has all families.
CASES = [*("apertus", "deepseek_v3", "hy_v3", "minimax_m2", "ministral3"), *("gemma3_text", "qwen3_next", "starcoder2")]


def test_experts_without_a_gate(tmp_path):
    check_codes(make_loud_model(tmp_path / "source", "nemotron_h", **NEMOTRON_EXPERTS), tmp_path)


@pytest.mark.parametrize("family", CASES)
def test_logits_of_codes_equal_transformers(tmp_path, family):
    check_codes(make_loud_model(tmp_path / "source", family), tmp_path)


def check_codes(source, tmp_path):
    quantize(source, "rtn-int4", tmp_path / "out", overrides={"weights.group_size": 16})
    sequences = prompts(1, 70)
    model = load_model(tmp_path / "out", dtype="float32", backend="native")
    expected = reference_logits(tmp_path / "out", sequences)
    assert difference(run(model, sequences, 32), expected) < 1e-4
    assert difference(expected, reference_logits(source, sequences)) > 1e-3


@pytest.mark.parametrize("family", EXPERTS_AS_VALUES)
def test_logits_of_codes_that_transformers_does_not_load(tmp_path, family):
    source = make_loud_model(tmp_path / "source", family, **EXPERTS_AS_VALUES[family])
    for format_ in ("compressed-tensors", "dense"):
        overrides = {"weights.group_size": 16, "format": format_}
        quantize(source, "rtn-int4", tmp_path / format_, overrides=overrides)
    sequences = prompts(1, 70)
    model = load_model(tmp_path / "compressed-tensors", dtype="float32", backend="native")
    assert difference(run(model, sequences, 32), reference_logits(tmp_path / "dense", sequences)) < 1e-4
