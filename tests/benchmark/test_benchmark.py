"""A whole benchmark: what is run, what is kept, and that two models are measured on the same requests."""

from __future__ import annotations

import pytest
import torch

from quantkit.benchmark import ceilings
from quantkit.benchmark.ceilings import fit_itl, fit_ttft
from quantkit.benchmark.diagnosis import diagnose
from quantkit.benchmark.options import BenchmarkOptions
from quantkit.benchmark.run import (
    CacheComparison,
    check_target,
    compare_cache,
    find_ceilings,
    generate_by_recomputing,
    load_target,
    measure_targets,
)
from quantkit.errors import ModelError, RequestError
from quantkit.results import BenchmarkResult, RequestTiming
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams
from tests.helpers import make_model

SMALL = {"prompt_tokens": 60, "new_tokens": 6, "num_requests": 2}
ENGINE = {"threads": 1, "num_pages": 16}


pytestmark = pytest.mark.usefixtures("quick_ceilings")


def test_runs_by_options():
    def names(**options):
        return [workload.name for workload in BenchmarkOptions(**SMALL, **options).workloads()]

    assert names() == ["closed-1", "closed-8", "sweep"]
    assert names(concurrencies=(4, 4), rates=(2.5,)) == ["closed-4", "poisson-2.5"]  # nothing alone, no sweep
    assert names(concurrencies=(2,), static=True) == ["closed-2", "static-2"]
    assert BenchmarkOptions(concurrencies=(1, 5)).max_sequences == 5
    assert BenchmarkOptions(rates=(1.0,)).max_sequences == 32
    limited = BenchmarkOptions(ttft_limit_s=0.5).workloads()
    assert [workload.ttft_limit_s for workload in limited] == [0.5, 0.5, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrencies": (1, 0)}, "concurrency is 0"),
        ({"prompt_tokens": 0}, "prompt length is 0"),
        ({"new_tokens": -1}, "number of new tokens is -1"),
        ({"num_requests": 0}, "number of requests is 0"),
        ({"rounds": 0}, "number of rounds is 0"),
        ({"rates": (0.0,)}, "above 0 requests per second"),
        ({"spread": 1.0}, "spread is 1.0"),
        ({"concurrencies": ()}, "nothing to measure"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        BenchmarkOptions(**options)


def test_one_model(tiny_llama):
    options = BenchmarkOptions(concurrencies=(1, 3), rates=(200.0,), static=True, rounds=2, **SMALL)
    target = load_target(tiny_llama, options, ENGINE)
    messages = []
    (result,) = measure_targets([target], options, find_ceilings([target]), messages.append)
    assert [run.workload.name for run in result.runs] == [
        *("closed-1", "closed-3", "static-1", "static-3", "poisson-200", "sweep")
    ]
    assert len(messages) == 6 * 2
    for run in result.runs[:-1]:
        assert run.rounds == 2
        assert [timing.num_new_tokens for timing in run.requests] == [6] * 4
    assert {(r.phase, r.batch) for r in result.roofline} >= {("prefill", 1), ("decode", 1)}
    assert target.llm.engine.pool.num_free == 16  # everything has ended
    assert fit_itl(result) is not None
    assert fit_ttft(result) is not None
    assert result.settings["threads"] == "1"
    assert any(finding.statement.startswith("Slow to") for finding in diagnose(result, target.cost).findings)
    assert BenchmarkResult.from_dict(result.to_dict()) == result


def test_static_batches_get_the_same_requests_in_turns(tiny_llama):
    options = BenchmarkOptions(concurrencies=(2,), static=True, spread=0.9, rounds=2, **{**SMALL, "num_requests": 6})
    target = load_target(tiny_llama, options, ENGINE)
    messages = []
    (result,) = measure_targets([target], options, find_ceilings([target]), messages.append)
    assert [text.split(":")[0] for text in messages] == ["closed-2", "static-2", "static-2", "closed-2"]
    closed, static = ([(t.prompt_tokens, t.num_new_tokens) for t in run.requests] for run in result.runs)
    assert closed == static
    assert len(set(closed)) > 3


def test_two_models_get_the_same_requests_in_turns(tiny_llama, tmp_path, monkeypatch):
    other = make_model(tmp_path, vocab_size=280)  # another vocabulary is no obstacle to comparing speed
    options = BenchmarkOptions(concurrencies=(1,), rounds=3, **SMALL)
    targets = [load_target(model, options, ENGINE) for model in (tiny_llama, other)]
    sent = {0: [], 1: []}
    order = []
    for who, target in enumerate(targets):
        add = target.llm.engine.add

        def spy(prompt, params, who=who, add=add):
            sent[who].append(prompt)
            order.append(who)
            return add(prompt, params)

        monkeypatch.setattr(target.llm.engine, "add", spy)
    ours, theirs = measure_targets(targets, options, find_ceilings(targets))
    assert sent[0] == sent[1]
    assert max(max(prompt) for prompt in sent[1]) < 260
    requests = [order[i] for i in range(0, 3 * 6, 3)]  # a round of closed-1: a warm-up and two requests
    assert requests == [0, 1, 1, 0, 0, 1]
    assert ours.runs[0].rounds == theirs.runs[0].rounds == 3
    assert diagnose(ours, targets[0].cost, theirs).findings[2:] == diagnose(ours, targets[0].cost).findings


def test_what_transformers_runs(tiny_llama):
    options = BenchmarkOptions(concurrencies=(1,), **SMALL)
    target = load_target(tiny_llama, options, {"backend": "transformers", "threads": 1})
    (result,) = measure_targets([target], options, find_ceilings([target]))
    parts = {record.part: record for record in result.memory}
    assert parts["weights"].observed_bytes == target.llm.model.num_bytes
    assert "kv pool" not in parts
    assert result.capacity_tokens is None
    assert diagnose(result, target.cost).findings


def test_no_prompt_is_known_from_another(tiny_llama):
    llm = load_target(tiny_llama, BenchmarkOptions(**SMALL), ENGINE).llm
    for _ in range(2):
        llm.generate([7] * 200, SamplingParams(max_tokens=2))
    assert llm.stats()["prefix_hit_tokens"] == 0


def test_prompts_that_do_not_fit_are_refused_before_loading(tiny_llama, monkeypatch):
    from quantkit.benchmark import run as benchmark

    def loaded(*_args, **_options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(benchmark, "LLM", loaded)
    options = BenchmarkOptions(prompt_tokens=250, new_tokens=10)
    with pytest.raises(RequestError, match=r"need 260 tokens, .* is 256 tokens; --prompt-tokens can be 246"):
        load_target(tiny_llama, options)
    with pytest.raises(RequestError, match="is 100 tokens"):
        load_target(tiny_llama, BenchmarkOptions(prompt_tokens=95), {"max_length": 100})
    with pytest.raises(ModelError):
        check_target("no/such/folder", BenchmarkOptions())


def test_a_pool_too_small_for_a_request_is_refused(tiny_llama):
    with pytest.raises(RequestError, match=r"the memory for one sequence of .* is 64 tokens"):
        load_target(tiny_llama, BenchmarkOptions(prompt_tokens=64, new_tokens=8), {"num_pages": 1, "threads": 1})


def test_ceilings_in_every_arithmetic():
    rates = ceilings.measure_ceilings(torch.device("cpu"), (torch.int8, torch.float32), repeats=1).flops_per_s
    assert set(rates) == {"int8", "float32"}
    assert min(rates.values()) > 0


@pytest.fixture(scope="module")
def demo():
    # In float32: in 16 bits a prompt and a token may round differently, and a tie then parts the texts.
    return LLM(dtype="float32", max_sequences=2, prefix_cache=False, threads=1)


@pytest.fixture
def computed(demo, monkeypatch):
    """Tokens of every forward pass; decode steps run layer by layer, since one native call is not seen here."""
    compute, counts = demo.model.compute, []
    monkeypatch.setattr(
        demo.model, "compute", lambda batch, cache: (counts.append(len(batch.token_ids)), compute(batch, cache))[1]
    )
    with demo.engine.runner.layer_by_layer():
        yield counts


def test_every_token_is_a_prefill_of_all_before_it(demo, computed):
    ids, timing = generate_by_recomputing(demo, [5, 6, 7], 6)
    assert computed == [3, 4, 5, 6, 7, 8]
    assert timing.num_new_tokens == len(ids) == 6
    computed.clear()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    assert demo.generate([5, 6, 7], params)[0].token_ids == tuple(ids)
    assert computed == [3, 1, 1, 1, 1, 1]  # with the cache


def test_a_prefix_cache_would_be_no_comparison(computed):
    """What the fixture's engine must not have: with it, pages that are known are not computed again."""
    cached = LLM(max_sequences=2, prefix_cache=True, threads=1, page_size=4)
    ids, _ = generate_by_recomputing(cached, list(range(10, 30)), 3)
    assert cached.stats()["prefix_hit_tokens"] > 0
    assert len(ids) == 3


def test_the_gain_of_a_cache(demo):
    reported = []
    comparison = compare_cache(demo, list(range(10, 30)), 120, reported.append)
    assert comparison.num_same == 120
    assert reported[-120:] == list(range(1, 121))
    marks = comparison.marks()
    assert [mark.new_tokens for mark in marks] == [1, 10, 30, 100, 120]
    assert marks[-1].recomputed_s == comparison.recomputed.token_s[-1] - comparison.recomputed.arrived_s
    assert marks[-1].ratio > 1.5  # 80 times the tokens; measured far above


def test_marks_by_hand():
    cached = RequestTiming(request_id=0, prompt_tokens=3, arrived_s=1.0, token_s=(1.5, 1.6, 1.7))
    slow = RequestTiming(request_id=0, prompt_tokens=3, arrived_s=10.0, token_s=(10.5, 11.0, 11.4))
    marks = CacheComparison(cached=cached, recomputed=slow, num_same=3).marks()
    assert [(mark.new_tokens, round(mark.ratio, 6)) for mark in marks] == [(1, 1.0), (3, 2.0)]
