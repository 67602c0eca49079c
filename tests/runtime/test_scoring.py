"""Scored continuations: the numbers of whole logits, whatever is shared, batched or cut; and nothing computed twice."""

from __future__ import annotations

import random

import pytest
import torch

from quantkit.errors import RequestError
from quantkit.kernels.types import WrappedLinear
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import PromptScoring, SamplingParams, ScoredText
from tests.helpers import save_tokenizer
from tests.runtime.helpers import make_loud_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_loud_model(tmp_path_factory.mktemp("model"), "llama")
    save_tokenizer(folder)
    return folder


def make_llm(folder, **settings):
    return LLM(folder, dtype="float32", device="cpu", threads=1, **{"page_size": 16, "max_sequences": 8, **settings})


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(folder)


def make_texts(seed=0, contexts=6, choices=3):
    """Contexts of 5 to 90 tokens with a common beginning of 40, each with several continuations, in mixed order."""
    rng = random.Random(seed)
    common = [rng.randrange(258) for _ in range(40)]
    texts = []
    for number in range(contexts):
        context = (common if number % 2 else []) + [rng.randrange(258) for _ in range(5 + 9 * number)]
        for _ in range(choices):
            tail = [rng.randrange(258) for _ in range(rng.randint(1, 6))]
            texts.append(ScoredText(ids=(*context, *tail), num_scored=len(tail)))
    rng.shuffle(texts)
    return texts


def expected(llm, texts):
    """The same numbers from all logits of each text alone."""
    actual = []
    for text in texts:
        logits = llm.score([text.ids[:-1]])[0][-text.num_scored :]
        tokens = torch.tensor(text.ids[-text.num_scored :])
        logprobs = logits.log_softmax(-1)[torch.arange(text.num_scored), tokens]
        actual.append((logprobs, bool((logits.argmax(-1) == tokens).all())))
    return actual


def assert_same(actual, reference, tolerance=2e-5):
    for one, (logprobs, greedy) in zip(actual, reference, strict=True):
        torch.testing.assert_close(one.logprobs, logprobs, atol=tolerance, rtol=tolerance)
        assert bool(one.greedy.all()) == greedy


@pytest.mark.parametrize(
    ("settings", "chunk_size"),
    [
        ({}, None),
        ({}, 1),
        ({}, 7),
        ({"prefix_cache": False}, None),
        ({"num_pages": 7, "max_length": 100}, None),
        ({"token_budget": 11, "max_sequences": 3}, None),
        ({"backend": "transformers"}, None),
    ],
    ids=str,
)
def test_scores_are_those_of_whole_logits(folder, llm, settings, chunk_size):
    texts = make_texts()
    other = make_llm(folder, **settings) if settings else llm
    assert_same(other.score_tokens(texts, chunk_size=chunk_size), expected(llm, texts))
    other.engine.pool.check_integrity([])


def test_a_greedy_continuation_is_recognized(llm):
    prompt = list(range(20))
    tokens = llm.generate([prompt])[0].token_ids[:5]
    wrong = (*tokens[:4], (tokens[4] + 1) % 258)
    actual = llm.score_tokens([ScoredText(ids=(*prompt, *t), num_scored=5) for t in (tokens, wrong)])
    assert [bool(one.greedy.all()) for one in actual] == [True, False]


def count_tokens(llm, monkeypatch):
    """Numbers of tokens fed, one per step."""
    fed = []
    step = llm.engine.runner.step

    def counting(chunks):
        fed.append(sum(len(chunk.tokens) for chunk in chunks))
        return step(chunks)

    monkeypatch.setattr(llm.engine.runner, "step", counting)
    return fed


def test_full_pages_of_a_common_beginning_are_computed_once(folder, monkeypatch):
    llm = make_llm(folder)
    fed = count_tokens(llm, monkeypatch)
    context = tuple(range(50))  # three full pages of 16 and two tokens
    texts = [ScoredText(ids=(*context, 100 + n, 7, 8), num_scored=3) for n in range(5)]
    llm.score_tokens(texts)
    assert fed == [52, 4 * (52 - 48)]


def test_answers_that_differ_in_the_last_token_share_one_input(folder, monkeypatch):
    llm = make_llm(folder)
    fed = count_tokens(llm, monkeypatch)
    texts = [ScoredText(ids=(*range(9), answer), num_scored=1) for answer in (3, 4, 5)]
    texts.append(ScoredText(ids=(*range(9), 5), num_scored=4))  # scored from further ahead
    actual = llm.score_tokens(texts)
    assert fed == [9]
    assert_same(actual, expected(llm, texts))


