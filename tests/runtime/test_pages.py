"""The page pool: nothing lost, nothing doubled, the oldest contents go first."""

from __future__ import annotations

import random

import pytest

from quantkit.runtime.cache.pages import PagePool


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
