"""Two thousand random requests with cancellations in a fifth of the pages they want; and what batching is worth."""

from __future__ import annotations

import random

import pytest

from quantkit.runtime.types import SamplingParams
from tests.runtime.toy import VOCAB, ToyModel, build_engine, evicting, greedy, run


@pytest.mark.parametrize("speculate", [None, "ngram", "draft"])
def test_two_thousand_requests_and_every_page_comes_back(speculate):
    chance = random.Random(1)
    asked = 2000 if speculate is None else 500
    model = ToyModel()
    sequences, page_size, longest, new = 16, 4, 24, 16
    num_pages = sequences * (longest + new) // page_size // 5
    engine = build_engine(
        model=model, num_pages=num_pages, page_size=page_size, max_sequences=sequences, token_budget=48,
        speculate=speculate, max_drafts=2,
    )  # fmt: skip
    common = [chance.randrange(VOCAB) for _ in range(longest)]
    alive, prompts, added, done, cancelled = [], {}, 0, {}, 0
    while added < asked or engine.has_work:
        for _ in range(chance.randint(0, 3)):
            if added < asked and len(alive) < 40:
                head = common[: chance.choice([0, 0, 8, 17])]
                prompt = (head + [chance.randrange(VOCAB) for _ in range(chance.randint(1, longest))])[:longest]
                number = engine.add(prompt, SamplingParams(max_tokens=chance.randint(1, new)))
                alive.append(number)
                prompts[number] = prompt
                added += 1
        if alive and chance.random() < 0.2:
            number = alive.pop(chance.randrange(len(alive)))
            output = engine.cancel(number)
            assert output.completion.finish_reason == "cancelled"
            cancelled += 1
            engine.check_integrity()
        for output in engine.step():
            if output.completion:
                done[output.request_id] = output.completion
                alive.remove(output.request_id)
        engine.check_integrity()
    assert engine.pool.num_free == num_pages
    assert len(done) + cancelled == asked
    assert cancelled > asked / 10
    assert engine.scheduler.num_preemptions > asked / 100
    assert engine.prefix.num_hit_tokens > asked
    for number in list(done)[:: asked // 100]:
        count = len(done[number].token_ids)
        assert done[number].token_ids == greedy(model, prompts[number], count)


def test_static_batches_take_more_than_twice_the_steps():
    chance = random.Random(0)
    lengths = [chance.choice([2, 4, 8, 16, 120]) for _ in range(32)]
    steps = {}
    for together in (32, 8):  # a static batch is one that nobody joins
        model = ToyModel()
        engine = build_engine(model=model, num_pages=512, max_sequences=8, token_budget=64)
        for start in range(0, 32, together):
            for index, length in enumerate(lengths[start : start + together], start=start):
                engine.add([index] * 5, SamplingParams(max_tokens=length))
            run(engine)
        steps[together] = model.num_forwards
    assert steps[32] < 0.6 * steps[8], steps


@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_pages_come_back_from_sequences_that_gave_some_up(speculate):
    """Prompts and texts longer than the budget, beginnings in common, cancellations, preemptions: what each request
    sees is its sinks and its newest pages, alone or not."""
    chance, model, budget, chunk = random.Random(2), ToyModel(), 16, 12
    settings = {
        "model": model, "page_size": 2, "max_sequences": 8, "token_budget": chunk, "kv_budget": budget,
        "kv_policy": "window", "speculate": speculate, "max_drafts": 2,
    }  # fmt: skip
    engine = build_engine(num_pages=40, **settings)
    common = [chance.randrange(VOCAB) for _ in range(30)]
    alive, asked, done, cancelled = [], {}, {}, 0
    while len(asked) < 300 or engine.has_work:
        if len(asked) < 300 and len(alive) < 20:
            head = common[: chance.choice([0, 6, 12, 25])]
            prompt = head + [chance.randrange(VOCAB) for _ in range(chance.randint(1, 20))]
            number = engine.add(prompt, SamplingParams(max_tokens=chance.randint(1, 25)))
            alive.append(number)
            asked[number] = prompt
        if alive and chance.random() < 0.1:
            engine.cancel(alive.pop(chance.randrange(len(alive))))
            cancelled += 1
        for output in engine.step():
            if output.completion:
                done[output.request_id] = output.completion
                alive.remove(output.request_id)
        engine.check_integrity()
        for sequence in engine.scheduler.running:
            assert sequence.num_kept <= engine.eviction.budget.peak
            assert sequence.num_kept < budget or sequence.num_computed < sequence.num_prompt
    assert engine.pool.num_free == engine.pool.num_pages
    assert len(done) + cancelled == len(asked)
    assert engine.eviction.num_evicted_pages > 300
    assert engine.scheduler.num_preemptions > 0
    assert engine.prefix.num_hit_tokens > 300
    for number, completion in list(done.items())[::5]:
        assert completion.token_ids == evicting(model, asked[number], len(completion.token_ids), budget, chunk)
