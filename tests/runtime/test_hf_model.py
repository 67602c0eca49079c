"""Models that only transformers knows run behind the same protocol, with sequences that come, go and roll back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import CheckpointError, ModelError, RequestError
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.hf_model import TransformersModel
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import SamplingParams
from tests.helpers import edit_config, known_to_transformers
from tests.runtime.helpers import difference, make_batch, make_loud_model, prompts, reference_logits, run

SEQUENCES = prompts(1, 40, 90)
PAGES = [[0], [1], [2]]


@pytest.fixture(scope="module", params=["olmo", "gemma2", "mamba", "gpt2", "qwen3_next", "bamba", "minimax"])
def folder(request, tmp_path_factory):
    """Another family; windows and softcaps; a state of its own kind; other names; a state that cannot be cropped;
    positions that are counted from zero unless they are told; a class of cache of its own."""
    if not known_to_transformers(request.param):
        pytest.skip(f"transformers has no {request.param}")
    changes = {
        "mamba": {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4},
        "gpt2": {"n_positions": 512},
        "minimax": {
            "head_dim": 16,
            "num_local_experts": 4,
            "block_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    }
    return make_loud_model(tmp_path_factory.mktemp("hf"), request.param, **changes.get(request.param, {}))


@pytest.fixture
def model(folder):
    return load_model(folder, dtype="float32", backend="transformers")


@pytest.mark.parametrize("chunk", [None, 7, 1])
def test_chunks_do_not_change_logits(model, folder, chunk):
    assert isinstance(model, TransformersModel)
    assert difference(run(model, SEQUENCES, chunk), reference_logits(folder, SEQUENCES)) < 1e-4


def test_a_sequence_can_go_back_and_continue_otherwise(model, folder):
    first, second = SEQUENCES[2][:30], SEQUENCES[1][:12]
    model.forward(make_batch([first], [0], PAGES[:1], page_size=512), None)
    # Ten tokens are taken back, others come in their place.
    logits = model.forward(make_batch([second], [20], PAGES[:1], page_size=512), None)
    expected = reference_logits(folder, [first[:20] + second])[0][20:]
    assert difference([logits], [expected]) < 1e-4


def test_rows_of_some_sequences(model, folder):
    tokens = [SEQUENCES[1][:5], SEQUENCES[2][:4], SEQUENCES[2][:3]]
    whole = torch.cat(reference_logits(folder, tokens))
    rows = [0, 4, 11]
    logits = model.forward(make_batch(tokens, [0, 0, 0], PAGES, page_size=512, rows=rows), None)
    assert difference([logits], [whole[rows]]) < 1e-4
    assert model.forward(make_batch([[5]], [5], PAGES[:1], page_size=512, rows=[]), None).shape == (0, 260)


def test_a_forgotten_sequence_starts_anew(model):
    batch = make_batch([SEQUENCES[1]], [0], PAGES[:1], page_size=512, ids=[7])
    once = model.forward(batch, None)
    model.forget(7)
    assert model._states == {}
    assert torch.equal(model.forward(batch, None), once)
    with pytest.raises(AssertionError, match="sequence 8 continues at 3, but has 0 computed tokens"):
        model.forward(make_batch([[1]], [3], PAGES[:1], page_size=512, ids=[8]), None)


def test_what_the_engine_asks_of_a_model(tmp_path):
    model = load_model(make_loud_model(tmp_path / "untied", "olmo"), backend="transformers")
    assert (model.vocab_size, model.max_length, model.eos_ids, model.paged) == (260, 512, (1,), False)
    assert model.layouts(None, 16) == []
    assert model.stored_bytes < model.num_bytes
    tied = load_model(make_loud_model(tmp_path / "tied", "olmo", tie_word_embeddings=True), backend="transformers")
    assert tied.stored_bytes == tied.num_bytes == model.stored_bytes


def test_what_transformers_cannot_load_is_one_line(tmp_path):
    folder = make_loud_model(tmp_path, "olmo")
    edit_config(folder, architectures=["UnheardOfForCausalLM"], model_type="unheard_of")  # no test registers it
    with pytest.raises(ModelError, match="transformers cannot load this model") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", ["", "model.embed"])
def test_tensors_that_are_missing_are_not_made_up(tmp_path, kept):
    folder = make_loud_model(tmp_path, "olmo")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if kept and name.startswith(kept)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor \S+ is missing"):
        load_model(folder, backend="transformers", dtype="float32")


def test_tensors_without_a_place_and_of_other_shapes_are_refused(tmp_path):
    """transformers only warns: scales of codes would be dropped, and noise put in for what does not fit."""
    folder = make_loud_model(tmp_path, "olmo")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, folder / "model.safetensors")
    load_model(folder, backend="transformers", dtype="float32")
    save_file({**tensors, f"{name}_scale": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"would ignore tensor {name}_scale \\(1 in all\\)"):
        load_model(folder, backend="transformers", dtype="float32")
    save_file({**tensors, name: tensors[name][:-1].clone()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[\d+, 64\] where transformers expects"):
        load_model(folder, backend="transformers", dtype="float32")


def test_a_kv_type_that_it_cannot_keep_is_refused(tmp_path):
    folder = make_loud_model(tmp_path, "olmo")
    with pytest.raises(RequestError, match="kv_cache is 'int4', but transformers runs this model"):
        LLM(folder, backend="transformers", kv_cache="int4", threads=1)


def test_layers_with_another_kind_of_state_run_too(tmp_path):
    from transformers import AutoModelForCausalLM, Lfm2Config

    config = Lfm2Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    options = {"threads": 1, "dtype": "float32"}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = LLM(tmp_path, **options).generate(prompts(5, 20), params)
    guessed = LLM(tmp_path, **options, speculate="ngram", force_speculation=True).generate(prompts(5, 20), params)
    assert [item.token_ids for item in plain] == [item.token_ids for item in guessed]
