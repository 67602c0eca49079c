"""Language models inside wrappers with encoders beside them: text of theirs is computed natively."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from quantkit.api import quantize
from quantkit.models.config import NotNative
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import SamplingParams
from tests.helpers import SETTINGS, SIZES, edit_config, known_to_transformers, load_tensors, save_tokenizer
from tests.runtime.helpers import difference, make_loud, prompts, run

VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 14}
FAMILIES = [name for name in ("qwen3_5", "qwen3_5_moe") if known_to_transformers(name)]
SEQUENCES = prompts(1, 40, 70)


def make_wrapped(folder, family):
    """A tied language model in a wrapper that is not: the wrapper, which has the head, decides."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**SIZES, **SETTINGS[f"{family}_text"], "tie_word_embeddings": True}
    config = AutoConfig.for_model(family, text_config=text, vision_config={**VISION, "out_hidden_size": 64})
    make_loud(AutoModelForImageTextToText.from_config(config)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def expected(folder):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([sequence])).logits[0] for sequence in SEQUENCES]


@pytest.mark.parametrize(
    "family", [*FAMILIES[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)
def test_logits_equal_transformers_before_and_after_a_recipe(tmp_path, family):
    source = make_wrapped(tmp_path / "source", family)
    quantize(source, "rtn-int4", tmp_path / "out", overrides={"weights.group_size": 16})
    for folder in (source, tmp_path / "out"):
        model = load_model(folder, dtype="float32", backend="native")
        assert difference(run(model, SEQUENCES, 32), expected(folder)) < 1e-4
        assert any("image and other encoders are left out" in note for note in model.notes)


@pytest.mark.parametrize("family", FAMILIES[:1])
def test_the_engine_runs_it_and_other_names_are_left_to_transformers(tmp_path, family):
    source = make_wrapped(tmp_path / "source", family)
    assert any(name.startswith("model.visual.") for name in load_tensors(source))
    edit_config(source, eos_token_id=None)
    llm = LLM(source, dtype="float32")
    assert llm.engine.runner.model.eos_ids == (SIZES["eos_token_id"],)  # as its text_config says
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    texts = [item.token_ids for item in llm.generate(SEQUENCES, greedy)]
    other = LLM(source, backend="transformers", dtype="float32")
    assert texts == [item.token_ids for item in other.generate(SEQUENCES, greedy)]
    (source / "model.safetensors").unlink()
    save_file({"language_model.model.norm.weight": torch.ones(64)}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotNative, match=r"ForConditionalGeneration whose tensors are not named model\.language_model"):
        load_model(source, backend="native")
