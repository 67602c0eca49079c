"""AutoRound: its written-out gradients against autograd, and that tuning never makes a layer worse."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

import quantkit
from quantkit.compress.algorithms._autoround_block import Examples, tunable
from quantkit.compress.algorithms._autoround_weight import TunedWeight
from quantkit.compress.algorithms.autoround import STEP, AutoRoundStep
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.stream import Stream
from quantkit.compress.recipe.load import build
from quantkit.errors import RecipeError
from quantkit.huggingface.layer_call import hidden_states
from quantkit.numerics import native
from quantkit.numerics.affine import Ranges, WeightGrid, search_parameters
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme, WeightScheme
from tests.compress.pipeline.killer import KillAfterFirst, Killed

QUICK = {"iterations": 24, "learning_rate": 0.03}
RECIPE = """
weights: {dtype: int4, group_size: 16}
steps: [STEPS{autoround: {iterations: 24}}]
calibration: {data: TEXT, samples: 8, sequence_length: 24}
"""


@pytest.fixture
def layer_of(make_layer):
    """A layer with the original beside it, as the pipeline hands it to a step that needs it."""

    def fresh(family="llama", **arguments):
        layer = make_layer(family, **arguments)
        layer.data.original = Stream(copy.deepcopy(layer.block), layer.store, layer.stream.arguments)
        return layer

    return fresh


def problem(dtype="int3", group_size=8, symmetric=True, seed=0):
    torch.manual_seed(seed)
    weight, scheme = torch.randn(6, 24), WeightScheme(dtype=DTYPES[dtype], group_size=group_size, symmetric=symmetric)
    return weight, scheme, *search_parameters(weight, WeightGrid(scheme, torch.float32))[:2]


def round_through(values):
    """Rounding that counts as the identity for gradients."""
    return values + (values.round() - values).detach()


def plain_formula(weight, scheme, offset, scale, zero):
    """(N, G, g) values, from what autograd differentiates."""
    raw = round_through(weight.view(*scale.shape, -1) / scale.unsqueeze(-1) + offset.view(*scale.shape, -1))
    shift = 0.0 if zero is None else round_through(zero).unsqueeze(-1)
    return ((raw + shift).clamp(scheme.dtype.minimum, scheme.dtype.maximum) - shift) * scale.unsqueeze(-1)


def gradients(tuned, gradient):
    """Of the loss by offset (N, K), as signs; by scale and zero point (N, G); from that by the values."""
    before, ((rows, scratch),) = tuned.offset.clone(), tuned._blocks()
    by_scale, by_zero = tuned._move(rows, gradient, 1e-3, scratch)
    signs = (before - tuned.offset).sign()
    tuned.offset = before
    return signs, by_scale, by_zero


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["int2", "int3", "int4"])
@pytest.mark.parametrize("group_size", [8, None])
def test_gradients_are_those_of_the_plain_formula(dtype, group_size, symmetric):
    weight, scheme, scale, zero = problem(dtype, group_size, symmetric)
    scale = scale * 0.7  # some weights are clamped
    tuned = TunedWeight(weight, WeightGrid(scheme, torch.float32), Ranges(scale, zero))
    tuned.offset.uniform_(-0.5, 0.5)
    leaves = [tuned.offset.clone().requires_grad_(), scale.clone().requires_grad_()]
    leaves += [] if zero is None else [zero.clone().requires_grad_()]
    values = plain_formula(weight, scheme, *leaves, *([None] if zero is None else []))
    gradient = torch.randn_like(weight)
    values.backward(gradient.view_as(values))
    decoded = torch.empty_like(weight)
    tuned.dequantize(decoded)
    torch.testing.assert_close(decoded, values.detach().view_as(weight))
    signs, *of_ranges = gradients(tuned, gradient)
    assert torch.equal(signs, leaves[0].grad.sign())
    for actual, leaf in zip(of_ranges, leaves[1:], strict=False):
        torch.testing.assert_close(actual, leaf.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(native.library() is None, reason="no C library")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [8, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_c_equal_those_in_torch(dtype, group_size, symmetric, monkeypatch):
    weight, scheme, scale, zero = problem("int2", group_size, symmetric)
    grid, ranges = WeightGrid(scheme, torch.bfloat16), Ranges(scale * 0.7, zero)
    in_c, in_torch = (TunedWeight(weight.to(dtype), grid, ranges) for _ in range(2))
    monkeypatch.setattr(in_torch, "_in_c", lambda _: False)
    ours, theirs = torch.full_like(weight, torch.nan, dtype=dtype), torch.empty_like(weight, dtype=dtype)
    for _ in range(20):
        gradient = torch.randn_like(weight).to(dtype)
        in_c.step(gradient, ours, 0.05)
        in_torch.step(gradient, theirs, 0.05)
        assert torch.equal(ours, theirs)
    assert torch.equal(in_c.offset, in_torch.offset)
    assert torch.equal(in_c.result().codes, in_torch.result().codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_step_goes_against_the_signs_and_writes_the_new_values(symmetric, monkeypatch):
    weight, scheme, scale, zero = problem(symmetric=symmetric)
    tuned = TunedWeight(weight, WeightGrid(scheme, torch.float32), Ranges(scale, zero))
    gradient, values = torch.randn_like(weight), torch.empty_like(weight)
    signs, by_scale, _ = gradients(tuned, gradient)
    tuned._step_rows = 4  # two blocks, in torch
    monkeypatch.setattr(tuned, "_in_c", lambda _: False)
    tuned.step(gradient, values, 0.1)
    torch.testing.assert_close(tuned.offset, -0.1 * signs)
    torch.testing.assert_close(tuned.factor, 1 - 0.05 * (by_scale * scale).sign())  # also where a scale is negative
    expected = torch.empty_like(weight)
    tuned.dequantize(expected)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(tuned.result().dequantize(), expected)


def test_a_negative_scale_stays_negative():
    weight, scheme, scale, _ = problem()
    tuned = TunedWeight(weight, WeightGrid(scheme, torch.bfloat16), Ranges(-scale.abs(), None))
    values = torch.empty_like(weight)
    for _ in range(3):
        tuned.step(torch.randn_like(weight), values, 0.2)
    assert (tuned.result().scale < 0).all()
    torch.testing.assert_close(tuned.result().dequantize(), values)


@pytest.mark.parametrize("batches", [1, 2])
def test_gradients_handed_over_are_those_of_autograd(layer_of, batches):
    """Of one batch, and the sum over several; nothing is left behind for the next step."""
    layer = layer_of()
    names, handed = tuple(layer.schemes), {}
    with tunable(layer, names) as block:
        examples = Examples(layer)
        pairs = [(hidden, target + hidden) for hidden, target in map(examples.batch, range(batches))]

        def keep(name, gradient, _):
            handed[name] = gradient.clone()

        for number, pair in enumerate(pairs, start=1):
            block.backward(*pair, keep if number == batches else None)
        assert not block._sums
    weights = {name: layer.weight(name).clone().requires_grad_() for name in names}
    for hidden, target in pairs:
        values = {f"{name}.weight": weight for name, weight in weights.items()}
        arguments = tree_map_only(torch.Tensor, torch.Tensor.clone, layer.stream.arguments(hidden))
        output = hidden_states(functional_call(layer.block, values, (hidden,), arguments))
        (1024 * (output - target).square().sum() / target.square().sum()).backward()
    for name, weight in weights.items():
        torch.testing.assert_close(handed[name], weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "dtype", "group_size", "symmetric"),
    [
        ("llama", "int4", None, True),
        ("qwen3", "int4", 16, True),
        ("llama", "int3", 16, False),
        ("llama", "int2", 16, True),
    ],
)
def test_better_than_rounding(layer_of, output_error, family, dtype, group_size, symmetric):
    arguments = {"dtype": dtype, "group_size": group_size, "symmetric": symmetric}
    rounding = output_error(layer_of(family, **arguments), lambda layer: layer.finish())
    tuned = output_error(layer_of(family, **arguments), lambda layer: STEP(**QUICK).apply(layer))
    assert tuned < rounding


def test_equal_runs_give_equal_codes_and_leave_the_layer_usable(layer_of):
    first, second = layer_of(), layer_of()
    for layer in (first, second):
        with torch.inference_mode():
            AutoRoundStep(**QUICK, batch_size=2).apply(layer)
        assert not any(value.requires_grad for value in layer.block.parameters())
        assert set(layer.chosen.quantized) == set(layer.schemes)
    for name, weight in first.chosen.quantized.items():
        assert torch.equal(weight.codes, second.chosen.quantized[name].codes)
        assert torch.equal(weight.dequantize(), first.weight(name))
    other = layer_of()
    other.seed = 1
    with torch.inference_mode():
        AutoRoundStep(**QUICK, batch_size=2).apply(other)
    assert any(not torch.equal(w.codes, other.chosen.quantized[n].codes) for n, w in first.chosen.quantized.items())


def test_never_worse_than_where_it_started(layer_of, output_error):
    def started(layer):
        STEP(iterations=1, learning_rate=1e-9).apply(layer)

    start = output_error(layer_of(), started)
    layer = layer_of()
    assert output_error(layer, lambda layer: STEP(iterations=3, learning_rate=1.0).apply(layer)) <= start * 1.0001
    assert any("did not lower the held-out error" in note for note in layer.chosen.notes)


def test_kept_only_if_sequences_that_were_not_tuned_on_agree(layer_of, monkeypatch):
    layer, used, judged, batch = layer_of(), [], [], Examples.batch
    monkeypatch.setattr(Examples, "batch", lambda self, *which: (used.append(which), batch(self, *which))[1])

    def error(_, examples, sequences):
        judged.extend(sequences)
        return float(len(judged))  # it grows

    monkeypatch.setattr("quantkit.compress.algorithms._autoround_block.TunedBlock.error", error)
    STEP(**QUICK).apply(layer)
    assert judged and len(used) == QUICK["iterations"]
    assert not any(which in judged for which in used)
    assert any("did not lower the held-out error" in note for note in layer.chosen.notes)


def test_an_error_that_is_no_number_falls_back(layer_of, monkeypatch):
    monkeypatch.setattr("quantkit.compress.algorithms._autoround_block.TunedBlock.backward", lambda *_: float("nan"))
    layer, start = layer_of(), layer_of()
    with torch.inference_mode():
        STEP(**QUICK).apply(layer)
        STEP(iterations=1, learning_rate=1e-9).apply(start)
    assert any("rounded to nearest" in note for note in layer.chosen.notes)
    for name, weight in layer.chosen.quantized.items():
        assert torch.equal(weight.codes, start.chosen.quantized[name].codes)


def test_linears_ignored_stay_as_they_are(layer_of):
    layer = layer_of(ignored=("self_attn.o_proj",))
    before = layer.weight("self_attn.o_proj").clone()
    with torch.inference_mode():
        STEP(**QUICK).apply(layer)
    assert torch.equal(layer.weight("self_attn.o_proj"), before)
    assert "self_attn.o_proj" not in layer.chosen.quantized


def test_quantized_inputs_are_seen_while_tuning(layer_of):
    layer = layer_of(activation=ActivationScheme(dtype=DTYPES["int4"]))
    names = tuple(layer.schemes)
    with torch.inference_mode():
        with tunable(layer, names) as block:
            examples = Examples(layer)
            quantized = block.error(examples, examples.sequences)
        plain = replace(layer, schemes={name: replace(s, activation=None) for name, s in layer.schemes.items()})
        with tunable(plain, names) as block:
            examples = Examples(plain)
            assert block.error(examples, examples.sequences) == 0
        assert quantized > 1e-6
        STEP(**QUICK).apply(layer)
    assert layer.chosen.quantized.keys() == set(names)


def test_floats_are_rounded_first_and_said(layer_of):
    layer = layer_of()
    fp8 = WeightScheme(dtype=DTYPES["fp8"])
    layer.schemes = {**layer.schemes, "mlp.down_proj": replace(layer.schemes["mlp.down_proj"], weight=fp8)}
    with torch.inference_mode():
        STEP(**QUICK).apply(layer)
    assert any("mlp.down_proj is fp8 channel, which autoround cannot tune" in note for note in layer.chosen.notes)
    assert set(layer.chosen.quantized) == set(layer.schemes)


def test_states_on_disk_give_the_same_codes(layer_of, tmp_path):
    layers = layer_of(), layer_of()
    layers[1].stream.store = ActivationStore(tmp_path / "a", "disk", iter(list(layers[0].store)))
    layers[1].data.original.store = ActivationStore(tmp_path / "b", "disk", iter(list(layers[0].store)))
    for layer in layers:
        with torch.inference_mode():
            STEP(**QUICK).apply(layer)
    for name, weight in layers[0].chosen.quantized.items():
        assert torch.equal(weight.codes, layers[1].chosen.quantized[name].codes)


@pytest.mark.parametrize("first", ["", "awq, "])
def test_a_killed_run_resumes_bit_for_bit(tiny_llama, text_file, tmp_path, first):
    recipe, whole, resumed = tmp_path / "recipe.yaml", tmp_path / "whole", tmp_path / "resumed"
    recipe.write_text(RECIPE.replace("STEPS", first).replace("TEXT", str(text_file)))
    quantkit.quantize(tiny_llama, recipe, whole)
    with pytest.raises(Killed):
        quantkit.quantize(tiny_llama, recipe, resumed, listener=KillAfterFirst())
    result = quantkit.quantize(tiny_llama, recipe, resumed)
    assert result.resumed_layers == 1
    for path in sorted(whole.glob("*.safetensors")):
        assert path.read_bytes() == (resumed / path.name).read_bytes()


@pytest.mark.parametrize("options", [{"iterations": 0}, {"batch_size": 0}, {"learning_rate": 2.0}])
def test_options_that_make_no_sense_are_refused(options):
    ((name, value),) = options.items()
    recipe = {"name": "x", "weights": {"dtype": "int4"}, "steps": [{"autoround": options}]}
    with pytest.raises(RecipeError, match=rf"x: steps\[0\]\.autoround\.{name}: input should be .*, found {value}"):
        build(recipe, "x")


def test_targets_are_what_the_original_gives_and_no_copy_of_it_is_kept(tiny_llama, text_file, tmp_path, monkeypatch):
    recipe, apply, seen = tmp_path / "recipe.yaml", AutoRoundStep.apply, []
    recipe.write_text(RECIPE.replace("STEPS", "").replace("TEXT", str(text_file)))

    def watched(self, layer):
        pairs = zip(layer.data.targets, map(layer.forward, layer.store), strict=True)
        seen.append((layer.data.original, [torch.equal(target, output) for target, output in pairs]))
        apply(self, layer)

    monkeypatch.setattr(AutoRoundStep, "apply", watched)
    for mode in ("ram", "disk"):
        quantkit.quantize(tiny_llama, recipe, tmp_path / mode, activations=mode)
    assert [original for original, _ in seen] == [None] * 4
    assert [all(same) for _, same in seen] == [True, False] * 2  # the second layer is fed by the quantized first
    for path in sorted((tmp_path / "ram").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "disk" / path.name).read_bytes()
