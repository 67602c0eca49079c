"""Latent attention: what the cache holds of a token; pages, prefixes, drafts and preemption know no difference."""

from __future__ import annotations

import functools

import pytest
import torch

from quantkit.errors import SchemeError
from quantkit.models.kv_sizes import BF16, FP8, INT4, INT8
from quantkit.models.layer_state_sizes import AttentionShape
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import SamplingParams
from tests.runtime.helpers import difference, make_loud_model, prompts, run

LENGTHS = (1, 5, 40, 17, 33)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    return make_loud_model(tmp_path_factory.mktemp("latent"), "deepseek_v3")


@functools.cache
def expected(folder):
    """Greedy tokens by transformers, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        outs = [
            model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
            for prompt in prompts(*LENGTHS, vocab_size=258)
        ]
    return [tuple(out[0, -24:].tolist()) for out in outs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 16, "num_pages": 6, "max_length": 90},
        {"page_size": 16, "token_budget": 8, "max_sequences": 4},
        {"speculate": "self", "force_speculation": True, "page_size": 16},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers(latent, settings):
    speculate = latent if settings.get("speculate") else None
    llm = LLM(latent, backend="native", dtype="float32", threads=1, **{**settings, "speculate": speculate})
    for repeat in range(2):  # the second time pages of the prompts are there
        actual = llm.generate(prompts(*LENGTHS, vocab_size=258), GREEDY)
        assert [completion.token_ids for completion in actual] == expected(latent), repeat
    llm.engine.check_integrity()
    stats = llm.stats()
    assert stats["kv_free_pages"] == stats["kv_pages"]
    assert (stats["preemptions"] > 0) == ("num_pages" in settings)
    if speculate:
        assert stats["acceptance"] > 0.95
    if settings.get("page_size") == 16:
        assert llm.engine.prefix.num_hit_tokens > 0


@pytest.mark.parametrize(("name", "form", "bytes_"), [("bf16", BF16, 96), ("fp8", FP8, 48), ("int8", INT8, 50)])
def test_a_token_takes_what_planning_says(latent, name, form, bytes_):
    """The narrow vector of 32 channels and the rotated key of 16, once for all heads, with one scale for int8."""
    model = load_model(latent, dtype="bfloat16", backend="native")
    (first, *_), shape = model.layouts(name, 64), model.config.attention(0)
    assert first.page_bytes == shape.page_bytes(form) == 64 * bytes_
    assert shape.offers(form)
    assert shape.entry_bytes(form) == bytes_
    assert shape.allocated_bytes(65, form) == 2 * first.page_bytes


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.1), ("int8", 0.02)])
def test_eight_bits_are_close(tmp_path, name, most):
    model = load_model(make_loud_model(tmp_path, "youtu"), dtype="float32", backend="native")
    sequences = prompts(5, 90)
    assert 0 < difference(run(model, sequences, 7, kv=name), run(model, sequences)) < most


def test_four_bits_are_refused(latent):
    model = load_model(latent, dtype="float32", backend="native")
    with pytest.raises(SchemeError, match=r"latent attention does not support int4 .* use bf16, fp8 or int8"):
        model.layouts("int4", 16)
    assert not AttentionShape(num_heads=4, key_dim=48, rope_dim=16).offers(INT4)
