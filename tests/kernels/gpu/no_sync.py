"""Steps that ask the device for nothing: run on tensors without memory, under a mode that refuses what would wait.

Run by `test_interpreted`, in a process of its own: kernels are not run here, only their launches are let through. What
it cannot see is a Python list as an index, which torch copies to the device out of sight.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[3] / "evals" / "gpu"))
from random_model import make_model
from step_count import META, PAGE, StepCount, on_meta

from quantkit.kernels.transfer import send
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.batch_builder import ScheduledChunk
from quantkit.runtime.engine.runner import Runner
from quantkit.runtime.sampling import choose_tokens
from quantkit.runtime.types import SamplingParams
from tests.runtime.test_sampling import sequence

WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount"}


class NothingWaits(TorchDispatchMode):
    """Refuses operations for which the host waits: answers of the device, and copies between it and ordinary memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        devices = {item.device.type for item in flat if isinstance(item, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            devices.add(result.device.type)
        if "meta" in devices and name in WAITING:
            raise AssertionError(f"{name} asks the device")
        if devices == {"cpu", "meta"} and name in ("to", "_to_copy", "copy_"):
            given = args[-1] if name == "copy_" and len(args) == 3 else (kwargs or {}).get("non_blocking", False)
            assert given, f"{name} waits for the device"
        elif devices == {"cpu", "meta"}:
            assert "scalar" in name or all(
                item.dim() == 0 for item in flat if isinstance(item, torch.Tensor) and item.device.type == "cpu"
            ), f"{name} takes a tensor of the host"
        masks = [item for item in flat if isinstance(item, torch.Tensor) and item.dtype == torch.bool]
        assert not (name in ("index", "index_put", "index_put_") and masks), f"{name} counts what a mask keeps"
        return result


@pytest.fixture
def no_wait(monkeypatch):
    """As on a GPU: kernels are launched, and a tensor made there of numbers of the host is a copy that waits."""
    plain = torch.tensor

    def tensor(values, *args, device=None, **named):
        assert device is None or torch.device(device) != META, "torch.tensor(values, device=...) waits for its copy"
        return plain(values, *args, device=device, **named)

    with on_meta(StepCount(), set()):
        monkeypatch.setattr(torch, "tensor", tensor)
        with torch.inference_mode(), NothingWaits():
            yield


def test_what_waits_is_found(no_wait):
    there = torch.empty(4, device=META)
    for act in (
        lambda: there.tolist(),
        lambda: bool(there.any()),
        lambda: torch.zeros(4).to(META),
        lambda: torch.tensor([1.0], device=META),
        lambda: there[torch.tensor([0, 1])],
        lambda: there[there > 0],
        lambda: there.copy_(torch.zeros(4)),
    ):
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            act()
    there[torch.empty(2, dtype=torch.int64, device=META)] = 1.0
    assert [tensor.shape for tensor in send(META, np.zeros(3), np.zeros((2, 5), dtype=np.int32))] == [(3,), (2, 5)]


MIXES = {
    "greedy": [{}],
    "temperature": [{"temperature": 0.7}],
    "mixed": [{}, {"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.1}, {"temperature": 0.5}],
    "top-k": [{"temperature": 0.7, "top_k": 20}],
    "top-p": [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.5, "top_p": 0.3, "top_k": 500, "min_p": 0.1}],
    "all": [{}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "min_p": 0.1}, {"temperature": 0.5}],
    "penalties": [{"repetition_penalty": 1.3}, {"temperature": 1.0, "presence_penalty": 0.5}],
}


def holder(number, pages):
    return SimpleNamespace(id=number, row=number, pages=pages, num_table_entries=0, num_evicted=0, adapter=None)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kv", ["auto", "int4"])
@pytest.mark.parametrize("weights", ["bf16", "w4a16 head8"])
def test_a_step_and_its_choice_wait_for_nothing(no_wait, weights, kv, mix):
    model = make_model("tiny", weights, META)
    cache = KVCache(model.layouts(kv, PAGE), 64, 8, META)
    runner = Runner(model, cache, EngineConfig(max_sequences=8, page_size=PAGE), max_pages=8)
    pages = range(len(MIXES[mix]))
    chunks = [ScheduledChunk(holder(i, [i]), [i], 5, 1) for i in pages]
    rows = [(sequence(SamplingParams(**params)), 0) for params in MIXES[mix]]
    tokens = choose_tokens(runner.step(chunks), rows)
    assert (tokens.device, tokens.shape, tokens.dtype) == (META, (len(rows),), torch.int64)
    # And the next step takes them from there.
    assert choose_tokens(runner.step(chunks, tokens), rows).shape == (len(rows),)


@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
def test_prompts_wait_for_nothing_either(no_wait, kv):
    """A chunk over a page's border, drafts and a decode in one step."""
    model = make_model("tiny", "w4a16 head8", META)
    cache = KVCache(model.layouts(kv, PAGE), 64, 8, META)
    runner = Runner(model, cache, EngineConfig(max_sequences=8, page_size=PAGE), max_pages=8)
    spans = ((0, 3, PAGE + 7, 1), (1, 9, 10, 1), (2, 20, 24, 4), (3, 0, 5, 0))
    chunks = [
        ScheduledChunk(
            SimpleNamespace(id=i, row=i, pages=[2 * i, 2 * i + 1], num_table_entries=0, num_evicted=0, adapter=None),
            [5] * (end - start),
            start,
            num_logits,
        )
        for i, start, end, num_logits in spans
    ]
    drafting = sequence(SamplingParams(temperature=1.0), drafts=(1, 2, 3))
    rows = [(sequence(SamplingParams()), 0)] * 2 + [(drafting, ahead) for ahead in range(4)]
    assert choose_tokens(runner.step(chunks), rows).shape == (6,)


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("weights", ["bf16", "w4a16"])
def test_experts_are_chosen_without_waiting(no_wait, weights, count):
    model = make_model("tiny experts", weights, META)
    assert model.why_not_capturable(PAGE) is None
    cache = KVCache(model.layouts(None, PAGE), 64, 8, META)
    runner = Runner(model, cache, EngineConfig(max_sequences=8, page_size=PAGE), max_pages=8)
    holders = [holder(i, [i]) for i in range(count)]
    chunks = [ScheduledChunk(each, [1], 5, 1) for each in holders]
    assert choose_tokens(runner.step(chunks), [(sequence(SamplingParams()), 0)] * count).shape == (count,)
