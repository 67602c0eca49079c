"""The engine on the toy model: the same tokens whatever the schedule."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from quantkit.runtime.types import SamplingParams
from tests.runtime.toy import ToyModel, generate, greedy, make_engine, prompts, run

SCHEDULES = [
    {"chunk_size": chunk, "prefix_cache": prefix, "num_pages": pages, "speculate": speculate}
    for chunk, prefix, pages, speculate in itertools.product(
        (None, 1, 7), (True, False), (128, 20), (None, "ngram", "draft", "self")
    )
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_greedy_tokens_do_not_depend_on_the_schedule(schedule):
    model = ToyModel()
    asked = prompts(9)
    engine = make_engine(model=model, **schedule)
    got = generate(engine, asked, SamplingParams(max_tokens=25))
    assert got == [greedy(model, prompt, 25) for prompt in asked]
    if schedule["num_pages"] == 20:
        assert engine.scheduler.num_preemptions > 0
    if schedule["speculate"] == "self":
        assert engine.governor.acceptance == 1
    elif schedule["speculate"]:
        assert 0 < engine.governor.acceptance < 1


SAMPLED = SamplingParams(
    max_tokens=25, temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_sampled_tokens_do_not_depend_on_the_schedule(schedule):
    asked = prompts(9)
    alone = [sampled_alone(i, prompt) for i, prompt in enumerate(asked)]
    engine = make_engine(**schedule)
    numbers = [engine.add(prompt, seeded(i)) for i, prompt in enumerate(asked)]
    done = run(engine)
    assert [done[number].token_ids for number in numbers] == alone
    assert len(set(alone)) == len(alone)


def sampled_alone(seed, prompt):
    return generate(make_engine(max_sequences=1, num_pages=128), [prompt], seeded(seed))[0]


def seeded(seed):
    return dataclasses.replace(SAMPLED, seed=seed)
