"""Models with recurrent layers in the engine: the same text whatever the schedule, and what their state rules out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.api import quantize
from quantkit.errors import CheckpointError, RequestError
from quantkit.models.config import NotNative
from quantkit.models.families import find
from quantkit.models.kv_sizes import FP32
from quantkit.planning.memory import kv_allocated_bytes
from quantkit.planning.source import from_model
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import SamplingParams
from tests.helpers import NEMOTRON_EXPERTS
from tests.runtime.helpers import difference, make_loud_model, prompts, reference_logits, run

FAMILIES = ("qwen3_5_text", "granitemoehybrid")
ASKED = prompts(40, 1, 7, 90, 23)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that gives a family's model and what transformers writes with it; each is made once."""
    made = {}

    def get(family):
        if family not in made:
            folder = make_loud_model(tmp_path_factory.mktemp(family) / "model", family)
            made[family] = folder, texts(LLM(folder, backend="transformers", dtype="float32"))
        return made[family]

    return get


def texts(llm, asked=ASKED):
    return [completion.token_ids for completion in llm.generate(asked, GREEDY)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_sequences": 2, "token_budget": 33}, {"num_pages": 14, "page_size": 16, "token_budget": 64}],
    ids=["together", "two at a time", "few pages"],
)
def test_greedy_text_is_that_of_transformers(models, family, settings):
    folder, expected = models(family)
    llm = LLM(folder, backend="native", dtype="float32", **settings)
    assert texts(llm) == expected
    assert (llm.stats()["preemptions"] > 0) == ("num_pages" in settings)
    llm.engine.check_integrity()
    # Rows are used again, and a sequence that begins reads nothing of what is in them.
    assert texts(llm, ASKED[::-1]) == expected[::-1]
    assert llm.stats()["prefix_hit_tokens"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_checkpoint_runs_as_in_transformers(models, tmp_path, family):
    quantize(models(family)[0], "rtn-int4", tmp_path / "q", overrides={"weights.group_size": 8})
    sequences = prompts(3, 70)
    model = load_model(tmp_path / "q", dtype="float32", backend="native")
    assert difference(run(model, sequences, 16), reference_logits(tmp_path / "q", sequences)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_the_bytes_of_the_pool(models, family):
    folder, _ = models(family)
    llm = LLM(folder, backend="native", dtype="float32", max_sequences=3, num_pages=3 * 2)
    planned = kv_allocated_bytes(from_model(folder), 128, FP32)
    assert llm.stats()["kv_bytes"] == 3 * planned
    assert llm.engine.runner.cache.states[0].num_bytes > 0


def test_letters_name_the_layers_of_nemotron(tmp_path):
    """As Nemotron-H was published; with narrow experts it is none of what the file describes."""
    folder = make_loud_model(tmp_path / "model", "nemotron_h", **NEMOTRON_EXPERTS)
    expected = run(load_model(folder, dtype="float32", backend="native"), ASKED)
    config = json.loads((folder / "config.json").read_text())
    del config["layers_block_type"]
    (folder / "config.json").write_text(json.dumps({**config, "hybrid_override_pattern": "ME*-"}))
    assert difference(run(load_model(folder, dtype="float32", backend="native"), ASKED), expected) == 0
    with pytest.raises(NotNative, match="NemotronHForCausalLM"):
        find({**config, "moe_latent_size": 32})


def test_a_bounded_step_is_not_native(tmp_path):
    folder = make_loud_model(tmp_path / "model", "bamba", time_step_limit=[0.0, 0.1])
    with pytest.raises(NotNative, match=r"time_step_limit = \[0\.0, 0\.1\]"):
        load_model(folder, backend="native")


def test_drafts_are_refused(models):
    folder, _ = models("qwen3_5_text")
    with pytest.raises(RequestError, match=r"the model keeps a recurrent state, .* leave speculate out"):
        LLM(folder, lazy=True, speculate="ngram")
    plain = make_loud_model(folder.parent / "plain", "llama")
    with pytest.raises(RequestError, match=r"the draft model keeps a recurrent state"):
        LLM(plain, lazy=True, speculate=folder)


def test_layers_by_interval_and_tensors_that_nobody_reads(models, tmp_path):
    """As Qwen3-Next was published: no list of layer types, and a layer beside the model that predicts more tokens."""
    folder = make_loud_model(
        tmp_path / "model", "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    expected = run(load_model(folder, dtype="float32", backend="native"), ASKED)
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps({**config, "full_attention_interval": 2}))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.zeros(2, 2)}, folder / "model.safetensors", {"format": "pt"})
    assert difference(run(load_model(folder, dtype="float32", backend="native"), ASKED), expected) == 0
    save_file({**tensors, "model.mtp.weight": torch.zeros(2, 2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no tensor model\.mtp\.weight"):
        load_model(folder, dtype="float32", backend="native")
