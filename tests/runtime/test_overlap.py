"""Steps launched before the last one's tokens are read: the same tokens, and nothing lost when the batch changes."""

from __future__ import annotations

import itertools

import pytest

from quantkit.runtime.types import SamplingParams
from tests.runtime.toy import ToyModel, build_engine, generate, greedy, prompts, run

ASKED = prompts(7, longest=30)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_k=20, top_p=0.95)


@pytest.mark.parametrize(("pages", "sequences"), list(itertools.product((128, 13), (1, 3, 8))))
def test_greedy_tokens_are_those_without(pages, sequences):
    engine = build_engine(num_pages=pages, max_sequences=sequences, overlap=True)
    expected = [greedy(ToyModel(), prompt, 20) for prompt in ASKED]
    assert generate(engine, ASKED, SamplingParams(max_tokens=20)) == expected
    assert engine._overlap.num_followed > 10


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(max_tokens=20, temperature=1.0, seed=3)], ids=str)
def test_drawn_tokens_are_those_without(params):
    plain = generate(build_engine(), ASKED, params)
    engine = build_engine(overlap=True)
    assert generate(engine, ASKED, params) == plain
    assert engine._overlap.num_followed > 10


def test_who_stops_early_keeps_no_token_of_the_step_too_many():
    """A stop token is only seen after the next step has been launched."""
    expected = greedy(ToyModel(), ASKED[0], 40)
    stop = next(token for index, token in enumerate(expected) if index > 8 and token not in expected[:index])
    params = SamplingParams(max_tokens=40, stop_token_ids=(stop,))
    engine = build_engine(overlap=True)
    number = engine.add(ASKED[0], params)
    other = engine.add(ASKED[1], SamplingParams(max_tokens=40))
    done = run(engine)
    assert done[number].token_ids == expected[: expected.index(stop) + 1]
    assert done[number].finish_reason == "stop"
    assert done[other].token_ids == greedy(ToyModel(), ASKED[1], 40)


def test_late_arrivals_and_cancelled_requests_change_the_batch():
    engine = build_engine(overlap=True)
    first = [engine.add(prompt, SamplingParams(max_tokens=30)) for prompt in ASKED[:3]]
    done = {}
    for step in range(8):
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
        engine.check_integrity()
        if step == 4:
            engine.cancel(first[1])
    late = [engine.add(prompt, SamplingParams(max_tokens=30)) for prompt in ASKED[3:]]
    done |= run(engine)
    for number, prompt in zip([first[0], first[2], *late], [ASKED[0], ASKED[2], *ASKED[3:]], strict=True):
        assert done[number].token_ids == greedy(ToyModel(), prompt, 30)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=10, repetition_penalty=1.2), SamplingParams(max_tokens=10, logprobs=2)],
    ids=str,
)
def test_what_needs_the_tokens_first_is_not_followed(params):
    engine = build_engine(overlap=True)
    assert generate(engine, ASKED[:2], params) == generate(build_engine(), ASKED[:2], params)
    assert engine._overlap.num_followed == 0


def test_a_failing_step_ends_its_requests_and_the_next_goes_on():
    model = ToyModel()
    engine = build_engine(model=model, overlap=True)
    number = engine.add(ASKED[0], SamplingParams(max_tokens=30))
    for _ in range(4):
        engine.step()
    model.fail_at = model.num_forwards + 1
    with pytest.raises(RuntimeError, match="out of luck"):
        for _ in range(30):
            engine.step()
    assert engine.step()[0].completion.finish_reason == "error"
    again = engine.add(ASKED[0], SamplingParams(max_tokens=30))
    assert number != again
    assert run(engine)[again].token_ids == greedy(ToyModel(), ASKED[0], 30)
