"""How much of a decode step at batch 1 is the engine's own work, and how much the model's kernels.

    python evals/checks/engine_overhead.py [MODEL] [--steps 200] [--threads 1]

Every call of a kernel in one decode step (products, attention with its store, norms, rotation, gates, embedding lookup)
is recorded with its arguments; the same calls are then repeated in a loop with nothing between them. What a step takes
beyond that is the engine: scheduling, building the batch, going through the layers, sampling, text. Process CPU time,
medians. MODEL is a directory; without it, the bundled demo model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from quantkit import LLM, SamplingParams
from quantkit.kernels import ops
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model import model as model_module

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
OPERATIONS = ("rms_norm", "layer_norm", "rotary_", "gated", "activate")


class Recorder:
    """Stands for a linear; notes its calls."""

    def __init__(self, inner: Any, calls: list[Call]) -> None:
        self._inner, self._calls = inner, calls

    def __call__(self, x: Any) -> Any:
        """As the linear does."""
        self._calls.append((self._inner, (x.clone(),), {}))
        return self._inner(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--head", choices=["int8", "int4"])
    options = parser.parse_args()
    llm = LLM(options.model, threads=options.threads, max_sequences=1, head_dtype=options.head, max_length=512)
    prompt = [5 + index % 200 for index in range(100)]
    llm.engine.add(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(20):
        llm.engine.step()
    steps = []
    for _ in range(options.steps):
        start = time.process_time()
        llm.engine.step()
        steps.append(time.process_time() - start)
    calls = record_step(llm)
    rounds = []
    for _ in range(options.steps):
        start = time.process_time()
        for function, arguments, keywords in calls:
            function(*arguments, **keywords)
        rounds.append(time.process_time() - start)
    step, kernels = statistics.median(steps), statistics.median(rounds)
    print(
        f"step {1e6 * step:.0f} us, {len(calls)} kernel calls {1e6 * kernels:.0f} us, "
        f"outside kernels {1e6 * (step - kernels):.0f} us = {100 * (1 - kernels / step):.1f} % of the step"
    )


def record_step(llm: LLM) -> list[Call]:
    """The kernel calls of one decode step, in order; the model is as before afterwards."""
    calls: list[Call] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append((function, arguments, keywords))
            return function(*arguments, **keywords)

        return call

    undo: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for name in OPERATIONS:
        replace(ops, name, recorded(getattr(ops, name)))
    replace(model_module, "embedding", recorded(model_module.embedding))
    replace(KVCache, "attend", recorded(KVCache.attend))
    for block in llm.model.blocks:
        for owner, name in (
            (block.attention, "qkv"),
            (block.attention, "output"),
            (block.mlp, "up"),
            (block.mlp, "down"),
        ):
            replace(owner, name, Recorder(getattr(owner, name), calls))
    replace(llm.model, "head", Recorder(llm.model.head, calls))
    llm.engine.step()
    for owner, name, value in reversed(undo):
        setattr(owner, name, value)
    return calls


if __name__ == "__main__":
    main()
