"""What a layer tells algorithms about its inputs and outputs, and what it records."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map_only

from quantkit.compress.algorithms._smoothing import can_fold, fold
from quantkit.compress.calibration.errors import signal_to_noise_db, weight_error
from quantkit.compress.calibration.held_out import HeldOut, output_error
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.observers import Magnitude
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import INT8
from quantkit.numerics.scheme import ActivationScheme


def test_observe_shows_each_linear_its_own_inputs(make_layer):
    layer = make_layer()
    seen = {name: Magnitude(layer.weight(name).shape[1], layer.device) for name in ("mlp.gate_proj", "mlp.down_proj")}
    with torch.inference_mode():
        layer.observe(seen)
    assert seen["mlp.gate_proj"].num_tokens == seen["mlp.down_proj"].num_tokens == 4 * 2 * 24
    inputs = []
    layer.linear("mlp.down_proj").register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for hidden in layer.store:
        layer.forward(hidden)
    expected = torch.cat([x.reshape(-1, 96) for x in inputs]).abs().mean(0)
    torch.testing.assert_close(seen["mlp.down_proj"].mean, expected)


def test_observe_stops_after_the_last_linear_asked_for(make_layer):
    layer = make_layer()
    calls = []
    layer.linear("mlp.down_proj").register_forward_hook(lambda *args: calls.append(1))
    with torch.inference_mode():
        layer.observe({"self_attn.q_proj": Magnitude(64, layer.device)})
    assert calls == []


def test_capture_takes_whole_sequences_up_to_a_budget(make_layer):
    layer = make_layer()
    with torch.inference_mode():
        assert sum(c[0][0].shape[0] * 24 for c in layer.capture("mlp", 60)) == 72
        assert sum(c[0][0].shape[0] * 24 for c in layer.capture("mlp", 10_000)) == 4 * 2 * 24
        calls = layer.capture("self_attn", 24)
        output = layer.block.self_attn(*calls[0][0], **calls[0][1])[0]
    assert output.shape == (1, 24, 64)


def test_commit_puts_decoded_values_into_the_layer(make_layer):
    layer = make_layer()
    layer.stream.store = None
    weight, scheme = layer.weight("mlp.up_proj").clone(), layer.schemes["mlp.up_proj"].weight
    tensor = round_to_nearest(weight, WeightGrid(scheme, torch.float32))
    layer.commit({"mlp.up_proj": tensor})
    assert torch.equal(layer.weight("mlp.up_proj"), tensor.dequantize())
    record = layer.chosen.records["mlp.up_proj"]
    assert (
        record.error
        == record.rounding_error
        == pytest.approx(((tensor.dequantize() - weight).norm() / weight.norm()).item())
    )
    assert record.measure == "weight"
    assert record.bits_per_weight == 4 + 32 / 16
    assert [names for _, names in layer.pending()][2] == ("mlp.gate_proj",)


def test_plain_rounding_is_that_of_the_weights_before_scales_were_folded_in(make_layer):
    scales = torch.rand(64, generator=torch.Generator().manual_seed(0)).mul(4).exp()
    records = []
    for smooths in (False, True):
        layer = make_layer()
        held_out, weights = held_out_of(layer)
        with torch.inference_mode():
            held_out.aim(layer, is_last=True)
            if smooths:
                group = next(group for group in layer.sets if "mlp.gate_proj" in group.linears)
                fold(layer, group, scales)
            layer.finish()
            held_out.judge(layer, weights.__getitem__, is_last=True)
        records.append(layer.chosen.records["mlp.gate_proj"])
    assert records[1].rounding_error == pytest.approx(records[0].rounding_error, rel=0.02)
    assert records[1].error > 1.2 * records[0].error  # these scales do harm, which the column beside it must show


def test_scales_that_only_move_cost_nothing(make_layer):
    """Of a source whose outputs are divided as well as of the linears that read them."""
    layer = make_layer(dtype="int8", group_size=None)
    held_out, weights = held_out_of(layer)
    with torch.inference_mode():
        held_out.aim(layer, is_last=True)
        group = next(group for group in layer.sets if group.source == "mlp.up_proj")
        fold(layer, group, torch.linspace(0.2, 5, layer.weight("mlp.up_proj").shape[0]))
        layer.finish()
        held_out.judge(layer, weights.__getitem__, is_last=True)
    assert all(record.error < 0.03 for record in layer.chosen.records.values())


def test_codes_that_are_worse_than_plain_rounding_are_replaced_by_it(make_layer):
    layer = make_layer()
    held_out, weights = held_out_of(layer)
    bad = "self_attn.k_proj"
    with torch.inference_mode():
        held_out.aim(layer, is_last=True)
        layer.finish()
        kept = dict(layer.chosen.quantized)
        worse = replace(kept[bad], scale=kept[bad].scale * 1.5, input_scale=torch.ones(1))
        layer.commit({bad: worse})
        held_out.judge(layer, weights.__getitem__, is_last=True)
    plain = round_to_nearest(weights[bad], layer.grid(bad))
    assert torch.equal(layer.weight(bad), plain.dequantize())
    assert torch.equal(layer.chosen.quantized[bad].codes, plain.codes)
    assert layer.chosen.quantized[bad].input_scale == 1
    assert layer.chosen.notes[-1].startswith(f"{bad}") and "smaller held-out error" in layer.chosen.notes[-1]
    for name, record in layer.chosen.records.items():
        assert 0 < record.error <= 1.02 * record.rounding_error, name
    assert layer.chosen.records[bad].error == pytest.approx(layer.chosen.records[bad].rounding_error)


def test_a_layer_with_harmful_scales_must_be_quantized_again(make_layer):
    """Not its source: the source's outputs are divided, so its original weight can be divided and rounded."""
    layer = make_layer()
    held_out, weights = held_out_of(layer)
    group = next(group for group in layer.sets if group.source == "mlp.up_proj")
    source, reader = "mlp.up_proj", group.linears[0]
    scales = torch.rand(96, generator=torch.Generator().manual_seed(0)).mul(4).exp()
    with torch.inference_mode():
        held_out.aim(layer, is_last=True)
        fold(layer, group, scales)
        layer.finish()
        coarse = layer.chosen.quantized[source]
        layer.commit({source: replace(coarse, scale=coarse.scale * 1.5)})
        assert not held_out.judge(layer, weights.__getitem__, is_last=True)  # rounding alone is no step's choice
        assert layer.chosen.records[source].error == pytest.approx(
            layer.chosen.records[source].rounding_error, rel=0.01
        )
        layer.commit({reader: layer.chosen.quantized[reader]})
        assert held_out.judge(layer, weights.__getitem__, is_last=True) == reader
        assert layer.chosen.records[reader].error > 1.02 * layer.chosen.records[reader].rounding_error
        layer.data.unscaled = frozenset({reader})
        layer.commit({reader: layer.chosen.quantized[reader]})
        assert not can_fold(layer, group)
        assert not held_out.judge(layer, weights.__getitem__, is_last=True)  # never asked for twice


