"""A cache with a budget: what stays is what attention sees, everything else is gone, and nothing else changes."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import pytest
import torch

from quantkit.errors import InputError, RequestError
from quantkit.planning import estimate
from quantkit.runtime.cache import policies
from quantkit.runtime.cache.policies import Policy
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.assembly import build_engine
from quantkit.runtime.engine.speculation import SpeculationController
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import PromptScoring, SamplingParams
from tests.kernels.paged import KV_TYPES
from tests.runtime.helpers import make_loud_model, prompts
from tests.runtime.kept import Recorder, worst_difference
from tests.runtime.toy import run

KV_POLICIES = policies.REGISTRY.names()
CHUNKS = (1, 7, 64, None)
# Every two of a policy, a type and a chunk meet.
CASES = [
    (KV_POLICIES[(i + j) % len(KV_POLICIES)], kind, chunk)
    for i, kind in enumerate(KV_TYPES)
    for j, chunk in enumerate(CHUNKS)
]
QUICK = CASES[::3]
SMALL = {"page_size": 4, "max_sequences": 3, "token_budget": 256, "prefix_cache": False, "dtype": "fp32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(make_loud_model(tmp_path_factory.mktemp("model"), "llama"), dtype="float32")


def engine_of(model, **settings):
    return build_engine(model, EngineConfig(**{**SMALL, **settings}))


def ignore(first, rows):
    """The recorder sees the logits; without a reader they would not be computed."""


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
    scoring = PromptScoring(read_logits=ignore, chunk_size=chunk)
    generate(engine, prompts(19, 13, 61), scoring=scoring, max_tokens=45)
    assert engine.eviction.num_evicted_pages > 20
    assert engine.scheduler.num_preemptions > 0
    assert worst_difference(engine, recorder) < 1e-4


FAMILIES = {
    "gemma3_text": "window",  # sliding windows
    "deepseek_v3": "keydiff",  # latent
    "qwen3_next": "keydiff",  # recurrent states beside pages
    "gpt_oss": "keydiff",  # sinks and sliding windows
}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "gemma3_text" else [pytest.mark.slow]) for f in FAMILIES]
)
def test_other_kinds_of_layers_see_what_they_should(tmp_path, family):
    other = load_model(make_loud_model(tmp_path, family), dtype="float32")
    engine = engine_of(other, kv_budget=60, kv_policy=FAMILIES[family], num_pages=50)
    recorder = Recorder(engine)
    generate(engine, prompts(90, 41, 77), scoring=PromptScoring(read_logits=ignore, chunk_size=16))
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
    """Positions that each head of each sequence kept in the end, by layer, and the preemptions on the way."""
    engine = engine_of(model, kv_budget=32, **settings)
    recorder = Recorder(engine)
    generate(engine, asked, max_tokens=40)
    kept = [[positions.T.tolist() for positions in recorder.kept[n].values()] for n in sorted(recorder.kept)]
    return kept, engine.scheduler.num_preemptions


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_what_is_kept_does_not_depend_on_who_else_runs_nor_on_preemptions(model, policy):
    asked = prompts(12, 9, 61)
    plain, calm = kept_by(model, asked, kv_policy=policy, token_budget=16, num_pages=60)
    tight, hurried = kept_by(model, asked, kv_policy=policy, token_budget=16, num_pages=20)
    alone = [kept_by(model, [one], kv_policy=policy, token_budget=16)[0][0] for one in asked]
    assert calm == 0 < hurried
    assert plain == tight == alone
    heads = [kept for layers in alone for by_head in layers for kept in by_head]
    for kept in heads:
        assert policy == "keydiff" or kept[:4] == [0, 1, 2, 3]
        assert kept[-2:] == [kept[-1] - 1, kept[-1]]
        assert len(kept) <= 32
    for by_head in itertools.chain(*alone):
        assert (len(set(map(tuple, map(sorted, by_head)))) > 1) == (policy != "window")


class Whim(Policy):
    """Scores that are others each time."""

    def scores(self, keys):
        return torch.rand(keys.shape[:2])


def test_what_was_given_up_once_is_given_up_again(model):
    """A sequence that is computed again reads other roundings: what its policy would choose then is not asked."""
    engine = engine_of(model, kv_budget=32, kv_policy="keydiff", token_budget=16, num_pages=20)
    engine.eviction.policy = Whim()
    recorder, seen, replayed = Recorder(engine), {}, 0
    for prompt in prompts(12, 9, 61):
        engine.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    while engine.has_work:
        engine.step()
        for number, steps in recorder.steps.items():
            first = seen.setdefault((number, steps[-1].start), steps[-1])
            assert all((first.evicted[n] == slots).all() for n, slots in steps[-1].evicted.items())
            replayed += bool(first.evicted) and first is not steps[-1]
    assert replayed
    assert worst_difference(engine, recorder) < 1e-4


@pytest.mark.parametrize("num_pages", [18, 60])
def test_pages_that_others_read_are_copied_before_they_are_written(model, num_pages):
    """Three prompts begin alike; of pages that nobody else holds, names are given up where no page is free."""
    common, (one, two, three) = prompts(36)[0], prompts(3, 20, 9)
    asked = [common + one, common + two, common + three, common + one]
    settings = {"kv_budget": 32, "kv_policy": "keydiff", "token_budget": 16}
    alone = [generate(engine_of(model, **settings), [each], max_tokens=40)[0].token_ids for each in asked]
    engine = engine_of(model, **settings, prefix_cache=True, num_pages=num_pages)
    assert [done.token_ids for done in generate(engine, asked, max_tokens=40)] == alone
    assert engine.prefix.num_hit_tokens >= 28


def test_what_was_given_up_is_remembered_only_while_it_may_be_asked_for(model):
    """Nobody takes the pages of the request that came first, so its record does not grow with its text."""
    engine = engine_of(model, kv_budget=32, kv_policy="keydiff", token_budget=16, num_pages=20)
    first, second = (engine.add(prompt, SamplingParams(max_tokens=60, ignore_eos=True)) for prompt in prompts(12, 9))
    most = {first: 0, second: 0}
    while first in engine._requests:
        engine.step()
        for sequence in engine.scheduler.running:
            most[sequence.id] = max(most[sequence.id], len(sequence.evictions))
            assert all(slots.itemsize == 1 for event in sequence.evictions.values() for slots in event.values())
    assert most[first] == 1 < most[second]


def test_the_youngest_gives_its_pages_for_a_copy(model):
    """No page is free for the copy of one that two others read: of the three, the youngest is computed again."""
    common, own = prompts(28)[0], prompts(3, 20, 9)
    asked, settings = [common + one for one in own], {"kv_budget": 32, "kv_policy": "keydiff", "token_budget": 16}
    alone = [generate(engine_of(model, **settings), [each], max_tokens=40)[0].token_ids for each in asked]
    engine = engine_of(model, **settings, prefix_cache=True, num_pages=18)
    taken, evict = [], engine.eviction.evict

    def watched(sequences, preempt, oldest):
        evict(sequences, lambda: (taken.append(engine.scheduler.running[-1].id), preempt()), oldest)

    engine.eviction.evict = watched
    generate(engine, [common], max_tokens=1)  # for all of them to find
    assert [done.token_ids for done in generate(engine, asked, max_tokens=40)] == alone
    assert taken


def test_pages_in_use_are_what_the_plan_says_to_the_byte(tmp_path):
    folder = make_loud_model(tmp_path, "llama")
    other = load_model(folder, dtype="float32")
    engine = engine_of(other, kv_budget=256, page_size=64, token_budget=64, max_sequences=1, num_pages=8)
    plan = estimate(folder, context=400, kv_cache="fp32", kv_budget=256)
    engine.add(prompts(400)[0], SamplingParams(max_tokens=100, ignore_eos=True))
    most = 0
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            if sequence.num_computed >= sequence.num_prompt:
                most = max(most, len(sequence.pages))
    bytes_of = engine.runner.cache.num_bytes // engine.pool.num_pages
    (form,) = plan.forms
    assert most * bytes_of == plan.eviction.sequence_bytes(plan.shape, 400, form) == plan.caches[0].per_sequence
    full = estimate(folder, context=400, kv_cache="fp32")
    freed = full.eviction.sequence_bytes(plan.shape, 400, form) - plan.eviction.sequence_bytes(plan.shape, 400, form)
    assert freed == 3 * bytes_of  # of 7 pages


@pytest.mark.parametrize(("budget", "page_size"), [(52, 16), (106, 32), (128, 32), (209, 64)])
def test_small_budgets_get_small_pages_in_runtime_and_plan(tmp_path, budget, page_size):
    folder = make_loud_model(tmp_path, "llama")
    llm = LLM(folder, kv_budget=budget, max_length=400, max_sequences=1, token_budget=64, dtype="fp32")
    plan = estimate(folder, context=400, kv_cache="fp32", kv_budget=budget)
    assert llm.engine.config.page_size == plan.eviction.page_size == page_size
    llm.generate(prompts(300), SamplingParams(max_tokens=50, ignore_eos=True))
    assert llm.engine.eviction.num_evicted_pages > 0
    pages = -(-budget // page_size) * llm.kv_bytes_per_token * page_size
    assert plan.eviction.sequence_bytes(plan.shape, 400, plan.forms[0]) == pages


def test_too_small_a_budget_is_refused_alike_by_runtime_and_plan(tmp_path):
    folder = make_loud_model(tmp_path, "llama")
    message = "pages of 16 tokens, give at least 52"
    with pytest.raises(RequestError, match=message):
        LLM(folder, kv_budget=51, max_length=400, lazy=True)
    with pytest.raises(RequestError, match=message):
        estimate(folder, context=400, kv_budget=51)


def test_more_requests_are_admitted(model):
    most = {}
    for budget in (None, 40):
        engine = engine_of(model, kv_budget=budget, num_pages=60, max_sequences=12, token_budget=16)
        for prompt in prompts(*[120] * 12):
            engine.add(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
        counts = []
        while engine.has_work:
            engine.step()
            counts.append(len(engine.scheduler.running))
        most[budget] = max(counts)
    assert most == {None: 1, 40: 5}  # pages for 144 tokens, or for 40 and once for a chunk


@pytest.mark.parametrize("settings", [{"overlap": True}, {"speculate": "ngram"}], ids=str)
def test_steps_that_are_launched_early_or_guessed_write_the_same_text(model, settings):
    asked, common = prompts(50, 31, 7), {"kv_budget": 44, "kv_policy": "keydiff", "token_budget": 16}
    asked[1] = asked[1][:10] * 5
    plain = generate(engine_of(model, **common), asked, max_tokens=60)
    controller = SpeculationController(4, force=True) if "speculate" in settings else None
    config = EngineConfig(**{**SMALL, **common, **settings})
    engine = build_engine(model, config, controller=controller)
    assert [done.token_ids for done in generate(engine, asked, max_tokens=60)] == [done.token_ids for done in plain]
    assert engine.eviction.num_evicted_pages > 20
    if controller is not None:
        assert controller.num_accepted > 0
    else:
        assert engine._overlap.num_followed > 20


REFUSED = {
    "pages of 4 tokens, give at least 13": {"kv_budget": 12},
    "KV pool holds 80 tokens, and one page must stay free .* give a budget of 76 or less": {
        "kv_budget": 78,
        "num_pages": 20,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_kept_is_one_line(model, message):
    with pytest.raises(RequestError, match=message) as caught:
        engine_of(model, **REFUSED[message])
    assert "\n" not in str(caught.value)


def test_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(RequestError, match="needs a kv_budget"):
        EngineConfig(kv_policy="keydiff")
    with pytest.raises(InputError, match="neither a number of tokens nor a share"):
        EngineConfig(kv_budget="120%")
    windowed = make_loud_model(tmp_path / "windowed", "gemma3_text")
    with pytest.raises(RequestError, match=r"pages of 4 tokens and a sliding window of 32, give at least 44"):
        LLM(windowed, page_size=4, kv_budget=40, lazy=True)
    plain = make_loud_model(tmp_path / "plain", "llama")
    with pytest.raises(RequestError, match="a draft model or an MTP head, which keep all keys"):
        LLM(plain, kv_budget=256, speculate=plain, lazy=True)
    with pytest.raises(RequestError, match="keeps its own keys and values"):
        LLM(plain, kv_budget=256, backend="transformers")


def test_shares_are_of_the_context():
    assert EngineConfig(kv_budget="25%").budget_tokens(4096) == 1024
    assert EngineConfig(kv_budget=0.5).budget_tokens(300) == 150
    assert EngineConfig(kv_budget="2k").budget_tokens(4096) == 2048
    assert EngineConfig(kv_budget=4096).budget_tokens(4096) is None


FILE = '''
"""Tokens with large keys stay."""

from quantkit.runtime.cache.policies import Policy


class Loud(Policy):
    """Large keys stay."""

    def scores(self, keys):
        return keys.norm(dim=-1)


POLICY = Loud()
'''


@pytest.fixture
def loud(tmp_path, monkeypatch):
    """The name of a policy whose file lies in a temporary folder."""
    (tmp_path / "loud.py").write_text(FILE)
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    yield "loud"
    sys.modules.pop("quantkit.runtime.cache.policies.loud", None)
    vars(policies).pop("loud", None)


def test_a_new_policy_is_one_file(model, loud, tmp_path):
    engine = engine_of(model, kv_budget=40, kv_policy=loud, num_pages=27)
    recorder = Recorder(engine)
    generate(engine, prompts(19, 13, 61), scoring=PromptScoring(read_logits=ignore), max_tokens=45)
    assert engine.eviction.num_evicted_pages > 20
    assert worst_difference(engine, recorder) < 1e-4
    plan = estimate(make_loud_model(tmp_path / "plan", "llama"), context=400, kv_budget=256, kv_policy=loud)
    assert plan.eviction.policy == loud
    code = (
        "from quantkit.runtime.cache import policies\n"
        f"policies.__path__.append({str(tmp_path)!r})\n"
        "import quantkit.cli\n"
        "quantkit.cli.main(['generate', '--help'])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "keydiff|loud|window" in re.sub(r"\s", "", said)


def test_an_unknown_policy_is_refused_with_those_there_are():
    for accept in (EngineConfig, estimate):
        with pytest.raises(InputError, match=r"unknown eviction policy 'keydif' \(did you mean 'keydiff'\?\)"):
            accept(kv_budget=64, kv_policy="keydif")


def layer_with(odd):
    """Keys that are alike but for one that points elsewhere."""
    keys = torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(2, 24, 1)
    keys += 0.01 * torch.randn(keys.shape, generator=torch.Generator().manual_seed(0))
    keys[:, odd] = torch.tensor([1.0, -1.0, 0, 0])
    return keys


def test_a_token_that_matters_stays_longest():
    scores = policies.REGISTRY.load("keydiff").scores(layer_with(odd=14))
    assert scores.shape == (2, 24)
    assert scores.argmax(1).tolist() == [14, 14]


def test_the_window_ranks_tokens_by_age():
    assert policies.REGISTRY.load("window").scores(layer_with(odd=3)).argsort(1).tolist() == [list(range(24))] * 2


def test_a_budget_without_a_policy_keeps_tokens_by_keydiff(model):
    """The newest tokens alone lose what was said before: recall 0.08 with half of the tokens, keydiff 0.97."""
    engine = engine_of(model, kv_budget=40)
    assert engine.eviction.policy is policies.REGISTRY.load("keydiff")
