"""Errors on held-out tokens: the definition computed once more with transformers, and which tokens are held out."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quantkit
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.algorithms._smoothing import fold, shared_by_heads
from quantkit.compress.algorithms.awq import AwqStep
from quantkit.compress.calibration.dataset import load_samples
from quantkit.compress.calibration.held_out import output_error
from quantkit.formats import recognise
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from tests.compress.pipeline.test_quantize import decode_linears
from tests.helpers import make_model

SIZES = {"calibration.samples": 6, "calibration.sequence_length": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("held") / "model", hidden_size=64, intermediate_size=128)


def inputs_and_weights(model, token_ids):
    """(T, K) input and weight of each linear in the decoder layers, by full name."""
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(
                lambda module, args, name=name: seen.update({name: (args[0].flatten(0, -2), module.weight.data)}),
                prepend=True,  # before inputs are rounded
            )
    with torch.no_grad():
        model(input_ids=token_ids)
    return seen


def decoded(source, output):
    model, reader = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), CheckpointReader(output)
    format_, scheme = recognise(reader.config, "")
    decode_linears(model, reader, format_, scheme)
    for name, parameter in model.named_parameters():
        if name in reader and not name.endswith("proj.weight"):
            parameter.data = reader.tensor(name).float()
    return model, scheme


@pytest.mark.parametrize("recipe", ["gptq-int4", "awq-int4", "w8a8-int8"])
def test_both_errors_are_against_the_outputs_of_the_original_model(model, tmp_path, text_file, recipe):
    overrides = {**SIZES, "calibration.data": str(text_file)}
    if recipe != "w8a8-int8":
        overrides["weights.group_size"] = 32
    result = quantkit.quantize(model, recipe, tmp_path / "out", overrides=overrides)
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = load_samples(text_file, tokenizer, samples=6, sequence_length=40, vocab_size=260, seed=0)
    token_ids = torch.tensor(samples.held_out)
    before = inputs_and_weights(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), token_ids)
    quantized, scheme = decoded(model, tmp_path / "out")
    after = inputs_and_weights(quantized, token_ids)
    compared = 0
    for layer in result.layers:
        for record in layer.linears:
            assert record.measure == "held-out"
            name = f"{layer.name}.{record.name}"
            (inputs, weight), (seen, codes) = before[name], after[name]
            target = inputs @ weight.T
            # AWQ divides the outputs of these two by scales, which the definition takes out again.
            if recipe != "awq-int4" or record.name not in ("self_attn.v_proj", "mlp.up_proj"):
                assert record.error == pytest.approx(output_error(target, seen, codes.__getitem__), rel=1e-3)
            if recipe == "gptq-int4":  # the others' inputs have been divided by scales
                plain = round_to_nearest(weight, WeightGrid(scheme.find(name).weight, torch.float32)).dequantize()
                assert record.rounding_error == pytest.approx(output_error(target, seen, plain.__getitem__), rel=1e-3)
                compared += 1
            assert 0 < record.error < 2 * record.rounding_error, name
    assert compared == (14 if recipe == "gptq-int4" else 0)


def test_scales_that_make_a_linear_worse_than_rounding_are_left_out(model, tmp_path, text_file, monkeypatch):
    """Even if AWQ scales all inputs badly. Then the files equal those that are written without AWQ."""
    overrides = {**SIZES, "calibration.data": str(text_file), "weights.group_size": 32, "weights.symmetric": True}
    plain = quantkit.quantize(model, "awq-int4", tmp_path / "plain", overrides={**overrides, "steps": ["gptq"]})
    harmful = torch.rand(128, generator=torch.Generator().manual_seed(0)).mul(6).exp()

    def scale(self, layer, group, seen):
        fold(layer, group, shared_by_heads(layer, group, harmful[: layer.weight(group.linears[0]).shape[1]]))

    monkeypatch.setattr(AwqStep, "_scale", scale)
    steps = [{"awq": {"clip": False}}, "gptq"]
    result = quantkit.quantize(model, "awq-int4", tmp_path / "out", overrides={**overrides, "steps": steps})
    for layer, without in zip(result.layers, plain.layers, strict=True):
        assert any("are not scaled, because with scales" in note for note in layer.notes)
        assert all(record.error <= 1.02 * record.rounding_error for record in layer.linears), layer
        assert layer.linears == without.linears
    written, expected = CheckpointReader(tmp_path / "out"), CheckpointReader(tmp_path / "plain")
    assert all(torch.equal(written.tensor(name), expected.tensor(name)) for name in expected.names)


def test_held_out_tokens_are_of_the_same_text_and_not_among_the_samples(model, text_file):
    tokenizer = AutoTokenizer.from_pretrained(model)
    few, many = (
        load_samples(text_file, tokenizer, samples=count, sequence_length=32, vocab_size=260, seed=0)
        for count in (4, 4_000)
    )
    assert len(few.token_ids) == 4
    assert len(few.held_out) == 1
    assert not set(few.held_out) & set(few.token_ids)
    assert few.record.num_held_out == 32
    assert many.held_out == ()  # all of the text was asked for


def test_where_no_text_is_left_the_records_say_so(model, tmp_path, text_file):
    overrides = {"calibration.samples": 4_000, "calibration.sequence_length": 32, "calibration.data": str(text_file)}
    result = quantkit.quantize(model, "awq-int4", tmp_path / "out", overrides={**overrides, "weights.group_size": 32})
    assert {linear.measure for layer in result.layers for linear in layer.linears} == {"calibration"}
    assert result.calibration.num_held_out == 0
