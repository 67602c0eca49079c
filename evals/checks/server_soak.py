"""Thousands of requests to a server, a third of which go away at some moment, with slow readers among them.

    python evals/checks/server_soak.py [--requests 5000] [--model DIR] [--kv-cache TYPE --kv-memory SIZE] [--seed 0]
        [--out FILE]

The server runs in a process of its own with a fifth of the pages that its requests would like to have, three lengths
of prompt and prefixes that are shared. At the end: every request that stayed was answered, every page is free, nothing
is open, and memory has not grown (resident bytes of the last quarter against the first). Integrity is checked in the
server after every step. Prints one JSON object and writes it to FILE; exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
import launch
from provenance import write_json
from record import about

SERVER = """
import sys
from quantkit.runtime.engine.engine import Engine
from quantkit.cli import main
step = Engine.step
def checked(self):
    outputs = step(self)
    self.check_integrity()
    return outputs
Engine.step = checked
main(sys.argv[1:])
"""
LENGTHS, MOST_NEW = (8, 100, 300), 60
STREAMS, RUNNING = 64, 32


async def ask(session: aiohttp.ClientSession, url: str, number: int, chance: random.Random, seen: Counter[str]) -> None:
    """One request, which may go away before it is answered."""
    length = chance.choice(LENGTHS)
    shared = [3 + index % 50 for index in range(length // 2)]
    prompt = shared + [3 + chance.randrange(200) for _ in range(length - len(shared))]
    body = {"prompt": prompt, "max_tokens": chance.randrange(1, MOST_NEW), "temperature": chance.choice([0, 1])}
    body |= {"stream": chance.random() < 0.6, "ignore_eos": True}
    leaves_after = chance.expovariate(8) if chance.random() < 1 / 3 else None
    while True:
        try:
            async with asyncio.timeout(leaves_after):
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    text = await answer.text()
        except TimeoutError:
            seen["left"] += 1
            return
        if answer.status == 429:
            seen["busy"] += 1
            await asyncio.sleep(0.05)
            continue
        complete = answer.status == 200 and ("[DONE]" in text if body["stream"] else "finish_reason" in text)
        seen["answered" if complete and "server_error" not in text else f"status {answer.status}"] += 1
        return


async def read_slowly(url: str, until: asyncio.Event) -> None:
    """A client that takes a few bytes at a time, again and again."""
    port = int(url.rpartition(":")[2])
    asked = {"prompt": [5] * 4, "max_tokens": 200, "stream": True, "logprobs": 20, "ignore_eos": True}
    body = json.dumps(asked).encode()
    while not until.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        for _ in range(200):
            if until.is_set() or not await reader.read(64):
                break
            await asyncio.sleep(0.01)
        writer.close()


def pages_wanted() -> int:
    """Of requests that are computed together, all of them the longest."""
    from quantkit.runtime.config import DEFAULT_PAGE_SIZE

    return -(-(max(LENGTHS) + MOST_NEW) // DEFAULT_PAGE_SIZE) * RUNNING


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def soak(url: str, pid: int, count: int, seed: int) -> dict[str, Any]:
    """Send the requests; what became of them, and memory while they ran."""
    chance, seen, memory = random.Random(seed), Counter[str](), list[int]()
    waiting, until = iter(range(count)), asyncio.Event()
    slow = [asyncio.create_task(read_slowly(url, until)) for _ in range(2)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for number in waiting:
                await ask(session, url, number, chance, seen)
                memory.append(resident(pid))

        await asyncio.gather(*(client() for _ in range(STREAMS)))
        until.set()
        await asyncio.gather(*slow, return_exceptions=True)
        metrics: dict[str, float] = {}
        for _ in range(100):
            async with session.get(f"{url}/metrics") as answer:
                found = re.findall(r"^(quantkit_\w+) ([0-9.e+]+)$", await answer.text(), re.M)
            metrics = {name: float(value) for name, value in found}
            if not (metrics["quantkit_requests_running"] or metrics["quantkit_requests_waiting"]):
                break
            await asyncio.sleep(0.1)
    quarter = len(memory) // 4
    first = statistics.median(memory[:quarter])
    return {
        "outcomes": dict(seen),
        "pages": metrics["quantkit_kv_pages"],
        "pages_used": metrics["quantkit_kv_pages_used"],
        "running": metrics["quantkit_requests_running"],
        "waiting": metrics["quantkit_requests_waiting"],
        "preemptions": metrics["quantkit_preemptions_total"],
        "prefix_hit_tokens": metrics["quantkit_prefix_hit_tokens_total"],
        "resident_first_quarter": first,
        "resident_last_over_first": statistics.median(memory[-quarter:]) / first,
    }


def held_of_soak(result: dict[str, Any], said: str, count: int) -> dict[str, bool]:
    """What is asked of a soak."""
    outcomes = result["outcomes"]
    return {
        "answered": outcomes.get("answered", 0) + outcomes.get("left", 0) == count,
        "pages": result["pages_used"] == result["running"] == result["waiting"] == 0,
        "memory": result["resident_last_over_first"] <= 1.02,
        "pool": 0.15 <= result["pages"] / pages_wanted() <= 0.25,
        "end": result["exit_code"] == 0 and "a step failed" not in said,
    }


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--model")
    parser.add_argument("--kv-cache", default="auto")
    parser.add_argument("--kv-memory", default="10MiB", help="so much that the pool has a fifth of the pages wanted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    count = options.requests
    origin = about(
        requests=count,
        seed=options.seed,
        model=options.model or "demo",
        kv_cache=options.kv_cache,
        kv_memory=options.kv_memory,
    )
    # With the demo model, a fifth of what so many of the longest would like; `held` says whether it was that.
    cache = ["--kv-cache", options.kv_cache, "--kv-memory", options.kv_memory, "--threads", "1"]
    limits = ["--max-running", str(RUNNING), "--max-waiting", "48", "--max-length", "400", *cache]
    with launch.quantkit(options.model, limits, program=("-c", SERVER)) as server:
        began = time.monotonic()
        result = asyncio.run(soak(server.url, server.process.pid, count, options.seed))
        result["seconds"] = round(time.monotonic() - began, 1)
    assert server.process.stderr is not None
    said = server.process.stderr.read()
    result |= {"exit_code": server.process.returncode, "said": said.splitlines()[-3:]}
    held = held_of_soak(result, said, count)
    data = {"about": origin, **result, "held": held}
    print(json.dumps(data, indent=1))
    if options.out is not None:
        write_json(options.out, data)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
