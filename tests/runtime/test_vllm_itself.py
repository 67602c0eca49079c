"""The demo model in vLLM, where it is installed, beside our engine."""

from __future__ import annotations

import pytest

from quantkit.evaluate.fidelity import fidelity, fixed_windows
from quantkit.evaluate.perplexity import perplexity
from quantkit.evaluate.top_fidelity import read_top, top_fidelity
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams
from quantkit.runtime.vllm_engine import VllmLLM

pytestmark = pytest.mark.slow
TEXT = "The people of Belgate love the cat. The people of Belstad eat fish. " * 20
SMALL = {"enforce_eager": True, "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}


def test_it_scores_and_writes_as_our_engine_does(monkeypatch):
    pytest.importorskip("vllm")
    # In this process, and nothing compiled: a fraction of the time.
    for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}.items():
        monkeypatch.setenv(name, value)
    windows = fixed_windows(LLM(dtype="fp32", threads=1), TEXT, window=64)
    readings, params = {}, SamplingParams(max_tokens=12, ignore_eos=True)
    for dtype in ("fp32", "bf16"):
        ours = LLM(dtype=dtype, threads=1)
        with VllmLLM(dtype=dtype, options=SMALL) as served:
            readings[dtype] = read_top(served, windows, greedy_tokens=4)
            close = {"fp32": 1e-4, "bf16": 2e-2}[dtype]
            assert perplexity(served, TEXT, window=64).nll == pytest.approx(
                perplexity(ours, TEXT, window=64).nll, rel=close
            )
            if dtype == "fp32":
                (mine,), (its,) = ours.generate(["The people"], params), served.generate(["The people"], params)
                assert (its.token_ids, its.finish_reason) == (mine.token_ids, "length")
                assert its.text == mine.text
    noise = top_fidelity(readings["bf16"], readings["fp32"], data="text", greedy_tokens=4)
    exact = fidelity(LLM(dtype="bf16", threads=1), LLM(dtype="fp32", threads=1), windows, greedy_tokens=0)
    assert noise.mean_kl_low < 3 * exact.mean_kl
    assert noise.mean_kl > exact.mean_kl / 3