def test_plain_rounding_is_measured_as_the_model_computes_with_it(make_layer):
    """In bfloat16, whose own rounding is not small beside that of 8 bits."""
    layer = make_layer(dtype="int8", group_size=None)
    layer.block.to(torch.bfloat16)
    arguments = layer.stream.arguments
    layer.stream.arguments = lambda batch: tree_map_only(torch.Tensor, in_bfloat16, arguments(batch))
    layer.stream.store = ActivationStore(None, "ram", map(in_bfloat16, list(layer.store)))
    held_out, weights = held_out_of(layer)
    with torch.inference_mode():
        held_out.aim(layer, is_last=True)
        layer.finish()
        for name, weight in weights.items():
            layer.round_plainly(name, weight)
        held_out.judge(layer, weights.__getitem__, is_last=True)
    for record in layer.chosen.records.values():
        assert record.error == pytest.approx(record.rounding_error, rel=1e-4)


def in_bfloat16(tensor):
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def held_out_of(layer):
    """Held-out tokens of a layer alone, and its weights as they are."""
    stores = [ActivationStore(None, "ram", iter([layer.store[0]])) for _ in range(2)]
    held_out = HeldOut(original=stores[0], quantized=stores[1], measure="held-out", num_tokens=10_000)
    return held_out, {name: layer.weight(name).clone() for name in layer.schemes}


def test_errors_are_measured_on_outputs_when_there_is_data(make_layer):
    layer = make_layer()
    held_out, weights = held_out_of(layer)
    with torch.inference_mode():
        held_out.aim(layer, is_last=True)
        del held_out.targets["mlp.down_proj"]  # as of a module that was never called
        layer.finish()
        held_out.judge(layer, weights.__getitem__, is_last=True)
    assert layer.chosen.records["mlp.up_proj"].measure == "held-out"
    assert layer.chosen.records["mlp.down_proj"].measure == "weight"
    assert all(0 < record.error <= 2 * record.rounding_error for record in layer.chosen.records.values())


def test_forward_quantizes_the_inputs_of_committed_linears(make_layer):
    scheme = ActivationScheme(dtype=INT8)
    layer = make_layer(dtype="int8", group_size=None, activation=scheme)
    layer.finish()
    hidden = layer.store[0]
    actual = layer.forward(hidden)
    for name in layer.schemes:
        layer.linear(name).register_forward_pre_hook(lambda module, args: (fake_quantize_inputs(args[0], scheme),))
    with torch.no_grad():
        by_hand = layer.block(hidden, **layer.stream.arguments(hidden))
    assert torch.equal(actual, by_hand)


def test_relative_error_and_signal_to_noise():
    weight = torch.eye(2)
    decoded, zeros = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2)
    assert weight_error(weight, lambda rows: weight[rows] * 1.5) == pytest.approx(0.5)
    assert weight_error(zeros, lambda rows: zeros[rows]) == 0
    inputs = torch.tensor([[3.0, 4.0]])
    assert output_error(inputs, inputs, lambda rows: decoded[rows]) == pytest.approx(0.8)
    assert output_error(2 * inputs, inputs, lambda rows: weight[rows]) == pytest.approx(0.5)  # what inputs bring along
    assert signal_to_noise_db(torch.ones(4), torch.ones(4) * 1.1) == pytest.approx(20, abs=1e-3)
    assert signal_to_noise_db(torch.ones(4), torch.ones(4)) == 200
    assert math.isfinite(signal_to_noise_db(torch.zeros(4), torch.ones(4)))
