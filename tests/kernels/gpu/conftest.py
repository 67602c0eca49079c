"""Tests of kernels draw the same numbers each time: their tolerances are for those."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
