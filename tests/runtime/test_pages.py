"""The page pool: nothing lost, nothing doubled, the oldest contents go first.

The prefix cache: common prefixes are computed once, and never anything but the same tokens.
"""

from __future__ import annotations

import random

import pytest

from quantkit.runtime.cache.pages import PagePool, PrefixCache
from quantkit.runtime.sequence import Sequence
from quantkit.runtime.types import SamplingParams
from tests.runtime.toy import ToyModel, build_engine, generate, greedy, run


def test_pages_are_shared_and_come_back():
    pool = PagePool(3)
    first = pool.allocate(2)
    pool.share(first[0])
    pool.release(first)
    assert pool.num_free == 2
    assert not pool.is_free(first[0])
    pool.check_integrity([[first[0]]])
    pool.release([first[0]])
    pool.check_integrity([])
    assert pool.num_free == 3


def test_contents_survive_release_until_the_page_is_needed():
    pool = PagePool(4)
    pages = pool.allocate(3)
    for page in pages:
        pool.publish(b"%d" % page, page)
    pool.release(pages)
    pool.share(pages[0])  # in use again
    assert pool.find(b"%d" % pages[0]) == pages[0]
    assert pages[1] not in pool.allocate(1)  # the one without contents goes first
    # Released last to first, so the end of the sequence is the first to be forgotten.
    assert pool.allocate(1) == [pages[2]]
    assert pool.find(b"%d" % pages[2]) is None
    assert pool.find(b"%d" % pages[1]) == pages[1]
    pool.check_integrity([[pages[0]], [3], [pages[2]]])


def test_equal_contents_are_named_once():
    pool = PagePool(2)
    one, two = pool.allocate(2)
    pool.publish(b"same", one)
    pool.publish(b"same", two)
    assert pool.find(b"same") == one
    pool.release([two])
    pool.check_integrity([[one]])


def test_a_random_life_keeps_its_integrity():
    chance = random.Random(0)
    pool, held, keys = PagePool(20), [], 0
    for _ in range(3000):
        action = chance.random()
        if action < 0.4 and pool.num_free >= 3:
            held.append(pool.allocate(chance.randint(1, 3)))
            if chance.random() < 0.7:
                pool.publish(b"%d" % keys, held[-1][0])
                keys += 1
        elif action < 0.6:
            page = pool.find(b"%d" % chance.randrange(max(1, keys)))
            if page is not None:
                pool.share(page)
                held.append([page])
        elif held:
            pool.release(held.pop(chance.randrange(len(held))))
        pool.check_integrity(held)
    assert keys > 100


@pytest.mark.parametrize(
    "sensitivity",
    [
        lambda pool: pool._blank.append(0),
        lambda pool: pool._blank.pop(),
        lambda pool: pool._counts.__setitem__(0, 2),
        lambda pool: pool._page_of.clear(),
        lambda pool: pool._blank.append(pool._blank[-1]),
    ],
)
def test_sensitivity_is_found(sensitivity):
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.publish(b"a", pages[0])
    pool.check_integrity([pages])
    sensitivity(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity([pages])


def test_a_page_held_twice_by_one_sequence_is_found():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.share(pages[0])
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity([[pages[0], pages[0]]])


def test_a_pool_that_forgets_is_as_new():
    pool = PagePool(4)
    held, other = pool.allocate(2), pool.allocate(1)
    pool.publish(b"held", held[0])
    pool.publish(b"free", other[0])
    pool.release(other)
    pool.forget()
    assert pool.find(b"free") is None
    assert pool.find(b"held") == held[0]
    pool.check_integrity([held])
    pool.release(held)
    pool.forget()
    assert pool.allocate(4) == PagePool(4).allocate(4)


def sequence(ids, number=0):
    return Sequence(
        id=number, ids=list(ids), num_prompt=len(ids), params=SamplingParams(), limit=99, seed=0,
        stop_ids=frozenset(), arrived=0.0,
    )  # fmt: skip


def published(ids, **options):
    pool = PagePool(8)
    prefix = PrefixCache(pool, 4, **options)
    known = sequence(ids)
    known.pages, known.num_computed = pool.allocate(-(-len(ids) // 4)), len(ids)
    prefix.publish(known)
    return prefix, known


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (20, 2)])
def test_one_token_is_always_left(length, pages):
    prefix, known = published(range(11))
    asked = sequence([*range(11), *range(30, 50)][:length])
    assert prefix.match(asked) == known.pages[:pages]


def test_what_a_preempted_request_finds_again_is_not_counted_as_cached():
    """Users read `cached_tokens` as work that an earlier request saved them; these pages were mostly its own."""
    prefix, known = published(range(12))
    first, again = sequence(range(12)), sequence(range(12))
    again.num_preemptions = 1
    for asked in (first, again):
        prefix.take(asked, known.pages[:2])
    assert (first.num_cached, again.num_cached, again.num_computed) == (8, 0, 8)


def test_a_page_counts_only_after_the_same_history():
    prefix, _ = published([1, 2, 3, 4, 5, 6, 7, 8])
    assert len(prefix.match(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))) == 2
    assert prefix.match(sequence([9, 2, 3, 4, 5, 6, 7, 8, 9])) == []
    assert prefix.match(sequence([5, 6, 7, 8, 9])) == []


