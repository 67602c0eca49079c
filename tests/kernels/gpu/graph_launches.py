"""What a decode graph launches is compiled already: its launches have the keys of eager steps.

Run by `test_interpreted`, in a process of its own: on tensors without memory, launches are recorded instead of made. A
key is what Triton compiles a kernel anew for: constants, types, and whether numbers and addresses are multiples of 16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[3] / "evals" / "gpu"))
from random_model import make_model
from step_count import META, PAGE, StepCount, on_meta

from quantkit.kernels.types import ForwardBatch
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.engine.batch_builder import BatchBuilder, ScheduledChunk
from quantkit.runtime.engine.runner import DecodeGraphs
from quantkit.runtime.model.model import NativeModel

MOST_SEQUENCES, MOST_PAGES = 17, 41


def what_is_compiled(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(what_is_compiled, value))
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.storage_offset() * value.element_size() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool) and value != 1:
        return value % 16 == 0
    return "float" if isinstance(value, float) else value


class Launches:
    """Keys of what is launched while it is open."""

    def __init__(self) -> None:
        self.keys: dict[Any, str] = {}

    def record(self, kernel: Any, *values: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        given = dict(zip(kernel.arg_names, values, strict=False)) | named
        constants = {param.name for param in kernel.params if param.is_constexpr}
        key = {
            name: repr(value) if name in constants or name not in kernel.arg_names else what_is_compiled(value)
            for name, value in given.items()
        }
        self.keys.setdefault((kernel.__name__, repr(sorted(key.items()))), kernel.__name__)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    with on_meta(StepCount(), set()):
        kept = Launches()
        monkeypatch.setattr(JITFunction, "run", lambda kernel, *values, **named: kept.record(kernel, *values, **named))
        with torch.inference_mode():
            yield kept


def builder() -> BatchBuilder:
    return BatchBuilder(max_sequences=MOST_SEQUENCES, max_pages=MOST_PAGES, page_size=PAGE, device=META)


def eager_batch(count: int, pages: int) -> ForwardBatch:
    holders = [
        SimpleNamespace(id=i, row=i, pages=np.arange(pages).tolist(), num_table_entries=0, num_evicted=0, adapter=None)
        for i in range(count)
    ]
    return builder().build([ScheduledChunk(holder, [1], pages * PAGE - 1, 1) for holder in holders])


@pytest.mark.parametrize("kv", ["auto", "int4"])
@pytest.mark.parametrize(("shape", "weights"), [("tiny", "w4a16 head8"), ("tiny", "w8a8"), ("tiny experts", "w4a16")])
def test_graphs_compile_nothing_that_eager_steps_do_not(launches, shape, weights, kv):
    model = make_model(shape, weights, META)
    assert isinstance(model, NativeModel)
    cache = KVCache(model.layouts(kv, PAGE), 64, MOST_SEQUENCES, META)
    for count in (1, 2, 4, 8, 16, MOST_SEQUENCES):
        for pages in (1, 3, 16, 17, 32, 33, MOST_PAGES):
            model.forward(eager_batch(count, pages), cache)
    eager, launches.keys = launches.keys, {}
    graphs = DecodeGraphs(
        model, cache, builder(), max_sequences=MOST_SEQUENCES, max_pages=MOST_PAGES, capture=lambda step: step
    )
    for count in (1, 2, 3, 5, 9, MOST_SEQUENCES):
        for pages in (1, 17, MOST_PAGES):
            holders = [
                SimpleNamespace(id=i, row=i, pages=[0] * pages, num_table_entries=0, num_evicted=0, adapter=None)
                for i in range(count)
            ]
            assert graphs.run([ScheduledChunk(one, [1], pages * PAGE - 1, 1) for one in holders]) is not None
    assert graphs.failure is None
    assert len(graphs._steps) == 18
    assert len(launches.keys) > 8
    assert [name for key, name in launches.keys.items() if key not in eager] == []
