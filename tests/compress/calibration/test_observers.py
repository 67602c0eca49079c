"""Statistics against the same thing computed at once in float64."""

from __future__ import annotations

import pytest
import torch

from quantkit.compress.calibration import observers
from quantkit.compress.calibration.observers import CrossGram, Gram, GroupGram, Magnitude, Workspace


@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [torch.randn(n, 24) for n in (5, 1, 40)]


@pytest.mark.parametrize(("panel", "tokens"), [(7, 1024), (24, 3), (512, 40), (24, 16)])
def test_gram_is_the_mean_outer_product(batches, panel, tokens, monkeypatch, device):
    monkeypatch.setattr(observers, "_PANEL", panel)
    monkeypatch.setattr(observers, "_TOKENS", tokens)  # batches are taken in pieces, and all of them count
    monkeypatch.setattr(observers, "_LARGEST_NORM", 1e9)
    gram = Gram(24, device)
    for batch in batches:
        gram.update(batch.to(device))
    everything = torch.cat(batches).double()
    (mean,) = gram.finish()
    expected = everything.T @ everything / 46
    torch.testing.assert_close(mean.tril().cpu().double(), expected.tril(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(8, 5), (4, 5)])
def test_cross_gram_is_the_mean_product_of_errors_and_inputs(batches, sizes, monkeypatch, device):
    monkeypatch.setattr(observers, "_TOKENS", 16)
    monkeypatch.setattr(observers, "_LARGEST_NORM", 1e9)
    weights = [torch.randn(size, 24) for size in sizes]
    cross = CrossGram([weight.to(device) for weight in weights])
    originals = [batch + torch.randn_like(batch) for batch in batches]
    for batch, original in zip(batches, originals, strict=True):
        cross.update(batch.to(device), original.to(device))
    x, o = torch.cat(batches).double(), torch.cat(originals).double()
    (errors, halves), expected = cross.errors(), (o - x).T @ x / 46
    outputs = torch.cat(weights).double() @ expected  # so few that none are combined
    torch.testing.assert_close((halves[0] + halves[1]).cpu().double(), outputs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(halves[0], halves[1])
    if sum(sizes) > 12:  # half the inputs
        torch.testing.assert_close(errors.cpu().double(), expected, rtol=1e-5, atol=1e-6)
        return
    for weight, error in zip(weights, errors, strict=True):
        torch.testing.assert_close(error.cpu().double(), weight.double() @ expected, rtol=1e-5, atol=1e-5)


def test_a_workspace_is_taken_once_and_gives_what_own_ones_give(device):
    torch.manual_seed(0)
    workspace, weight = Workspace(), torch.randn(8, 24, device=device)
    inputs = [torch.randn(n, 24, device=device).bfloat16() for n in (40, 5, 40)]
    sums = [(Gram(24, device, workspace=own), CrossGram([weight], own)) for own in (workspace, None)]
    for batch in inputs:
        for gram, cross in sums:
            gram.update(batch)
            cross.update(batch, batch * 1.5)
    taken = [workspace.empty(batch.shape, "inputs", batch) for batch in inputs]
    assert taken[1].data_ptr() == taken[0].data_ptr() == taken[2].data_ptr()
    (shared, errors), (alone, expected) = ((gram.finish()[0].tril(), cross.errors().mean) for gram, cross in sums)
    assert torch.equal(shared, alone) and all(map(torch.equal, errors, expected))


def test_halves_add_up_and_each_is_of_its_tokens(batches, device):
    whole, halves = Gram(24, device), Gram(24, device, parts=2)
    for batch in batches:
        whole.update(batch.to(device))
        halves.update(batch.to(device))
    first, second = (half.tril() for half in halves.finish())
    torch.testing.assert_close(first + second, whole.finish()[0].tril())
    rows = torch.cat([batch[: (len(batch) + 1) // 2] for batch in batches]).to(device)
    torch.testing.assert_close(first, (rows.T @ rows / 46).tril())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_enormous_inputs_counts_as_one_of_a_few(dtype, device):
    """The first token of a text has them in many models: alone it would be nearly all of the mean."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(500, 24, device=device).to(dtype), torch.randn(13, 24, device=device)
    inputs[7] *= 1000
    original = (inputs.float() * 1.25).to(dtype)
    gram, cross = Gram(24, device), CrossGram([weight])
    gram.update(inputs)
    cross.update(inputs, original)
    tamed = inputs.float()
    norms = tamed.norm(dim=1)
    tamed[7] *= 2 * norms.median() / norms[7]
    expected = tamed.T @ tamed / 500
    torch.testing.assert_close(gram.finish()[0].tril(), expected.tril(), rtol=0.02, atol=0.01)
    torch.testing.assert_close(cross.errors().mean, expected / 4, rtol=0.05, atol=0.01)


def test_outputs_are_combined_where_there_are_many(device):
    torch.manual_seed(0)
    weights = [torch.randn(300, 24, device=device), torch.randn(212, 24, device=device)]
    cross, inputs = CrossGram(weights), torch.randn(400, 24, device=device)
    cross.update(inputs, inputs + 0.1 * torch.randn(400, 24, device=device))
    mean, halves = cross.errors()
    assert all(half.shape == (256, 24) for half in halves)
    size = (torch.cat(weights) @ mean).square().sum()
    assert (halves[0] + halves[1]).square().sum() == pytest.approx(size.item(), rel=0.3)


def test_group_gram_is_the_diagonal_blocks_of_the_gram(batches, device, monkeypatch):
    monkeypatch.setattr(observers, "_LARGEST_NORM", 1e9)
    whole, blocks = Gram(24, device), GroupGram(24, 8, device)
    for batch in batches:
        whole.update(batch.to(device))
        blocks.update(batch.to(device))
    full = whole.finish()[0].tril()
    full += full.tril(-1).T
    expected = torch.stack([full[i : i + 8, i : i + 8] for i in (0, 8, 16)])
    torch.testing.assert_close(blocks.mean, expected, rtol=1e-5, atol=1e-6)


def test_magnitudes(batches, device):
    seen = Magnitude(24, device)
    for batch in batches:
        seen.update(batch.to(device))
    everything = torch.cat(batches).to(device)
    torch.testing.assert_close(seen.mean, everything.abs().mean(0))
    torch.testing.assert_close(seen.mean_square, everything.square().mean(0))
    assert torch.equal(seen.largest, everything.abs().amax(0))
