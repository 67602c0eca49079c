"""Scored continuations: the numbers of whole logits, whatever is shared, batched or cut; and nothing computed twice."""

from __future__ import annotations

import random

import pytest
import torch

from quantkit.errors import RequestError
from quantkit.runtime.engine.likelihood import Query, score_tokens
from quantkit.runtime.llm import LLM
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


def make_queries(seed=0, contexts=6, choices=3):
    """Contexts of 5 to 90 tokens with a common beginning of 40, each with several continuations, in mixed order."""
    rng = random.Random(seed)
    common = [rng.randrange(258) for _ in range(40)]
    queries = []
    for number in range(contexts):
        context = (common if number % 2 else []) + [rng.randrange(258) for _ in range(5 + 9 * number)]
        for _ in range(choices):
            tail = [rng.randrange(258) for _ in range(rng.randint(1, 6))]
            queries.append(Query(ids=(*context, *tail), num_scored=len(tail)))
    rng.shuffle(queries)
    return queries


def expected(llm, queries):
    """The same numbers from all logits of each text alone."""
    found = []
    for query in queries:
        logits = llm.score([query.ids[:-1]])[0][-query.num_scored :]
        tokens = torch.tensor(query.ids[-query.num_scored :])
        logprobs = logits.log_softmax(-1)[torch.arange(query.num_scored), tokens]
        found.append((logprobs, bool((logits.argmax(-1) == tokens).all())))
    return found


def assert_same(found, wanted, tolerance=2e-5):
    for one, (logprobs, greedy) in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.logprobs, logprobs, atol=tolerance, rtol=tolerance)
        assert one.greedy == greedy


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
    queries = make_queries()
    other = make_llm(folder, **settings) if settings else llm
    assert_same(score_tokens(other.engine, queries, chunk_size=chunk_size), expected(llm, queries))
    other.engine.pool.check_integrity([])


def test_a_greedy_continuation_is_recognized(llm):
    prompt = list(range(20))
    tokens = llm.generate([prompt])[0].token_ids[:5]
    wrong = (*tokens[:4], (tokens[4] + 1) % 258)
    found = score_tokens(llm.engine, [Query(ids=(*prompt, *t), num_scored=5) for t in (tokens, wrong)])
    assert [one.greedy for one in found] == [True, False]


def count_tokens(llm, monkeypatch):
    """Numbers of tokens fed, one per step."""
    fed = []
    run = llm.engine.runner.run

    def counting(pieces):
        fed.append(sum(len(piece.tokens) for piece in pieces))
        return run(pieces)

    monkeypatch.setattr(llm.engine.runner, "run", counting)
    return fed


def test_full_pages_of_a_common_beginning_are_computed_once(folder, monkeypatch):
    llm = make_llm(folder)
    fed = count_tokens(llm, monkeypatch)
    context = tuple(range(50))  # three full pages of 16 and two tokens
    queries = [Query(ids=(*context, 100 + n, 7, 8), num_scored=3) for n in range(5)]
    score_tokens(llm.engine, queries)
    assert fed == [52, 4 * (52 - 48)]


def test_answers_that_differ_in_the_last_token_share_one_input(folder, monkeypatch):
    llm = make_llm(folder)
    fed = count_tokens(llm, monkeypatch)
    queries = [Query(ids=(*range(9), answer), num_scored=1) for answer in (3, 4, 5)]
    queries.append(Query(ids=(*range(9), 5), num_scored=4))  # scored from further ahead
    found = score_tokens(llm.engine, queries)
    assert fed == [9]
    assert_same(found, expected(llm, queries))


def test_nothing_is_left_behind_when_the_model_fails(folder, monkeypatch):
    llm = make_llm(folder)
    monkeypatch.setattr(llm.engine.runner, "run", lambda pieces: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score_tokens(llm.engine, make_queries())
    monkeypatch.undo()
    llm.engine.pool.check_integrity([])
    assert_same(score_tokens(llm.engine, make_queries(1)), expected(llm, make_queries(1)))


def test_with_a_quantized_cache_everything_before_the_answer_is_read_from_it(folder):
    queries = make_queries()
    shared, alone = (make_llm(folder, kv_cache="int4", page_size=64, prefix_cache=on) for on in (True, False))
    together = score_tokens(shared.engine, queries)
    apart = [score_tokens(alone.engine, [query])[0] for query in queries]
    assert_same(together, [(one.logprobs, one.greedy) for one in apart], 1e-4)
    exact = score_tokens(make_llm(folder).engine, queries)
    assert any((a.logprobs - b.logprobs).abs().max() > 1e-3 for a, b in zip(together, exact, strict=True))


def test_progress_counts_every_query(llm):
    seen = []
    score_tokens(llm.engine, make_queries(), progress=seen.append)
    assert sum(seen) == 18
    assert len(seen) > 1


BAD = [
    (Query(ids=(1,), num_scored=1), None, "a text to score has 1 tokens; 2 to 513 fit"),
    (Query(ids=(1,) * 514, num_scored=1), None, "has 514 tokens"),
    (Query(ids=(1, 2, 3), num_scored=3), None, "3 of 3 tokens are to be scored; 1 to 2 can be"),
    (Query(ids=(1, 2, 3), num_scored=0), None, "0 of 3 tokens"),
    (Query(ids=(1, 999, 3), num_scored=1), None, "tokens outside 0 to 259"),
    (Query(ids=(1, 2), num_scored=1), 0, "chunk_size is 0; give at least 1, or None"),
]


@pytest.mark.parametrize(("query", "chunk_size", "message"), BAD)
def test_bad_queries_are_refused(llm, query, chunk_size, message):
    with pytest.raises(RequestError, match=message):
        score_tokens(llm.engine, [query], chunk_size=chunk_size)


def test_running_requests_are_not_disturbed(folder):
    llm = make_llm(folder)
    llm.engine.add([1, 2, 3])
    with pytest.raises(RequestError, match="requests are running"):
        score_tokens(llm.engine, make_queries())
