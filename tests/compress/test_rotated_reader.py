"""A rotated checkpoint computes what the original computes, or is refused in one line."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.rotated_reader import RotatedReader
from quantkit.errors import ModelError
from quantkit.models.families import find
from quantkit.output.writer import copy_tensors
from tests.helpers import edit_config, make_model, transformers_logits


def rotated(folder, heads=True):
    source = CheckpointReader(folder)
    return RotatedReader(source, find(source.config), seed=0, heads=heads)


def write(reader, folder):
    folder.mkdir()
    copy_tensors(reader, reader.names, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(reader.config))
    return folder


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("granite", {}),
        ("gemma", {}),
        ("phi3", {}),
        ("smollm3", {}),
    ],
)
def test_the_rotated_model_is_the_original(tmp_path, family, changes, heads):
    source = make_model(tmp_path / "source", family, **changes)
    reader = rotated(source, heads)
    folder = write(reader, tmp_path / "rotated")
    ids = torch.randint(2, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(transformers_logits(folder, ids), transformers_logits(source, ids), rtol=1e-4, atol=2e-5)
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.allclose(reader.tensor(name), CheckpointReader(source).tensor(name), atol=1e-3)


def test_a_view_is_the_same_whichever_way_it_is_read(tmp_path):
    source = make_model(tmp_path / "source", dtype=torch.bfloat16, tie_word_embeddings=True)
    reader = rotated(source)
    assert "lm_head.weight" in reader and reader.config["tie_word_embeddings"] is False
    assert any("needs its own once rotated: 0.0 MB more" in note for note in reader.notes)
    for name in reader.names:
        whole = reader.tensor(name)
        assert whole.dtype == reader.info(name).dtype and tuple(whole.shape) == reader.info(name).shape
        data = b"".join(reader.chunks(name, size=1000))
        assert data == whole.view(-1).view(torch.uint8).numpy().tobytes(), name
        assert torch.equal(reader.rows(name, 3, 9), whole[3:9])
    rows = torch.tensor([[5, 5], [200, 0]])
    embedding = reader.tensor("model.embed_tokens.weight")
    assert torch.equal(reader.gather_rows("model.embed_tokens.weight", rows), embedding[rows])


def test_outliers_are_spread(tmp_path):
    """The channels that a norm makes loud are no longer to be seen in the weights behind it."""
    source = make_model(tmp_path / "source")
    plain = ModelReader(source, find(CheckpointReader(source).config))
    name = "model.layers.1.mlp.gate_proj.weight"
    loud = plain.tensor(name) * plain.tensor("model.layers.1.post_attention_layernorm.weight")

    def peak(weight):
        sizes = weight.square().mean(0).sqrt()
        return (sizes.max() / sizes.mean()).item()

    assert peak(rotated(source).tensor(name)) < 1.3 < 2 < peak(loud)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("phi", "its norms subtract the mean"),
        ("cohere", "its norms subtract the mean"),
        ("gemma2", "it has a norm between"),
        ("olmo2", "it has a norm between"),
        ("qwen3_moe", "it has experts"),
    ],
)
def test_what_cannot_be_rotated_is_refused(tmp_path, family, reason):
    with pytest.raises(ModelError, match=f"the step rotate does not support this model: .*{reason}"):
        rotated(make_model(tmp_path / "source", family))


@pytest.mark.parametrize("width", [float("inf"), 1 << 40, 5, "wide", {}])
def test_a_width_of_heads_that_is_none_is_refused(tmp_path, width):
    source = make_model(tmp_path / "source")
    edit_config(source, head_dim=width)
    with pytest.raises(ModelError, match=r"head_dim is|not a multiple of the head width 5"):
        rotated(source)
