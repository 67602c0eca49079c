"""Decode steps over fixed buffers in Triton's interpreter: what a graph would repeat.

A graph repeats its launches with the numbers of the host as they were when it was captured. Here the "graph" is the
step itself on its fixed batch, whose host side says nothing true: what it computes right, it has read from the device.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.interpreter import GridExecutor

from quantkit.errors import first_line
from quantkit.kernels import gpu
from quantkit.runtime.engine.overlap import Overlap
from quantkit.runtime.engine.runner import DecodeGraphs, _CudaCapture, why_not
from quantkit.runtime.llm import LLM
from quantkit.runtime.model import loader
from quantkit.runtime.model import weights as _weights
from quantkit.runtime.types import SamplingParams
from tests.helpers import make_model
from tests.runtime.mtp_models import drafts_in_turns, make_mtp_model

PROMPTS = [[5, 6, 7] * 5, [9] * 30, [3, 1]]
LENGTHS = (4, 7, 3)


GREEDY = ({}, {}, {})


def generate(llm, kinds=GREEDY):
    numbers = [
        llm.engine.add(prompt, SamplingParams(max_tokens=count, ignore_eos=True, **kind))
        for prompt, count, kind in zip(PROMPTS, LENGTHS, kinds, strict=True)
    ]
    done = {}
    while llm.engine.has_work:
        done |= {output.request_id: output.completion for output in llm.engine.step() if output.completion}
    return [done[number].token_ids for number in numbers]


def make(folder, kv_cache, **options):
    return LLM(folder, dtype="float16", kv_cache=kv_cache, page_size=16, max_length=64, threads=1, **options)


@pytest.mark.slow
def test_fixed_steps_give_the_same_tokens(tmp_path, monkeypatch):
    """Of a cache in codes; `test_tokens_go_from_step_to_step_on_the_device` has one in 16 bits."""
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    plain = make(folder, "int4")
    runner = plain.engine.runner
    assert why_not(plain.model, runner.cache, 64) is None
    expected = generate(plain)
    again = make(folder, "int4")
    runner = again.engine.runner
    graphs = DecodeGraphs(
        again.model, runner.cache, runner.builder, max_sequences=3, max_pages=4, capture=lambda step: step
    )
    runner._graphs = graphs
    assert generate(again) == expected
    assert len(graphs._steps) == 3  # of one, two and three sequences
    assert runner.graph_status == "yes"


def keep_outputs(step):
    """As a graph has it: every replay writes over what the last one gave."""
    kept, _ = step()
    return lambda: (kept.copy_(step()[0]), None)


MIXED = ({"temperature": 0.9, "seed": 3}, {}, {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 5})


@pytest.mark.slow
def test_tokens_go_from_step_to_step_on_the_device(tmp_path, monkeypatch):
    """The next step is launched before the last tokens are read; one request is greedy, two draw."""
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    expected = generate(make(folder, "auto", head_dtype="int8"), MIXED)
    again = make(folder, "auto", head_dtype="int8")
    assert "Triton" in again.model.head.description
    runner = again.engine.runner
    runner._graphs = DecodeGraphs(
        again.model, runner.cache, runner.builder, max_sequences=3, max_pages=4, capture=keep_outputs
    )
    again.engine._overlap = Overlap(runner, again.engine.scheduler)
    assert generate(again, MIXED) == expected
    assert again.engine._overlap.num_followed >= 3


@pytest.mark.slow
def test_an_mtp_head_reads_the_hidden_states_of_fixed_steps(tmp_path, monkeypatch):
    """Steps without drafts are replayed, those with drafts are not; the head reads both."""
    folder = make_mtp_model(tmp_path, "glm4_moe", first_k_dense_replace=3)
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = drafts_in_turns(make(folder, "auto", speculate="mtp"), [[5, 6, 7], [8, 9], [1]], params)
    again = make(folder, "auto", speculate="mtp")
    runner = again.engine.runner
    runner._graphs = DecodeGraphs(
        again.model, runner.cache, runner.builder, max_sequences=3, max_pages=4, capture=lambda step: step
    )
    assert drafts_in_turns(again, [[5, 6, 7], [8, 9], [1]], params) == expected
    assert runner._graphs._steps


REFUSALS = (
    RuntimeError("operation not permitted when stream is capturing\nand more"),
    OutOfResources(300000, 232448, "shared memory"),
    PTXASError("Internal Triton PTX codegen error"),
)


@pytest.mark.parametrize(
    "refusal",
    REFUSALS,
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_capture_that_fails_is_told_and_done_without(tmp_path, monkeypatch, refusal):
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    llm = make(folder, "auto")  # torch computes: what a step is made of makes no difference here
    runner = llm.engine.runner

    def fail(step):
        raise refusal

    runner._graphs = DecodeGraphs(llm.model, runner.cache, runner.builder, max_sequences=2, max_pages=4, capture=fail)
    assert len(generate(llm)[0]) == LENGTHS[0]
    assert runner.graph_status == f"no: {first_line(refusal)}"


def test_rehearsals_and_captures_share_a_stream(monkeypatch):
    """Counters belong to streams: those that a graph keeps were allocated, and set to zero, before it was captured."""
    current, streams = ["the engine's"], iter(range(9))

    @contextlib.contextmanager
    def entered(stream):
        current.append(stream)
        yield
        current.pop()

    def stream(device):
        return SimpleNamespace(number=next(streams), wait_stream=lambda other: None)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: "pool"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: entered(stream))
    capture, used = _CudaCapture(torch.device("cuda", 0)), []
    for _ in range(2):
        capture(lambda: used.append(current[-1].number))
    assert used == 6 * [0]


def test_loads_and_launches_are_on_the_models_gpu(tmp_path, monkeypatch):
    """Triton launches on the current device, wherever its arguments are."""
    current, seen = [0], []

    @contextlib.contextmanager
    def device(entered):
        current.append(entered.index)
        yield
        current.pop()

    launch = GridExecutor.__call__
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda *given, **named: (seen.append(current[-1]), launch(*given, **named))
    )
    llm = make(folder, "auto", head_dtype="int8")
    llm.model.device = torch.device("cuda", 1)
    llm.engine.add([1, 2], SamplingParams(max_tokens=1))
    llm.engine.step()
    assert len(seen) > 2
    assert set(seen) == {1}
    monkeypatch.setattr(loader, "load_native", lambda *given, **named: current[-1])
    assert loader.load_model(folder, device="cuda:1") == 1
    assert loader.load_model(folder, device="cpu") == 0


def test_the_device_chooses_experts(tmp_path, monkeypatch):
    """One or several tokens, in fixed steps or not: the tokens that experts run one by one give."""
    folder = make_model(tmp_path / "model", "qwen2_moe", num_hidden_layers=1)
    monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    monkeypatch.setattr(_weights, "can_stack", lambda device, dtype: False)
    loop = make(folder, "auto")
    expected = generate(loop)
    assert "experts" in why_not(loop.model, loop.engine.runner.cache, 64)
    monkeypatch.undo()
    monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    stacked = make(folder, "auto")
    assert stacked.model.notes == loop.model.notes
    assert (stacked.model.stored_bytes, stacked.model.num_bytes) == (loop.model.stored_bytes, loop.model.num_bytes)
    runner = stacked.engine.runner
    assert "QUANTKIT_CUDA_GRAPHS" in why_not(stacked.model, runner.cache, 64)
    monkeypatch.setenv("QUANTKIT_CUDA_GRAPHS", "experts")
    assert why_not(stacked.model, runner.cache, 64) is None
    runner._graphs = DecodeGraphs(
        stacked.model, runner.cache, runner.builder, max_sequences=3, max_pages=4, capture=lambda step: step
    )
    assert generate(stacked) == expected
    assert runner.graph_status == "yes"


def test_what_asks_the_host_is_not_captured(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "moe", "mixtral", num_hidden_layers=1, hidden_act="relu")
    llm = LLM(folder, dtype="float32", page_size=16, max_length=64, threads=1)
    assert "torch" in why_not(llm.model, llm.engine.runner.cache, 64)
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    llm = make(folder, "auto")
    assert "experts" in why_not(llm.model, llm.engine.runner.cache, 64)
    assert any("no kernel for experts with the activation relu" in note for note in llm.model.notes)
