"""Compare predicted and observed memory: weights, KV pool, residual windows, activations, and their sum, the peak.

Observed values are the summed sizes of the tensors that exist, not sizes reported by the code that allocated them. The
peak is the sum of the parts, not the memory of the process: the process also holds libraries, and the system allocates
pages of the pool only when they are written. On CUDA, activations come from the allocator's statistics. The memory of
the process (on CUDA, the memory that the allocator keeps beyond the peak) is reported separately.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from quantkit.benchmark.memory_prediction import Prediction
from quantkit.benchmark.options import BenchmarkOptions
from quantkit.machine.system import resident_bytes
from quantkit.results import MemoryRecord
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.model import Model, NativeModel
from quantkit.runtime.model.rope import RopeTable
from quantkit.runtime.types import SamplingParams

# Types that a walk does not enter: modules, classes and functions lead to everything; a rotary table is not a weight.
_CLOSED = (
    *(type, ModuleType, FunctionType, BuiltinFunctionType, str, bytes, int, float, type(None)),
    *(torch.dtype, torch.device, RopeTable),
)


def observed_weight_bytes(model: Model) -> int:
    """Return the bytes of all weight tensors of a model, counting each storage once."""
    if isinstance(model, NativeModel):
        return _storage_bytes(_walk(model))
    return model.num_bytes


def observed_cache_bytes(cache: KVCache | None) -> int:
    """Return the bytes of all pools and residual windows of a cache, counted on its tensors."""
    return 0 if cache is None else _storage_bytes(_walk(cache))


def observed_activation_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the bytes held in tensors that `work` creates.

    On CUDA it reads the allocator's statistics. On a CPU it tracks the results of all operations until they are freed;
    scratch space inside an operation is not counted.

    Args:
        work: function to measure, e.g. one step of an engine.
        device: the device.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    meter = _Meter()
    with meter:
        work()
    return meter.peak_bytes


def process_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that the process holds: resident on a CPU, reserved by the allocator on CUDA."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def memory_records(llm: LLM, prediction: Prediction | None, options: BenchmarkOptions) -> tuple[MemoryRecord, ...]:
    """Return the memory of a model: one record per part, one for their sum, and one for memory that is not predicted.

    Activations are those of the largest possible step.

    Args:
        llm: loaded, idle model.
        prediction: prediction made before loading; None if there is none.
        options: options of the benchmark; they determine the largest step.
    """
    engine, cache = llm.engine, llm.engine.runner.cache
    settings, count = engine.config, max(options.concurrencies, default=1)
    tokens = min(settings.token_budget, count * options.prompt_tokens)
    pages, residuals = engine.pool.num_pages, 0 if cache is None else cache.residual_bytes
    predicted: dict[str, int] = {}
    if prediction is not None:
        predicted["weights"] = prediction.weight_bytes
        predicted["activations"] = prediction.activation_bytes(tokens, options.prompt_tokens, count)
    if prediction is not None and cache is not None:
        predicted["kv pool"] = pages * prediction.page_bytes
        predicted["kv residuals"] = settings.max_sequences * prediction.residual_bytes

    def largest_step() -> None:
        for _ in range(count):
            # Two tokens: the prefill makes the first, a decode step of the whole batch the second.
            engine.add([1] * options.prompt_tokens, SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_work:
            engine.step()

    pool = None if cache is None else observed_cache_bytes(cache) - residuals
    capacity = "kept by transformers" if cache is None else f"{pages * settings.page_size:,} tokens of capacity"
    estimated = f"step of {tokens} tokens; the prediction is an estimate"
    observed = (
        ("weights", observed_weight_bytes(llm.model), ""),
        ("kv pool", pool, capacity),
        ("kv residuals", residuals, "newest keys and values, not quantized yet" if residuals else ""),
        ("activations", observed_activation_bytes(largest_step, llm.device), estimated),
    )
    parts = [
        MemoryRecord(part=part, predicted_bytes=predicted.get(part), observed_bytes=size, note=note)
        for part, size, note in observed
        if predicted.get(part) or size
    ]
    peak = MemoryRecord(
        part="peak",
        predicted_bytes=_total(record.predicted_bytes for record in parts),
        observed_bytes=_total(record.observed_bytes for record in parts),
    )
    return (*parts, peak, _rest(peak, llm.device))


def _total(parts: Iterable[int | None]) -> int | None:
    """Return the sum of the parts; None if one is unknown."""
    known = list(parts)
    return None if None in known else sum(part or 0 for part in known)


def _rest(peak: MemoryRecord, device: torch.device) -> MemoryRecord:
    """Return a record of unpredictable memory: the whole process on a CPU, the allocator's reserve on CUDA."""
    held = process_bytes(device)
    if device.type == "cpu":
        note = "resident now; this includes Python and libraries, and pool pages only after they are written"
        return MemoryRecord(part="process", observed_bytes=held, note=note)
    rest = None if held is None or peak.observed_bytes is None else max(0, held - peak.observed_bytes)
    return MemoryRecord(part="reserve", observed_bytes=rest, note="kept by the allocator")


def _walk(root: object) -> Iterator[Tensor]:
    """Yield all tensors reachable from an object through attributes, containers and slots."""
    seen, waiting = {id(root)}, [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            yield item
            continue
        for child in gc.get_referents(item):
            if id(child) not in seen and not isinstance(child, _CLOSED):
                seen.add(id(child))
                waiting.append(child)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            # Views and tied weights share a storage, which counts once.
            sizes["storage", storage.data_ptr()] = storage.nbytes()
        else:  # a private layout of oneDNN
            sizes["tensor", id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages created by operations, and how many of their bytes are in use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_iter((args, kwargs)):
            if isinstance(given, Tensor):
                self._follow(given, counted=False)  # existing tensors, whose storage new views may share
        result = func(*args, **(kwargs or {}))
        for made in tree_iter(result):
            if isinstance(made, Tensor):
                self._follow(made, counted=True)
        return result

    def _follow(self, tensor: Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if counted else 0
        self._now += self._sizes[key]
        self.peak_bytes = max(self.peak_bytes, self._now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)
