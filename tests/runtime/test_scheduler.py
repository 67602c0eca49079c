"""Who gets how many tokens: the budget, chunks, page borders, preemption, fairness."""

from __future__ import annotations

import sys

import pytest

from quantkit.runtime.cache.pages import PagePool, PrefixCache
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.scheduler import Scheduler
from quantkit.runtime.sequence import Sequence
from quantkit.runtime.types import PromptScoring, SamplingParams
from tests.runtime.toy import ToyModel, build_engine


def scheduler(num_pages=64, **changes):
    options = {"page_size": 4, "max_sequences": 8, "token_budget": 32, **changes}
    pool = PagePool(num_pages)
    preempted = []
    made = Scheduler(pool, PrefixCache(pool, 4, enabled=False), EngineConfig(**options), preempted.append)
    return made, preempted


def sequence(number, length):
    return Sequence(id=number, ids=list(range(length)), num_prompt=length, params=SamplingParams(), limit=10_000)


def step(made):
    """Schedule and pretend to compute; {request: tokens}."""
    work = made.schedule()
    for item, count in work:
        item.num_computed += count
        if item.num_computed == len(item.ids):
            item.ids.append(0)
    made.check_integrity()
    return {item.id: count for item, count in work}


def test_decodes_come_first_and_prompts_share_the_rest():
    made, _ = scheduler(num_pages=200)
    for number in range(3):
        made.add(sequence(number, 3))
    assert step(made) == {0: 3, 1: 3, 2: 3}
    for number in range(3, 6):
        made.add(sequence(number, 100))
    # 29 tokens are left: half of what is left for each but the last, cut at page borders; then nothing is left over.
    assert step(made) == {0: 1, 1: 1, 2: 1, 3: 13, 4: 8, 5: 8}
    assert sum(step(made).values()) == 32


def test_a_giant_prompt_does_not_hold_up_short_ones():
    made, _ = scheduler(num_pages=600)
    made.add(sequence(0, 2000))
    made.add(sequence(1, 10))
    made.add(sequence(2, 4))
    assert step(made) == {0: 20, 1: 8, 2: 4}
    assert step(made) == {0: 29, 1: 2, 2: 1}
    assert step(made) == {0: 30, 1: 1, 2: 1}


def test_chunks_end_at_page_borders_when_others_take_the_rest():
    made, _ = scheduler(token_budget=30)
    made.add(sequence(0, 100))
    made.add(sequence(1, 18))
    assert step(made) == {0: 12, 1: 18}
    made.add(sequence(2, 99))
    # Half of 29 is 14, but 24 is a border: 12 for the first; 16 of the rest end at one too, one token remains.
    assert step(made) == {0: 13, 1: 1, 2: 16}


def test_whole_prompts_ignore_the_budget_one_at_a_time():
    made, _ = scheduler(chunked=False)
    for number, length in enumerate((50, 20, 10)):
        made.add(sequence(number, length))
    assert step(made) == {0: 50}
    assert step(made) == {0: 1, 1: 20, 2: 10}


def test_the_youngest_gives_way_and_waits_at_the_front():
    made, preempted = scheduler(num_pages=6)
    for number in range(3):
        made.add(sequence(number, 7))
    assert step(made) == {0: 7, 1: 7}  # two pages each, one kept for growth: the third has to wait
    for _ in range(4):
        step(made)
    assert not preempted
    for _ in range(8):
        last = step(made)
    assert [item.id for item in preempted] == [1]
    assert [item.id for item in made.waiting] == [1, 2]
    assert last == {0: 1}
    assert preempted[0].num_computed == 0


def test_the_oldest_always_gets_on():
    made, _ = scheduler(num_pages=5)
    for number in range(4):
        made.add(sequence(number, 4))
    for _ in range(12):
        assert step(made).get(0)


def test_a_prompt_takes_pages_of_younger_decodes():
    made, preempted = scheduler(num_pages=9, token_budget=8)
    old = sequence(0, 30)
    made.add(old)
    step(made)
    young = sequence(1, 2)
    made.running.append(young)  # as if it had come in while the old one did not know yet what it would need
    young.row = made._rows.pop()
    young.pages = made._pool.allocate(5)
    young.num_computed, young.ids = 19, list(range(20))
    for _ in range(6):
        step(made)
    assert preempted == [young]


def test_drafts_fit_into_budget_and_pages_or_are_cut():
    made, preempted = scheduler(num_pages=4, token_budget=8, max_sequences=2)
    one, two = sequence(0, 6), sequence(1, 3)
    made.add(one)
    made.add(two)
    step(made)
    one.drafts, two.drafts = [1] * 7, [2] * 5
    work = {item.id: count for item, count in made.schedule()}
    assert work == {0: 7, 1: 1}  # six drafts of the first fill budget and pages
    assert (len(one.drafts), len(two.drafts)) == (6, 0)
    assert not preempted


def test_nobody_starves_in_a_stream_of_short_requests():
    engine = build_engine(model=ToyModel(), num_pages=24, max_sequences=4, token_budget=16)
    first = [engine.add([1] * 60, SamplingParams(max_tokens=20))]
    waited = 0
    while any(number in engine._requests for number in first):
        engine.add([2] * 3, SamplingParams(max_tokens=3))
        engine.step()
        waited += 1
        assert waited < 60


@pytest.mark.parametrize(("others", "second"), [(15, True), (16, False)])
def test_the_search_for_a_request_that_need_not_wait_has_an_end(others, second):
    """Requests whose beginning is being computed are overtaken, but a step looks at no more than 8 times its rows."""
    made, _ = scheduler(max_sequences=2, token_budget=64)
    made._prefix = PrefixCache(made._pool, 4)
    asked = [list(range(12)) for _ in range(1 + others)] + [list(range(50, 62))]
    for number, ids in enumerate(asked):
        params = SamplingParams(max_tokens=0, scoring=PromptScoring(num_tokens=2))
        made.add(Sequence(id=number, ids=ids, num_prompt=12, params=params, limit=99))
    assert [item.id for item, _ in made.schedule()] == ([0, 1 + others] if second else [0])


def test_who_waits_for_pages_keeps_no_drafts():
    made, preempted = scheduler(num_pages=4)
    old, young = sequence(0, 3), sequence(1, 7)
    made.add(old)
    made.add(young)
    assert step(made) == {0: 3, 1: 7}
    assert step(made) == {0: 1, 1: 1}
    young.drafts = [1, 2]
    assert step(made) == {0: 1}  # the last page is for the older
    assert young.drafts == []
    assert not preempted


def interrupt_at(line, act):
    """The user presses Ctrl-C before the n-th line of the scheduler that `act` comes to; whether there is one."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_globals["__name__"] != Scheduler.__module__:
            return None
        lines += event == "line"
        if lines == line and event == "line":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("preempts", [False, True])
def test_requests_are_taken_out_wherever_an_interrupt_came(preempts):
    for line in range(1, 10_000):
        made, _ = scheduler(num_pages=4 if preempts else 64)
        one, two = sequence(1, 7), sequence(2, 7)
        made.add(one)
        made.add(two)
        if preempts:
            step(made)
            one.ids += [0] * 4  # which needs a page of the other
        is_interrupted = interrupt_at(line, made.schedule)
        for item in (one, two):
            made.remove(item)
        assert not made.waiting
        assert not made.running
        if not is_interrupted:
            break
    assert 10 < line < 10_000
