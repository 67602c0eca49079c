"""One step of a model: which logits it gives, and that neighbours and pages change nothing that they must not."""

from __future__ import annotations

import pytest
import torch

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.kernels.reference.experts import route
from quantkit.models.families import find
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.loader import load_model
from tests.runtime.helpers import difference, make_batch, make_loud_model, prompts, run

SEQUENCES = prompts(1, 40, 90)


@pytest.fixture(scope="module", params=["llama", "gemma2", "mixtral"])
def model(request, tmp_path_factory):
    return load_model(make_loud_model(tmp_path_factory.mktemp("model"), request.param))


def test_only_the_wanted_logits_are_computed(model):
    tokens = [SEQUENCES[1][:5], SEQUENCES[2][:4]]
    pages = [[0], [1]]
    cache = KVCache(model.layouts(None, 16), 2, 2)
    whole = model.forward(make_batch(tokens, [0, 0], pages), cache)
    some = model.forward(make_batch(tokens, [0, 0], pages, rows=[8, 2]), cache)
    none = model.forward(make_batch(tokens, [0, 0], pages, rows=[]), cache)
    assert whole.dtype == torch.float32
    assert difference([some], [whole[[8, 2]]]) < 1e-5
    assert none.shape == (0, 260)


def test_a_sequence_alone_and_in_a_batch_is_the_same(model):
    together = run(model, SEQUENCES, 7)
    for sequence, expected in zip(SEQUENCES, together, strict=True):
        assert difference(run(model, [sequence], 7), [expected]) < 1e-5


def test_tokens_taken_back_leave_no_trace(model):
    """Speculation: drafts are computed, rejected, and their positions are written again."""
    first, second = SEQUENCES[2][:30], SEQUENCES[1][:12]
    cache = KVCache(model.layouts(None, 16), 4, 1)
    model.forward(make_batch([first], [0], [[2, 0, 3]]), cache)
    logits = model.forward(make_batch([second], [20], [[2, 0, 3]]), cache)
    assert difference([logits], [run(model, [first[:20] + second])[0][20:]]) < 1e-5


def test_quantized_keys_and_values_are_close(tmp_path):
    model = load_model(make_loud_model(tmp_path, "llama"))
    plain, errors = torch.cat(run(model, SEQUENCES, 7)), {}
    for name in ("int8", "fp8", "int4"):
        quantized = torch.cat(run(model, SEQUENCES, 7, kv=name))
        errors[name] = ((quantized - plain).norm() / plain.norm()).item()
        # A prompt's own tokens attend to each other as computed, not as stored.
        assert difference(run(model, SEQUENCES, kv=name), run(model, SEQUENCES)) < 1e-5
    assert 0 < errors["int8"] < errors["fp8"] < errors["int4"]
    assert errors["int8"] < 0.03
    assert errors["int4"] < 0.6


def test_sixteen_bits_are_as_close_as_transformers_own(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_loud_model(tmp_path, "llama", dtype=torch.bfloat16)
    exact = run(load_model(folder, dtype="float32"), SEQUENCES)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.inference_mode():
        reference = [theirs(input_ids=torch.tensor([sequence])).logits[0].float() for sequence in SEQUENCES]
    assert difference(run(load_model(folder, dtype="bfloat16"), SEQUENCES), exact) < 1.5 * difference(reference, exact)


def test_layers_with_a_window_are_not_quantized(tmp_path):
    model = load_model(make_loud_model(tmp_path, "gemma2"))
    assert [layout.scheme.is_quantized for layout in model.layouts("int8", 16)] == [False, True]
    assert find(CheckpointReader(tmp_path).config) is model.config.family


def test_routing_by_hand():
    scores = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    weights, chosen = route(scores, 2, normalize=False)
    torch.testing.assert_close(weights, scores.softmax(-1)[:, [1, 2]])
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(route(scores, 2, normalize=True)[0].sum(), torch.tensor(1.0))
