"""Benchmark over HTTP: send a load to a server and record what a client sees, in the same way for every engine.

A token's timestamp is the time at which the client has read the event that contains the token. If a server sends
several tokens in one event, as quantkit does for slow clients, these tokens share the timestamp. If there are fewer
events than tokens counted by the server, tokens are spread evenly over the events.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from quantkit.benchmark.compare import measure_rounds
from quantkit.benchmark.options import BenchmarkOptions
from quantkit.benchmark.workload import Load
from quantkit.errors import RequestError
from quantkit.results import BenchmarkRun, RequestTiming
from quantkit.server.client import Remote

COMMON_TOKENS = 1000
"""Vocabulary size that every model is assumed to reach. Prompts are drawn from this many tokens if no checkpoint
gives the size.
"""


def measure_server(
    remote: Remote,
    options: BenchmarkOptions,
    *,
    vocab_size: int = COMMON_TOKENS,
    avoid: Sequence[int] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[BenchmarkRun]:
    """Measure every workload on a server.

    Args:
        remote: the server; this function opens and closes the connection.
        options: what to measure; static batches are not supported.
        vocab_size: number of tokens that prompts are drawn from.
        avoid: tokens that prompts must not contain.
        progress: called with a description of the current work.
    Raises:
        QuantkitError: the server cannot be reached, refuses a request or fails.
    """
    with asyncio.Runner() as loop:
        loop.run(remote.__aenter__())
        try:
            (runs,) = measure_rounds(
                options,
                [remote.url],
                lambda _, load: loop.run(run_load(remote, load)),
                vocab_size=vocab_size,
                avoid=avoid,
                progress=progress,
            )
        finally:
            loop.run(remote.__aexit__())
    return runs


async def run_load(remote: Remote, load: Load) -> BenchmarkRun:
    """Send the requests of a load to a server and time them, as `benchmark.workload.run_load` does with an engine."""
    workload, first = load.workload, load.workload.num_warmup
    requests = list(zip(load.prompts, load.new_tokens, strict=True))
    await asyncio.gather(*(_timed(remote, number, *request) for number, request in enumerate(requests[:first])))
    waiting = list(enumerate(requests[first:]))
    if load.due_s:
        start = time.perf_counter()
        sent = [
            _timed(remote, n, *request, due_s=start + due)
            for (n, request), due in zip(waiting, load.due_s, strict=True)
        ]
        timings = list(await asyncio.gather(*sent))
    else:
        timings = []

        async def client() -> None:
            while waiting:
                number, request = waiting.pop(0)
                timings.append(await _timed(remote, number, *request))

        await asyncio.gather(*(client() for _ in range(workload.concurrency or 1)))
    return BenchmarkRun(workload=workload, requests=tuple(sorted(timings, key=lambda timing: timing.request_id)))


async def _timed(
    remote: Remote, number: int, prompt: Sequence[int], new_tokens: int, due_s: float | None = None
) -> RequestTiming:
    """Send a request when it is due, and record the time of each token."""
    if due_s is not None:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    arrived = time.perf_counter() if due_s is None else due_s
    body = {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    times: list[float] = []
    usage: dict[str, Any] = {}
    async for part in remote.stream("/v1/completions", body):
        usage = part.get("usage") or usage
        if any("text" in choice for choice in part.get("choices") or ()):
            times.append(time.perf_counter())
    count = int(usage.get("completion_tokens", len(times)))
    if count != new_tokens or not times:
        raise RequestError(
            f"{remote.url} generated {count} tokens instead of {new_tokens}, so its timing would be misleading; "
            "measure a server that supports ignore_eos"
        )
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return RequestTiming(
        request_id=number,
        prompt_tokens=len(prompt),
        arrived_s=arrived,
        token_s=tuple(times[index * len(times) // count] for index in range(count)),
        finished_s=time.perf_counter(),
        cached_tokens=cached,
    )
