"""Every dense family goes through the pipeline: what it writes loads in transformers and computes what was decoded."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import ModelError
from tests.helpers import MORE_FAMILIES, make_model, transformers_logits
from tests.pipeline.test_quantize import IDS, decoded_logits, run


@pytest.mark.parametrize("recipe", ["rtn-int4", "gptq-int4"])
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_every_dense_family_loads_in_transformers(tmp_path, text_file, family, recipe):
    model = make_model(tmp_path / "model", family, num_hidden_layers=2)
    result = run(model, recipe, tmp_path / "out", text_file)
    assert all(layer.linears for layer in result.layers)
    quantized = transformers_logits(tmp_path / "out", IDS)
    torch.testing.assert_close(quantized, decoded_logits(model, tmp_path / "out"), rtol=0, atol=1e-4)
    assert not torch.allclose(quantized, transformers_logits(model, IDS), atol=1e-4)


@pytest.mark.parametrize("family", ["starcoder2", "granite", "glm4", "phi3", "gemma2", "olmo2"])
def test_smoothing_changes_no_output_of_a_family(tmp_path, text_file, family):
    """AWQ folds scales into norms and linears; at eight bits that adds nothing to the error of plain rounding."""
    model = make_model(tmp_path / "model", family, num_hidden_layers=2)
    expected, wrong = transformers_logits(model, IDS), {}
    for recipe in ("awq-int4", "rtn-int4"):
        run(model, recipe, tmp_path / recipe, text_file, overrides={"weights.dtype": "int8"})
        wrong[recipe] = (transformers_logits(tmp_path / recipe, IDS) - expected).norm() / expected.norm()
    assert wrong["awq-int4"] < 1.2 * wrong["rtn-int4"]


def test_a_family_with_experts_is_refused_before_any_work(tmp_path):
    model = make_model(tmp_path / "model", "mixtral")
    with pytest.raises(ModelError, match="can be run but not compressed"):
        run(model, "rtn-int4", tmp_path / "out")
    assert not (tmp_path / "out").exists()
