"""A cache with a budget: what stays is what attention sees, everything else is gone, and nothing else changes."""

from __future__ import annotations

import itertools

import pytest

from quantkit.runtime.config import KV_POLICIES, EngineConfig
from quantkit.runtime.engine.assembly import build_engine
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import PromptScoring, SamplingParams
from tests.kernels.paged import KV_TYPES
from tests.runtime.helpers import make_loud_model, prompts
from tests.runtime.kept import Recorder, worst_difference
from tests.runtime.toy import run

CHUNKS = (1, 7, 64, None)
CASES = list(itertools.product(KV_POLICIES, KV_TYPES, CHUNKS))
QUICK = CASES[::5]
SMALL = {"page_size": 4, "max_sequences": 3, "token_budget": 256, "prefix_cache": False, "dtype": "fp32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(make_loud_model(tmp_path_factory.mktemp("model"), "llama"), dtype="float32")


def engine_of(model, **settings):
    return build_engine(model, EngineConfig(**{**SMALL, **settings}))


def generate(engine, asked, **params):
    numbers = [
        engine.add(prompt, SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params})) for prompt in asked
    ]
    done = run(engine)
    return [done[number] for number in numbers]


@pytest.mark.parametrize(
    ("policy", "kind", "chunk"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_logits_are_those_of_dense_attention_to_what_was_kept(model, policy, kind, chunk):
    """In batches, in chunks of every size, and with sequences that are preempted and computed again."""
    engine = engine_of(model, kv_budget=40, kv_policy=policy, kv_cache=kind, num_pages=27)
    recorder = Recorder(engine)
    scoring = PromptScoring(logits=True, chunk_size=chunk)
    generate(engine, prompts(19, 13, 61), scoring=scoring, max_tokens=45)
    assert engine.eviction.num_evicted_pages > 20
    assert engine.scheduler.num_preemptions > 0
    assert worst_difference(engine, recorder) < 1e-4


FAMILIES = {
    "gemma3_text": "window",  # sliding windows
    "deepseek_v3": "attention",  # latent
    "qwen3_next": "keydiff",  # recurrent states beside pages
    "gpt_oss": "keynorm",  # sinks and sliding windows
}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "gemma3_text" else [pytest.mark.slow]) for f in FAMILIES]
)
def test_other_kinds_of_layers_see_what_they_should(tmp_path, family):
    other = load_model(make_loud_model(tmp_path, family), dtype="float32")
    engine = engine_of(other, kv_budget=60, kv_policy=FAMILIES[family], num_pages=50)
    recorder = Recorder(engine)
    generate(engine, prompts(90, 41, 77), scoring=PromptScoring(logits=True, chunk_size=16))
    assert engine.eviction.num_evicted_pages > 10
    assert worst_difference(engine, recorder) < 1e-4


@pytest.mark.parametrize("kind", KV_TYPES)
def test_a_budget_that_nobody_exceeds_changes_no_token(model, kind):
    settings = {"kv_cache": kind, "num_pages": 60, "token_budget": 32, "prefix_cache": True}
    asked = prompts(50, 31, 7, 50)
    plain = generate(engine_of(model, **settings), asked, logprobs=1)
    for policy in KV_POLICIES:
        engine = engine_of(model, kv_budget=74, kv_policy=policy, **settings)  # prompts and what they generate
        assert engine.eviction is not None
        assert [done.token_ids for done in generate(engine, asked, logprobs=1)] == [done.token_ids for done in plain]
        assert engine.eviction.num_evicted_pages == 0


def kept_by(model, asked, **settings):
    """Positions that each sequence kept in the end, and the preemptions on the way."""
    engine = engine_of(model, kv_budget=32, **settings)
    recorder = Recorder(engine)
    generate(engine, asked, max_tokens=40)
    return recorder.kept, engine.scheduler.num_preemptions


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_what_is_kept_does_not_depend_on_who_else_runs_nor_on_preemptions(model, policy):
    asked = prompts(12, 9, 61)
    plain, calm = kept_by(model, asked, kv_policy=policy, token_budget=16, num_pages=60)
    tight, hurried = kept_by(model, asked, kv_policy=policy, token_budget=16, num_pages=20)
    alone = [kept_by(model, [one], kv_policy=policy, token_budget=16)[0][0] for one in asked]
    assert calm == 0 < hurried
    assert [plain[number] for number in sorted(plain)] == [tight[number] for number in sorted(tight)] == alone
    for kept in alone:
        assert kept[:4] == [0, 1, 2, 3]
        assert kept[-8:] == list(range(kept[-1] - 7, kept[-1] + 1))
        assert len(kept) <= 32