def test_nothing_is_left_behind_when_the_model_fails(folder, monkeypatch):
    llm = make_llm(folder)
    monkeypatch.setattr(llm.engine.runner, "step", lambda chunks: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.score_tokens(make_texts())
    monkeypatch.undo()
    llm.engine.pool.check_integrity([])
    assert_same(llm.score_tokens(make_texts(1)), expected(llm, make_texts(1)))


def test_with_a_quantized_cache_everything_before_the_answer_is_read_from_it(folder):
    texts = make_texts()
    shared, alone = (make_llm(folder, kv_cache="int4", page_size=64, prefix_cache=on) for on in (True, False))
    together = shared.score_tokens(texts)
    apart = [alone.score_tokens([text])[0] for text in texts]
    assert_same(together, [(one.logprobs, bool(one.greedy.all())) for one in apart], 1e-4)
    exact = make_llm(folder).score_tokens(texts)
    assert any((a.logprobs - b.logprobs).abs().max() > 1e-3 for a, b in zip(together, exact, strict=True))


def test_progress_counts_every_query(llm):
    seen = []
    llm.score_tokens(make_texts(), progress=seen.append)
    assert sum(seen) == 18
    assert len(seen) > 1


BAD = [
    (ScoredText(ids=(1,), num_scored=1), None, "cannot score 1 of 1 tokens"),
    (
        ScoredText(ids=(1,) * 514, num_scored=1),
        None,
        "the prompt has 513 tokens, but .* shorten the prompt to 512 tokens or less$",
    ),
    (ScoredText(ids=(1, 2, 3), num_scored=3), None, "cannot score 3 of 3 tokens; score at least 1 and at most 2"),
    (ScoredText(ids=(1, 2, 3), num_scored=0), None, "cannot score 0 of 3 tokens"),
    (ScoredText(ids=(1, 999, 3), num_scored=1), None, "token 999; the model's token ids are 0 to 259"),
    (ScoredText(ids=(1, 2, 999), num_scored=1), None, "token 999; the model's token ids are 0 to 259"),
    (ScoredText(ids=(1, 2), num_scored=1), 0, "chunk_size is 0; give an integer of at least 1"),
]


@pytest.mark.parametrize(("text", "chunk_size", "message"), BAD)
def test_bad_texts_are_refused(llm, text, chunk_size, message):
    with pytest.raises(RequestError, match=message):
        llm.score_tokens([text], chunk_size=chunk_size)
    assert not llm.engine.has_work


def test_as_many_tokens_as_the_context_has_are_scored(folder):
    llm = make_llm(folder, num_pages=4, max_length=64)
    text = ScoredText(ids=tuple(index % 250 for index in range(65)), num_scored=64)
    (actual,) = llm.score_tokens([text])
    assert actual.logprobs.shape == (64,)
    llm.engine.check_integrity()


def test_running_requests_go_on_beside(folder):
    """What decodes and what is scored share steps; neither changes the other."""
    llm, plain = make_llm(folder), make_llm(folder)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected_tokens = plain.generate([[1, 2, 3]], params)[0].token_ids
    stream = llm.stream([1, 2, 3], params)
    texts = make_texts()
    assert_same(llm.score_tokens(texts), expected(plain, texts))
    assert llm.engine.has_work, "the stream has not ended"
    *_, last = stream
    assert last.completion.token_ids == expected_tokens
    llm.engine.check_integrity()


@pytest.mark.parametrize("kv_cache", ["auto", "int4"])
def test_a_request_may_be_scored_and_go_on(folder, kv_cache):
    """Scores of its prompt and of what might follow, then the tokens that it would have had anyway."""
    llm = make_llm(folder, kv_cache=kv_cache, page_size=64, token_budget=32)
    prompt = [index % 250 for index in range(70)]
    plain = SamplingParams(max_tokens=8, ignore_eos=True)
    scored = SamplingParams(
        max_tokens=8, ignore_eos=True, scoring=PromptScoring(num_tokens=20, continuations=(5, 6), chunk_size=32)
    )
    done = llm.generate([prompt], scored)[0]
    if kv_cache == "auto":  # else the cuts change what is read from the cache
        assert done.token_ids == llm.generate([prompt], plain)[0].token_ids
    alone = llm.score_tokens([ScoredText(ids=(*prompt, last), num_scored=21) for last in (5, 6)], chunk_size=32)
    for index, one in enumerate(alone):
        reference = torch.cat([done.scores.logprobs[:20], done.scores.logprobs[20 + index :][:1]])
        torch.testing.assert_close(one.logprobs, reference, atol=1e-5, rtol=1e-5)
    assert len(done.token_ids) == 8


def test_scores_survive_preemption(folder):
    """A decoding request takes pages from a prompt that is being scored; it is computed again, to the same scores."""
    llm = make_llm(folder, num_pages=8, max_length=120, token_budget=10)
    texts = [ScoredText(ids=tuple((7 * index) % 250 for index in range(90)), num_scored=80)]
    reference = expected(make_llm(folder), texts)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(4):
        next(stream)
    assert_same(llm.score_tokens(texts, chunk_size=1), reference)
    assert llm.stats()["preemptions"] > 0
    list(stream)
    llm.engine.check_integrity()


def test_a_cancelled_request_has_no_scores(llm):
    params = SamplingParams(max_tokens=0, scoring=PromptScoring(num_tokens=2))
    number = llm.engine.add([1, 2, 3], params)
    assert llm.engine.cancel(number).completion.scores is None


def test_logits_are_of_the_model_as_it_is_now(folder):
    """Weights may be swapped between two calls, so no page of the first may be read by the second."""
    llm = make_llm(folder)
    ids = list(range(50))
    before = llm.score([ids])[0]
    up = llm.model.blocks[0].mlp.up
    llm.model.blocks[0].mlp.up = WrappedLinear(up, lambda x: x * 2)
    changed = llm.score([ids])[0]
    llm.model.blocks[0].mlp.up = up
    assert not torch.allclose(before, changed)
    assert torch.equal(llm.score([ids])[0], before)
    assert llm.engine.prefix.num_hit_tokens == 0
