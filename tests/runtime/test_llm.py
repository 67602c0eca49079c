"""The Python door on real architecture code: the tokens of transformers, and bad input in one line."""

from __future__ import annotations

import functools
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quantkit.errors import QuantkitError, RequestError
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams
from tests.helpers import SHARED, edit_config
from tests.runtime.helpers import make_loud_model, prompts

LENGTHS = (1, 5, 40, 17, 33)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return make_loud_model(tmp_path_factory.mktemp("draft"), "llama", num_hidden_layers=1)


@functools.cache
def expected(folder, count=24):
    """Greedy tokens by transformers, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    actual = []
    for prompt in prompts(*LENGTHS, vocab_size=258):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        actual.append(tuple(out[0, len(prompt) :].tolist()))
    return actual


SETTINGS = [
    {},
    {"max_sequences": 1},
    {"page_size": 16, "num_pages": 6, "max_length": 90},
    {"page_size": 16, "token_budget": 8, "max_sequences": 4},
    {"chunked": False, "prefix_cache": False},
    {"speculate": "ngram", "force_speculation": True},
    {"speculate": "ngram", "force_speculation": True, "page_size": 16, "num_pages": 8, "max_drafts": 16},
    {"speculate": "draft", "force_speculation": True},
    {"speculate": "draft", "page_size": 16, "num_pages": 8},
    {"speculate": "self", "force_speculation": True, "max_drafts": 8},
    {"backend": "transformers"},
    {"backend": "transformers", "page_size": 16, "num_pages": 6, "max_length": 90},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_tokens_are_those_of_transformers(loud_llama, draft, settings):
    speculate = {"draft": draft, "self": loud_llama}.get(settings.get("speculate"), settings.get("speculate"))
    llm = LLM(loud_llama, dtype="float32", threads=1, **{**settings, "speculate": speculate})
    actual = llm.generate(prompts(*LENGTHS, vocab_size=258), GREEDY)
    assert [completion.token_ids for completion in actual] == expected(loud_llama)
    llm.engine.check_integrity()
    stats = llm.stats()
    assert stats["kv_free_pages"] == stats["kv_pages"]
    if settings.get("num_pages") == 6:
        assert stats["preemptions"] > 0
    if settings.get("speculate") == "self":
        assert stats["acceptance"] > 0.95


@pytest.mark.skipif(not (SHARED / "babyllama-361").is_dir(), reason="the trained models are not here")
@pytest.mark.parametrize("settings", [{}, {"page_size": 16, "num_pages": 40}], ids=str)
def test_a_trained_model_gives_its_text(settings):
    llm = LLM(SHARED / "babyllama-361", dtype="float32", threads=1, **settings)
    actual = llm.generate(["Once upon a time"] * 3, SamplingParams(max_tokens=60))
    assert {completion.text for completion in actual} == {
        ", there was a little girl named Lily. She loved to play outs"
    }


@pytest.fixture(scope="module")
def llm(loud_llama):
    return LLM(loud_llama, dtype="float32", threads=1, page_size=16)


def test_streams_give_the_pieces_of_the_text_and_may_be_read_in_turns(llm):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    whole = llm.generate(["one", "other"], params)
    streams = [llm.stream("one", params), llm.stream("other", params)]
    shown = ["", ""]
    done = [None, None]
    while None in done:
        for index, stream in enumerate(streams):
            for output in stream:
                shown[index] += output.text
                done[index] = done[index] or output.completion
                break
    assert shown == [completion.text for completion in whole]
    assert [item.token_ids for item in done] == [completion.token_ids for completion in whole]


def test_a_stream_closed_early_gives_its_pages_back(llm):
    stream = llm.stream("one", GREEDY)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    assert llm.stats()["kv_free_pages"] == llm.stats()["kv_pages"]


def test_a_stream_that_nobody_began_to_read_is_cancelled_too(llm):
    stream = llm.stream("one", GREEDY)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    llm.stream("one", GREEDY)  # dropped
    assert not llm.engine.has_work


def test_a_prompt_that_is_too_long_is_told_once(llm, monkeypatch):
    warnings = []
    for handler in logging.getLogger("transformers").handlers:
        monkeypatch.setattr(handler, "handle", warnings.append)
    monkeypatch.setattr(llm.tokenizer, "model_max_length", 3)
    llm.tokenizer.deprecation_warnings.clear()
    with pytest.raises(RequestError, match="the prompt has"):
        llm.generate("one other " * 300)
    assert not warnings


def test_text_that_is_not_unicode_is_refused(llm):
    with pytest.raises(RequestError, match="not UTF-8"):
        llm.generate(b"\xff one".decode("utf-8", "surrogateescape"))


def test_prompts_come_in_all_shapes(llm):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    ids = llm.encode("one")
    one = llm.generate("one", params)
    assert one[0].prompt_token_ids == tuple(ids)
    for shape in (["one"], ids, [ids], tuple(ids), [tuple(ids)]):
        assert [c.token_ids for c in llm.generate(shape, params)] == [one[0].token_ids]
    assert llm.generate([], params) == []
    mixed = llm.generate(["one", ids], [params, SamplingParams(max_tokens=5, ignore_eos=True)])
    assert [len(completion.token_ids) for completion in mixed] == [3, 5]
    assert llm.generate("", params)[0].prompt_token_ids == (0,), "an empty prompt is BOS"


def test_scores_are_the_logits_of_transformers_for_every_chunk_size(loud_llama, llm):
    from tests.runtime.helpers import difference, reference_logits

    sequences = prompts(1, 30, 64, 7, vocab_size=258)
    reference = reference_logits(loud_llama, sequences)
    for chunk_size in (None, 1, 7, 64):
        actual = llm.score(sequences, chunk_size)
        assert [scores.shape for scores in actual] == [(len(ids), 260) for ids in sequences]
        assert difference(actual, reference) < 1e-4
    assert llm.stats()["kv_free_pages"] == llm.stats()["kv_pages"]
    llm.engine.check_integrity()


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_scores_go_through_the_quantized_cache(loud_llama, llm, kind):
    sequences = prompts(50, vocab_size=258)
    exact = llm.score(sequences)[0]
    coarse = LLM(loud_llama, dtype="float32", threads=1, page_size=16, kv_cache=kind)
    off = (coarse.score(sequences, chunk_size=1)[0] - exact).abs().max() / exact.abs().max()
    assert 1e-4 < off < 0.5
    # In one chunk, nothing is read back from the cache.
    assert (coarse.score(sequences)[0] - exact).abs().max() < 1e-3


def test_threads_score_at_the_same_time(llm):
    """Each thread also computes the steps of the other, including its last one."""
    sequences = prompts(5, 9, vocab_size=258)
    expected = llm.score(sequences)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: llm.score(sequences, 3), range(40)):
            assert all((one - other).abs().max() < 1e-4 for one, other in zip(found, expected, strict=True))
    assert llm.score([]) == []


def test_scoring_refuses_what_does_not_fit(llm):
    with pytest.raises(RequestError, match="has 513 tokens, but the context is 512 tokens; shorten the prompt to 512"):
        llm.score([[1] * 513])
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.score([[]])
    with pytest.raises(RequestError, match="token 260; the model's token ids are 0 to 259"):
        llm.score([[260]])
    with pytest.raises(RequestError, match="chunk_size is 0"):
        llm.score([[1]], 0)


def test_chat_needs_a_template(llm, loud_llama, tmp_path):
    with pytest.raises(RequestError, match="has no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    made = copied(loud_llama, tmp_path)
    settings = json.loads((made / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('no x here') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    chatty = LLM(made, dtype="float32", threads=1)
    ids = chatty.encode_chat([{"role": "user", "content": "hi"}])
    assert chatty.tokenizer.decode(ids) == "<s>[user] hi\n[assistant]"
    assert len(chatty.chat([{"role": "user", "content": "hi"}], GREEDY).token_ids) == 24
    with pytest.raises(RequestError, match="the chat template refuses these messages: no x here"):
        chatty.chat([{"role": "x", "content": "hi"}])


def copied(folder, target):
    import shutil

    return Path(shutil.copytree(folder, target / "copy"))


def test_without_a_tokenizer_token_ids_still_work(loud_llama, tmp_path):
    made = copied(loud_llama, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).unlink()
    bare = LLM(made, dtype="float32", threads=1)
    assert len(bare.generate([[1, 2]], GREEDY)[0].token_ids) == 24
    with pytest.raises(RequestError, match="has no usable tokenizer"):
        bare.generate("text")


def test_code_that_comes_with_a_tokenizer_is_not_run_and_nobody_is_asked(loud_llama, tmp_path, monkeypatch):
    made = copied(loud_llama, tmp_path)
    (made / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Theirs: pass\n")
    settings = json.loads((made / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"]}}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    LLM(made, dtype="float32", threads=1)
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_an_empty_prompt_without_bos_is_refused(loud_llama, tmp_path):
    from transformers import PreTrainedTokenizerFast

    made = copied(loud_llama, tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(made)
    tokenizer.backend_tokenizer.post_processor = None
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>").save_pretrained(made)
    with pytest.raises(RequestError, match="the prompt is empty, and the tokenizer has no BOS"):
        LLM(made, dtype="float32", threads=1).generate("")


def test_end_tokens_come_from_the_generation_config(loud_llama, tmp_path):
    made = copied(loud_llama, tmp_path)
    tokens = LLM(made, dtype="float32", threads=1).generate([[3, 4]], GREEDY)[0].token_ids
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, tokens[4]]}))
    done = LLM(made, dtype="float32", threads=1).generate([[3, 4]])[0]
    assert done.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert done.finish_reason == "stop"
    (made / "generation_config.json").unlink()
    edit_config(made, eos_token_id=tokens[4])
    assert LLM(made, dtype="float32", threads=1).generate([[3, 4]])[0].token_ids == done.token_ids


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_length": 600}, "max_length is 600, but the model's context is 512 tokens; give 512 or less"),
        ({"num_pages": 1, "max_length": 100}, "1 pages of 64 tokens hold 64 tokens, too few for a sequence"),
        ({"memory": "1KiB"}, "a KV pool of 1.0 KiB is too small for one page"),
        ({"memory": "lots"}, "memory 'lots' is not an amount"),
        ({"kv_cache": "int5"}, "unknown KV cache type 'int5'"),
        ({"device": "abacus"}, "unknown device 'abacus'"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"speculate": "nowhere/at/all"}, "no such model directory"),
        ({"speculate": "ngram", "max_drafts": 50}, "max_drafts is 50"),
        ({"threads": 0}, "threads is 0"),
        ({"token_budget": 4}, "token_budget is 4"),
    ],
)
def test_bad_settings_are_one_line_with_exit_code_4(loud_llama, settings, said):
    with pytest.raises(QuantkitError, match=said) as caught:
        LLM(loud_llama, **settings)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(("device", "budget"), [("cpu", 512), ("cuda:1", 2048)])
def test_a_step_takes_more_tokens_on_a_gpu_unless_it_is_told(loud_llama, monkeypatch, device, budget):
    monkeypatch.setattr("quantkit.runtime.llm.pick_device", torch.device)
    sizes = {"device": device, "num_pages": 16, "lazy": True}
    assert LLM(loud_llama, **sizes).config.token_budget == budget
    assert LLM(loud_llama, **sizes, token_budget=64).config.token_budget == 64


def test_a_bad_prompt_leaves_nothing_behind(llm):
    with pytest.raises(RequestError, match="the prompt has 600 tokens, but the context is 512 tokens"):
        llm.generate([[1], [1] * 600])
    assert not llm.engine.has_work
    with pytest.raises(RequestError, match="there are 2 prompts but 1 SamplingParams"):
        llm.generate(["a", "b"], [GREEDY])


def test_it_says_how_it_runs(llm):
    llm.generate(["a common beginning, long enough for a page"] * 2, SamplingParams(max_tokens=2))
    llm.generate(["a common beginning, long enough for a page"], SamplingParams(max_tokens=2))
    topics, stats = llm.describe(), llm.stats()
    assert topics["computed in"] == "float32 on cpu"
    assert topics["threads"].startswith("1 ")
    assert stats["prefix_hit_tokens"] >= 32
    assert stats["kv_bytes"] == stats["kv_tokens"] * llm.kv_bytes_per_token
    assert stats["weight_bytes"] == llm.model.num_bytes > 0
