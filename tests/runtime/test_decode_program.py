"""Decode steps as one native call against the same steps layer by layer: the same text, and logits of the same bits."""

from __future__ import annotations

import random

import pytest
import torch

from quantkit.api import quantize
from quantkit.kernels import cpu
from quantkit.kernels.cpu.program import Program
from quantkit.runtime.engine.runner import Runner
from quantkit.runtime.engine.speculation import NgramProposer, num_useful
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams
from tests.helpers import one_of_each, save_tokenizer
from tests.runtime.helpers import make_loud_model, prompts

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.status())
SWITCH = "QUANTKIT_DECODE_PROGRAM"
# From a single token on; pages have 16 tokens, and some prompts end beside the border of one.
LENGTHS = (5, 1, 15, 16, 17, 33, 40, 8, *range(2, 14))


@pytest.fixture(autouse=True)
def small_models_share_work(monkeypatch):
    """Let threads share the work of tiny models too."""
    monkeypatch.setattr("quantkit.kernels.cpu.program._PARALLEL_FROM", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that makes a model of a family, each once."""
    made = {}

    def make(family, **changes):
        key = (family, str(changes))
        if key not in made:
            made[key] = make_loud_model(tmp_path_factory.mktemp("model"), family, **changes)
            save_tokenizer(made[key])
        return made[key]

    return make


def generate(path, on, monkeypatch, *, batch=8, tokens=24, params=None, **settings):
    """Return the texts, every step's logits, the rows of each step that was one native call, and the engine."""
    monkeypatch.setenv(SWITCH, "1" if on else "0")
    llm = LLM(path, page_size=16, **{"max_sequences": 8, "max_length": 128, "threads": 1, **settings})
    logits, calls = [], []
    with monkeypatch.context() as patch:
        step, run = Runner.step, Program.run
        patch.setattr(Runner, "step", lambda *arguments: logits.append(step(*arguments).clone()) or logits[-1])
        patch.setattr(Program, "run", lambda *arguments: calls.append(arguments[1]) or run(*arguments))
        params = params or SamplingParams(max_tokens=tokens, ignore_eos=True)
        done = llm.generate(prompts(*LENGTHS[:batch], vocab_size=250), params)
    return [list(one.token_ids) for one in done], logits, calls, llm


def check(path, monkeypatch, **settings):
    """Compare text and logits of both, and return the engine with the program."""
    text, logits, calls, llm = generate(path, True, monkeypatch, **settings)
    expected, plain, none, _ = generate(path, False, monkeypatch, **settings)
    assert calls
    assert not none
    assert text == expected
    assert len(logits) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(logits, plain, strict=True))
    assert llm.describe()["decode steps"] == "one native call"
    assert max(calls) <= max(32, settings.get("max_sequences", 8))
    return llm


FAMILIES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "smollm3"]


@pytest.mark.parametrize(("family", "dtype"), one_of_each(FAMILIES, ("fp32", "bf16", "bf16")))
def test_families(folder, monkeypatch, family, dtype):
    """Biases, norms of queries and keys, norms after a layer, scaled embeddings, softcaps, windows, no positions."""
    check(folder(family), monkeypatch, dtype=dtype, threads=2)


@pytest.mark.parametrize(
    ("kv_cache", "threads"), one_of_each(("fp16", "int8", "int4", "fp8", "bf16", "fp32", "int8", "int4"), (1, 2, 3))
)
def test_caches(folder, monkeypatch, kv_cache, threads):
    """Texts of 24 tokens cross at least one border of a page."""
    check(folder("llama"), monkeypatch, kv_cache=kv_cache, threads=threads, dtype="bf16")


@pytest.mark.parametrize("batch", range(1, 9))
def test_batches(folder, monkeypatch, batch):
    check(folder("qwen3"), monkeypatch, batch=batch, threads=2, kv_cache="int8")


@pytest.mark.parametrize(
    ("recipe", "head"), one_of_each(("rtn-int4", "rtn-int8", "w8a8-int8", "fp8-dynamic"), (None, "int8", "int4"))
)
def test_quantized_weights(folder, monkeypatch, tmp_path, recipe, head):
    settings = {"weights.group_size": 16} if recipe == "rtn-int4" else {}
    quantize(folder("llama"), recipe, tmp_path / "out", overrides=settings)
    check(tmp_path / "out", monkeypatch, head_dtype=head, threads=2)


@pytest.mark.parametrize("recipe", ["rtn-int4", "w8a8-int8"])
def test_more_sequences_than_an_amx_tile_has_rows(folder, monkeypatch, tmp_path, recipe):
    settings = {"weights.group_size": 32} if recipe == "rtn-int4" else {}
    quantize(folder("llama"), recipe, tmp_path / "out", overrides=settings)
    check(tmp_path / "out", monkeypatch, batch=20, max_sequences=20, threads=2, dtype="bf16")


def test_linears_that_are_not_fused(folder, monkeypatch):
    """As those of GGUF files whose values have more bits than queries and keys."""
    monkeypatch.setattr("quantkit.runtime.model.weights.join", lambda weights: None)
    llm = check(folder("qwen2"), monkeypatch, threads=2)
    assert " | " in llm.model.blocks[0].attention.qkv.description


@pytest.mark.parametrize("num_pages", [9, 40])
def test_preempted_and_evicted_sequences(folder, monkeypatch, num_pages):
    """A pool that is too small for all, and a budget after which cached positions are no longer those of the text."""
    check(folder("llama"), monkeypatch, num_pages=num_pages, tokens=40)
    llm = check(folder("llama"), monkeypatch, num_pages=40, tokens=70, kv_budget=64, kv_cache="int4")
    assert llm.stats()["kv_evicted_pages"] > 0


