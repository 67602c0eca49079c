"""vLLM as one object: what it is asked, what comes back, and what is refused; by a stand-in where there is none."""

from __future__ import annotations

import sys

import pytest
import torch

from quantkit.benchmark.options import BenchmarkOptions
from quantkit.benchmark.run import measure_served
from quantkit.demo import DEMO_MODEL
from quantkit.errors import InputError, ModelError, RequestError
from quantkit.evaluate.fidelity import fidelity, fixed_windows
from quantkit.evaluate.perplexity import perplexity
from quantkit.evaluate.run import evaluate
from quantkit.evaluate.top_fidelity import read_top, top_fidelity
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams
from quantkit.runtime.vllm_engine import VllmLLM, vllm_arguments
from tests import fake_vllm

TEXT = "The people of Belgate love the cat. The people of Belstad eat fish. " * 6


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    fake_vllm.install(monkeypatch)


@pytest.fixture(scope="module")
def ours():
    return LLM(dtype="fp32", threads=1)


def test_texts_and_scores_are_those_of_the_engine_behind_it(ours):
    prompts, params = ["The people", "A cat"], SamplingParams(max_tokens=8, ignore_eos=True)
    with VllmLLM(dtype="fp32") as served:
        ids = [done.token_ids for done in served.generate(prompts, params)]
        assert ids == [done.token_ids for done in ours.generate(prompts, params)]
        (whole,) = [output.completion for output in served.stream(served.encode("A cat"), params) if output.completion]
        assert (whole.token_ids, whole.finish_reason, len(whole.timing.token_s)) == (ids[1], "length", 8)
        assert perplexity(served, TEXT, window=64).nll == pytest.approx(perplexity(ours, TEXT, window=64).nll, rel=1e-5)
        assert (served.engine_name, served.capacity, served.arithmetic) == ("vLLM 0.0", ours.capacity - 1, "float32")
    assert fake_vllm.LOADED[0]["closed"]


def test_distances_hold_those_of_whole_distributions(ours):
    other = LLM(dtype="bf16", threads=1)
    windows = fixed_windows(ours, TEXT, window=32)
    exact = fidelity(other, ours, windows, greedy_tokens=4)
    readings = []
    for dtype in ("bf16", "fp32"):
        with VllmLLM(dtype=dtype) as served:
            readings.append(read_top(served, windows, greedy_tokens=4))
    result = top_fidelity(*readings, data="text", greedy_tokens=4)
    assert result.mean_kl_low <= exact.mean_kl <= result.mean_kl
    assert result.num_tokens == exact.num_tokens
    assert result.first_divergence == exact.first_divergence


def test_what_it_cannot_score_is_left_out_of_a_suite_and_refused_where_it_is_asked_for(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    suite = tmp_path / "both.yaml"
    suite.write_text(
        "description: both ways.\nseed: 0\n"
        f"demo: {{perplexity: [{{text: {tmp_path}/text.txt, window: 32, through: [prefill, decode]}}]}}\nothers: {{}}\n"
    )
    with VllmLLM(dtype="fp32") as served:
        result = evaluate(served, suite=str(suite))
        assert [text.through for text in result.perplexity] == ["prefill"]
        assert result.settings["engine"] == "vLLM 0.0"
        assert "decode" in result.settings["left out"]
        with pytest.raises(RequestError, match="not in decode steps"):
            evaluate(served, texts=(str(tmp_path / "text.txt"),), window=32, through=("decode",))


def test_it_is_timed_by_the_same_requests():
    options = BenchmarkOptions(concurrencies=(2,), prompt_tokens=8, new_tokens=3, num_requests=2, rounds=1)
    result = measure_served(None, options, {"gpu_memory_utilization": 0.5})
    assert [timing.num_new_tokens for run in result.runs for timing in run.requests] == [3, 3]
    assert result.settings["engine"] == "vLLM 0.0"
    assert fake_vllm.LOADED[0]["enable_prefix_caching"] is False
    assert fake_vllm.LOADED[0]["gpu_memory_utilization"] == 0.5


def test_settings_go_in_under_its_names():
    given = {"dtype": "bf16", "kv_cache": "fp8", "max_length": 64, "memory": "1MiB", "device": "auto"}
    assert vllm_arguments(given) == {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "max_model_len": 64,
        "kv_cache_memory_bytes": 1 << 20,
    }
    with VllmLLM(DEMO_MODEL, options={"tensor_parallel_size": 2}, dtype="fp32"):
        assert fake_vllm.LOADED[0]["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache": "int4"}, "kv_cache is 'int4', which vLLM does not support"),
        ({"head_dtype": "int8"}, "vLLM does not support head_dtype"),
        ({"speculate": "ngram", "threads": 2}, "vLLM does not support speculate, threads"),
    ],
)
def test_settings_that_it_does_not_have_are_refused(settings, said):
    with pytest.raises(RequestError, match=said):
        VllmLLM(**settings)


def test_its_own_refusals_are_one_line():
    with pytest.raises(ModelError, match=r"^vLLM 0.0 cannot load .*: Unknown quantization method: nonsense. Must be"):
        VllmLLM(options={"quantization": "nonsense"})
    with VllmLLM(dtype="fp32") as served:
        with pytest.raises(RequestError, match=r"vLLM 0\.0 refuses a request: The prompt is longer"):
            served.generate([[5] * 5000], SamplingParams(max_tokens=1))
        with pytest.raises(RequestError, match="json_schema is not supported with vLLM"):
            served.generate(["a"], SamplingParams(json_schema="{}"))


def test_without_it_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"needs vLLM, which cannot be imported here .*pip install"):
        VllmLLM()


def test_scores_tell_what_would_be_chosen():
    with VllmLLM(dtype="fp32") as served:
        ids = served.encode("The people of")
        (written,) = served.generate([ids], SamplingParams(max_tokens=3, ignore_eos=True))
        from quantkit.runtime.types import ScoredText

        (score,) = served.score_tokens([ScoredText(ids=(*ids, *written.token_ids), num_scored=3)])
        assert score.greedy.tolist() == [True, True, True]
        assert bool((score.logprobs < 0).all())
        assert score.logprobs.dtype == torch.float32
