"""Weights and a Hessian for GPTQ's tests."""

from __future__ import annotations

import torch


def problem(width=48, rows=10, seed=0):
    torch.manual_seed(seed)
    inputs = torch.randn(400, width) @ torch.randn(width, width)
    return torch.randn(rows, width), inputs.T @ inputs / 400