@pytest.fixture
def guesses(monkeypatch):
    """Return a function that generates texts, which the engine then drafts; some last drafts are wrong."""

    def know(path, **settings):
        text, *_ = generate(path, False, monkeypatch, **settings)
        starts = prompts(*LENGTHS[: settings["batch"]], vocab_size=250)
        whole = [start + new for start, new in zip(starts, text, strict=True)]

        def propose(self, sequences, count):
            for sequence in sequences:
                known = len(sequence.ids)
                # With a quantized cache, drafts may change the text, see `speculation`.
                ids = next((ids for ids in whole if ids[:known] == sequence.ids), sequence.ids)
                drafts = ids[known : known + num_useful(sequence, count)]
                if drafts and random.Random(known).random() < 0.5:
                    drafts[-1] = (drafts[-1] + 1) % 250
                sequence.drafts = drafts

        monkeypatch.setattr(NgramProposer, "propose", propose)
        return {"speculate": "ngram", "force_speculation": True, **settings}

    return know


@pytest.mark.parametrize(
    ("family", "kv_cache", "dtype", "drafts"),
    [
        ("llama", "fp32", "fp32", 3),
        ("gemma3_text", "bf16", "bf16", 4),  # windows of the text, and norms of queries and keys
        ("qwen2", "int8", "bf16", 2),  # steps are stored after all of their tokens attended
        ("llama", "int4", "bf16", 5),  # a page that the drafts complete is quantized
        ("llama", "int4", "fp32", 7),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_with_drafts(folder, monkeypatch, guesses, family, kv_cache, dtype, drafts, batch):
    """Several new tokens of a sequence, some of which are rejected."""
    rows = []
    settings = guesses(folder(family), kv_cache=kv_cache, dtype=dtype, threads=2, batch=batch)
    run = Program.run
    with monkeypatch.context() as patch:
        patch.setattr(Program, "run", lambda *args: rows.append((args[1], len(args[2]))) or run(*args))
        llm = check(folder(family), monkeypatch, max_drafts=drafts, **settings)
    assert any(count == (1 + drafts) * sequences for count, sequences in rows)
    stats = llm.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


def test_steps_with_many_drafts_run_layer_by_layer(folder, monkeypatch, guesses):
    settings = {**guesses(folder("llama"), batch=8), "max_drafts": 7}
    text, logits, calls, _ = generate(folder("llama"), True, monkeypatch, **settings)
    expected, plain, _, _ = generate(folder("llama"), False, monkeypatch, **settings)
    assert any(len(rows) == 64 for rows in logits)
    assert max(calls) <= 32
    assert text == expected
    assert all(torch.equal(one, other) for one, other in zip(logits, plain, strict=True))


def test_tokens_that_the_host_does_not_know(folder, monkeypatch):
    check(folder("llama"), monkeypatch, overlap=True)


def test_drawn_tokens(folder, monkeypatch):
    check(folder("llama"), monkeypatch, params=SamplingParams(max_tokens=20, temperature=0.9, top_k=20, logprobs=2))


def test_scores_by_single_tokens_outlive_the_step(folder, monkeypatch):
    """The program writes each step's logits to the same memory."""
    rows = []
    for on in (True, False):
        monkeypatch.setenv(SWITCH, "1" if on else "0")
        llm = LLM(folder("llama"), max_length=128, threads=1, dtype="fp32")
        rows.append(llm.score(prompts(20), chunk_size=1)[0])
    assert torch.equal(*rows)
    assert len({tuple(row) for row in rows[0].tolist()}) == 20


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def test_texts_beyond_a_turning_length_go_layer_by_layer(folder, monkeypatch):
    """Their angles depend on their own length."""
    changes = {"rope_parameters": {**LONG, "rope_theta": 1e4, "original_max_position_embeddings": 32}}
    path = folder("phi3", original_max_position_embeddings=32, **changes)
    text, logits, calls, _ = generate(path, True, monkeypatch, batch=1, tokens=40)
    expected, plain, _, _ = generate(path, False, monkeypatch, batch=1, tokens=40)
    assert 20 < len(calls) < 30  # from 5 tokens to 32
    assert text == expected
    assert all(torch.equal(one, other) for one, other in zip(logits, plain, strict=True))


REFUSED = {
    "mixtral": "mixtures of experts",
    "deepseek_v3": "latent or recurrent states",
    "olmo2": "RMS norms",
    "gpt_neox": "side by side",
    "cohere": "side by side",
    "glm": "neighbouring channels",
    "granite": "a factor on additions",
    "gpt_oss": "sinks|experts",
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_models_run_layer_by_layer_and_say_why(folder, monkeypatch, family):
    _, _, calls, llm = generate(folder(family), True, monkeypatch, batch=2, tokens=3)
    assert not calls
    status = llm.describe()["decode steps"]
    assert status.startswith("layer by layer: ")
    assert any(reason in status for reason in REFUSED[family].split("|")), status


def test_switches(folder, monkeypatch):
    _, _, calls, llm = generate(folder("llama"), False, monkeypatch, batch=1, tokens=3)
    assert not calls
    assert llm.describe()["decode steps"] == f"layer by layer: {SWITCH}=0"
    monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    _, _, calls, llm = generate(folder("llama"), True, monkeypatch, batch=1, tokens=3)
    assert not calls
    assert llm.describe()["decode steps"] == "layer by layer: C kernels are off: QUANTKIT_NATIVE=0"
