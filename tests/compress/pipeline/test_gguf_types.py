"""Runs that write ggml's types: one file, its types, what reads it, and importance matrices."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.api import quantize
from quantkit.checkpoints.dense_source import open_dense
from quantkit.compress.pipeline.imatrix import collect_imatrix
from quantkit.compress.recipe.load import build
from quantkit.errors import CheckpointError, RecipeError, SchemeError
from quantkit.formats.ggml.gguf_file import read_gguf
from quantkit.formats.ggml.imatrix import read_imatrix, write_imatrix
from tests.helpers import load_tensors, make_model, transformers_logits

WIDE = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2}
RECIPE = {
    "name": "k",
    "weights": {"dtype": "q3_k"},
    "overrides": [{"modules": ["*.v_proj"], "weights": {"dtype": "q5_k"}}],
    "format": "gguf",
    "embedding": "q4_k",
}
CALIBRATED = {"steps": ["gptq"], "calibration": {"samples": 4, "sequence_length": 64}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m", dtype=torch.bfloat16, **WIDE)


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "m.gguf"
    quantize(model, build({**RECIPE, **CALIBRATED}, "k"), path)
    return path


def errors(model, path):
    """Relative error of each linear's values, by name."""
    original, reader = load_tensors(model), open_dense(path)
    names = [name for name in original if "proj" in name]
    return {
        name: float((reader.tensor(name).float() - original[name].float()).norm() / original[name].float().norm())
        for name in names
    }


def test_every_linear_has_its_type(file):
    types = {name: info.block.name for name, info in read_gguf(file).tensors.items()}
    assert types["blk.0.attn_q.weight"] == types["blk.1.ffn_up.weight"] == "Q3_K"
    assert types["blk.1.attn_v.weight"] == "Q5_K"  # beside q and k, which other formats' engines would fuse
    assert types["blk.1.ffn_down.weight"] == "Q4_0"  # of 320 inputs
    assert types["token_embd.weight"] == types["output.weight"] == "Q4_K"
    assert read_gguf(file).metadata["general.file_type"] == 11  # Q3_K_S


def test_our_reader_gives_values_near_the_original(model, file):
    measured = errors(model, file)
    assert len(measured) == 14
    limits = {"v_proj": 0.12, "down_proj": 0.25}
    assert all(0 < error < limits.get(name.split(".")[-2], 0.4) for name, error in measured.items()), measured


def test_llama_cpp_loads_it(model, file):
    llama_cpp = pytest.importorskip("llama_cpp")
    ids = [3, 17, 5, 60, 8, 2, 9, 30]
    loaded = llama_cpp.Llama(str(file), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    loaded.eval(ids)
    expected = transformers_logits(model, torch.tensor([ids]))[0]
    assert (torch.tensor(loaded.scores[: len(ids)]) - expected).std() < 0.7 * expected.std()


def test_an_interrupted_run_resumes_with_the_blocks_it_has(model, file, tmp_path, monkeypatch):
    from quantkit.compress.pipeline import run

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    recipe = build({**RECIPE, **CALIBRATED}, "k")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "finish_run", stop)
        quantize(model, recipe, tmp_path / "m.gguf")
    result = quantize(model, recipe, tmp_path / "m.gguf")
    assert result.resumed_layers == 2
    first, again = read_gguf(file), read_gguf(tmp_path / "m.gguf")
    assert all(b"".join(first.chunks(name)) == b"".join(again.chunks(name)) for name in first.tensors)


def test_an_importance_matrix_weighs_the_errors(model, tmp_path):
    matrix = collect_imatrix(str(model), tmp_path / "i.gguf", samples=4, sequence_length=64)
    assert read_imatrix(tmp_path / "i.gguf").counts["blk.0.attn_q.weight"].tolist() == [256.0]
    assert torch.equal(matrix.means["blk.0.attn_q.weight"], matrix.means["blk.0.attn_v.weight"])
    quantize(model, build(RECIPE, "k"), tmp_path / "plain.gguf")
    quantize(model, build({**RECIPE, "imatrix": str(tmp_path / "i.gguf")}, "k"), tmp_path / "weighted.gguf")
    original = load_tensors(model)
    for ours, theirs in (("mlp.up_proj", "ffn_up"), ("self_attn.q_proj", "attn_q")):
        name, weights = f"model.layers.0.{ours}.weight", matrix.means[f"blk.0.{theirs}.weight"]
        plain, weighted = (
            float(
                ((open_dense(tmp_path / file).tensor(name).float() - original[name].float()).square() * weights).sum()
            )
            for file in ("plain.gguf", "weighted.gguf")
        )
        assert weighted < 0.95 * plain


def test_the_mean_squares_are_those_of_the_inputs(model, tmp_path):
    from tests.helpers import load_tensors as tensors

    matrix = collect_imatrix(str(model), tmp_path / "i.gguf", samples=2, sequence_length=32)
    norm = tensors(model)["model.layers.0.input_layernorm.weight"].float()
    # A normalised token has a mean square of 1, so that of the inputs is about the square of the norm's weight.
    ratio = matrix.means["blk.0.attn_q.weight"][0] / norm.square()
    assert math.isclose(float(ratio.mean()), 1.0, rel_tol=0.15)


def test_what_does_not_go_together_is_refused(model, tmp_path):
    def run(**changes):
        quantize(model, build({**RECIPE, **changes}, "k"), tmp_path / "m.gguf")

    collect_imatrix(str(model), tmp_path / "i.gguf", samples=2, sequence_length=32)
    with pytest.raises(SchemeError, match="step autoround cannot choose the scales of q3_k blocks"):
        run(**{**CALIBRATED, "steps": ["autoround"]})
    with pytest.raises(RecipeError, match="imatrix: cannot be combined with steps"):
        run(imatrix="i.gguf", **CALIBRATED)
    with pytest.raises(RecipeError, match="only format gguf can store the embedding in a different type"):
        build({"name": "k", "weights": {"dtype": "int4"}, "embedding": "q6_k"}, "k")
    with pytest.raises(RecipeError, match="embedding: expected one of f32"):
        build({**RECIPE, "embedding": "q7_k"}, "k")
    matrix = read_imatrix(tmp_path / "i.gguf")
    means = {name: mean for name, mean in matrix.means.items() if name != "blk.1.attn_v.weight"}
    write_imatrix(tmp_path / "less.gguf", type(matrix)(means=means, counts=matrix.counts))
    with pytest.raises(CheckpointError, match=r"no statistics for blk\.1\.attn_v\.weight"):
        run(imatrix=str(tmp_path / "less.gguf"))
    other = {name: mean[:, :32] for name, mean in matrix.means.items()}
    write_imatrix(tmp_path / "other.gguf", type(matrix)(means=other, counts=matrix.counts))
    with pytest.raises(CheckpointError, match="have shape"):
        run(imatrix=str(tmp_path / "other.gguf"))
    assert not (tmp_path / "m.gguf").exists()
