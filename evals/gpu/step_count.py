"""What a decode step launches and reads, counted without a GPU: the model runs on tensors without memory.

Every operation of torch that is not a view is one launch, and so is every kernel of quantkit. A launch reads the
tensors it is given, once each; of tables it reads the rows it takes, of experts those that differ for each token as
long as there are such; the KV cache is left out. FP8 products of torch are only there on a GPU: for more than 16
sequences that row counts what stands in for them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from attention import PAGE, decode_batch
from random_model import make_model
from recorder import arguments_of, pretended
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.model import NativeModel

META = torch.device("meta")
CHIP = 90  # compute capability that is pretended
# Arguments that a kernel of quantkit only writes.
_OF_EXPERTS = ("words", "scale", "zero", "outer")
_WRITTEN = {"out", "total", "partial_out", "partial_sums", "partials", "counters"}
# Operations of torch that read as much of a table as they return.
_LOOKUPS = ("embedding", "index")


@dataclass(frozen=True)
class Call:
    """One launch.

    Args:
        name: of the kernel, or of torch's operation.
        bytes_read: of everything but the KV cache.
    """

    name: str
    bytes_read: int


@dataclass
class StepCount:
    """One decode step.

    Args:
        calls: one after another.
        num_layers: of the model.
    """

    calls: list[Call] = field(default_factory=list)
    num_layers: int = 0

    @property
    def launches(self) -> Counter[str]:
        """How many, by name."""
        return Counter(call.name for call in self.calls)

    @property
    def bytes_read(self) -> int:
        """Of everything but the KV cache."""
        return sum(call.bytes_read for call in self.calls)

    @property
    def per_layer(self) -> float:
        """Launches of the step by layer, those outside the layers shared among them."""
        return len(self.calls) / self.num_layers


class Operations(TorchDispatchMode):
    """Counts what torch launches."""

    def __init__(self, count: StepCount) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch: called for every operation."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh")):
            return result
        tensors = [item for item in (*args, *(kwargs or {}).values()) if isinstance(item, torch.Tensor)]
        read = result.nbytes if name in _LOOKUPS else sum(tensor.nbytes for tensor in tensors)
        self._count.calls.append(Call(f"torch {name}", read))
        return result


@contextlib.contextmanager
def on_meta(count: StepCount, pools: set[int]) -> Iterator[None]:
    """While open, tensors without memory are for quantkit's kernels, whose launches are counted instead of made.

    Args:
        count: gets the launches.
        pools: storages of the KV cache.
    """

    def record(kernel: JITFunction[Any], *values: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        given = arguments_of(kernel, values, named)
        pairs = given.get("order")
        # Of all experts, which lie in one tensor, the chosen are read.
        share = 1.0 if pairs is None or "words" not in given else min(1.0, pairs.numel() / len(given["words"]))
        read = 0
        for name, value in given.items():
            is_read = isinstance(value, torch.Tensor) and name not in _WRITTEN
            if is_read and value.untyped_storage()._cdata not in pools:
                read += round(value.nbytes * (share if name in _OF_EXPERTS else 1.0))
        count.calls.append(Call(kernel.__name__.strip("_"), read))

    with pretended(record, CHIP, used=True):
        yield


def count_step(shape: str, weights: str, kv: str, batch: int, context: int) -> tuple[StepCount, NativeModel]:
    """Count one decode step and its greedy choice.

    Args:
        shape, weights: see `random_model`.
        kv: name of the KV type.
        batch: sequences.
        context: tokens of each.
    Returns:
        what was counted, and the model.
    """
    count, pools = StepCount(), set[int]()
    step, num_pages = decode_batch(batch, context, "meta")
    with on_meta(count, pools):
        model = make_model(shape, weights, META)
        cache = KVCache(model.layouts(kv, PAGE), num_pages, batch, META)
        stored = [*cache._pools, *cache._residuals]
        pools |= {tensor.untyped_storage()._cdata for tensor in stored}
        count.calls.clear()
        count.num_layers = len(model.blocks)
        with Operations(count):
            model.forward(step, cache).argmax(-1)
    return count, model
