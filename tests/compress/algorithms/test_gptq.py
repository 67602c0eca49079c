"""GPTQ against its textbook form in float64, and what it must never do."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from quantkit.compress.algorithms import _gptq_asymmetric, _gptq_factor, _gptq_jobs
from quantkit.compress.algorithms._gptq_asymmetric import Correction, choose_correction, corrected, shift_of
from quantkit.compress.algorithms._gptq_factor import add_lower, cholesky_factor
from quantkit.compress.algorithms._gptq_jobs import cut_rows
from quantkit.compress.algorithms._gptq_loop import settle_columns
from quantkit.compress.algorithms.awq import AwqStep
from quantkit.compress.algorithms.gptq import STEP, GptqStep
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.observers import CrossErrors, CrossGram, Gram
from quantkit.compress.calibration.stream import Stream
from quantkit.errors import ModelError
from quantkit.numerics.affine import Ranges, WeightGrid, minmax_parameters
from quantkit.numerics.dtype import INT4
from quantkit.numerics.scheme import WeightScheme
from tests.compress.algorithms.gptq_problem import problem


def settled_codes(weights, factor, groups, ranges, scheme, block=128):
    """(N, K), inputs in order."""
    codes = settle_columns(weights, factor, groups, ranges, scheme, block).codes
    return codes[torch.argsort(factor.backwards)].T


def textbook(weight, hessian, order, scale, zero, group):
    """Frantar et al., algorithm 1, column by column with the Cholesky factor of the inverse, in float64."""
    matrix = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(len(order))
    upper = torch.linalg.cholesky(torch.linalg.inv(matrix[order][:, order]), upper=True)
    open_, codes = weight.double()[:, order].clone(), torch.empty_like(weight)
    for position, column in enumerate(order.tolist()):
        step = scale[:, column // group].double()
        offset = 0 if zero is None else zero[:, column // group].double()
        code = (open_[:, position] / step + offset).round().clamp(-8, 7)
        codes[:, column] = code.float()
        error = (open_[:, position] - (code - offset) * step) / upper[position, position]
        open_[:, position + 1 :] -= error[:, None] * upper[position, position + 1 :]
    return codes


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_size", [5, 16, 128])
@pytest.mark.parametrize("shuffled", [False, True])
def test_equals_the_textbook(implementation, symmetric, block_size, shuffled):
    weight, hessian = problem()
    order = torch.randperm(48) if shuffled else torch.arange(48)
    scheme = WeightScheme(dtype=INT4, group_size=12, symmetric=symmetric)
    scale, zero, *_ = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    expected = textbook(weight, hessian, order, scale, zero, 12)
    factor = cholesky_factor(hessian.clone(), order, 0.01)
    # Two weights with the same inputs go through the loop together.
    parts, groups = [weight[:4], weight[4:]], torch.arange(48) // 12
    codes = settled_codes(parts, factor, groups, Ranges(scale, zero), scheme, block_size)
    assert factor.raised == 0
    assert (codes.float() == expected).float().mean() > 0.995  # float32 against float64 may flip a tie


def test_cholesky_factor_factors_the_damped_hessian(monkeypatch):
    monkeypatch.setattr(_gptq_factor, "_COPIED", 16)  # several blocks
    monkeypatch.setattr(_gptq_factor, "_PANEL", 20)
    _, hessian = problem()
    order = torch.randperm(48)
    factor = cholesky_factor(hessian.tril().add(torch.ones(48, 48).triu(1)), order, 0.01)  # above: anything
    lower, backwards, *_ = factor
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(48)
    assert torch.equal(backwards, order.flip(0))
    torch.testing.assert_close(lower.tril() @ lower.tril().T, damped[backwards][:, backwards], rtol=1e-4, atol=1e-3)
    # In the same square, above the factor.
    assert torch.equal(torch.cat([factor.hessian(slice(0, 20)), factor.hessian(slice(20, 48))]), damped)


def test_a_column_without_a_root_is_found_in_the_last_panel_too(monkeypatch):
    monkeypatch.setattr(_gptq_factor, "_PANEL", 20)
    _, hessian = problem()
    hessian[47, 47] = -1.0
    assert cholesky_factor(hessian, torch.arange(48).flip(0), 0.01).raised > 0.01


def test_a_singular_hessian_raises_the_damping_and_says_so(make_layer):
    layer = make_layer()
    one = torch.randn(1, 1, 64)
    layer.stream.store = [one.expand(1, 8, 64).contiguous()]  # rank one: every token is the same
    with torch.inference_mode():
        GptqStep(damping=1e-12).apply(layer)
    assert any("damping raised to" in note for note in layer.chosen.notes)
    assert set(layer.chosen.quantized) == set(layer.schemes)


def test_dead_inputs_are_rounded_on_their_own():
    weight, hessian = problem()
    hessian[3] = 0
    hessian[:, 3] = 0
    scheme = WeightScheme(dtype=INT4)
    scale, *_ = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    order = torch.arange(48)
    factor = cholesky_factor(hessian, order, 0.01)
    groups = torch.zeros(48, dtype=torch.int64)
    codes = settled_codes([weight], factor, groups, Ranges(scale, None), scheme)
    assert torch.equal(codes[:, 3].float(), (weight[:, 3] / scale[:, 0]).round().clamp(-8, 7))


@pytest.mark.parametrize(("tokens", "expected"), [(6, 1.0), (100, 0.4 * math.sqrt(48 / 100)), (10**9, 0.01)])
def test_automatic_damping_grows_with_inputs_per_token(tokens, expected):
    hessian = torch.eye(48) * 2
    assert GptqStep()._factor(hessian, tokens).diagonal[0].item() == pytest.approx(2 * (1 + expected))
    assert GptqStep(damping=0.3)._factor(torch.eye(48), tokens).diagonal[0].item() == pytest.approx(1.3)


def test_a_dead_input_gets_the_mean_of_the_diagonal_before_damping():
    _, hessian = problem()
    hessian[3] = hessian[:, 3] = 0
    mean = hessian.diagonal().mean().item()
    assert cholesky_factor(hessian, torch.arange(48), 0.01).diagonal[3].item() == pytest.approx(1.01 * mean)


def test_infinite_inputs_are_an_error(make_layer):
    with pytest.raises(ModelError, match="cannot be factorised"):
        cholesky_factor(torch.full((4, 4), torch.inf), torch.arange(4), 0.01)
    layer = make_layer()
    layer.stream.store = [torch.full((1, 4, 64), torch.nan)]
    with pytest.raises(ModelError, match="inputs are not finite"), torch.inference_mode():
        GptqStep().apply(layer)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"act_order": "none"}, {"act_order": "group"}, {"true_sequential": True}])
def test_beats_rounding_on_every_family(make_layer, output_error, family, options):
    rounding = output_error(make_layer(family), lambda layer: layer.finish())
    gptq = output_error(make_layer(family), lambda layer: STEP(**options).apply(layer))
    assert gptq < 0.9 * rounding


@pytest.mark.parametrize(("dtype", "group_size"), [("int2", 16), ("int3", 16), ("int4", None), ("int8", None)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_integer_type_and_granularity(make_layer, output_error, dtype, group_size, symmetric):
    arguments = {"dtype": dtype, "group_size": group_size, "symmetric": symmetric}
    rounding = output_error(make_layer(**arguments), lambda layer: layer.finish())
    gptq = output_error(make_layer(**arguments), lambda layer: GptqStep().apply(layer))
    assert gptq < rounding


def test_act_order_group_stores_the_index(make_layer):
    layer = make_layer()
    with torch.inference_mode():
        GptqStep(act_order="group").apply(layer)
    weight = layer.chosen.quantized["mlp.down_proj"]
    assert sorted(weight.group_index.bincount().tolist()) == [16] * 6
    assert torch.equal(weight.dequantize(), layer.weight("mlp.down_proj"))


@pytest.mark.parametrize("rows", [10, 60])  # fewer and more than inputs
def test_the_corrected_target_is_the_least_squares_solution(rows, monkeypatch):
    monkeypatch.setattr(_gptq_asymmetric, "_DIVIDED_ROWS", 7)  # several blocks, the last ones smaller
    monkeypatch.setattr(_gptq_asymmetric, "_DIVIDED_COLUMNS", 20)
    weight, hessian = problem(rows=rows)
    torch.manual_seed(1)
    error, chosen = torch.randn(48, 48) * 0.1, Correction(0.01, 0.5)
    damped = (hessian + 0.01 * hessian.diagonal().mean() * torch.eye(48)).double()
    expected = weight.double() + 0.5 * weight.double() @ error.double() @ torch.linalg.inv(damped)
    hessian = hessian.tril() + torch.full_like(hessian, math.nan).triu(1)  # which is not read
    parts = [weight[:4], weight[4:]]

    def target(mean):
        shift = shift_of(CrossErrors(mean, []), hessian, chosen, by_all=False)
        return torch.cat(corrected(parts, shift))

    by_outputs, actual = target(tuple(part @ error for part in parts)), target(error.clone())
    torch.testing.assert_close(by_outputs, actual, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    in_16_bits = [part.bfloat16() for part in parts]
    shift = torch.randn(48, 48) / 50
    wanted = torch.cat([part.double() + part.double() @ shift.double() for part in in_16_bits])
    torch.testing.assert_close(torch.cat(corrected(in_16_bits, shift)).double(), wanted, rtol=0, atol=0.01)


def upstream(tokens, noise=0.3, outputs=24):
    """Statistics of inputs that carry an error: one part of it follows from them, the other is noise."""
    torch.manual_seed(4)
    mix, weight = 0.05 * torch.randn(48, 48) / 48**0.5, torch.randn(outputs, 48)
    inputs = torch.randn(tokens, 48) @ torch.randn(48, 48) / 48**0.5
    original = inputs + inputs @ mix + noise * torch.randn(tokens, 48)
    gram, cross = Gram(48, torch.device("cpu"), parts=2), CrossGram([weight])
    gram.update(inputs)
    cross.update(inputs, original)
    return gram.finish(), cross.errors(), weight @ mix.T


def test_a_correction_that_few_tokens_ask_for_is_not_believed(monkeypatch):
    monkeypatch.setattr(_gptq_asymmetric, "_DIVIDED_COLUMNS", 20)
    shares = {}
    for tokens in (100, 1000, 200_000):
        hessians, errors, true = upstream(tokens)
        chosen = choose_correction(hessians, errors.halves, 1.0)
        shares[tokens] = chosen.share
        add_lower(hessians[0], hessians[1])

        def distance(correction, total=hessians[0], errors=errors, true=true):
            mean = tuple(part.clone() for part in errors.mean)
            shift = shift_of(CrossErrors(mean, []), total, correction, by_all=False)
            return (true if shift is None else shift[0] - true).square().sum().item()

        whole = distance(Correction(0.01, 1.0))
        assert distance(chosen) < (1.01 if tokens == 200_000 else 0.7) * whole
        assert distance(chosen) < 1.05 * distance(Correction(0.01, 0.0))
    assert shares[100] < 0.2 and shares[200_000] > 0.95, shares
    hessians, errors, _ = upstream(200_000)
    assert choose_correction(hessians, errors.halves, 0.25).share == 0.25
    assert choose_correction(hessians, [torch.zeros_like(half) for half in errors.halves], 1.0).share == 0


def gptaq(weight, hessian, error, scale):
    """Li et al. 2025, algorithm 1 with plain column order, in float64: the correction moves on column by column."""
    width = weight.shape[1]
    matrix = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(width)
    upper = torch.linalg.cholesky(torch.linalg.inv(matrix), upper=True)
    spread = (error.double() @ upper.T).triu(1) @ upper
    open_, decoded = weight.double().clone(), torch.empty_like(weight, dtype=torch.float64)
    for column in range(width):
        value = open_[:, column].clone()
        decoded[:, column] = (value / scale[:, 0]).round().clamp(-8, 7) * scale[:, 0]
        wrong = (value - decoded[:, column]) / upper[column, column]
        open_[:, column:] -= wrong[:, None] * upper[column, column:] - value[:, None] * spread[column, column:]
    return decoded.float()


def test_correction_comes_nearer_to_the_original_outputs_than_gptq_and_than_gptaq():
    torch.manual_seed(3)
    original = torch.randn(4000, 32) @ torch.randn(32, 32)
    inputs = original + 0.3 * original @ torch.randn(32, 32) / 32**0.5 + 0.1 * torch.randn(4000, 32)
    weight, scheme = torch.randn(24, 32), WeightScheme(dtype=INT4)
    hessian, error = inputs.T @ inputs / 4000, (original - inputs).T @ inputs / 4000
    scale, *_ = minmax_parameters(weight, WeightGrid(scheme, torch.float32))
    order = torch.arange(32)
    factor = cholesky_factor(hessian.clone(), order, 0.01)

    def distance(decoded):
        return (inputs @ decoded.T - original @ weight.T).square().mean().item()

    def loop(target):
        ranges = minmax_parameters(target, WeightGrid(scheme, torch.float32))
        codes = settled_codes([target], factor, torch.zeros(32, dtype=torch.int64), ranges, scheme)
        return distance(codes * ranges[0])

    shift = shift_of(CrossErrors(error.clone(), []), hessian, Correction(0.01, 1.0), by_all=False)
    ours = loop(corrected([weight], shift)[0])
    assert ours < distance(gptaq(weight, hessian, error, scale)) < loop(weight)


def with_original(layer, noise):
    """The context of a layer whose inputs are not those of the original model any more."""
    generator = torch.Generator().manual_seed(5)
    layer.data.original = Stream(copy.deepcopy(layer.block), layer.store, layer.stream.arguments)
    mix = noise * torch.randn(64, 64, generator=generator) / 8
    layer.stream.store = ActivationStore(None, "ram", (hidden + hidden @ mix for hidden in layer.data.original.store))
    return layer


@pytest.mark.parametrize("options", [{}, {"true_sequential": True}, {"act_order": "group"}])
def test_upstream_errors_are_made_up_for(make_layer, options):
    def run(asymmetric_calibration):
        layer = with_original(make_layer(), noise=0.2)
        targets = [layer.data.original.forward(hidden) for hidden in layer.data.original.store]
        with torch.inference_mode():
            GptqStep(asymmetric_calibration=asymmetric_calibration, **options).apply(layer)
        actual = [layer.forward(hidden) for hidden in layer.store]
        # The residual stream carries the error on; the layer can only mend what it adds.
        added = zip(actual, layer.store, targets, layer.data.original.store, strict=True)
        return sum(((f - s) - (w - o)).square().sum().item() for f, s, w, o in added)

    assert run(1.0) < 0.8 * run(0.0)


def test_matrices_go_through_the_loop_alone_as_they_do_together(make_layer, monkeypatch):
    def codes(largest):
        monkeypatch.setattr(_gptq_jobs, "_TALLEST", largest)
        layer = with_original(make_layer(), noise=0.2)
        with torch.inference_mode():
            GptqStep(asymmetric_calibration=1.0).apply(layer)
        return [layer.chosen.quantized[name].codes for name in layer.schemes]

    assert all(torch.equal(a, b) for a, b in zip(codes(1), codes(1 << 28), strict=True))


def test_nothing_upstream_is_nothing_to_make_up_for(make_layer):
    """Smoothing changes inputs and weights, but is no error: the inputs are compared as they were before it."""
    layer = with_original(make_layer(), noise=0.0)
    plain, step = make_layer(), STEP(asymmetric_calibration=1.0, true_sequential=False)
    with torch.inference_mode():
        for item in (layer, plain):
            AwqStep(grid=4).apply(item)
        assert layer.data.divisors
        step.apply(layer)
        STEP().apply(plain)
    for name in layer.chosen.quantized:
        same = layer.chosen.quantized[name].codes == plain.chosen.quantized[name].codes
        assert same.float().mean() > 0.99, name


@pytest.mark.parametrize("group_size", [16, None])
def test_refitting_lowers_the_output_error(make_layer, output_error, group_size):
    def run(refit):
        layer = make_layer(dtype="int3", group_size=group_size)
        return output_error(layer, lambda layer: GptqStep(refit=refit).apply(layer))

    assert run(1) < run(0)


def test_linears_ignored_stay_as_they_are(make_layer):
    layer = make_layer(ignored=("self_attn.o_proj",))
    before = layer.weight("self_attn.o_proj").clone()
    with torch.inference_mode():
        GptqStep().apply(layer)
    assert torch.equal(layer.weight("self_attn.o_proj"), before)
    assert "self_attn.o_proj" not in layer.chosen.quantized


def test_one_hessian_per_set(make_layer, monkeypatch):
    """q, k and v (and gate and up) share inputs: four Gram matrices per layer, not seven."""
    import quantkit.compress.algorithms.gptq as module

    made = []
    original = module.Gram
    monkeypatch.setattr(module, "Gram", lambda *args, **split: made.append(args) or original(*args, **split))
    with torch.inference_mode():
        GptqStep().apply(make_layer())
    assert [args[0] for args in made] == [64, 64, 64, 96]


def test_rows_are_cut_into_parts_of_about_one_size():
    assert cut_rows([100], 1, 16) == [[(0, slice(0, 100))]]
    assert cut_rows([2048, 256, 256], 2, 64) == [
        [(0, slice(0, 1280))],
        [(0, slice(1280, 2048)), (1, slice(0, 256)), (2, slice(0, 256))],
    ]
    # Whole heights of each matrix, so fewer parts than asked for.
    assert cut_rows([100, 100], 4, 64) == [[(0, slice(0, 64))], [(0, slice(64, 100))], [(1, slice(0, 100))]]


def test_parts_of_a_matrix_are_solved_as_the_whole(make_layer, monkeypatch):
    """On their own, with the same Hessian; products of fewer rows may differ in the last bit."""
    whole, cut = make_layer(), make_layer()
    with torch.inference_mode():
        GptqStep().apply(whole)
        monkeypatch.setattr(_gptq_jobs, "_SHORTEST", 32)
        GptqStep().apply(cut)
    for name, expected in whole.chosen.quantized.items():
        assert cut.chosen.quantized[name].shape == expected.shape
        original = make_layer().weight(name)
        errors = [(each.dequantize() - original).norm().item() for each in (cut.chosen.quantized[name], expected)]
        assert errors[0] == pytest.approx(errors[1], rel=0.02)
