"""Attention over the paged cache against float64 attention done the slow way: every KV type, mask and mixture."""

from __future__ import annotations

import pytest
import torch

from quantkit.kernels.reference.kv_codes import codes_of
from tests.kernels.paged import IMPLEMENTATIONS, KV_TYPES, LENGTHS, STEPS, Sequences, dense, layout, use

OPTIONS = {
    "plain": {},
    "window": {"window": 6},
    "softcap": {"softcap": 5.0},
    "all": {"window": 9, "softcap": 4.0},
}


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request, monkeypatch):
    """Every test runs with each of them."""
    use(request.param, monkeypatch)


def largest_error(sequences, steps, **options) -> float:
    cache = sequences.cache()
    errors = []
    for spans in steps:
        for out, span in zip(sequences.step(cache, spans, **options), spans, strict=True):
            errors.append((out.double() - sequences.expected(*span, **options)).abs().max())
    return torch.stack(errors).max().item()  # NaN stays NaN


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KV_TYPES)
def test_mixed_steps_agree_with_dense_attention(kind, name):
    assert largest_error(Sequences(layout(kind), LENGTHS), STEPS, **OPTIONS[name]) < 5e-6


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "query_heads"), [(1, 5), (4, 4)])
def test_head_shapes(kind, dim, heads, query_heads):
    sequences = Sequences(layout(kind, dim=dim, heads=heads), (14, 5), query_heads=query_heads)
    assert largest_error(sequences, [[(0, 0, 5)], [(1, 0, 4), (0, 5, 13)], [(0, 13, 14), (1, 4, 5)]]) < 5e-6


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision(kind, dtype, bound):
    assert largest_error(Sequences(layout(kind, dtype=dtype), LENGTHS), STEPS) < bound


def test_pages_may_be_shorter_than_the_model_computes():
    """A float32 model over bf16 pages: what is remembered is rounded, what is fresh is not."""
    sequences = Sequences(layout(dtype=torch.bfloat16), LENGTHS)
    for states in (sequences.query, sequences.key, sequences.value):
        states[:] = [tensor.float() for tensor in states]
    assert largest_error(sequences, STEPS) < 5e-6


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 31])
def test_chunks_do_not_change_the_result(chunk):
    whole, split = Sequences(layout(), (31,)), Sequences(layout(), (31,))
    expected = whole.step(whole.cache(), [(0, 0, 31)])[0]
    cache = split.cache()
    actual = [split.step(cache, [(0, at, min(at + chunk, 31))])[0] for at in range(0, 31, chunk)]
    torch.testing.assert_close(torch.cat(actual), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KV_TYPES)
def test_a_sequence_does_not_depend_on_its_neighbours(kind):
    together, alone = Sequences(layout(kind), LENGTHS), Sequences(layout(kind), LENGTHS)
    shared, own = together.cache(), alone.cache()
    for spans in STEPS:
        for out, span in zip(together.step(shared, spans), spans, strict=True):
            assert torch.equal(out, alone.step(own, [span])[0])


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_error_of_a_decode_is_within_what_the_steps_allow(kind):
    """Scores err by d = scale * |q| . key steps / 2, outputs by (e^2d - 1) |v| + value step / 2 at most."""
    shape = layout(kind, heads=1, dim=32, page_size=16)
    sequences = Sequences(shape, (49,), query_heads=2)
    cache = sequences.cache()
    sequences.step(cache, [(0, 0, 48)])
    out = sequences.step(cache, [(0, 48, 49)])[0].double()
    exact = dense(sequences.query[0][48:], sequences.key[0], sequences.value[0], scale=32**-0.5)
    key, value = sequences.key[0][:48, 0].double(), sequences.value[0][:48, 0].double()
    if kind == "fp8":  # three bits of mantissa: half a unit is 2^-4 of the value, or of the smallest normal number
        key_error, value_error = (key.abs().clamp(min=2**-6) / 16, value.abs().clamp(min=2**-6) / 16)
    elif kind == "int8":
        key_error, value_error = (x.abs().amax(1, keepdim=True) / 254 * 1.002 for x in (key, value))
    else:
        pages = key.view(3, 16, 32)
        key_error = ((pages.amax(1) - pages.amin(1)) / 30 * 1.01).repeat_interleave(16, 0)
        value_error = (value.amax(1, keepdim=True) - value.amin(1, keepdim=True)) / 30 * 1.01
    score_error = (sequences.query[0][48].double().abs() @ key_error.expand(48, 32).T).max() * 32**-0.5
    bound = torch.expm1(2 * score_error) * value.abs().max() + value_error.max()
    assert 0 < (out - exact).abs().max() <= bound


def test_only_what_the_scheme_says_is_quantized():
    """The open page of per-channel keys is exact."""
    shape = layout("int4", page_size=8)
    sequences = Sequences(shape, (8,))
    cache = sequences.cache()
    sequences.step(cache, [(0, 0, 7)])
    tail = cache._views[0].key_residual[sequences.rows[0]].cpu()
    assert torch.equal(tail[:, :7], sequences.key[0][:7].transpose(0, 1))
    sequences.step(cache, [(0, 7, 8)])
    codes, _, _ = codes_of(sequences.key[0].transpose(0, 1), shape.scheme.key)
    assert torch.equal(cache._views[0].key.codes[sequences.pages[0][0]].cpu(), codes)
