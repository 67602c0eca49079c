"""The engine on the toy model: the same tokens whatever the schedule."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time

import pytest
import torch

from quantkit.errors import RequestError
from quantkit.runtime.types import SamplingParams
from tests.runtime.toy import VOCAB, ToyModel, build_engine, generate, greedy, prompts, run

SMALL = 13
SCHEDULES = [
    {"token_budget": budget, "prefix_cache": prefix, "num_pages": pages, "speculate": speculate}
    for budget, prefix, pages, speculate in itertools.product(
        (32, 8, 15), (True, False), (128, SMALL), (None, "ngram", "draft", "self")
    )
]


ASKED = prompts(7, longest=30)


@functools.cache
def expected(index):
    return greedy(ToyModel(), ASKED[index], 20)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_greedy_tokens_do_not_depend_on_the_schedule(schedule):
    engine = build_engine(**schedule)
    got = generate(engine, ASKED, SamplingParams(max_tokens=20))
    assert got == [expected(index) for index in range(len(ASKED))]
    if schedule["num_pages"] == SMALL:
        assert engine.scheduler.num_preemptions > 0
    if schedule["speculate"] == "self":
        assert engine.controller.acceptance == 1
    elif schedule["speculate"]:
        assert 0 < engine.controller.acceptance < 1


SAMPLED = SamplingParams(
    max_tokens=20, temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1
)


@functools.cache
def sampled_alone(index):
    return generate(build_engine(max_sequences=1, num_pages=128), [ASKED[index]], seeded(index))[0]


@pytest.mark.parametrize("schedule", SCHEDULES[::5], ids=str)
def test_sampled_tokens_do_not_depend_on_the_schedule(schedule):
    engine = build_engine(**schedule)
    numbers = [engine.add(prompt, seeded(index)) for index, prompt in enumerate(ASKED)]
    done = run(engine)
    alone = [sampled_alone(index) for index in range(len(ASKED))]
    assert [done[number].token_ids for number in numbers] == alone
    assert len(set(alone)) == len(alone)


def seeded(seed):
    return dataclasses.replace(SAMPLED, seed=seed)


class Letters:
    """A tokenizer of VOCAB letters; token 31 is special."""

    def decode(self, ids, **_):
        return "".join("abcdefghijklmnopqrstuvwxyzABCDE"[token] for token in ids if token < 31)


def text_of(tokens):
    return Letters().decode(tokens)


def one(engine, prompt, **params):
    number = engine.add(prompt, SamplingParams(**params))
    return run(engine)[number]


@pytest.mark.parametrize("speculate", [None, "self"])
def test_stop_texts_end_the_output_also_across_tokens(speculate):
    tokens = greedy(ToyModel(), [1, 2, 3], 30)
    text = text_of(tokens)
    for first, size in ((0, 1), (3, 4), (10, 3), (25, 5)):
        stop = text[first : first + size]
        engine = build_engine(tokenizer=Letters(), speculate=speculate)
        done = one(engine, [1, 2, 3], max_tokens=30, stop=["#never", stop])
        at = text.index(stop)
        assert done.text == text[:at]
        assert done.finish_reason == "stop"
        assert done.token_ids == tokens[: len(done.token_ids)]
        assert text_of(done.token_ids) == text[: at + size]
    whole = one(build_engine(tokenizer=Letters(), speculate=speculate), [1, 2, 3], max_tokens=30, stop="#never")
    assert (whole.text, whole.finish_reason) == (text, "length")


def test_pieces_are_the_text_and_never_a_stop_that_may_come():
    engine = build_engine(tokenizer=Letters())
    text = text_of(greedy(ToyModel(), [1, 2, 3], 30))
    engine.add([1, 2, 3], SamplingParams(max_tokens=30, stop=text[8:14]))
    shown = ""
    while engine.has_work:
        for output in engine.step():
            shown += output.text
            assert text[:8].startswith(shown)
    assert shown == text[:8]


@pytest.mark.parametrize("speculate", [None, "self"])
def test_end_tokens_stop_and_are_kept_but_not_shown(speculate):
    tokens = greedy(ToyModel(), [4, 5], 30)
    model = ToyModel()
    model.eos_ids = (tokens[6],)
    first = tokens.index(tokens[6])
    done = one(build_engine(model=model, tokenizer=Letters(), speculate=speculate), [4, 5], max_tokens=30)
    assert done.token_ids == tokens[: first + 1]
    assert (done.text, done.finish_reason) == (text_of(tokens[:first]), "stop")
    assert (
        one(build_engine(model=model, speculate=speculate), [4, 5], max_tokens=30, ignore_eos=True).token_ids == tokens
    )
    done = one(build_engine(speculate=speculate), [4, 5], max_tokens=30, stop_token_ids=[tokens[6]], ignore_eos=True)
    assert done.token_ids == tokens[: first + 1]


def test_logprobs_and_timing_come_with_every_token():
    model = ToyModel()
    engine = build_engine(model=model, speculate="self")
    done = one(engine, [1, 2, 3], max_tokens=9, logprobs=2)
    ids = [1, 2, 3, *done.token_ids]
    table = torch.from_numpy(model.logits_of(ids)).log_softmax(-1)
    for index, entry in enumerate(done.logprobs):
        row = table[2 + index]
        assert entry.token_id == ids[3 + index]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-5)
        assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
    assert len(done.logprobs) == 9
    timing = done.timing
    assert len(timing.token_s) == 9
    assert timing.arrived_s < timing.token_s[0] <= timing.token_s[-1] <= timing.finished_s
    assert len(timing.inter_token_s) == 8


def test_cancelling_frees_pages_at_once_wherever_the_request_is():
    engine = build_engine(num_pages=20, max_sequences=2, token_budget=16)
    first, second, third = (engine.add([number] * 20, SamplingParams(max_tokens=30)) for number in range(3))
    assert engine.cancel(third).completion.token_ids == ()  # waiting
    engine.step()
    assert engine.cancel(second).completion.finish_reason == "cancelled"  # in the middle of its prompt
    engine.check_integrity()
    for _ in range(5):
        engine.step()
    free = engine.pool.num_free
    assert len(engine.cancel(first).completion.token_ids) > 1  # decoding
    assert engine.pool.num_free == engine.pool.num_pages > free
    assert not engine.has_work
    assert engine.cancel(first) is None
    assert engine.cancel(99) is None


@pytest.mark.parametrize("speculate", [None, "draft"])
def test_an_exception_in_a_step_fails_what_was_running_and_nothing_else(speculate):
    model = ToyModel()
    engine = build_engine(model=model, max_sequences=2, speculate=speculate)
    numbers = [engine.add([number, 3], SamplingParams(max_tokens=10)) for number in range(3)]
    engine.step()
    model.fail_at = model.num_forwards + 1
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_pages
    failed = {output.request_id: output.completion.finish_reason for output in engine.step()}
    assert failed == {numbers[0]: "error", numbers[1]: "error"}
    assert run(engine)[numbers[2]].token_ids == greedy(model, [2, 3], 10)


def test_news_from_before_a_failure_in_the_same_step_are_not_lost(monkeypatch):
    engine = build_engine()
    ends, fails = engine.add([1, 3], SamplingParams(max_tokens=2)), engine.add([2, 3], SamplingParams(max_tokens=9))
    engine.step()
    append = engine._append

    def broken(sequence, *args):
        if sequence.id == fails:
            raise RuntimeError("out of luck")
        return append(sequence, *args)

    monkeypatch.setattr(engine, "_append", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    news = {output.request_id: output.completion.finish_reason for output in engine.step()}
    assert news == {ends: "length", fails: "error"}
    engine.check_integrity()


def test_a_prompt_is_whole_numbers_of_any_kind():
    assert generate(build_engine(), [torch.tensor([1, 2])], SamplingParams()) == generate(
        build_engine(), [[1, 2]], SamplingParams()
    )
    for wrong in ([1.5], ["1"], [None]):
        with pytest.raises(RequestError, match="not a list of token ids"):
            build_engine().add(wrong)


def test_what_cannot_fit_is_refused_with_the_number_that_would():
    engine = build_engine(model=ToyModel(max_length=30))
    with pytest.raises(RequestError, match="but the context is 30 tokens; shorten the prompt to 29 tokens"):
        engine.add([1] * 30)
    with pytest.raises(RequestError, match=r"max_tokens 11 need 31 tokens, but the context is 30.*to 10 or less"):
        engine.add([1] * 20, SamplingParams(max_tokens=11))
    engine = build_engine(num_pages=5)
    with pytest.raises(RequestError, match="need 21 tokens, but the KV pool holds 20 tokens; set max_tokens to 18"):
        engine.add([1] * 2, SamplingParams(max_tokens=19))
    assert not engine.has_work
    assert len(one(engine, [1] * 2, max_tokens=18).token_ids) == 18
    assert len(one(engine, [1] * 2, max_tokens=None).token_ids) == 18
    assert len(one(engine, [1] * 19, max_tokens=1).token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], {}, "the prompt is empty"),
        ([1, VOCAB], {}, "token 32; the model's token ids are 0 to 31"),
        ([-1], {}, "token -1"),
        ([1], {"stop": "x"}, "stop texts need a tokenizer"),
    ],
)
def test_bad_requests_are_one_line(prompt, params, said):
    with pytest.raises(RequestError, match=said) as caught:
        build_engine().add(prompt, SamplingParams(**params))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_requests_without_a_seed_get_one_from_the_engines():
    params = SamplingParams(max_tokens=12, temperature=1.5)
    runs = [generate(build_engine(max_sequences=n), [[1], [1], [1]], params) for n in (8, 1)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


def test_its_own_time_per_decode_step_is_small():
    """Far above what it takes (20 us here), far below what per-step tensors or detokenizing everything would."""
    engine = build_engine(num_pages=512, page_size=64)
    engine.model.forward = lambda batch, cache: torch.zeros(len(batch.logit_rows), VOCAB)
    engine.add([1] * 50, SamplingParams(max_tokens=2000))
    for _ in range(20):
        engine.step()
    times = []
    for _ in range(500):
        began = time.thread_time()
        engine.step()
        times.append(time.thread_time() - began)
    assert sorted(times)[50] < 150e-6
