"""Times a model that vLLM runs, by the same requests and the same clock as ours; see `latency`.

Memory and ceilings are not set beside it: what vLLM reserves says nothing of what a model needs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit.benchmark.compare import measure_rounds
from quantkit.benchmark.latency import run_load
from quantkit.benchmark.options import BenchmarkOptions
from quantkit.benchmark.workload import check_capacity
from quantkit.machine.devices import processor_name
from quantkit.results import BenchmarkResult
from quantkit.runtime.vllm_engine import VllmLLM


def measure_served(
    path: str | Path | None,
    options: BenchmarkOptions,
    vllm: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> BenchmarkResult:
    """Load a model into vLLM, measure every workload, and let go of it.

    Args:
        path: directory or hub id; None = the demo model.
        options: what to measure.
        vllm: vLLM's own settings.
        settings: of `EngineConfig`.
        progress: called with what is going on.
    Raises:
        QuantkitError: as `VllmLLM`; the prompts are too long.
    """
    name = "demo model" if path is None else str(path)
    progress(f"loading {name} into vLLM")
    # The same prompts come again in every round, which a prefix cache would not compute a second time.
    with VllmLLM(path, options={"enable_prefix_caching": False, **vllm}, **(settings or {})) as llm:
        check_capacity(options.workloads(), llm.capacity, f"the context of {name}")
        avoid = () if llm.tokenizer is None else tuple(llm.tokenizer.all_special_ids)
        (runs,) = measure_rounds(
            options,
            [name],
            lambda _, load: run_load(llm, load),
            vocab_size=llm.vocab_size,
            avoid=avoid,
            progress=progress,
        )
        return BenchmarkResult(
            model=name,
            runs=tuple(runs),
            kv_cache=llm.kv_type,
            device=llm.device_name or processor_name() or "CPU",
            settings={"engine": llm.engine_name, "computed in": llm.arithmetic, **{k: str(v) for k, v in vllm.items()}},
        )
