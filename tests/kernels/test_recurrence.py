"""Recurrent layers: whatever the chunks, what matrix products give is what the rule gives token by token."""

from __future__ import annotations

import pytest
import torch

from quantkit.kernels.reference.recurrence import causal_conv, recur, scan

B, G, H, N, P = 2, 2, 6, 16, 8


def inputs(tokens, *, delta):
    torch.manual_seed(tokens)
    query, key = (torch.nn.functional.normalize(torch.randn(B, tokens, G, N), dim=-1) for _ in range(2))
    decay, rate = -2 * torch.rand(B, tokens, H), torch.rand(B, tokens, H) if delta else None
    return [query, key, torch.randn(B, tokens, H, P), decay, rate], torch.randn(B, H, N, P)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 200])
def test_chunks_give_what_single_tokens_give(tokens, delta):
    given, state = inputs(tokens, delta=delta)
    for actual, expected in zip(scan(*given, state), recur(*given, state), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("split", [1, 30, 99])
def test_a_state_goes_on_where_it_was(split, delta):
    given, state = inputs(100, delta=delta)
    expected, last = scan(*given, state)
    outputs = []
    for part in (slice(0, split), slice(split, 100)):
        output, state = scan(*(x if x is None else x[:, part] for x in given), state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=2e-5)


def test_decays_that_leave_nothing_are_no_nan():
    given, state = inputs(80, delta=True)
    given[3] = torch.full_like(given[3], -100.0)
    assert all(tensor.isfinite().all() for tensor in scan(*given, state))


@pytest.mark.parametrize("biased", [True, False])
def test_the_convolution_is_torchs(biased):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(B, 9, 5), torch.randn(4, 5), torch.randn(5) if biased else None
    padded = torch.nn.functional.pad(x.mT, (3, 0))
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight.mT[:, None], bias, groups=5)).mT
    past, parts = torch.zeros(B, 3, 5), []
    for part in x.split([1, 2, 6], dim=1):
        output, past = causal_conv(part, weight, bias, past)
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    torch.testing.assert_close(past, x[:, -3:])
