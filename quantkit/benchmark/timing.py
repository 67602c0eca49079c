"""Time of short device work: operands that rotate through more than the cache, replayed graphs, medians, turns.

On CUDA a graph of all calls is recorded once and replayed, so that the host is not in the figure; calls that cannot be
recorded are timed as they are, and the figure says so. Elsewhere it is the host's clock, for rehearsals.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

Calls = Sequence[Callable[[], object]]

_CACHES = 4  # operands rotate through more than so many L2 caches
_QUICK_S = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Calls, ready to be timed.

    Args:
        run: makes them all.
        num_calls: how many that is.
        how: "graph", "eager" or "host".
    """

    run: Callable[[], object]
    num_calls: int
    how: str


def num_copies(num_bytes: int, device: str, limit: int = 64) -> int:
    """Number of copies of an operand that make more than four L2 caches."""
    if torch.device(device).type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(limit, -(-_CACHES * cache // max(num_bytes, 1)) + 1))


def record(calls: Calls, device: str) -> Recorded:
    """Run calls once, which compiles what they need, and make them one graph."""
    if torch.device(device).type != "cuda":
        return Recorded(run=lambda: [call() for call in calls], num_calls=len(calls), how="host")
    for call in calls:
        call()
    torch.cuda.synchronize()
    # Short calls repeat within one graph, so that launching the graph does not show.
    rounds = max(1, 32 // len(calls)) if _quick(calls) else 1
    run, how = _captured(calls, rounds)
    for _ in range(3):
        run()
    return Recorded(run=run, num_calls=len(calls) * rounds, how=how)


def in_turns(recorded: Sequence[Recorded], device: str, repeats: int) -> list[list[float]]:
    """Microseconds of one call of each, measured in turns whose order alternates, so that drift meets all alike.

    Returns:
        for each of `recorded`, one sample per turn.
    """
    on_gpu = torch.device(device).type == "cuda"
    marks: list[list[tuple[Any, Any]]] = [[] for _ in recorded]
    order = list(zip(recorded, marks, strict=True))
    for turn in range(repeats):
        for item, samples in order if turn % 2 == 0 else reversed(order):
            # Nothing waits in here: a host that does lets the device run idle between samples.
            begin = _mark(on_gpu)
            item.run()
            samples.append((begin, _mark(on_gpu)))
    if on_gpu:
        torch.cuda.synchronize()
    return [
        [(begin.elapsed_time(end) * 1e3 if on_gpu else (end - begin) * 1e6) / item.num_calls for begin, end in samples]
        for item, samples in order
    ]


def _mark(on_gpu: bool) -> Any:
    """This moment: an event of the stream, or the host's clock."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def measure(calls: Calls, device: str, repeats: int = 15) -> dict[str, Any]:
    """Microseconds of one call: median, p10 and p90 over repeats, each repeat going once through all calls."""
    item = record(calls, device)
    times = sorted(in_turns([item], device, repeats if item.how != "host" else min(repeats, 3))[0])
    return {"us": median(times), "p10": times[len(times) // 10], "p90": times[-1 - len(times) // 10], "how": item.how}


def _quick(calls: Calls) -> bool:
    begun = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    return time.perf_counter() - begun < _QUICK_S


def _captured(calls: Calls, rounds: int) -> tuple[Callable[[], object], str]:
    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except Exception:  # a host sync inside, or an allocation that a graph cannot have
        torch.cuda.synchronize()
        return run, "eager"
    return graph.replay, "graph"
