"""A whole distillation: what it changes, what it refuses, and what a killed run leaves."""

from __future__ import annotations

import json

import pytest
import torch

import quantkit
from quantkit import DistillOptions, distill
from quantkit.compress.convert.source import open_source
from quantkit.compress.distill.training import Training
from quantkit.errors import CheckpointError, DataError, ModelError, OutputError, ResumeError, SchemeError
from tests.checkpoints.adapters import make_adapter
from tests.helpers import load_tensors, make_model

QUICK = {"samples": 16, "sequence_length": 32, "steps": 12, "check_every": 4, "batch_size": 2, "learning_rate": 0.01}


class Killed(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def pair(tiny_llama, tmp_path_factory):
    """A model and its 2-bit checkpoint."""
    out = tmp_path_factory.mktemp("pair") / "out"
    overrides = {"weights.dtype": "int2", "weights.group_size": 16}
    quantkit.quantize(tiny_llama, "rtn-int4", out, overrides=overrides, device="cpu")
    return tiny_llama, out


@pytest.fixture
def options(text_file):
    return DistillOptions(data=str(text_file), **QUICK)


def test_kl_falls_and_only_scales_and_vectors_change(pair, options, tmp_path):
    model, checkpoint = pair
    result = distill(checkpoint, model, tmp_path / "new", options, device="cpu")
    assert result.kl_after < 0.9 * result.kl_before and result.steps > 0
    assert result.history[0] == result.kl_before and result.history[result.steps] == result.kl_after
    before, after = open_source(checkpoint), open_source(tmp_path / "new")
    assert after.format is before.format and after.linears == before.linears
    for name in before.linears:
        assert torch.equal(before.weight(name).codes, after.weight(name).codes)
        assert not torch.equal(before.weight(name).scale, after.weight(name).scale)
    old, new = load_tensors(checkpoint), load_tensors(tmp_path / "new")
    assert {name: value.shape for name, value in old.items()} == {name: value.shape for name, value in new.items()}
    assert not torch.equal(old["model.norm.weight"], new["model.norm.weight"])
    assert torch.equal(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"])
    manifest = json.loads((tmp_path / "new/quantkit.json").read_text())
    assert manifest["distilled"]["steps"] == result.steps
    assert quantkit.inspect(tmp_path / "new").made_by["distilled"].endswith(f"{result.steps} steps")
    # What the file holds is what was measured.
    again = distill(tmp_path / "new", None, tmp_path / "third", options, device="cpu")  # it names its original
    assert again.kl_before == pytest.approx(result.kl_after, rel=1e-5)


def test_a_killed_run_resumes_bit_for_bit(pair, options, tmp_path):
    model, checkpoint = pair
    distill(checkpoint, model, tmp_path / "whole", options, device="cpu")
    lines = []

    def kill(text):
        lines.append(text)
        if text.startswith("step 8"):
            raise Killed

    with pytest.raises(Killed):
        distill(checkpoint, model, tmp_path / "resumed", options, device="cpu", progress=kill)
    assert not (tmp_path / "resumed").exists()
    rest = []
    distill(checkpoint, model, tmp_path / "resumed", options, device="cpu", progress=rest.append)
    assert [text.split(":")[0] for text in rest if text.startswith("step")] == ["step 12 of 12"]
    for path in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "resumed" / path.name).read_bytes()


def test_a_run_with_other_options_is_not_continued(pair, options, tmp_path):
    model, checkpoint = pair

    def kill(text):
        if text.startswith("step 4"):
            raise Killed

    with pytest.raises(Killed):
        distill(checkpoint, model, tmp_path / "new", options, device="cpu", progress=kill)
    changed = DistillOptions(data=options.data, **{**QUICK, "seed": 1})
    with pytest.raises(ResumeError, match=r"options\.seed: 0 -> 1"):
        distill(checkpoint, model, tmp_path / "new", changed, device="cpu")
    distill(checkpoint, model, tmp_path / "new", changed, device="cpu", resume=False)


def test_if_no_step_helps_the_checkpoint_stays_as_it_is(pair, options, tmp_path):
    model, checkpoint = pair
    far = DistillOptions(data=options.data, **{**QUICK, "learning_rate": 5.0})
    result = distill(checkpoint, model, tmp_path / "new", far, device="cpu")
    assert result.steps == 0 and result.kl_after == result.kl_before
    for name, value in load_tensors(checkpoint).items():
        assert torch.equal(load_tensors(tmp_path / "new")[name], value)


def test_a_kl_that_is_no_number_ends_training(pair, options, tmp_path, monkeypatch):
    model, checkpoint = pair
    kl, lines = Training._kl, []

    def broken(self, batch, *, train=False):
        return float("nan") if train and len(lines) > 4 else kl(self, batch, train=train)

    monkeypatch.setattr(Training, "_kl", broken)
    result = distill(checkpoint, model, tmp_path / "new", options, device="cpu", progress=lines.append)
    assert any("not finite" in line for line in lines)
    assert result.steps < options.steps and result.kl_after < result.kl_before


def test_patience_ends_training(pair, options, tmp_path):
    model, checkpoint = pair
    far = DistillOptions(data=options.data, **{**QUICK, "learning_rate": 5.0, "patience": 2})
    assert distill(checkpoint, model, tmp_path / "new", far, device="cpu").steps_run == 8


def test_models_that_do_not_belong_together_are_refused(pair, options, tmp_path):
    other = make_model(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"num_layers 2, but .* has 3; give the model that"):
        distill(pair[1], other, tmp_path / "new", options, device="cpu")


def test_an_unquantized_model_is_refused(pair, options, tmp_path):
    other = make_model(tmp_path / "other")
    with pytest.raises(SchemeError, match="is not quantized"):
        distill(other, pair[0], tmp_path / "new", options, device="cpu")


def test_a_checkpoint_is_not_its_own_baseline(pair, options, tmp_path):
    with pytest.raises(ModelError, match="is its own baseline"):
        distill(pair[1], pair[1], tmp_path / "new", options, device="cpu")


def test_a_kl_that_is_no_number_before_training_is_an_error(pair, options, tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "_kl", lambda self, batch, *, train=False: float("nan"))
    with pytest.raises(CheckpointError, match="NaN or infinite before any training"):
        distill(pair[1], pair[0], tmp_path / "new", options, device="cpu")
    assert not (tmp_path / "new").exists()


def test_another_model_of_the_same_shape_is_used_with_a_warning(pair, options, tmp_path):
    other, lines = make_model(tmp_path / "other", rope_theta=500.0), []
    distill(pair[1], other, tmp_path / "new", options, device="cpu", progress=lines.append)
    assert f"warning: {pair[1]} was made from other files than those in {other}" in lines


def test_an_output_that_looks_like_a_file_is_refused(pair, options, tmp_path):
    with pytest.raises(OutputError, match="distill writes a folder"):
        distill(pair[1], pair[0], tmp_path / "new.gguf", options, device="cpu")


def test_one_sample_is_too_little(pair, tmp_path):
    (tmp_path / "short.txt").write_text("Few words.")
    few = DistillOptions(data=str(tmp_path / "short.txt"), **QUICK)
    with pytest.raises(DataError, match="give more text"):
        distill(pair[1], pair[0], tmp_path / "new", few, device="cpu")


def test_samples_that_are_held_out_are_not_trained_on(pair, options, tmp_path, monkeypatch):
    kl, batches = Training._kl, {True: [], False: []}

    def noted(self, batch, *, train=False):
        batches[train] += batch
        return kl(self, batch, train=train)

    monkeypatch.setattr(Training, "_kl", noted)
    distill(pair[1], pair[0], tmp_path / "new", options, device="cpu")
    assert set(batches[False]) == {0, 8} and not set(batches[True]) & set(batches[False])


def test_a_merged_adapter_must_be_in_the_original(pair, options, tmp_path):
    model, _ = pair
    adapter = make_adapter(tmp_path / "adapter", model)
    quantkit.quantize(model, "rtn-int8", tmp_path / "out", adapter=adapter, device="cpu")
    with pytest.raises(ModelError, match="an adapter was merged into"):
        distill(tmp_path / "out", model, tmp_path / "new", options, device="cpu")


def test_a_gguf_file_is_refused(pair, options, tmp_path):
    model, _ = pair
    file = tmp_path / "model.gguf"
    quantkit.convert(model, "gguf", file, type_name="q8_0")
    with pytest.raises(SchemeError, match="is a GGUF file; distill a compressed folder"):
        distill(file, model, tmp_path / "new", options, device="cpu")


def test_an_output_that_exists_is_kept(pair, options, tmp_path):
    model, checkpoint = pair
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_text("x")
    with pytest.raises(OutputError, match="exists already"):
        distill(checkpoint, model, tmp_path / "new", options, device="cpu")


@pytest.mark.parametrize("format_", ["gptq", "awq", "mlx"])
def test_every_format_keeps_the_trained_scales(options, tmp_path, format_):
    model = make_model(tmp_path / "model", dtype=torch.bfloat16)
    overrides = {"weights.group_size": 32, "weights.symmetric": format_ == "gptq"}
    quantkit.quantize(model, "rtn-int4", tmp_path / "codes", overrides=overrides, device="cpu")
    quantkit.convert(tmp_path / "codes", format_, tmp_path / "out")
    short = DistillOptions(data=options.data, **{**QUICK, "steps": 4})
    result = distill(tmp_path / "out", model, tmp_path / "new", short, device="cpu")
    assert result.kl_after < result.kl_before
    assert open_source(tmp_path / "new").format.name == format_
