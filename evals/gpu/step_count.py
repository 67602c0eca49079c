"""What a decode step launches and reads, counted without a GPU: the model runs on tensors without memory.

    python evals/gpu/step_count.py [--batch 1] [--context 1024]

Every operation of torch that is not a view is one launch, and so is every kernel of quantkit. A launch reads the
tensors it is given, once each; of tables it reads the rows it takes, of experts those that differ for each token as
long as there are such; the KV cache is left out. FP8 products of torch are only there on a GPU: for more than 16
sequences that row counts what stands in for them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from attention import PAGE
from random_model import SHAPES, WEIGHTS, make_model
from recorder import PROCESSORS, arguments_of, pretended
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from quantkit.kernels.types import ForwardBatch
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.model import NativeModel

META = torch.device("meta")
# Arguments that a kernel of quantkit only writes.
_OF_EXPERTS = ("words", "scale", "zero", "outer")
_WRITTEN = {"out", "total", "partial_out", "partial_sums", "partials", "counters"}
# Operations of torch that read as much of a table as they return.
_LOOKUPS = ("embedding", "index")
# Whose last tensor is (K, N).
_PRODUCTS = ("mm", "addmm")


@dataclass(frozen=True)
class Call:
    """One launch.

    Args:
        name: of the kernel, or of torch's operation.
        bytes_read: of everything but the KV cache.
        flops: of a product of torch.
        kernel, grid, arguments: of a launch of Triton's.
        cache_bytes: of the KV cache, as far as tensors of it are arguments.
    """

    name: str
    bytes_read: int
    flops: int = 0
    kernel: JITFunction[Any] | None = None
    grid: tuple[int, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    cache_bytes: int = 0


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
        flops = 2 * result.numel() * tensors[-1].shape[0] if name in _PRODUCTS else 0
        self._count.calls.append(Call(f"torch {name}", read, flops))
        return result


@contextlib.contextmanager
def on_meta(count: StepCount, pools: set[int], chip: int = 90, processors: int = PROCESSORS) -> Iterator[None]:
    """While open, tensors without memory are for quantkit's kernels, whose launches are counted instead of made.

    Args:
        count: gets the launches.
        pools: storages of the KV cache.
        chip, processors: of the device that is pretended: compute capability, multiprocessors.
    """

    def record(kernel: JITFunction[Any], *values: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        given = arguments_of(kernel, values, named)
        pairs = given.get("order")
        # Of all experts, which lie in one tensor, the chosen are read.
        share = 1.0 if pairs is None or "words" not in given else min(1.0, pairs.numel() / len(given["words"]))
        read = cached = 0
        for name, value in given.items():
            if not isinstance(value, torch.Tensor) or name in _WRITTEN:
                continue
            if value.untyped_storage()._cdata in pools:
                cached += value.nbytes
            else:
                read += round(value.nbytes * (share if name in _OF_EXPERTS else 1.0))
        count.calls.append(Call(kernel.__name__.strip("_"), read, 0, kernel, grid, given, cached))

    with pretended(record, chip, processors, used=True):
        yield


def decode_batch(batch: int, context: int) -> ForwardBatch:
    """A decode step in which every sequence gets one token."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    return ForwardBatch(
        token_ids=numbers(batch),
        positions=numbers(batch),
        query_starts=numbers(batch + 1, dtype=torch.int32),
        page_table=numbers(batch, -(-context // PAGE), dtype=torch.int32),
        slots=numbers(batch),
        residual_rows=numbers(batch),
        logit_rows=numbers(batch),
        query_lengths=(1,) * batch,
        context_lengths=(context,) * batch,
        sequence_ids=tuple(range(batch)),
    )


def count_step(
    shape: str, weights: str, kv: str, batch: int, context: int, chip: int = 90, processors: int = PROCESSORS
) -> tuple[StepCount, NativeModel]:
    """Count one decode step and its greedy choice.

    Args:
        shape, weights: see `random_model`.
        kv: name of the KV type.
        batch: sequences.
        context: tokens of each.
        chip, processors: see `on_meta`.
    Returns:
        what was counted, and the model.
    """
    count, pools = StepCount(), set[int]()
    with on_meta(count, pools, chip, processors):
        model = make_model(shape, weights, META)
        cache = KVCache(model.layouts(kv, PAGE), batch * -(-context // PAGE), batch, META)
        stored = [*cache._pools, *cache._residuals]
        pools |= {tensor.untyped_storage()._cdata for tensor in stored}
        count.calls.clear()
        count.num_layers = len(model.blocks)
        with Operations(count):
            model.forward(decode_batch(batch, context), cache).argmax(-1)
    return count, model


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=list(SHAPES), default="8B")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--json", action="store_true", help="launches per layer by weights and KV type, nothing else")
    arguments = parser.parse_args()
    per_layer = {}
    for weights in WEIGHTS:
        for kv in ("auto", "int8", "fp8", "int4"):
            try:
                count, model = count_step(arguments.shape, weights, kv, arguments.batch, arguments.context)
            except NotImplementedError:  # experts without a kernel of their own
                print(f"{weights:12} KV {kv:5} not counted: the host asks who is chosen")
                continue
            per_layer[f"{weights}, {kv}"] = count.per_layer
            if arguments.json:
                continue
            share = count.bytes_read / model.stored_bytes
            print(
                f"{weights:12} KV {kv:5} {len(count.calls):5} launches, {count.per_layer:.1f} per layer; "
                f"{count.bytes_read / 1e9:.3f} GB read without KV, {share:.1%} of the stored weights"
            )
            print("   ", ", ".join(f"{name} {number}" for name, number in count.launches.most_common()))
    if arguments.json:
        print(json.dumps(per_layer))


if __name__ == "__main__":
    main()
