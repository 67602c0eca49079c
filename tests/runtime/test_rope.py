"""Angles equal those of transformers for every scaling; the table grows and follows each sequence's length."""

from __future__ import annotations

import pytest
import torch

from quantkit.models.families import find
from quantkit.models.rope import RopeConfig
from quantkit.runtime.model.config import read_config
from quantkit.runtime.model.rope import RopeTable, frequencies
from tests.helpers import tiny_config
from tests.runtime.helpers import make_batch

KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "short_factor": [1.0 + i / 16 for i in range(16)],
        "long_factor": [2.0 + i for i in range(16)],
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [100, 256, 700])
def test_angles_equal_transformers(kind, length):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope_parameters = {"rope_type": kind, "rope_theta": 20000.0, **KINDS[kind]}
    config = tiny_config("llama", head_dim=32, rope_parameters=rope_parameters)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    entries = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    rope = read_config(entries, find(entries)).ropes[0]
    table = RopeTable(rope, torch.device("cpu"))
    angles = table.gather(make_batch([[0] * length], [0], [list(range(100))]))
    # transformers repeats each pair's angle for its second channel.
    torch.testing.assert_close(angles[0], cos[0, :, :16], rtol=0, atol=2e-4)
    torch.testing.assert_close(angles[1], sin[0, :, :16], rtol=0, atol=2e-4)
    assert angles[0].dtype == torch.float32


def test_a_longer_sequence_does_not_change_its_neighbours():
    rope = RopeConfig(kind="dynamic", theta=10000.0, width=16, max_length=64, factor=4.0)
    table = RopeTable(rope, torch.device("cpu"))
    pages = [list(range(10)), list(range(10, 20))]
    alone = table.gather(make_batch([[0] * 5], [20], pages[:1]))
    beside = table.gather(make_batch([[0] * 5, [0]], [20, 150], pages))
    assert torch.equal(beside[0][:5], alone[0])
    longer = torch.tensor(150.0) * frequencies(rope, 151)
    assert torch.equal(beside[0][5], longer.cos())
    assert not torch.allclose(frequencies(rope, 151), frequencies(rope, 64))


def test_the_table_grows_as_far_as_it_is_asked_for():
    table = RopeTable(RopeConfig(theta=10000.0, width=8, max_length=1 << 20), torch.device("cpu"))
    far = table.gather(make_batch([[0]], [100_000], [list(range(7000))]))
    angles = torch.tensor(100_000.0) * frequencies(table.rope, 0)
    torch.testing.assert_close(far[1][0], angles.sin(), rtol=0, atol=0)
