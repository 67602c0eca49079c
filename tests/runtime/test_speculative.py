"""Proposers and the decision whether they pay; that speculation changes no token is in test_engine."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch

from quantkit.errors import RequestError
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.draft_model import DraftModelProposer
from quantkit.runtime.engine.speculation import NgramProposer, SpeculationController
from quantkit.runtime.sampling import sample
from quantkit.runtime.sequence import Sequence
from quantkit.runtime.types import SamplingParams
from tests.runtime.toy import VOCAB, ToyCache, ToyModel, build_engine, generate, greedy, prompts, run

GREEDY = SamplingParams()


def sequence(ids, *, limit=99, seed=0, params=GREEDY):
    return Sequence(
        id=0, ids=list(ids), num_prompt=len(ids), params=params, limit=limit, seed=seed, stop_ids=frozenset(),
        arrived=0.0,
    )  # fmt: skip


def proposed(ids, count=4, **changes):
    item = sequence(ids, **changes)
    NgramProposer(3, 2).propose([item], count)
    return item.drafts


def test_ngrams_propose_what_followed_last_time():
    assert proposed([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]
    assert proposed([1, 2, 3, 4, 1, 2, 9, 8, 7, 1, 2]) == [9, 8, 7, 1], "the most recent"
    assert proposed([5, 1, 2, 3, 4, 7, 1, 2, 9, 9, 5, 1, 2]) == [3, 4, 7, 1], "but a longer match before that"
    assert proposed([1, 2, 3, 4]) == []
    assert proposed([1, 9, 1]) == [], "one token is not enough"
    assert proposed([3, 1, 2, 1, 2]) == [1, 2, 1, 2], "in a circle"
    assert proposed([1, 2, 3, 4, 5, 1, 2], limit=9) == [3], "the step adds one token itself"
    assert proposed([1, 2, 3, 4, 5, 1, 2], limit=8) == []


def test_ngrams_learn_while_the_sequence_grows():
    proposer, item = NgramProposer(3, 2), sequence([1, 2])
    for token in (3, 4, 1, 2):
        proposer.propose([item], 3)
        assert item.drafts == []
        item.ids.append(token)
    proposer.propose([item], 3)
    assert item.drafts == [3, 4, 1]
    proposer.check_integrity({0})
    proposer.forget(0)
    proposer.check_integrity(set())


def test_a_draft_model_proposes_its_own_tokens_and_takes_rejected_ones_back():
    draft = ToyModel(seed=1)
    config = EngineConfig(page_size=4, max_sequences=2, token_budget=16)
    proposer = DraftModelProposer(draft, ToyCache(32, 4), config, num_pages=32, vocab_size=VOCAB)
    item = sequence(range(40))
    proposer.propose([item], 3)
    assert item.drafts == [], "it takes three steps to catch up with 40 tokens"
    proposer.propose([item], 3)
    for accepted in (0, 3, 1, 2, 0, 3):
        item.drafts = []
        proposer.propose([item], 3)
        assert tuple(item.drafts) == greedy(draft, item.ids, 3)
        item.ids += [*item.drafts[:accepted], (item.drafts[accepted] + 1) % VOCAB if accepted < 3 else 5]
        proposer.check_integrity({0})
    proposer.forget(0)
    proposer.check_integrity(set())
    assert draft.forgotten == [0]


def test_a_draft_model_without_room_proposes_nothing():
    config = EngineConfig(page_size=4, max_sequences=2, token_budget=64)
    proposer = DraftModelProposer(ToyModel(), ToyCache(3, 4), config, num_pages=3, vocab_size=VOCAB)
    item = sequence(range(20))
    proposer.propose([item], 3)
    assert item.drafts == []
    proposer.check_integrity(set())


def test_another_vocabulary_is_refused_with_both_sizes():
    config = EngineConfig(page_size=4, max_sequences=2, token_budget=64)
    with pytest.raises(RequestError, match="vocabulary has 32 tokens, but the model's has 99"):
        DraftModelProposer(ToyModel(), ToyCache(3, 4), config, num_pages=3, vocab_size=99)


class Fixed(ToyModel):
    """The same distribution after every token, so that every draw has known probabilities."""

    def __init__(self, logits):
        super().__init__()
        self.row = torch.tensor(logits)

    def forward(self, batch, cache):
        return self.row.repeat(len(batch.logit_rows), 1)


def test_sampled_output_has_the_targets_distribution():
    """Chi-square over the tokens of many requests, with a draft whose distribution is quite another."""
    generator = torch.Generator().manual_seed(3)
    target = torch.full((VOCAB,), -torch.inf)
    target[:6] = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -0.5])
    draft = torch.full((VOCAB,), -torch.inf)
    draft[:6] = torch.randn(6, generator=generator)
    engine = build_engine(model=Fixed(target.tolist()), speculate="draft", max_sequences=16, num_pages=256)
    engine._proposer.model.forward = Fixed(draft.tolist()).forward
    numbers = [engine.add([1], SamplingParams(max_tokens=40, temperature=1.0, seed=seed)) for seed in range(100)]
    done = run(engine, check=False)
    counts = collections.Counter(token for number in numbers for token in done[number].token_ids)
    total, chances = 100 * 40, target.softmax(0).tolist()
    distance = sum((counts[token] - total * p) ** 2 / (total * p) for token, p in enumerate(chances[:6]))
    assert distance < 20.5, counts  # 99.9 % point of chi-square with 5 degrees of freedom
    p, q = target.softmax(0), draft.softmax(0)
    far = float((p - q).abs().sum() / 2)
    assert (1 - far) / (1 + far) - 0.03 < engine.controller.chance < 1 - far + 0.03


def test_draws_of_draft_and_target_are_coupled():
    """Near distributions give the same token nearly always, which independent draws would not."""
    torch.manual_seed(0)
    params = SamplingParams(temperature=1.0)
    logits = torch.randn(400)
    near = logits + 0.02 * torch.randn(400)
    rows = [(sequence([1] * (1 + at), params=params, seed=5), 0) for at in range(300)]
    one, two = sample(logits.repeat(300, 1), rows), sample(near.repeat(300, 1), rows)
    assert sum(a == b for a, b in zip(one, two, strict=True)) > 285


def test_more_drafts_than_can_be_taken_back_are_refused():
    with pytest.raises(RequestError, match="max_drafts is 17; give 1 to 16"):
        SpeculationController(17)


def play(controller, *, plain, per_draft, chance, steps=300):
    """Steps of one sequence that take plain + k * per_draft seconds; the number of drafts of each."""
    import random

    luck = random.Random(0)
    chosen = []
    for _ in range(steps):
        count = controller.choose(1)
        chosen.append(count)
        if count:
            accepted = next((i for i in range(count) if luck.random() > chance), count)
            controller.accepted(count, accepted)
        controller.timed(1, plain + count * per_draft, [count] if count else [])
    return chosen


def test_drafts_stay_on_where_they_win_and_off_where_they_lose():
    wins = play(SpeculationController(4), plain=1.0, per_draft=0.05, chance=0.8)
    assert sum(count > 0 for count in wins[20:]) > 0.9 * 280
    loses = play(SpeculationController(4), plain=1.0, per_draft=0.6, chance=0.3)
    assert sum(count > 0 for count in loses[20:]) < 0.1 * 280
    longer = play(SpeculationController(4), plain=1.0, per_draft=0.6, chance=0.3, steps=1500)
    trials = [at for at, (before, count) in enumerate(itertools.pairwise(longer)) if count and not before]
    assert [after - at for at, after in itertools.pairwise(trials)] == [68, 132, 260, 260, 260, 260], (
        "tried more rarely"
    )
    assert set(play(SpeculationController(4, force=True), plain=1.0, per_draft=0.6, chance=0.3)) == {4}


def test_fewer_drafts_where_the_later_ones_are_rarely_right():
    cheap = play(SpeculationController(8), plain=1.0, per_draft=0.01, chance=0.9)
    dear = play(SpeculationController(8), plain=1.0, per_draft=0.2, chance=0.5)
    assert max(cheap[100:]) == 8
    assert max(dear[100:]) in (1, 2)


def test_it_wins_again_when_times_change():
    controller = SpeculationController(4)
    play(controller, plain=1.0, per_draft=0.6, chance=0.6)
    later = play(controller, plain=1.0, per_draft=0.02, chance=0.95, steps=1500)
    assert sum(count > 0 for count in later[-100:]) > 80


@pytest.mark.parametrize("speculate", ["ngram", "draft"])
def test_the_controller_changes_no_token(speculate):
    model, asked = ToyModel(), prompts(6)
    engine = build_engine(model=model, speculate=speculate, force=False)
    params = SamplingParams(max_tokens=40)
    assert generate(engine, asked, params) == [greedy(model, prompt, 40) for prompt in asked]


def test_drafts_fed_long_ago_are_compared_with_what_came():
    """Speculation may pause for steps: then more tokens have come than were drafted, and others."""
    draft = ToyModel(seed=1)
    config = EngineConfig(page_size=4, max_sequences=2, token_budget=64)
    proposer = DraftModelProposer(draft, ToyCache(32, 4), config, num_pages=32, vocab_size=VOCAB)
    item = sequence(range(10))
    proposer.propose([item], 4)
    item.ids += [item.drafts[0], (item.drafts[1] + 1) % VOCAB, 3, 4, 5, 6]
    item.drafts = []
    proposer.propose([item], 4)
    assert tuple(item.drafts) == greedy(draft, item.ids, 4)