def test_another_format_is_another_key():
    pool = PagePool(8)
    one, two = PrefixCache(pool, 4, identity="m int8"), PrefixCache(pool, 4, identity="m int4")
    known = sequence(range(8))
    known.pages, known.num_computed = pool.allocate(2), 8
    one.publish(known)
    assert one.match(sequence(range(9)))
    assert not two.match(sequence(range(9)))


def test_switched_off_it_finds_nothing():
    prefix, _ = published(range(8), enabled=False)
    assert prefix.match(sequence(range(9))) == []


def test_the_second_request_computes_only_what_is_new():
    model = ToyModel()
    engine = build_engine(model=model, max_sequences=1)
    prompt = list(range(21))
    first, second, third = generate(engine, [prompt, prompt, [*prompt, 3]], SamplingParams(max_tokens=5))
    assert first == second == greedy(model, prompt, 5)
    assert third == greedy(model, [*prompt, 3], 5)
    assert engine.prefix.num_hit_tokens == 20 + 20
    again = engine.add(prompt, SamplingParams(max_tokens=5))
    assert run(engine)[again].timing.cached_tokens == 20


def test_pages_of_the_same_step_are_not_matched():
    model = ToyModel()
    engine = build_engine(model=model, max_sequences=2, token_budget=64)
    prompt = list(range(21))
    tokens = generate(engine, [prompt, prompt], SamplingParams(max_tokens=5))
    assert engine.prefix.num_hit_tokens == 0
    assert tokens == [greedy(model, prompt, 5)] * 2


def test_a_prefix_whose_pages_are_all_shared_still_fits():
    """Matched pages come off the free list: counting them as free too would promise them twice."""
    model = ToyModel()
    engine = build_engine(model=model, num_pages=8, max_sequences=4)
    prompt = [*range(16)]
    params = SamplingParams(max_tokens=12)
    for _ in range(2):
        assert generate(engine, [prompt] * 4, params) == [greedy(model, prompt, 12)] * 4


def test_rejected_drafts_are_never_published():
    model = ToyModel(noise=3)
    engine = build_engine(model=model, speculate="draft", page_size=2)
    published = {}
    publish = engine.pool.publish
    engine.pool.publish = lambda key, page: (published.setdefault(key, page), publish(key, page))
    number = engine.add([1, 2, 3], SamplingParams(max_tokens=60))
    ids = [1, 2, 3, *run(engine)[number].token_ids]
    assert engine.controller.acceptance < 0.9
    keys = sequence(ids)
    assert set(published) == {engine.prefix._key(keys, index) for index in range((len(ids) - 1) // 2)}


def test_pages_of_a_prompt_are_shared_while_the_rest_of_it_is_computed():
    engine = build_engine(token_budget=16, max_sequences=2)
    prompt = [index % 32 for index in range(40)]
    engine.add(prompt, SamplingParams(max_tokens=2))
    engine.step()
    engine.add(prompt, SamplingParams(max_tokens=2))
    engine.step()
    assert engine.prefix.num_hit_tokens == 16
    run(engine)
