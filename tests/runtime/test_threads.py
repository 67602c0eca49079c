"""The number of threads: what is allowed, what measurements say, and that a request is obeyed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quantkit.errors import InputError
from quantkit.machine.system import ends_well
from quantkit.runtime.engine import threads
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams
from tests.helpers import make_model


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def timings(*costs):
    """One timing for 1, 2, 4, ... threads, both products taking that long."""
    return {1 << i: (cost, cost) for i, cost in enumerate(costs)}


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ((1.0, 0.5, 0.25), 4),
        ((1.0, 0.5, 0.48), 2),  # four are within 10 % of two
        ((1.0, 0.95, 0.92), 1),
        ((1.0, 3.0, 9.0), 1),  # busy neighbours
        ((1.0, 2.0, 0.2), 4),
    ],
)
def test_the_smallest_count_near_the_best_is_chosen(costs, expected):
    choice = threads.smallest_near_best(timings(*costs))
    assert choice.threads == expected
    assert choice.reason.startswith("measured speed per number of threads: 1: 1.00x, 2: ")


def test_a_request_is_obeyed_without_measuring(monkeypatch):
    monkeypatch.setattr(threads, "measure_threads", None)
    assert threads.choose_threads(3).threads == 3


@pytest.mark.parametrize("requested", [0, -2])
def test_fewer_than_one_is_refused(requested):
    with pytest.raises(InputError, match=f"threads is {requested}; give a positive number"):
        threads.choose_threads(requested)


def test_measuring_leaves_the_setting_alone(monkeypatch):
    monkeypatch.setattr(threads, "thread_limit", lambda: 4)
    monkeypatch.setattr(
        threads, "measure_threads", lambda counts, decodes: (torch.set_num_threads(7), timings(1.0, 0.5))[1]
    )
    torch.set_num_threads(1)
    assert threads.choose_threads().threads == 2
    assert torch.get_num_threads() == 1


def test_where_one_is_allowed_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(threads, "measure_threads", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads.thread_limit() == 1
    assert threads.choose_threads().threads == 1


def test_every_count_is_measured():
    measured = threads.measure_threads((1, 2))
    assert list(measured) == [1, 2]
    assert all(gemv_s > 0 and gemm_s > 0 for gemv_s, gemm_s in measured.values())


@pytest.mark.parametrize(("limit", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_counts_double_up_to_the_limit(limit, counts):
    assert threads.thread_counts(limit) == counts


def test_more_threads_than_can_be_started_are_refused():
    with pytest.raises(InputError, match=r"above the limit of \d+ on this machine"):
        threads.choose_threads(1_000_000)


def _generate(llm):
    assert threads.choose_threads().threads == 1
    assert torch.get_num_threads() == 1
    llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=4))


def test_a_fork_after_use_with_two_threads_does_not_hang(tmp_path):
    llm = LLM(make_model(tmp_path), threads=2)
    llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=4))
    torch.ones(2000, 2000) @ torch.ones(2000, 2000)  # both threads are there
    assert ends_well(lambda: _generate(llm), seconds=60)


def test_one_model_in_four_threads_gives_the_same_answers(tmp_path):
    llm, params = LLM(make_model(tmp_path), threads=1), SamplingParams(max_tokens=8)
    prompts = [[2 + number, 7, number] for number in range(8)]
    expected = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        done = [[pool.submit(llm.generate, [prompt], params) for prompt in prompts] for _ in range(4)]
        assert [[one.result()[0].token_ids for one in row] for row in done] == [expected] * 4
    llm.engine.check_integrity()


def test_prompts_alone_are_computed_with_what_is_best_for_large_products(monkeypatch):
    monkeypatch.setattr(threads, "thread_limit", lambda: 2)
    # Memory that one thread exhausts: decoding gains nothing from a second one, products twice.
    timings = {True: {1: (1.0, 1.0), 2: (1.5, 0.5)}, False: {1: (1.0,), 2: (0.5,)}}
    monkeypatch.setattr(threads, "measure_threads", lambda counts, decodes: timings[decodes])
    assert threads.choose_threads().threads == 1
    choice = threads.choose_threads(decodes=False)
    assert choice == (2, "measured speed per number of threads: 1: 1.00x, 2: 2.00x")


def test_every_count_is_measured_for_prompts():
    measured = threads.measure_threads((1, 2), decodes=False)
    assert list(measured) == [1, 2]
    assert all(seconds > 0 for (seconds,) in measured.values())
