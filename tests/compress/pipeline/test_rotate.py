"""The step rotate through a whole compression: nothing is lost by it, and a run that was interrupted goes on."""

from __future__ import annotations

import pytest
import torch

import quantkit
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ModelError
from tests.compress.pipeline.test_resume import hashes, interrupted, quantize
from tests.helpers import load_tensors, make_model, transformers_logits

RECIPE = """
weights: {dtype: int8, group_size: 32}
steps: [rotate, {gptq: {asymmetric_calibration: 1.0}}]
calibration: {samples: 8, sequence_length: 48}
"""


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied") / "model", tie_word_embeddings=True)


def test_the_compressed_model_computes_what_the_source_does(tied, tmp_path, text_file):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    result = quantkit.quantize(
        tied, str(recipe), tmp_path / "out", overrides={"calibration.data": str(text_file), "format": "dense"}
    )
    assert any("shares the embedding's weights" in warning and "MB more" in warning for warning in result.warnings)
    written = CheckpointReader(tmp_path / "out")
    assert written.config["tie_word_embeddings"] is False and "lm_head.weight" in written
    ids = torch.randint(2, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = transformers_logits(tied, ids)
    actual = transformers_logits(tmp_path / "out", ids)
    assert (actual - expected).norm() < 0.06 * expected.norm()  # 8 bits; a wrong rotation would be off by all of it
    norm = load_tensors(tmp_path / "out")["model.layers.1.input_layernorm.weight"]
    assert torch.equal(norm, torch.ones_like(norm))


def test_a_large_tied_head_is_written_as_the_view_computes_it(tmp_path):
    """The view yields whole rows of about 4 MB, which 192 bytes do not divide; files are read in other chunks."""
    model = make_model(tmp_path / "model", tie_word_embeddings=True, hidden_size=48, vocab_size=50_000)
    overrides = {"steps": ["rotate"], "weights.group_size": 16}
    quantkit.quantize(model, "rtn-int4", tmp_path / "out", overrides=overrides)
    written, head = CheckpointReader(tmp_path / "out"), load_tensors(model)["model.embed_tokens.weight"]
    assert written.info("lm_head.weight").shape == (50_000, 48)
    # A rotation changes no length of a row; the norm that is folded in has weights of its own.
    norm = load_tensors(model)["model.norm.weight"]
    assert torch.allclose(written.tensor("lm_head.weight").norm(dim=1), (head * norm).norm(dim=1), rtol=1e-4)


def test_an_interrupted_run_goes_on_bit_for_bit(tied, tmp_path, text_file):
    overrides = {"steps": ["rotate", "gptq"]}
    quantize(tied, tmp_path / "whole", text_file, overrides=overrides)
    interrupted(tied, tmp_path / "out", text_file, overrides=overrides)
    assert quantize(tied, tmp_path / "out", text_file, overrides=overrides).resumed_layers == 1
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_what_makes_no_sense_is_refused_before_any_work(tmp_path, text_file):
    model = make_model(tmp_path / "model", "gemma2")
    with pytest.raises(ModelError, match="the step rotate does not support this model"):
        quantize(model, tmp_path / "out", text_file, overrides={"steps": ["rotate", "gptq"]})
