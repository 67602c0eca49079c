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
    gram = Gram(24, device)
    for batch in batches:
        gram.update(batch.to(device))
    everything = torch.cat(batches).double()
    mean = gram.finish()
    expected = everything.T @ everything / 46
    torch.testing.assert_close(mean.tril().cpu().double(), expected.tril(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(8, 5), (4, 5)])
def test_cross_gram_is_the_mean_product_of_errors_and_inputs(batches, sizes, monkeypatch, device):
    monkeypatch.setattr(observers, "_TOKENS", 16)
    weights = [torch.randn(size, 24) for size in sizes]
    cross = CrossGram([weight.to(device) for weight in weights])
    originals = [batch + torch.randn_like(batch) for batch in batches]
    for batch, original in zip(batches, originals, strict=True):
        cross.update(batch.to(device), original.to(device))
    x, o = torch.cat(batches).double(), torch.cat(originals).double()
    errors, expected = cross.errors(), (o - x).T @ x / 46
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
    (shared, errors), (alone, expected) = ((gram.finish().tril(), cross.errors()[0]) for gram, cross in sums)
    assert torch.equal(shared, alone) and torch.equal(errors, expected)


def test_group_gram_is_the_diagonal_blocks_of_the_gram(batches, device):
    whole, blocks = Gram(24, device), GroupGram(24, 8, device)
    for batch in batches:
        whole.update(batch.to(device))
        blocks.update(batch.to(device))
    full = whole.finish().tril()
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
